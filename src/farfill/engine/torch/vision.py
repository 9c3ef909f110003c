"""The vision side of a vision-language model: from images to embeddings in place of placeholder tokens.

The text engine sees a text model (`TextPart`). What an image changes is confined to prefill: rows of the embeddings,
the positions (M-RoPE), and for Gemma 3 who looks at whom inside one image. Prefill chunks may begin and end anywhere:

- An image's embeddings are computed once, when the first chunk needs them, and each chunk takes its rows.
- Where tokens of an image look at each other both ways, the chunk that ends inside looks ahead: it computes the rest of
  the image with it, and keeps only its own rows. The next chunk computes the rest again, from the same keys.

Decode only needs `position_offset`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from farfill.core.errors import EngineError, InvalidRequestError, ModelUnsupportedError
from farfill.engine.media import MediaItem, material_of, open_image
from farfill.engine.torch.step import StepCache
from farfill.kv.hashing import KeyMaterial

Pixels = Mapping[str, torch.Tensor]
"""What the model's processor makes of one image, by name of the vision tower's argument."""


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a kind of model apart. `mrope`: images have positions of three axes. `both_ways`: an image's tokens
    look at each other both ways."""

    mrope: bool = False
    both_ways: bool = False


FAMILIES = {
    "gemma3": Family(both_ways=True),
    "lfm2_vl": Family(),
    "qwen2_5_vl": Family(mrope=True),
    "qwen3_5": Family(mrope=True),
    "smolvlm": Family(),
}


class TextPart(nn.Module):
    """The language model of a vision-language one, head included, as a text model of transformers."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.model = net.get_decoder()
        self.lm_head = net.lm_head
        self.config = net.config.get_text_config()
        self.generation_config = net.generation_config
        self.dtype, self.device = net.dtype, net.device

    @property
    def base_model(self) -> Any:
        """Without the head."""
        return self.model

    def get_decoder(self) -> Any:
        """The same."""
        return self.model

    def get_input_embeddings(self) -> Any:
        """The table of token embeddings."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The head."""
        return self.lm_head

    def forward(self, **kwargs: Any) -> SimpleNamespace:
        """`logits` [batch, tokens, vocabulary]."""
        return SimpleNamespace(logits=self.lm_head(self.model(**kwargs).last_hidden_state))


class VisionPart:
    """The vision tower and what else the images of a prompt need of their model."""

    def __init__(self, net: Any) -> None:
        self.family = FAMILIES[net.config.model_type]
        self.image_token_id: int = net.config.image_token_id
        self.text_config = net.config.get_text_config()
        self.dtype, self.device = net.dtype, net.device
        self.embeddings = net.get_input_embeddings()
        self._net = net.model
        self.on_progress: Callable[[], None] = lambda: None
        text = set(net.get_decoder().modules())
        for module in self._net.modules():
            # A large image takes longer than peers put up with silence; a layer does not.
            if isinstance(module, nn.ModuleList) and module not in text:
                for layer in module:
                    layer.register_forward_hook(lambda *_: self.on_progress())
        if self.family.both_ways:
            self._require_room(net.config)

    @torch.inference_mode()
    def features(self, pixels: Pixels) -> torch.Tensor:
        """One row per placeholder of an image, [tokens, hidden]."""
        moved = {name: value.to(self.device) for name, value in pixels.items()}
        found = self._net.get_image_features(**moved, return_dict=True).pooler_output
        rows = found if isinstance(found, torch.Tensor) else torch.cat(list(found))
        return rows.reshape(-1, rows.shape[-1]).to(self.dtype)

    def positions(self, token_ids: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Positions [3, 1, tokens] of a prompt [1, tokens] with M-RoPE; `grid` [images, 3] in patches."""
        kinds = (token_ids == self.image_token_id).int()
        positions, _ = self._net.get_rope_index(token_ids, mm_token_type_ids=kinds, image_grid_thw=grid)
        return positions.to(self.device)

    def _require_room(self, config: Any) -> None:
        """A sliding window forgets tokens that an image's last ones would have to look at, if it were shorter."""
        window = getattr(self.text_config, "sliding_window", None)
        if window is not None and config.mm_tokens_per_image >= window:
            raise ModelUnsupportedError(
                f"an image has {config.mm_tokens_per_image} tokens, more than fit a sliding window of {window}"
            )


class VisionPrompt:
    """Implements `MediaInputs` for one prompt. Its `step` is the engine thread's, `prepare` anybody's."""

    def __init__(
        self,
        vision: VisionPart,
        to_pixels: Callable[[Any], Pixels],
        prompt: Sequence[int],
        items: Sequence[MediaItem],
        position_offset: int,
    ) -> None:
        """Raises InvalidRequestError when the items are not where the prompt has placeholders."""
        self._vision = vision
        self._to_pixels = to_pixels
        self._ids = torch.tensor(list(prompt))
        self._items = tuple(items)
        self.position_offset = position_offset
        self._places = [self._placeholders(item) for item in self._items]
        self._pixels: list[Pixels] | None = None
        self._features: dict[int, torch.Tensor] = {}
        self._positions: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._runs = _runs(self._ids == vision.image_token_id) if vision.family.both_ways else None

    @property
    def material(self) -> tuple[KeyMaterial, ...]:
        """What prefix keys need to know."""
        return material_of(self._items)

    def prepare(self) -> None:
        """Pixels, and positions where they are not the tokens' indices. Raises InvalidRequestError."""
        with self._lock:
            if self._pixels is not None:
                return
            pixels = [self._to_pixels(open_image(item.data)) for item in self._items]
            offset = 0
            if self._vision.family.mrope:
                grid = torch.cat([image["image_grid_thw"] for image in pixels])
                self._positions = self._vision.positions(self._ids[None], grid)
                offset = next_offset(self._positions)
            if self.position_offset != offset:
                raise InvalidRequestError(
                    f"position_offset {self.position_offset} does not belong to these images, {offset} does",
                    param="position_offset",
                )
            self._pixels = pixels

    def step(self, start: int, tokens: int, cache: StepCache) -> dict[str, Any]:
        """Arguments of the decoder for prompt tokens [start, start + tokens), a step of `cache`."""
        self.prepare()
        end = start + tokens
        ahead = self._ahead(end)
        cache.look_ahead(ahead)
        inputs: dict[str, Any] = {
            "inputs_embeds": self._embeds(start, end + ahead),
            "position_ids": self._step_positions(start, end + ahead),
        }
        if self._runs is not None and bool((self._runs[start : end + ahead] >= 0).any()):
            inputs["attention_mask"] = self._masks(inputs, cache)
        return inputs

    def done(self, tokens: int) -> None:
        """The KV of the first `tokens` tokens is there: let go of what only they needed."""
        for index, item in enumerate(self._items):
            if item.end_token <= tokens:
                self._features.pop(index, None)
        if tokens >= len(self._ids) - 1:
            with self._lock:
                self._pixels = self._positions = None

    def _placeholders(self, item: MediaItem) -> torch.Tensor:
        """Indices of an image's placeholders in the prompt."""
        start, end = item.start_token, item.end_token
        if not 0 <= start < end < len(self._ids):
            raise InvalidRequestError(
                f"an image at tokens [{start}, {end}) of a prompt of {len(self._ids)}: it must end before the last",
                param="media",
            )
        found = (self._ids[start:end] == self._vision.image_token_id).nonzero().flatten() + start
        if len(found) == 0 or int(found[0]) != start or int(found[-1]) != end - 1:
            raise InvalidRequestError(f"tokens [{start}, {end}) are not those of an image", param="media")
        return found

    def _ahead(self, end: int) -> int:
        """Tokens to look at beyond `end`: the rest of an image that `end` is inside of."""
        runs = self._runs
        if runs is None or end >= len(runs) or runs[end] < 0 or runs[end] != runs[end - 1]:
            return 0
        return int((runs[end:] == runs[end]).sum())

    def _embeds(self, start: int, end: int) -> torch.Tensor:
        vision, ids = self._vision, self._ids[start:end]
        hidden = vision.embeddings(ids.masked_fill(ids == vision.image_token_id, 0)[None].to(vision.device))
        for index, places in enumerate(self._places):
            first, last = torch.searchsorted(places, torch.tensor([start, end])).tolist()
            if first < last:
                hidden[0, places[first:last] - start] = self._image(index)[first:last].to(hidden.dtype)
        return hidden

    def _image(self, index: int) -> torch.Tensor:
        found = self._features.get(index)
        if found is None:
            assert self._pixels is not None
            found = self._vision.features(self._pixels[index])
            if len(found) != len(self._places[index]):
                raise EngineError(f"an image gave {len(found)} embeddings for {len(self._places[index])} tokens")
            self._features[index] = found
        return found

    def _step_positions(self, start: int, end: int) -> torch.Tensor:
        if self._positions is not None:
            return self._positions[:, :, start:end]
        return torch.arange(start, end, device=self._vision.device)[None]

    def _masks(self, inputs: Mapping[str, torch.Tensor], cache: StepCache) -> dict[str, torch.Tensor | None]:
        """Causal masks in which the tokens of one image see each other."""
        assert self._runs is not None
        shared = {
            "config": self._vision.text_config,
            "inputs_embeds": inputs["inputs_embeds"],
            "attention_mask": None,
            "cache": cache,
            "position_ids": inputs["position_ids"],
            "block_sequence_ids": self._runs[None].to(self._vision.device),
        }
        return {
            "full_attention": create_causal_mask(**shared),
            "sliding_attention": create_sliding_window_causal_mask(**shared),
        }


def next_offset(positions: torch.Tensor) -> int:
    """What to add to the index of a token after a prompt with `positions` [3, 1, tokens]."""
    return int(positions.max()) + 1 - positions.shape[-1]


def _runs(marked: torch.Tensor) -> torch.Tensor:
    """The number of the run of marked tokens that a token is in, -1 outside."""
    begins = marked & ~torch.cat([torch.zeros(1, dtype=torch.bool), marked[:-1]])
    return torch.where(marked, begins.long().cumsum(0) - 1, -1)
