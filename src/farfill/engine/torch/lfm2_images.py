"""The image processor of LFM2-VL without torchvision, which transformers' own cannot do without.

An image is resized so that its sides are multiples of what one token stands for and its tokens lie between two bounds;
one much larger than that is cut into a grid of tiles of one size, seen beside a small picture of the whole. Pixels are
those of transformers' processor bit by bit: torchvision resizes by the function of torch that is used here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import interpolate, pad

_MODES = {2: "bilinear", 3: "bicubic"}
# Steps that settings may leave out; published models' do not, and here they are always done.
_ALWAYS = ("do_resize", "do_rescale", "do_normalize", "do_pad")


@dataclass(frozen=True, slots=True)
class Settings:
    """Those of `preprocessor_config.json` that matter, by its names. Sizes in pixels, `tiles` in a grid."""

    downsample_factor: int = 2
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0
    resample: int = 2
    rescale_factor: float = 1 / 255
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)

    @property
    def unit(self) -> int:
        """Pixels of a side of what one token stands for."""
        return self.encoder_patch_size * self.downsample_factor

    @property
    def most_patches(self) -> int:
        """Patches that every tile is padded to."""
        tile = (self.tile_size // self.encoder_patch_size) ** 2 if self.do_image_splitting else 0
        return max(self.max_image_tokens * self.downsample_factor**2, tile)


class Lfm2Images:
    """As `Lfm2VlImageProcessor` of transformers, as far as its processor makes use of that."""

    model_input_names: ClassVar = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # The processor counts tokens by these.
        self.use_thumbnail = settings.use_thumbnail
        self.tile_size = settings.tile_size
        self.downsample_factor = settings.downsample_factor
        self.encoder_patch_size = settings.encoder_patch_size

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Lfm2Images:
        """The one that a model folder's settings describe. Raises ValueError for what cannot be done here."""
        settings = Settings(**{field.name: found[field.name] for field in fields(Settings) if field.name in found})
        if settings.resample not in _MODES:
            raise ValueError(f"resample {settings.resample} is none of {list(_MODES)}")
        left_out = [name for name in _ALWAYS if found.get(name) is False]
        if left_out:
            raise ValueError(f"{', '.join(left_out)} cannot be false")
        return cls(settings)

    def fetch_images(self, images: Any) -> Any:
        """They are here already."""
        return images

    def __call__(self, images: Sequence[Any], **_: Any) -> dict[str, Any]:
        """RGB images, maybe in lists of one prompt's each; what the vision tower wants, and the grid of each image."""
        flat = [one for some in images for one in (some if isinstance(some, list) else [some])]
        tiles: list[torch.Tensor] = []
        grids: list[tuple[int, int]] = []
        sizes: list[list[int]] = []
        for image in flat:
            made, grid, size = self._tiles(torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()[None])
            tiles.extend(made)
            grids.append(grid)
            sizes.append(list(size))
        patches, masks, shapes = zip(*map(self._patches, tiles), strict=True)
        return {
            "pixel_values": torch.stack(patches),
            "pixel_attention_mask": torch.stack(masks),
            "spatial_shapes": torch.tensor(shapes),
            "image_rows": [rows for rows, _ in grids],
            "image_cols": [columns for _, columns in grids],
            "image_sizes": sizes,
        }

    def _tiles(self, image: torch.Tensor) -> tuple[list[torch.Tensor], tuple[int, int], tuple[int, int]]:
        """Of [1, 3, height, width]: its tiles, the (rows, columns) of them, and the size of it as one."""
        s, (height, width) = self.settings, image.shape[-2:]
        size = self._whole_size(height, width)
        if not s.do_image_splitting or s.min_tiles == s.max_tiles == 1 or not self._is_large(height, width):
            return [self._resized(image, size)], (1, 1), size
        columns, rows = self._grid(height, width)
        large = self._resized(image, (rows * s.tile_size, columns * s.tile_size))
        tiles = [tile for row in large.split(s.tile_size, 2) for tile in row.split(s.tile_size, 3)]
        if s.use_thumbnail and rows * columns > 1:
            tiles.append(self._resized(image, size))
        return tiles, (rows, columns), size

    def _whole_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of an image that is not cut: of whole units, as near to its shape as the bounds allow."""
        s, unit = self.settings, self.settings.unit
        least, most = s.min_image_tokens * unit**2, s.max_image_tokens * unit**2
        sides = [max(unit, round(side / unit) * unit) for side in (height, width)]
        area = sides[0] * sides[1]
        if area > most:
            shrink = math.sqrt(height * width / most)
            sides = [max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)]
        elif area < least:
            grow = math.sqrt(least / (height * width))
            sides = [math.ceil(side * grow / unit) * unit for side in (height, width)]
        return sides[0], sides[1]

    def _is_large(self, height: int, width: int) -> bool:
        s, unit = self.settings, self.settings.unit
        sides = [max(s.encoder_patch_size, round(side / unit) * unit) for side in (height, width)]
        return sides[0] * sides[1] > s.max_image_tokens * unit**2 * s.max_pixels_tolerance

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """(columns, rows) whose shape is nearest; among equals a larger one when the image fills half of it."""
        s = self.settings
        most = s.max_tiles
        shapes = {(w, h) for w in range(1, most + 1) for h in range(1, most + 1) if s.min_tiles <= w * h <= most}
        best, least = (1, 1), math.inf
        for columns, rows in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)):
            difference = abs(width / height - columns / rows)
            fills = height * width > 0.5 * s.tile_size**2 * columns * rows
            if difference < least or (difference == least and fills):
                best, least = (columns, rows), difference
        return best

    def _resized(self, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        if image.shape[-2:] == size:
            return image
        mode = _MODES[self.settings.resample]
        return interpolate(image, size=size, mode=mode, align_corners=False, antialias=True)

    def _patches(self, tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
        """Of [1, 3, height, width]: patches [most, patch * patch * 3], 1 where there is one, and (rows, columns)."""
        s, patch = self.settings, self.settings.encoder_patch_size
        # Scaled and shifted in one, as transformers does it: another order would round differently.
        scale = 1.0 / s.rescale_factor
        mean, std = (torch.tensor(values).view(3, 1, 1) * scale for values in (s.image_mean, s.image_std))
        pixels = (tile[0].float() - mean) / std
        rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
        flat = pixels.reshape(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        missing = s.most_patches - len(flat)
        if missing < 0:
            raise ValueError(f"it has {len(flat)} patches of {patch} pixels, at most {s.most_patches} fit: too long")
        mask = torch.ones(s.most_patches, dtype=torch.int32)
        mask[len(flat) :] = 0
        return pad(flat, (0, 0, 0, missing)), mask, (rows, columns)
