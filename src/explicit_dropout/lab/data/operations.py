"""The image operations of AutoAugment for batches of bytes (n, channels, height, width), each image with its strength.

Each means what Pillow's means (`ImageOps`, `ImageEnhance`, nearest-neighbour `Image.transform`), to within a rounding.
All are plain tensor operations of fixed shape: no loop over images, no wait for the device, nothing that stops
`torch.compile`.
"""

from __future__ import annotations

import torch
from torch import Tensor

GREY = 128
"""What fills the places that a shift, a shear or a rotation leaves empty."""


# ---------------------------------------------------------------------------------------------------- geometry


def gather(images: Tensor, x: Tensor, y: Tensor, fill: int) -> Tensor:
    """The pixel at column x and row y for each place (n, height, width); `fill` where that is outside."""
    _, channels, height, width = images.shape
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    place = (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).flatten(1)[:, None].expand(-1, channels, -1)
    taken = images.flatten(2).gather(2, place).view_as(images)
    return torch.where(inside[:, None], taken, taken.new_full((), fill))


def affine(images: Tensor, matrix: Tensor) -> Tensor:
    """Output (x, y) is input (a x + b y + c, d x + e y + f), all at the middle of pixels; matrix (n, 6)."""
    _, _, height, width = images.shape
    a, b, c, d, e, f = fixed_point(matrix)[:, :, None, None].unbind(0)
    across = torch.arange(width, device=images.device)[None, None, :]
    down = torch.arange(height, device=images.device)[None, :, None]
    return gather(images, (a * across + b * down + c) >> 16, (d * across + e * down + f) >> 16, GREY)


def fixed_point(matrix: Tensor) -> Tensor:
    """The same from corner to corner of pixels, times 2¹⁶: int64 (6, n), for a matrix (n, 6).

    As Pillow has it: where a point falls between two pixels, the same one is taken everywhere.
    """
    a, b, c, d, e, f = matrix.unbind(1)
    fixed = torch.stack([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2]) * 65536 + 0.5
    return fixed.floor().long()


def shear_matrix(along_x: Tensor, along_y: Tensor) -> Tensor:
    """(1, s, 0, 0, 1, 0) or (1, 0, 0, s, 1, 0): from the upper left corner, as AutoAugment does."""
    one, zero = torch.ones_like(along_x), torch.zeros_like(along_x)
    return torch.stack([one, along_x, zero, along_y, one, zero], dim=1)


def shift_matrix(right: Tensor, down: Tensor) -> Tensor:
    """By whole pixels."""
    one, zero = torch.ones_like(right), torch.zeros_like(right)
    return torch.stack([one, zero, -right.trunc(), zero, one, -down.trunc()], dim=1)


def rotation_matrix(degrees: Tensor, height: int, width: int) -> Tensor:
    """Counter-clockwise around the middle."""
    angle = -torch.deg2rad(degrees)
    cos, sin, x, y = angle.cos(), angle.sin(), width / 2, height / 2
    return torch.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], dim=1)


# ---------------------------------------------------------------------------------------------------- tables
# What changes each value by itself is a table of 256 entries for each image and channel: int32 (n, channels, 256).


def histogram(images: Tensor) -> Tensor:
    """How often each value occurs, int32 (n, channels, 256)."""
    n, channels = images.shape[:2]
    counts = torch.zeros(n, channels, 256, dtype=torch.int32, device=images.device)
    values = images.flatten(2).long()
    return counts.scatter_add_(2, values, torch.ones_like(values, dtype=torch.int32))


def values(like: Tensor) -> Tensor:
    """0 … 255 as int32 (1, 1, 256): the table that changes nothing."""
    return torch.arange(256, dtype=torch.int32, device=like.device)[None, None]


def look_up(images: Tensor, table: Tensor) -> Tensor:
    return table.to(torch.uint8).gather(2, images.flatten(2).long()).view_as(images)


def invert_table(same: Tensor) -> Tensor:
    return 255 - same


def solarize_table(same: Tensor, threshold: Tensor) -> Tensor:
    """Values from the threshold (n,) on are inverted."""
    return torch.where(same < threshold[:, None, None], same, 255 - same)


def posterize_table(same: Tensor, bits: Tensor) -> Tensor:
    """Only the highest bits (n,) are kept."""
    step = 1 << (8 - bits[:, None, None].to(torch.int32)).clamp(0, 8)
    return same // step * step


def autocontrast_table(same: Tensor, counts: Tensor) -> Tensor:
    """Stretched so that the darkest value becomes 0 and the brightest 255."""
    occurs = counts > 0
    low = torch.where(occurs, same, 255).amin(2, keepdim=True)
    high = torch.where(occurs, same, 0).amax(2, keepdim=True)
    stretched = ((same - low) * 255 // (high - low).clamp(min=1)).clamp(0, 255)
    return torch.where(high > low, stretched, same)


def equalize_table(same: Tensor, counts: Tensor) -> Tensor:
    """Values spread so that all become equally frequent."""
    brightest = torch.where(counts > 0, same, 0).amax(2, keepdim=True)
    total = counts.sum(2, keepdim=True, dtype=torch.int32)
    step = (total - counts.gather(2, brightest.long())) // 255
    before = counts.cumsum(2, dtype=torch.int32) - counts
    spread = ((step // 2 + before) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(step > 0, spread, same)


def blend(degenerate: Tensor, original: Tensor, factor: Tensor) -> Tensor:
    """degenerate + factor (original − degenerate), cut off to 0 … 255 and to whole numbers."""
    start = degenerate.to(torch.float32)
    return (start + factor * (original.to(torch.float32) - start)).clamp(0, 255).to(torch.int32)


def brightness_table(same: Tensor, factor: Tensor) -> Tensor:
    return blend(torch.zeros_like(same), same, factor[:, None, None])


def contrast_table(same: Tensor, factor: Tensor, grey: Tensor) -> Tensor:
    """Away from or towards the mean of the grey image (n, 1, height, width)."""
    total = grey.flatten(1).sum(1, dtype=torch.int32)
    pixels = grey.shape[2] * grey.shape[3]
    mean = (2 * total + pixels) // (2 * pixels)
    return blend(mean[:, None, None], same, factor[:, None, None])


# ---------------------------------------------------------------------------------------------------- pixels


def greyscale(images: Tensor) -> Tensor:
    """Brightness (ITU-R 601, in 16-bit fixed point), int32 (n, 1, height, width)."""
    wide = images.to(torch.int32)
    if images.shape[1] == 1:
        return wide
    red, green, blue = wide[:, 0:1], wide[:, 1:2], wide[:, 2:3]
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


def color(images: Tensor, factor: Tensor, grey: Tensor) -> Tensor:
    """Towards the grey image (factor below 1) or away from it."""
    return blend(grey, images, factor[:, None, None, None]).to(torch.uint8)


def smooth(images: Tensor) -> Tensor:
    """Mean over 3 × 3 pixels, the middle one counting five times; the border stays as it is. int32."""
    wide = images.to(torch.int32)
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    inner = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[:, :, 1:-1, 1:-1]
    inside = torch.nn.functional.pad((2 * inner + 13) // 26, (1, 1, 1, 1))
    height, width = images.shape[2:]
    down = torch.arange(height, device=images.device)[:, None]
    across = torch.arange(width, device=images.device)[None]
    border = (down == 0) | (down == height - 1) | (across == 0) | (across == width - 1)
    return torch.where(border, wide, inside)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Towards the smoothed image (factor below 1) or away from it."""
    return blend(smooth(images), images, factor[:, None, None, None]).to(torch.uint8)
