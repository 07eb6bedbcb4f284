"""Augmentation: each operation against Pillow, the policy against its publication, and randomness image by image."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from explicit_dropout.errors import InputError
from explicit_dropout.lab.data import augment as augmentation
from explicit_dropout.lab.data.augment import CIFAR10_POLICY, OPERATIONS, apply, augment, draw, magnitude, operate

SIGNED = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Contrast", "Color", "Brightness", "Sharpness"}
EXACT = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Invert", "Equalize", "Solarize", "Posterize"}
GREY = 128


def pictures(n=12, channels=3, side=32, seed=0):
    """Smooth random images with noise, some of them dull, one of a single colour: histograms of many kinds."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear")
    contrast = torch.linspace(0.1, 1, n)[:, None, None, None]
    noisy = smooth * contrast + 0.05 * torch.rand(n, channels, side, side, generator=generator)
    made = (noisy * 255).clamp(0, 255).to(torch.uint8)
    made[0] = 77
    return made


def pillow(name, image, strength):
    """What Pillow makes of one image (channels, height, width)."""
    array = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    fill = GREY if picture.mode == "L" else (GREY,) * 3
    matrices = {
        "ShearX": (1, strength, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, strength, 1, 0),
        "TranslateX": (1, 0, -int(strength), 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, -int(strength)),
    }
    if name in matrices:
        made = picture.transform(picture.size, Image.Transform.AFFINE, matrices[name], fillcolor=fill)
    elif name == "Rotate":
        made = picture.rotate(strength, fillcolor=fill)
    elif name in ("AutoContrast", "Invert", "Equalize"):
        made = getattr(ImageOps, name.lower())(picture)
    elif name == "Solarize":
        made = ImageOps.solarize(picture, strength)
    elif name == "Posterize":
        made = ImageOps.posterize(picture, int(strength))
    else:
        made = getattr(ImageEnhance, name)(picture).enhance(1 + strength)
    array = np.array(made)
    return torch.from_numpy(array[..., None] if array.ndim == 2 else array).permute(2, 0, 1)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_that_of_pillow_to_within_a_rounding(name, channels):
    images = pictures(channels=channels)
    for level in range(10):
        size = magnitude(name, level, 32, 32)
        for strength in (size, -size) if name in SIGNED else (size,):
            ours = operate(images, torch.full((12,), OPERATIONS.index(name)), torch.full((12,), float(strength)))
            theirs = torch.stack([pillow(name, image, strength) for image in images])
            apart = (ours.int() - theirs.int()).abs().max().item()
            assert apart <= (0 if name in EXACT else 1), (name, level, strength, apart)


def test_operations_of_a_batch_are_those_of_its_images_alone():
    images = pictures(len(OPERATIONS) + 1)
    kinds = torch.arange(-1, len(OPERATIONS))
    strengths = torch.tensor([0.0] + [magnitude(name, 6, 32, 32) for name in OPERATIONS])
    together = operate(images, kinds, strengths)
    alone = [operate(images[i : i + 1], kinds[i : i + 1], strengths[i : i + 1]) for i in range(len(images))]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[0], images[0])


def test_the_policy_is_the_published_one():
    published = pytest.importorskip("torchvision.transforms").AutoAugment
    theirs = published(pytest.importorskip("torchvision.transforms").AutoAugmentPolicy.CIFAR10)
    assert len(CIFAR10_POLICY) == 25
    for ours, other in zip(CIFAR10_POLICY, theirs.policies, strict=True):
        for (name, chance, level), (their_name, their_chance, their_level) in zip(ours, other, strict=True):
            assert (name, chance) == (their_name, their_chance)
            assert their_level in (None, level)
    space = theirs._augmentation_space(10, (32, 32))
    for name in OPERATIONS:
        strengths = space[name][0]
        if strengths.ndim:
            ours = [magnitude(name, level, 32, 32) for level in range(10)]
            np.testing.assert_allclose(ours, strengths.double().numpy(), atol=1e-4)


def test_every_sub_policy_is_drawn_equally_often_and_its_operations_at_their_rates():
    numbers = draw(200_000, "autoaugment", torch.Generator().manual_seed(0))
    policy = (numbers[:, 3] * 25).long()
    counts = torch.bincount(policy, minlength=25)
    assert counts.min() > 7500
    assert counts.max() < 8500
    chance = torch.tensor([[entry[1] for entry in pair] for pair in CIFAR10_POLICY])
    for step in range(2):
        happens = numbers[:, 4 + 2 * step] < chance[policy, step]
        for which in range(25):
            assert abs(happens[policy == which].float().mean() - chance[which, step]) < 0.02


def test_an_image_in_a_batch_is_augmented_by_its_own_numbers_alone():
    images = pictures(64)
    numbers = draw(64, "autoaugment", torch.Generator().manual_seed(3))
    whole = apply(images, "autoaugment", numbers)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(apply(images[order], "autoaugment", numbers[order]), whole[order])
    same = images[5:6].expand(64, -1, -1, -1)
    assert len({view.numpy().tobytes() for view in apply(same, "autoaugment", numbers)}) > 40


def test_the_same_generator_gives_the_same_views_and_another_seed_others():
    images = pictures(16)
    first, again, other = (augment(images, "autoaugment", torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_crop_and_flip_take_every_shift_of_four_pixels_over_black():
    image = pictures(2)[1] | 1  # never black
    views = augment(image.expand(4000, -1, -1, -1), "crop_flip", torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    expected = {}
    for y in range(9):
        for x in range(9):
            cut = padded[:, y : y + 32, x : x + 32]
            expected[cut.numpy().tobytes()] = (x, y, False)
            expected[cut.flip(-1).numpy().tobytes()] = (x, y, True)
    seen = [expected[view.numpy().tobytes()] for view in views]
    assert len(set(seen)) == 2 * 81
    assert abs(sum(flipped for _, _, flipped in seen) / 4000 - 0.5) < 0.03


def test_small_images_are_moved_less():
    image = torch.full((1, 1, 8, 8), 9, dtype=torch.uint8)
    views = augment(image.expand(300, -1, -1, -1), "crop_flip", torch.Generator().manual_seed(0))
    black = (views == 0).sum((1, 2, 3))
    assert sorted(set(black.tolist())) == [0, 8, 15]  # not moved, by one pixel, by one in both directions


def test_nothing_is_done_by_none():
    images = pictures(3)
    assert torch.equal(augment(images, "none"), images)


def test_apply_is_one_graph_for_the_compiler_and_gives_the_same():
    compiled = torch.compile(apply, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (6, 9):
        images, numbers = pictures(count), draw(count, "autoaugment", torch.Generator().manual_seed(2))
        assert torch.equal(compiled(images, "autoaugment", numbers), apply(images, "autoaugment", numbers))


@pytest.mark.parametrize(
    ("images", "kind", "argument"),
    [
        (torch.zeros(2, 3, 8, 8), "crop_flip", "images"),
        (torch.zeros(2, 2, 8, 8, dtype=torch.uint8), "crop_flip", "images"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), "crop_flip", "images"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "mixup", "augmentation"),
    ],
)
def test_what_cannot_be_augmented_is_refused(images, kind, argument):
    with pytest.raises(InputError) as raised:
        augment(images, kind)
    assert raised.value.argument == argument


def test_numbers_of_another_kind_are_refused():
    with pytest.raises(InputError, match="numbers"):
        augmentation.apply(pictures(2), "autoaugment", torch.zeros(2, 3))
