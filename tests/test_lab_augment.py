"""Augmentation: each operation against Pillow, the policy against its publication, and randomness image by image.

The kernels for GPUs against the operations in torch: needs a GPU, or TRITON_INTERPRET=1.
"""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from explicit_dropout.errors import InputError
from explicit_dropout.kernels.energy import HAS_TRITON, interpreted
from explicit_dropout.lab.data import augment as augmentation
from explicit_dropout.lab.data.augment import (
    CIFAR10_POLICY,
    OPERATIONS,
    agrees,
    apply,
    apply_in_torch,
    augment,
    draw,
    magnitude,
    operate,
)

SIGNED = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Contrast", "Color", "Brightness", "Sharpness"}
EXACT = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Invert", "Equalize", "Solarize", "Posterize"}
GREY = 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or interpreted()), reason="needs Triton and a GPU"
)
SHAPES = [(3, 32, 32), (1, 28, 28), (3, 12, 20), (1, 20, 12), (3, 8, 8), (1, 8, 8)]


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


def varied(n, channels, height, width):
    """Pictures, and noise of all values, of which histograms have no gaps."""
    smooth = torch.nn.functional.interpolate(pictures(n, channels), (height, width))
    noise = torch.randint(0, 256, smooth.shape, generator=torch.Generator().manual_seed(n))
    return torch.cat([smooth, noise.to(torch.uint8)]).to(DEVICE)


@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_kernel_of_each_operation_has_the_bits_of_torch(name, shape):
    from explicit_dropout.lab.data import triton_augment

    sizes = torch.tensor([magnitude(name, level, *shape[1:]) for level in (0, 2, 3, 5, 7, 9)])
    strengths = torch.cat([sizes, -sizes]).to(DEVICE)
    images = varied(len(strengths) // 2, *shape)
    for order in (slice(None), torch.arange(len(images)).flip(0)):  # both kinds of images with both signs
        given = images[order]
        kinds = torch.full_like(strengths, OPERATIONS.index(name), dtype=torch.long)
        expected = operate(given, kinds, strengths)
        assert torch.equal(triton_augment.operate(given, kinds, strengths), expected)


@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_autoaugment_by_kernels_has_the_bits_of_torch(shape):
    """Every operation of every sub-policy both ways in the first place, with any crop."""
    images = varied(50, *shape)
    numbers = draw(100, "autoaugment", torch.Generator().manual_seed(sum(shape)))
    numbers[:, 3] = (torch.arange(100) % 25 + 0.5) / 25
    numbers[:50, [4, 6]] = 0.0  # both happen
    numbers[50:, 4] = 0.0
    numbers[:, 5] = (torch.arange(100) // 25 % 2).float()
    numbers = numbers.to(DEVICE)
    assert augmentation.serves(images)
    assert torch.equal(apply(images, "autoaugment", numbers), apply_in_torch(images, "autoaugment", numbers))


@kernels
def test_many_images_of_all_shapes_that_the_kernels_take():
    count = 4096 if DEVICE == "cuda" else 8
    for shape in ((3, 32, 32), (3, 64, 64), (1, 2, 2), (3, 3, 700)):
        images = varied(count // 2, *shape)
        numbers = draw(count, "autoaugment", torch.Generator().manual_seed(1)).to(DEVICE)
        assert augmentation.serves(images)
        assert torch.equal(apply(images, "autoaugment", numbers), apply_in_torch(images, "autoaugment", numbers))


@kernels
def test_numbers_at_their_ends_are_the_same_for_kernels():
    images = varied(8, 3, 8, 8)
    ends = torch.tensor([0.0, 1 - 2**-24])
    numbers = ends[torch.randint(0, 2, (16, 8), generator=torch.Generator().manual_seed(0))].to(DEVICE)
    assert torch.equal(apply(images, "autoaugment", numbers), apply_in_torch(images, "autoaugment", numbers))


@kernels
def test_no_images_and_images_in_another_order_of_memory():
    few = varied(3, 3, 8, 8)
    for images in (few[:0], few.transpose(2, 3), few[:, :1].expand(-1, 3, -1, -1), few[::2], few[1:]):
        numbers = draw(len(images), "autoaugment", torch.Generator().manual_seed(4)).to(DEVICE)
        expected = apply_in_torch(images.contiguous(), "autoaugment", numbers)
        assert torch.equal(apply(images, "autoaugment", numbers), expected)
    large = varied(1, 1, 64, 65)
    numbers = draw(2, "autoaugment", torch.Generator().manual_seed(4)).to(DEVICE)
    assert not augmentation.serves(large)
    assert torch.equal(apply(large, "autoaugment", numbers), apply_in_torch(large, "autoaugment", numbers))


@kernels
def test_kernels_that_differ_from_torch_are_not_used(monkeypatch):
    from explicit_dropout.lab.data import triton_augment

    images, numbers = pictures(5).to(DEVICE), draw(5, "autoaugment", torch.Generator().manual_seed(1)).to(DEVICE)
    monkeypatch.setattr(triton_augment, "autoaugment", lambda images, _: images)
    agrees.cache_clear()
    with pytest.warns(UserWarning, match="torch's is used"):
        found = apply(images, "autoaugment", numbers)
    agrees.cache_clear()
    assert torch.equal(found, apply_in_torch(images, "autoaugment", numbers))
