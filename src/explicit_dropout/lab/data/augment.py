"""Augmentation of training images: for whole batches, on their device, with other random numbers for every image.

`augment(images, kind, generator)` = `apply(images, kind, draw(len(images), kind, generator))`. All randomness is in
`draw`, one call of `torch.rand`, so that several models can be augmented at once with the numbers of their own
generators, and so that `apply` can be compiled. AutoAugment on a GPU has Triton kernels, which give the same bits.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.errors import InputError
from explicit_dropout.kernels.energy import by_triton
from explicit_dropout.lab.config import Augmentation
from explicit_dropout.lab.data import operations as op

NUMBERS: dict[str, int] = {"none": 0, "crop_flip": 3, "autoaugment": 8}
"""How many random numbers each image needs: crop x, crop y, flip; sub-policy, and for each of its two operations
whether it happens and in which direction."""

LARGEST = 4096
"""Pixels of an image, for which one Triton program has all of it."""

OPERATIONS = (
    "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "AutoContrast", "Invert", "Equalize", "Solarize",
    "Posterize", "Contrast", "Color", "Brightness", "Sharpness",
)  # fmt: skip

# The 25 sub-policies that AutoAugment found on CIFAR-10: operation, probability, strength from 0 to 9.
CIFAR10_POLICY: tuple[tuple[tuple[str, float, int], tuple[str, float, int]], ...] = (
    (("Invert", 0.1, 7), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, 8), ("Equalize", 0.9, 2)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, 5), ("Equalize", 0.5, 1)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, 7), ("AutoContrast", 0.4, 8)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, 3)),
    (("Equalize", 0.2, 0), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.2, 8), ("Equalize", 0.6, 4)),
    (("Color", 0.9, 9), ("Equalize", 0.6, 6)),
    (("AutoContrast", 0.8, 4), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, 3)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, 2), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, 8), ("Invert", 0.1, 3)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, 1)),
)


def augment(images: Tensor, kind: Augmentation, generator: torch.Generator | None = None) -> Tensor:
    """Other views of the same images, uint8 (n, channels, height, width), on the device that they are on.

    Args:
        kind: crop_flip: moved by up to an eighth of the side over black (4 pixels of 32), mirrored half of the time;
            autoaugment: the same, then one of the 25 sub-policies for CIFAR-10; none.
        generator: where the random numbers come from; on the device of the images.
    """
    return apply(images, kind, draw(len(images), kind, generator, images.device))


def draw(
    n: int, kind: Augmentation, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """The random numbers of n images, float32 (n, NUMBERS[kind]), uniform from 0 to 1."""
    if kind not in NUMBERS:
        raise InputError("augmentation", f"one of {', '.join(NUMBERS)}", repr(kind))
    return torch.rand(n, NUMBERS[kind], generator=generator, device=device)


def apply(images: Tensor, kind: Augmentation, numbers: Tensor) -> Tensor:
    """What the numbers of `draw` say: a function without randomness, the same under `torch.compile`."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        given = f"{tuple(images.shape)} of {images.dtype}"
        raise InputError("images", "uint8 (n, 1 or 3 channels, height, width)", given)
    if numbers.shape != (len(images), NUMBERS[kind]):
        raise InputError("numbers", f"of shape {(len(images), NUMBERS[kind])} for {kind}", tuple(numbers.shape))
    if kind == "none":
        return images
    if kind == "autoaugment" and serves(images) and agrees(images.device):
        return cast("Tensor", _triton().autoaugment(images, numbers))
    return apply_in_torch(images, kind, numbers)


def apply_in_torch(images: Tensor, kind: Augmentation, numbers: Tensor) -> Tensor:
    """`crop_flip` and `autoaugment` without kernels of ours."""
    moved = crop_flip(images, *numbers[:, :3].unbind(1))
    return moved if kind == "crop_flip" else autoaugment(moved, numbers[:, 3:])


def serves(images: Tensor) -> bool:
    """Whether there are kernels for AutoAugment of these images, here and now."""
    if torch.compiler.is_compiling() or not by_triton(images) or not images.is_contiguous():
        return False
    return images.shape[2] * images.shape[3] <= LARGEST and not torch._C._are_functorch_transforms_active()


@cache
def agrees(device: torch.device) -> bool:
    """Whether on this device the kernels give what torch gives: looked at once, since training depends on it."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(256, (100, 3, 32, 32), dtype=torch.uint8, generator=random).to(device)
    numbers = draw(len(images), "autoaugment", random).to(device)
    same = torch.equal(_triton().autoaugment(images, numbers), apply_in_torch(images, "autoaugment", numbers))
    if not same:
        warnings.warn(
            f"Triton's AutoAugment is not torch's on {device}: torch's is used. Please report it", stacklevel=2
        )
    return same


@cache
def _triton() -> Any:
    from explicit_dropout.lab.data import triton_augment

    return triton_augment


def crop_flip(images: Tensor, right: Tensor, down: Tensor, flip: Tensor) -> Tensor:
    """Cut from the image with a black border of an eighth of its side, and mirrored where `flip` is below ½."""
    _, _, height, width = images.shape
    from_left, from_top, mirrored = moves(height, width, right, down, flip)
    across = torch.arange(width, device=images.device)
    x = torch.where(mirrored[:, None], width - 1 - across, across) + from_left[:, None]
    y = torch.arange(height, device=images.device) + from_top[:, None]
    return op.gather(images, x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width), fill=0)


def moves(height: int, width: int, right: Tensor, down: Tensor, flip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By how many pixels the crop is to the right and below the image, and whether it is mirrored, each (n,)."""
    left, top = max(width // 8, 1), max(height // 8, 1)
    from_left = ((2 * left + 1) * right).long().clamp(max=2 * left) - left
    from_top = ((2 * top + 1) * down).long().clamp(max=2 * top) - top
    return from_left, from_top, flip < 0.5


def autoaugment(images: Tensor, numbers: Tensor) -> Tensor:
    """One sub-policy for each image: two operations, each with its probability."""
    tables = policy_tables if torch.compiler.is_compiling() else _kept_policy_tables  # a cache is no part of a graph
    kinds, chances, strengths = tables(images.device, images.shape[2], images.shape[3])
    policy, happens, backwards = chosen(numbers, chances)
    for step in range(2):
        kind = torch.where(happens[:, step], kinds[policy, step], -1)
        strength = strengths[policy, step]
        images = operate(images, kind, torch.where(backwards[:, step], -strength, strength))
    return images


def chosen(numbers: Tensor, chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each image's sub-policy (n,); for both operations, whether they happen, and whether backwards, (n, 2)."""
    policy = (numbers[:, 0] * len(CIFAR10_POLICY)).long().clamp(max=len(CIFAR10_POLICY) - 1)
    return policy, numbers[:, 1::2] < chances[policy], numbers[:, 2::2] < 0.5


def operate(images: Tensor, kind: Tensor, strength: Tensor) -> Tensor:
    """The operation OPERATIONS[kind] on each image (−1: none), with its strength in the units of the operation.

    Strengths: shear as tangent; shift in pixels; rotation in degrees; threshold; bits; distance of a factor from 1. The
    sign is ignored where an operation has no direction.
    """
    return _color(_geometry(images, kind, strength), kind, strength)


def _geometry(images: Tensor, kind: Tensor, strength: Tensor) -> Tensor:
    """Shears, shifts and the rotation are one gather, with another matrix for each image."""
    return op.affine(images, matrix(kind, strength, *images.shape[2:]))


def matrix(kind: Tensor, strength: Tensor, height: int, width: int) -> Tensor:
    """The matrix of `op.affine` for each operation, (n, 6): that of a geometric one, or the identity."""

    def only(name: str) -> Tensor:
        return torch.where(kind == OPERATIONS.index(name), strength, 0.0)

    shear = op.shear_matrix(only("ShearX"), only("ShearY"))
    shift = op.shift_matrix(only("TranslateX"), only("TranslateY"))
    turn = op.rotation_matrix(only("Rotate"), height, width)
    still = op.shear_matrix(torch.zeros_like(strength), torch.zeros_like(strength))
    return shear + shift + turn - 2 * still  # at most one of them is not the identity


def _color(images: Tensor, kind: Tensor, strength: Tensor) -> Tensor:
    """What changes values by themselves is one look-up; colour and sharpness need the neighbours and come beside it."""
    same, counts, grey = op.values(images), op.histogram(images), op.greyscale(images)
    factor, size = 1 + strength, strength.abs()
    chosen = kind[:, None, None]
    table = same.expand_as(counts)
    for name, made in (
        ("AutoContrast", op.autocontrast_table(same, counts)),
        ("Invert", op.invert_table(same)),
        ("Equalize", op.equalize_table(same, counts)),
        ("Solarize", op.solarize_table(same, size)),
        ("Posterize", op.posterize_table(same, size)),
        ("Contrast", op.contrast_table(same, factor, grey)),
        ("Brightness", op.brightness_table(same, factor)),
    ):
        table = torch.where(chosen == OPERATIONS.index(name), made, table)
    changed = op.look_up(images, table)
    chosen = kind[:, None, None, None]
    changed = torch.where(chosen == OPERATIONS.index("Color"), op.color(images, factor, grey), changed)
    return torch.where(chosen == OPERATIONS.index("Sharpness"), op.sharpness(images, factor), changed)


def magnitude(name: str, level: int, height: int, width: int) -> float:
    """What a strength from 0 to 9 means for an operation, in its own units."""
    share = level / 9
    if name.startswith("Shear"):
        return 0.3 * share
    if name.startswith("Translate"):
        return 150 / 331 * (width if name.endswith("X") else height) * share
    if name == "Rotate":
        return 30 * share
    if name == "Solarize":
        return 255 * (9 - level) / 9
    if name == "Posterize":
        return 8 - round(4 * share)
    if name in ("Contrast", "Color", "Brightness", "Sharpness"):
        return 0.9 * share
    return 0.0  # AutoContrast, Equalize and Invert have no strength


def policy_tables(device: torch.device, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operation, probability and strength, each (25, 2)."""
    kinds = [[OPERATIONS.index(name) for name, _, _ in pair] for pair in CIFAR10_POLICY]
    chances = [[chance for _, chance, _ in pair] for pair in CIFAR10_POLICY]
    strengths = [[magnitude(name, level, height, width) for name, _, level in pair] for pair in CIFAR10_POLICY]
    return (
        torch.tensor(kinds, device=device),
        torch.tensor(chances, device=device),
        torch.tensor(strengths, device=device),
    )


_kept_policy_tables = cache(policy_tables)
"""Copied to each device once: a copy in every batch would make the host wait."""
