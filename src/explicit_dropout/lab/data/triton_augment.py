"""Triton: AutoAugment on a GPU, to the last bit what the operations in torch give. One program has all of an image.

Torch looks at every operation for every image and selects; here a program does only what its image needs. It runs
twice, once for each operation of the sub-policy, the first time on pixels that it takes through crop and flip. What an
image is to have done to it is a row of a plan, which has one for each operation of the policy in each direction.
"""

from __future__ import annotations

from functools import cache

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.lab.data import augment
from explicit_dropout.lab.data import operations as op

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

# In the order of OPERATIONS, after the five that move pixels; the last four are blends.
AUTOCONTRAST, INVERT, EQUALIZE, SOLARIZE, POSTERIZE, CONTRAST, COLOR, BRIGHTNESS, SHARPNESS = (
    tl.constexpr(number) for number in range(5, len(augment.OPERATIONS))
)
GREY = tl.constexpr(op.GREY)
SMALLEST, EACH = 128, 8
"""Pixels in a block, at least, and of a thread, at most: each has its own, and they stay in registers."""


@triton.jit
def _take(channel, place, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The pixels at column x and row y, black outside the image; grey where they are not `known`."""
    x, y, known = place
    seen = known & (x >= 0) & (x < WIDTH) & (y >= 0) & (y < HEIGHT)
    return tl.where(known, tl.load(channel + y * WIDTH + x, seen, 0).to(tl.int32), GREY)


@triton.jit
def _greyscale(image, place, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    red = _take(image, place, HEIGHT, WIDTH)
    if CHANNELS == 1:
        return red
    green = _take(image + HEIGHT * WIDTH, place, HEIGHT, WIDTH)
    blue = _take(image + 2 * HEIGHT * WIDTH, place, HEIGHT, WIDTH)
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


@triton.jit
def _mean(grey, there, PIXELS: tl.constexpr):
    return (2 * tl.sum(tl.where(there, grey, 0), 0) + PIXELS) // (2 * PIXELS)


@triton.jit
def _smooth(channel, value, place, border, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Neighbours are neighbours in the source, perhaps mirrored: what is sharpened is neither sheared nor turned."""
    x, y, known = place
    total = 4 * value
    for neighbour in range(9):
        total += _take(channel, (x + neighbour % 3 - 1, y + neighbour // 3 - 1, known), HEIGHT, WIDTH)
    return tl.where(border, value, (2 * total + 13) // 26)


@triton.jit
def _stretch(value, there):
    low, high = tl.min(tl.where(there, value, 255), 0), tl.max(tl.where(there, value, 0), 0)
    return tl.where(high > low, (value - low) * 255 // tl.maximum(high - low, 1), value)


@triton.jit
def _equalize(value, there, PIXELS: tl.constexpr):
    same, counts = tl.arange(0, 256), tl.histogram(value, 256, there)
    brightest = tl.max(tl.where(there, value, 0), 0)
    step = (PIXELS - tl.sum(tl.where(same == brightest, counts, 0), 0)) // 255
    before = tl.cumsum(counts, 0) - counts
    spread = tl.minimum((step // 2 + before) // tl.maximum(step, 1), 255)
    return tl.gather(tl.where(step > 0, spread, same), value, 0)


@triton.jit
def _blend(degenerate, original, factor):
    """Without fused multiply and add, as torch rounds."""
    start = degenerate.to(tl.float32)
    made = start + factor * (original.to(tl.float32) - start)
    return tl.minimum(tl.maximum(made, 0.0), 255.0).to(tl.int32)


@triton.jit
def _operation(
    source, out, rows, plan, strengths, crops,
    CROP: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PIXELS: tl.constexpr = HEIGHT * WIDTH
    image = tl.program_id(0).to(tl.int64)
    source, out = source + image * CHANNELS * PIXELS, out + image * CHANNELS * PIXELS
    row = tl.load(rows + 2 * image + (0 if CROP else 1))
    plan += 7 * row
    kind, strength = tl.load(plan), tl.load(strengths + row)
    factor, size = 1 + strength, tl.abs(strength)
    pixel = tl.arange(0, BLOCK)
    x, y, there = pixel % WIDTH, pixel // WIDTH, pixel < PIXELS
    border = (x == 0) | (x == WIDTH - 1) | (y == 0) | (y == HEIGHT - 1)
    u = (tl.load(plan + 1) * x + tl.load(plan + 2) * y + tl.load(plan + 3)) >> 16
    v = (tl.load(plan + 4) * x + tl.load(plan + 5) * y + tl.load(plan + 6)) >> 16
    known = (u >= 0) & (u < WIDTH) & (v >= 0) & (v < HEIGHT)
    if CROP:
        crops += 3 * image
        u = tl.where(tl.load(crops + 2) != 0, WIDTH - 1 - u, u) + tl.load(crops)
        v += tl.load(crops + 1)
    place = (u, v, known)
    for channel in tl.range(CHANNELS, disable_licm=True):  # what is kept for all branches costs registers
        value = _take(source + channel * PIXELS, place, HEIGHT, WIDTH)
        made = value
        if kind >= CONTRAST:
            start = tl.zeros_like(value)  # black: Brightness
            if kind == CONTRAST:
                start += _mean(_greyscale(source, place, CHANNELS, HEIGHT, WIDTH), there, PIXELS)
            elif kind == COLOR:
                start = _greyscale(source, place, CHANNELS, HEIGHT, WIDTH)
            elif kind == SHARPNESS:
                start = _smooth(source + channel * PIXELS, value, place, border, HEIGHT, WIDTH)
            made = _blend(start, value, factor)
        elif kind == AUTOCONTRAST:
            made = _stretch(value, there)
        elif kind == INVERT:
            made = 255 - value
        elif kind == EQUALIZE:
            made = _equalize(value, there, PIXELS)
        elif kind == SOLARIZE:
            made = tl.where(value.to(tl.float32) < size, value, 255 - value)
        elif kind == POSTERIZE:
            lost = tl.minimum(tl.maximum(8 - size.to(tl.int32), 0), 8)
            made = value >> lost << lost
        tl.store(out + channel * PIXELS + pixel, made.to(tl.uint8), there)


def autoaugment(images: Tensor, numbers: Tensor) -> Tensor:
    """`augment.apply(images, "autoaugment", numbers)` of contiguous images."""
    height, width = images.shape[2:]
    plan, strengths, chances = _policy_plan(images.device, height, width)
    policy, happens, backwards = augment.chosen(numbers[:, 3:], chances)
    row = 4 * policy[:, None] + 2 * torch.arange(2, device=images.device) + backwards
    rows = torch.where(happens, row, len(plan) - 1)
    crops = torch.stack(augment.moves(height, width, *numbers[:, :3].unbind(1)), 1).to(torch.int32)
    return _launch(_launch(images, rows, plan, strengths, crops), rows, plan, strengths)


def operate(images: Tensor, kind: Tensor, strength: Tensor) -> Tensor:
    """`augment.operate` of contiguous images, for strengths that move no pixel by more than 32767."""
    rows = torch.arange(len(images), device=images.device)[:, None].repeat(1, 2)
    return _launch(images, rows, *_plan(kind, strength, *images.shape[2:]))


def _plan(kind: Tensor, strength: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows of operation and fixed-point matrix, int32 (row, 7), and their strengths (row,)."""
    fixed = op.fixed_point(augment.matrix(kind, strength, height, width))
    return torch.stack([kind, *fixed], 1).to(torch.int32), strength


@cache
def _policy_plan(device: torch.device, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows for each sub-policy, operation and direction, the last for no operation; probabilities (25, 2)."""
    kinds, chances, strengths = augment.policy_tables(device, height, width)
    kind = torch.cat([kinds.flatten().repeat_interleave(2), kinds.new_tensor([-1])])
    strength = torch.cat([torch.stack([strengths, -strengths], 2).flatten(), strengths.new_zeros(1)])
    return *_plan(kind, strength, height, width), chances


def warps(block: int) -> int:
    return min(max(SMALLEST, block // EACH) // 32, 16)


def _launch(images: Tensor, rows: Tensor, plan: Tensor, strengths: Tensor, crops: Tensor | None = None) -> Tensor:
    """The first operation of each image, in its crop, or the second; rows (n, 2)."""
    out = torch.empty_like(images)
    if images.numel():
        channels, height, width = images.shape[1:]
        block = max(SMALLEST, triton.next_power_of_2(height * width))
        with torch.cuda.device_of(images):  # type: ignore[no-untyped-call]  # Triton launches on the current one
            _operation[(len(images),)](
                images, out, rows, plan, strengths, plan if crops is None else crops,
                crops is not None, channels, height, width, block, num_warps=warps(block), enable_fp_fusion=False,
            )  # fmt: skip
    return out
