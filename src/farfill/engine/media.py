"""Images in prompts, as every engine sees them: what stands behind a prompt's placeholder tokens.

Whoever has the model's processor renders a prompt once: from text with one placeholder an image to token ids with as
many placeholders as the image has tokens. From then on the prompt is token ids, and for each image its place and its
bytes. Decode needs neither the pixels nor the vision tower, unless it has to prefill by itself.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.kv.hashing import KeyMaterial

if TYPE_CHECKING:
    from PIL.Image import Image

DIGEST_BYTES = 16
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# What Pillow opens at most; gateways allow less.
MAX_PIXELS = 178_000_000


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image of a prompt: its placeholders lie in tokens [start_token, end_token), the first and the last of them
    at the ends. `data` is the image file as it came."""

    start_token: int
    end_token: int
    data: bytes = field(repr=False)
    digest: bytes = b""

    def __post_init__(self) -> None:
        if not self.digest:
            digest = blake2b(self.data, digest_size=DIGEST_BYTES, person=b"farfill-image-1").digest()
            object.__setattr__(self, "digest", digest)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids of a prompt with its images. `position_offset`: what is to be added to a token's index to get its
    position, after the prompt's last token (M-RoPE counts an image as fewer positions than it has tokens)."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    position_offset: int


class MediaInputs(Protocol):
    """The images of one prompt, on their way into the model."""

    @property
    def position_offset(self) -> int: ...

    @property
    def material(self) -> tuple[KeyMaterial, ...]:
        """What prefix keys need to know."""
        ...

    def prepare(self) -> None:
        """Decode and resize the images; blocks, any thread, idempotent. Raises InvalidRequestError.

        The engine does it by itself when it finds that nobody did, at the cost of everybody's step.
        """
        ...


class MediaProcessor(Protocol):
    """The image side of a loaded model. Calls block and come from any thread."""

    def render(self, text: str, images: Sequence[bytes], *, add_special_tokens: bool) -> RenderedPrompt:
        """`text` has one placeholder an image, in order. Raises InvalidRequestError when it has not."""
        ...

    def inputs(self, prompt: Sequence[int], items: Sequence[MediaItem], position_offset: int) -> MediaInputs:
        """What a rendered prompt's work carries. Raises InvalidRequestError when items and prompt do not match."""
        ...


def material_of(items: Sequence[MediaItem]) -> tuple[KeyMaterial, ...]:
    """What prefix keys need to know of `items`."""
    return tuple((item.start_token, item.digest) for item in items)


def open_image(data: bytes, max_pixels: int = MAX_PIXELS, param: str = "images") -> Image:
    """`data` as an RGB image, upright as its EXIF says, of an animation the first frame.

    The size is read and checked before anything is decoded. Raises InvalidRequestError (unsupported_media,
    media_too_large, media_invalid), ConfigError without Pillow.
    """
    pil: Any = _pillow()
    try:
        with warnings.catch_warnings():
            # Pillow only warns of sizes that it thinks are attacks; the limit here is ours.
            warnings.simplefilter("ignore")
            image = pil.Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > max_pixels:
                raise InvalidRequestError(
                    f"{param}: the image has {width} x {height} pixels, at most {max_pixels} are allowed",
                    param=param,
                    reason="media_too_large",
                )
            image.load()
            return pil.ImageOps.exif_transpose(image).convert("RGB")
    except pil.UnidentifiedImageError:
        raise InvalidRequestError(
            f"{param}: not an image in one of the formats {', '.join(FORMATS).lower()}",
            param=param,
            reason="unsupported_media",
        ) from None
    except pil.Image.DecompressionBombError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param, reason="media_too_large") from error
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        raise InvalidRequestError(
            f"{param}: the image cannot be decoded: {error}", param=param, reason="media_invalid"
        ) from error


def _pillow() -> Any:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError("images need Pillow: pip install 'farfill[vision]'") from error
    return PIL
