"""The model's own processor: how many tokens an image has, and the pixels its vision tower wants.

Only the image part is used, with the Pillow backend wherever there is one: results then do not depend on what else is
installed, and both sides of a transfer resize alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto import processing_auto
from transformers.processing_utils import ProcessorMixin

from farfill.core.errors import InvalidRequestError
from farfill.engine.media import MediaInputs, MediaItem, RenderedPrompt, open_image
from farfill.engine.torch.lfm2_images import Lfm2Images
from farfill.engine.torch.vision import Pixels, VisionPart, VisionPrompt, next_offset

_log = logging.getLogger(__name__)

# What processors return besides the inputs of the vision tower.
_TEXT_OUTPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class TorchMedia:
    """Implements `MediaProcessor`."""

    def __init__(self, vision: VisionPart, processor: Any) -> None:
        self._vision = vision
        self._processor = processor

    def render(self, text: str, images: Sequence[bytes], *, add_special_tokens: bool) -> RenderedPrompt:
        """See `MediaProcessor.render`."""
        placeholder = self._processor.image_token
        if text.count(placeholder) != len(images):
            raise InvalidRequestError(
                f"the prompt has {text.count(placeholder)} times {placeholder!r} for {len(images)} images; text may not"
                " contain it, and the model's chat template must write it for each image",
                param="messages",
                reason="media_placeholder",
            )
        opened = [open_image(data) for data in images]
        try:
            made = self._processor(
                text=[text],
                images=opened,
                add_special_tokens=add_special_tokens,
                return_text_replacement_offsets=True,
                return_tensors=None,
            )
        except ValueError as error:
            raise InvalidRequestError(
                f"the model's processor refuses these images: {error}", param="messages", reason="media_refused"
            ) from error
        token_ids = [int(token) for token in made["input_ids"][0]]
        items = self._items(token_ids, [found["replacement"] for found in made["text_replacement_offsets"][0]], images)
        offset = 0
        if self._vision.family.mrope:
            grid = torch.tensor([[int(n) for n in image] for image in made["image_grid_thw"]])
            positions = self._vision.positions(torch.tensor([token_ids]), grid)
            offset = next_offset(positions)
        return RenderedPrompt(token_ids, items, offset)

    def inputs(self, prompt: Sequence[int], items: Sequence[MediaItem], position_offset: int) -> MediaInputs:
        """See `MediaProcessor.inputs`."""
        return VisionPrompt(self._vision, self._pixels, prompt, items, position_offset)

    def _items(
        self, token_ids: Sequence[int], replacements: Sequence[str], images: Sequence[bytes]
    ) -> tuple[MediaItem, ...]:
        """Where each image's placeholders are: they come in the order of the images."""
        marker = self._vision.image_token_id
        places = [index for index, token in enumerate(token_ids) if token == marker]
        items: list[MediaItem] = []
        for replacement, data in zip(replacements, images, strict=True):
            ids = self._processor.tokenizer(replacement, add_special_tokens=False)["input_ids"]
            count = ids.count(marker)
            mine, places = places[:count], places[count:]
            if not mine:
                raise InvalidRequestError("an image has no tokens", param="messages", reason="media_refused")
            items.append(MediaItem(mine[0], mine[-1] + 1, data))
        if places:
            raise InvalidRequestError(
                "the text contains tokens that stand for images", param="messages", reason="media_placeholder"
            )
        return tuple(items)

    def _pixels(self, image: Any) -> Pixels:
        """Inputs of the vision tower for one image."""
        try:
            made = self._processor(text=[self._processor.image_token], images=[image], return_tensors="pt")
        except ValueError as error:
            raise InvalidRequestError(
                f"the model's processor refuses an image: {error}", param="messages", reason="media_refused"
            ) from error
        return {
            name: value for name, value in made.items() if name not in _TEXT_OUTPUTS and isinstance(value, torch.Tensor)
        }


def open_media(folder: Path, model_type: str, vision: VisionPart) -> TorchMedia | None:
    """The image side of the model in `folder`; None, with a warning, when its processor cannot be used here."""
    try:
        return TorchMedia(vision, _load_processor(folder, model_type))
    except (ImportError, OSError, ValueError) as error:
        _log.warning("%s takes text only here, its image processor cannot be loaded: %s", folder.name, error)
        return None


def _load_processor(folder: Path, model_type: str) -> Any:
    """The processor of a model folder, without its video part."""
    names: Any = getattr(processing_auto, "PROCESSOR_MAPPING_NAMES")  # noqa: B009 (not part of its typed exports)
    made: type[ProcessorMixin] = getattr(transformers, names[model_type])
    parts: dict[str, Any] = {
        "image_processor": _image_processor(folder, model_type),
        "tokenizer": AutoTokenizer.from_pretrained(folder, local_files_only=True),
    }
    # Its own text for itself wants all parts to be transformers'.
    changes = {"check_argument_for_proper_class": _any_class, "__repr__": object.__repr__}
    images_only = type(made.__name__, (made,), changes)
    settings, _ = made.get_processor_dict(folder, local_files_only=True)
    return images_only.from_args_and_dict([parts.get(name) for name in made.get_attributes()], settings)


def _image_processor(folder: Path, model_type: str) -> Any:
    if model_type != "lfm2_vl":
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    settings, _ = ImageProcessingMixin.get_image_processor_dict(folder, local_files_only=True)
    return Lfm2Images.of(settings)


def _any_class(*_: Any) -> None:
    """There may be no video processor."""
