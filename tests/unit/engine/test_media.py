"""Image files as engines and gateways open them."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from farfill.core.errors import InvalidRequestError
from farfill.engine.media import MediaItem, material_of, open_image

RED, BLUE = (255, 0, 0), (0, 0, 255)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, BLUE)]
    image = open_image(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", RED)


def test_an_image_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_image(saved(Image.new("RGB", (40, 20), RED), "JPEG", exif=exif)).size == (20, 40)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "unsupported_media"),
        (b"%PDF-1.7", "unsupported_media"),
        (saved(Image.new("RGB", (8, 8)), "BMP"), "unsupported_media"),
        (saved(Image.effect_noise((64, 64), 50), "PNG")[:200], "media_invalid"),
        (saved(Image.new("RGB", (101, 100)), "PNG"), "media_too_large"),
    ],
)
def test_what_is_not_an_image_within_the_limit_says_so(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        open_image(data, max_pixels=10_000, param="messages[0]")
    assert (caught.value.reason, caught.value.param) == (reason, "messages[0]")


def test_material_tells_files_apart_and_knows_their_places() -> None:
    one, same, other = MediaItem(3, 5, b"a"), MediaItem(3, 5, b"a"), MediaItem(3, 5, b"b")
    assert material_of([one]) == material_of([same]) != material_of([other])
    assert material_of([one])[0][0] == 3
