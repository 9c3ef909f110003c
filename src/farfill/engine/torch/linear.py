"""Linear layers on the CPU with weights packed once for oneDNN.

Two reasons. Speed: packed products of few rows are up to twice as fast as `torch.nn.functional.linear`, which a
decode step is made of. Exactness: a product over at most 1024 inputs is summed in one order whatever the number of
rows and threads (measured), so a sequence gets the same tokens alone and in
a batch. Longer products are cut into such parts, as long as the parts are few: each adds one rounding.

oneDNN compiles and keeps code for every number of rows it meets, some MiB a number; the odd lengths of prompts'
last chunks would fill memory with it. So numbers above `_EXACT_ROWS` are rounded up, and the extra rows dropped.

Layers that models call one after the other with the same input are one product, of which each takes its columns: a
decode step reads weights faster so, and its threads meet less often.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import pad

_MAX_PART_INPUTS = 1024
_MAX_PARTS = 4
_PART_MULTIPLE = 64
# The number of rows the packing is made for; other numbers run as well.
_ROWS_HINT = 8
_EXACT_ROWS = 16
_ROW_STEP = 32
# Names of layers in one module that get the same input, in the order they are called in.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """y = x Wᵀ + b for x [..., in_features]. Replaces an `nn.Linear`; the plain weight is let go."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight, bias = linear.weight.detach(), linear.bias
        # Some models ask a layer's weight for its type; this one has no numbers, so nobody can compute with it.
        self.weight = weight.to("meta")
        self.bias = None if bias is None else bias.detach()
        self._parts = [(start, end, _pack(weight[:, start:end])) for start, end in _cut(self.in_features)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b."""
        rows = x.shape[:-1].numel()
        padded = padded_rows(rows)
        if padded == rows:
            return self._multiply(x)
        y = self._multiply(pad(x.reshape(rows, self.in_features), (0, 0, 0, padded - rows)))
        return y[:rows].view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product, its parts added up in order."""
        product: Any = torch.ops.mkldnn._linear_pointwise
        _, end, weight = self._parts[0]
        y = product(x if len(self._parts) == 1 else x[..., :end], weight, self.bias, "none", [], "")
        for start, end, weight in self._parts[1:]:
            y = product.binary(x[..., start:end], y, weight, None, "add")
        return y


class _Shared:
    """The product of siblings, held from the first one's call to the last one's."""

    def __init__(self, siblings: Sequence[nn.Linear]) -> None:
        joined = nn.Linear(
            siblings[0].in_features, sum(one.out_features for one in siblings), bias=False, device="meta"
        )
        joined.weight = nn.Parameter(torch.cat([one.weight.detach() for one in siblings]), requires_grad=False)
        if siblings[0].bias is not None:
            joined.bias = nn.Parameter(torch.cat([one.bias.detach() for one in siblings]), requires_grad=False)
        self.product = PackedLinear(joined)
        # (x, y), as one: several threads may run the model.
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None


class SiblingLinear(nn.Module):
    """One of several layers with the same input; the first computes the others' results as well.

    One that is called with another input than the first was computes the product anew.
    """

    def __init__(self, linear: nn.Linear, shared: _Shared, columns: tuple[int, int], *, last: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.detach().to("meta")
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._shared = shared
        self._columns = columns
        self._first, self._last = columns[0] == 0, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b, a view of the siblings' product."""
        held = self._shared.held
        if self._first or held is None or held[0] is not x:
            held = x, self._shared.product(x)
        self._shared.held = None if self._last else held
        return held[1][..., self._columns[0] : self._columns[1]]


def padded_rows(rows: int) -> int:
    """The number of rows `rows` are computed as: exact when few, else at most a quarter more (32 below 256)."""
    if rows <= _EXACT_ROWS:
        return rows
    step = max(_ROW_STEP, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // step) * step


def pack_linears(net: nn.Module, called: Collection[nn.Module] = ()) -> int:
    """Replace every plain `nn.Linear` in `net` whose type this processor multiplies well; how many there were.

    `called` are the modules that ran in some pass. A layer that did not run although the one around it did has its
    weight read by that one, so it stays as it is.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    packed = 0
    for module in list(net.modules()):
        packed += _join_siblings(module, called)
        for name, child in list(module.named_children()):
            if module in called and child not in called:
                continue
            if _is_plain(child):
                setattr(module, name, PackedLinear(cast(nn.Linear, child)))
                packed += 1
    return packed


def _join_siblings(module: nn.Module, called: Collection[nn.Module]) -> int:
    """Replace those of `module` by ones that share a product; how many there were."""
    joined = 0
    for names in _SIBLINGS:
        found: list[Any] = [getattr(module, name, None) for name in names]
        if not all(_is_plain(one) and (module not in called or one in called) for one in found):
            continue
        if len({(one.in_features, one.weight.dtype, one.bias is None) for one in found}) > 1:
            continue
        shared, start = _Shared(found), 0
        for name, one in zip(names, found, strict=True):
            end = start + one.out_features
            setattr(module, name, SiblingLinear(one, shared, (start, end), last=name == names[-1]))
            start = end
        joined += len(names)
    return joined


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and _is_fast(module.weight.dtype)


def _is_fast(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32


def _cut(inputs: int) -> list[tuple[int, int]]:
    """[start, end) of each part; one part when there would be too many."""
    count = -(-inputs // _MAX_PART_INPUTS)
    if count > _MAX_PARTS:
        return [(0, inputs)]
    step = -(-inputs // (count * _PART_MULTIPLE)) * _PART_MULTIPLE
    return [(start, min(start + step, inputs)) for start in range(0, inputs, step)]


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
