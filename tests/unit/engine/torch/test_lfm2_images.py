"""LFM2-VL's images: how large they get, into how many tiles they are cut, and what cannot be done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from farfill.engine.torch.lfm2_images import Lfm2Images


def image(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.mark.parametrize(
    ("size", "grid", "whole", "tiles"),
    [
        ((512, 512), (1, 1), (512, 512), 1),
        ((100, 100), (1, 1), (256, 256), 1),  # at least 64 tokens
        ((640, 480), (1, 1), (416, 576), 1),  # at most 256 tokens
        ((1920, 1080), (2, 4), (384, 672), 9),  # eight tiles, and the whole
        ((400, 2400), (6, 1), (1248, 192), 7),
    ],
)
def test_an_image_is_bounded_and_a_large_one_is_cut(
    size: tuple[int, int], grid: tuple[int, int], whole: tuple[int, int], tiles: int
) -> None:
    made = Lfm2Images.of({})([[image(*size)]])
    assert (made["image_rows"][0], made["image_cols"][0]) == grid
    assert tuple(made["image_sizes"][0]) == whole
    assert made["pixel_values"].shape == (tiles, 1024, 16 * 16 * 3)
    rows, columns = made["spatial_shapes"][-1].tolist()
    assert (rows * 16, columns * 16) == whole
    assert made["pixel_attention_mask"].sum(1).tolist() == made["spatial_shapes"].prod(1).tolist()


def test_patches_are_the_image_scaled_to_one() -> None:
    whole = image(512, 512)
    made = Lfm2Images.of({})([whole])["pixel_values"][0]
    pixels = torch.from_numpy(np.array(whole)).float() / 127.5 - 1
    assert torch.allclose(made[33], pixels[16:32, 16:32].reshape(-1), atol=1e-6)


@pytest.mark.parametrize("settings", [{"do_rescale": False}, {"do_pad": False}, {"resample": 1}])
def test_settings_that_cannot_be_followed_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Lfm2Images.of(settings)


def test_an_image_much_longer_than_wide_is_refused() -> None:
    small = Lfm2Images.of({"tile_size": 64, "encoder_patch_size": 8, "min_image_tokens": 4, "max_image_tokens": 16})
    with pytest.raises(ValueError, match="too long"):
        small([[image(1, 700)]])
