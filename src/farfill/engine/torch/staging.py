"""A sequence's buffer on an accelerator and its mirror in host memory, which is what transfers read and write.

Rows that will leave are copied on a stream of their own while the device computes the next layers; `fetch` then
waits for that copy alone. The mirror is made when it is first needed: a sequence that never leaves has none. It may
be made within a step or outside of one, so all use of it is in inference mode, as tensors made there demand.
"""

from __future__ import annotations

import torch


class HostMirror:
    """Host memory as large as `device_bytes`, page-locked where the device can copy from there by itself."""

    def __init__(self, device_bytes: torch.Tensor) -> None:
        self._device = device_bytes
        self._streams = device_bytes.device.type == "cuda"
        self._host: torch.Tensor | None = None
        # Byte ranges on their way to the host, with the event that says they are there.
        self._coming: dict[tuple[int, int], torch.cuda.Event] = {}

    def view(self, first: int, last: int) -> memoryview:
        """The host's bytes [first, last)."""
        return self._host_bytes().numpy().data[first:last]

    @torch.inference_mode()
    def prefetch(self, first: int, last: int) -> None:
        """Begin to copy bytes [first, last) to the host once the device has done what it was told until now."""
        if not self._streams:
            return
        host = self._host_bytes()
        side = _side_stream(self._device.device)
        side.wait_stream(torch.cuda.current_stream(self._device.device))
        with torch.cuda.stream(side):
            host[first:last].copy_(self._device[first:last], non_blocking=True)
            copied = self._coming[first, last] = torch.cuda.Event()
            copied.record(side)
        # The buffer must not be given to anyone else while the copy runs.
        self._device.record_stream(side)

    @torch.inference_mode()
    def fetch(self, first: int, last: int) -> None:
        """Have bytes [first, last) on the host, as they are on the device now."""
        event = self._coming.pop((first, last), None)
        if event is not None:
            event.synchronize()
        else:
            self._host_bytes()[first:last].copy_(self._device[first:last])

    @torch.inference_mode()
    def send(self, first: int, last: int) -> None:
        """Copy bytes [first, last) from the host to the device, and wait for it: the host's may change next."""
        self._device[first:last].copy_(self._host_bytes()[first:last])

    def _host_bytes(self) -> torch.Tensor:
        if self._host is None:
            self._host = torch.empty(self._device.numel(), dtype=torch.uint8, pin_memory=self._streams)
        return self._host


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device for copies to the host: they share one link anyway."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]
