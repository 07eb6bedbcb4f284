"""The kernels equal plain torch, in value and gradient, and are the same bits every time.

On a GPU they run as they are. Without one, energies and scores are those that a CPU has, or Triton's where it
interprets its kernels (TRITON_INTERPRET=1), which incoherent scores need.
"""

import re
from functools import partial

import pytest
import torch
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout import kernels
from explicit_dropout.hooks.attention import apart
from explicit_dropout.kernels import plain, torch_energy
from explicit_dropout.kernels.launch import Launch

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's, of activations
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
fused = pytest.mark.skipif(
    not kernels.by_triton(torch.zeros(1, device=DEVICE)), reason="no GPU, and Triton does not interpret its kernels"
)
SHAPES = [(3, 5, 7), (2, 70, 300), (0, 4, 8), (4, 0, 8), (129, 130), (1, 1, 1), (5, 1024)]
if DEVICE == "cuda":
    SHAPES += [(33, 65, 384), (7, 197, 768), (3, 1024, 3072), (10007, 33)]


def draw(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found, expected, rounding):
    """Within rounding of the largest element: sums cancel, elements do not decide."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = expected.double().abs().max().item() if expected.numel() else 0.0
    assert_close(found.double(), expected.double(), rtol=rounding, atol=rounding * scale)


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}

# ---------------------------------------------------------------------------------------------- energies


def through(x, bias, by_column, mask=None, rows=None, lower=None):
    """The tensor and its energy, by the kernels."""
    passed, energies = kernels.passing(x, bias=bias, mask=mask, rows=rows, lower=lower, by_column=by_column)
    return passed, energies.sum(0) if by_column else energies.sum()


def plainly(x, bias, by_column, mask=None, rows=None, lower=None):
    """The same in float64."""
    x = x if lower is None else x.to(lower)
    own = (x if rows is None else x[..., rows]).double()
    columns = plain.columns(own, None if bias is None else bias.double(), mask)
    return x, columns if by_column else columns.sum()


def compare(shape, dtype, *, biased, masked, by_column, sliced, lowered):
    width = 4 if sliced else shape[-1]
    rows = slice(2, 6) if sliced else None
    mask = draw(shape[:-1], seed=5) > -0.3 if masked else None
    lower = torch.bfloat16 if lowered else None
    weights = draw((width,), seed=3) if by_column else torch.tensor(0.7, device=DEVICE)
    passing = draw(shape, seed=4)
    found = []
    for function in (through, plainly):
        x, bias = draw(shape, dtype, 1).requires_grad_(), draw((width,), seed=2).requires_grad_() if biased else None
        out, energy = function(x, bias, by_column, mask, rows, lower)
        leaves = [x] if bias is None else [x, bias]
        loss = (energy * weights).sum() + (out.double() * passing).sum()
        found.append((out.detach(), energy.detach().float(), *torch.autograd.grad(loss, leaves)))
    rounding = ROUNDING[lower or dtype]
    if lower is None or DEVICE == "cuda":  # the interpreter of Triton cuts off where it should round
        assert torch.equal(found[0][0], found[1][0])
    close(found[0][1], found[1][1], 1e-5 if lower is None else 1e-2)
    close(found[0][2], found[1][2], rounding)
    if biased:
        close(found[0][3], found[1][3], 1e-4)


CHOICES = [
    set(),
    {"biased", "masked"},
    {"by_column", "masked"},
    {"biased", "sliced"},
    {"biased", "masked", "by_column", "sliced"},
]
"""Every option with and without every other one, without compiling all of their combinations."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: "+".join(sorted(choices)) or "plain")
def test_energies_and_their_gradients_equal_plain_torch(choices, dtype):
    for shape in SHAPES if dtype == torch.bfloat16 else SHAPES[:2]:
        if "sliced" not in choices or shape[-1] > 6:
            flags = {name: name in choices for name in ("biased", "masked", "by_column", "sliced")}
            compare(shape, dtype, **flags, lowered=False)


@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: "+".join(sorted(choices)) or "plain")
def test_a_tensor_of_many_blocks_has_the_same_energies(choices, monkeypatch):
    monkeypatch.setattr(torch_energy, "BLOCK_ELEMENTS", 64)
    flags = {name: name in choices for name in ("biased", "masked", "by_column", "sliced")}
    compare((3, 5, 7), torch.float32, **flags, lowered=False)


@pytest.mark.parametrize("masked", [False, True])
def test_a_tensor_lowered_on_its_way_is_the_one_that_autocast_makes(masked):
    for shape in SHAPES:
        compare(shape, torch.float32, biased=False, masked=masked, by_column=True, sliced=False, lowered=True)


def test_the_weight_that_a_tensor_passes_to_has_its_columns_summed_as_well():
    x, weight = draw((3, 50, 40), torch.bfloat16).requires_grad_(), draw((30, 40), seed=2)
    for layer in (weight, weight.mT.contiguous().mT):  # as nn.Linear and as the Conv1D of GPT-2 keep theirs
        leaf = layer.detach().requires_grad_()
        passed, columns, norms = kernels.passing_to(leaf, x)
        energy = (columns.sum(0) * norms.sum(0)).sum()
        expected = (plain.columns(x) * plain.columns(leaf)).sum()
        assert_close(energy, expected)
        found = torch.autograd.grad(energy + passed.sum(), (x, leaf), retain_graph=True)
        wanted = torch.autograd.grad(expected + x.sum(), (x, leaf))
        close(found[0], wanted[0], 2**-7)
        close(found[1], wanted[1], 1e-5)
        again = torch.autograd.grad(energy, leaf, create_graph=True)[0].square().sum()
        other = torch.autograd.grad((plain.columns(x) * plain.columns(leaf)).sum(), leaf, create_graph=True)[0]
        close(*(torch.autograd.grad(value, leaf)[0] for value in (again, other.square().sum())), 1e-4)


def test_many_weights_have_the_norms_of_their_columns_taken_at_once():
    given = [draw((30, 40), seed=2), draw((300, 40), seed=3).mT, draw((30, 7), torch.bfloat16, 4), draw((3, 5), seed=5)]
    found = []
    for function in (kernels.norms, lambda weights: torch.cat([plain.columns(weight) for weight in weights])):
        leaves = [weight.detach().requires_grad_() for weight in given]
        norms = function(leaves)
        first = torch.autograd.grad(norms.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(slope.double().square().sum() for slope in first), leaves)
        found.append([norms.detach(), *(slope.detach() for slope in first), *second])
    for mine, other in zip(*found, strict=True):
        close(mine, other, 2**-7 if mine.dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "swapped"])
def test_any_layout_of_memory_will_do(layout):
    base = draw((24, 70, 40))
    x = {
        "transposed": base.mT,
        "expanded": base[:, :1].expand(24, 70, 40),
        "strided": base[:, ::2, 3:37:3],
        "swapped": base.transpose(0, 1),
    }[layout]
    leaf, bias = x.detach().requires_grad_(), draw((x.shape[-1],), seed=2)
    assert leaf.stride() == x.stride()
    for by_column in (False, True):
        out, energy = through(leaf, bias, by_column)
        (found,) = torch.autograd.grad(energy.sum() + out.mT.sum(), leaf)
        close(found, 2 * (x - bias) + 1, 1e-6)
        close(energy.detach(), plainly(x, bias, by_column)[1].float(), 1e-5)


@pytest.mark.parametrize(
    "x", [torch.zeros(5, 0, 16).transpose(0, 1), torch.zeros(0, 5, 16), torch.empty_strided((4, 3, 0), (7, 5, 1))]
)
def test_an_empty_tensor_may_have_any_strides(x):
    x = x.to(DEVICE).requires_grad_()
    passed, energies = kernels.passing(x)
    (passed.sum(1).sin().sum() + energies.sum()).backward()  # the gradient that comes back has strides of its own
    assert energies.sum() == 0
    assert x.grad.shape == x.shape


def test_nothing_of_a_row_that_does_not_count_is_seen():
    x, mask = draw((4, 9, 20)), torch.rand(4, 9, device=DEVICE) < 0.5
    x[~mask] = torch.nan
    x.requires_grad_()
    out, energies = kernels.passing(x, mask=mask, bias=draw((20,), seed=2))
    assert energies.isfinite().all()
    (gradient,) = torch.autograd.grad(energies.sum() + out.nan_to_num().sum(), x)
    assert gradient.isfinite().all()


def test_the_same_bits_every_time():
    x, bias = draw((40, 197, 768) if DEVICE == "cuda" else (4, 30, 70), torch.bfloat16), None
    results = []
    for _ in range(5):
        leaf = x.clone().requires_grad_()
        out, energies = kernels.passing(leaf, bias=bias)
        results.append((energies.detach(), *torch.autograd.grad(energies.sum().square() + out.sum(), leaf)))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))


@pytest.mark.parametrize("by_column", [False, True])
def test_second_derivatives_are_right(by_column):
    x, bias = draw((70, 30)).requires_grad_(), draw((4,), seed=2).requires_grad_()
    found = []
    for function in (through, plainly):
        out, energy = function(1.5 * x, bias, by_column, None, slice(2, 6))
        loss = 1e-3 * energy.sum().square() + out.sin().sum()
        first = torch.autograd.grad(loss, (x, bias), create_graph=True)
        found.append(torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, bias)))
    for a, b in zip(*found, strict=True):
        close(a, b.to(a.dtype), 1e-4)


def test_a_tensor_changed_in_place_afterwards_is_copied_or_refused():
    layer, x = torch.nn.Linear(8, 8).to(DEVICE), draw((4, 8))
    expected = torch.autograd.grad(layer(x).relu().sum() + (layer(x) - layer.bias).square().sum(), layer.weight)
    out, energies = kernels.passing(layer(x), bias=layer.bias, copied=True)
    assert_close(torch.autograd.grad(out.relu_().sum() + energies.sum(), layer.weight), expected)
    out, energies = kernels.passing(layer(x), bias=layer.bias)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (out.relu_().sum() + energies.sum()).backward()


@pytest.mark.parametrize("changed", [False, True])
def test_a_copy_has_second_derivatives_too(changed):
    x, bias = draw((7, 6)).requires_grad_(), draw((6,), seed=2).requires_grad_()
    found = []
    for copied in (True, False):
        made = 1.5 * x
        out, energies = kernels.passing(made, bias=bias, copied=True) if copied else (made, plain.columns(made, bias))
        out = out.relu_() if copied and changed else out.relu() if changed else out
        loss = 1e-2 * energies.sum().square() + out.sin().sum()
        first = torch.autograd.grad(loss, (x, bias), create_graph=True)
        found.append(torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, bias)))
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-4)


def test_function_transforms_and_float64_take_the_plain_way():
    x = draw((4, 6))
    mapped = torch.vmap(torch.func.grad(lambda row: kernels.columns(row[None]).sum()))(x)
    assert_close(mapped, 2 * x)
    assert not kernels.serves(x.double())


def test_a_single_row_without_a_batch_has_an_energy_too():
    for by_column in (False, True):
        x, bias = draw((9,), seed=1).requires_grad_(), draw((9,), seed=2).requires_grad_()
        out, energy = through(x, bias, by_column)
        slopes = torch.autograd.grad(energy.sum() + out.sum(), (x, bias))
        expected = plain.columns(x, bias)
        wanted = torch.autograd.grad(expected.sum() + x.sum(), (x, bias))
        for mine, other in zip((energy, *slopes), (expected if by_column else expected.sum(), *wanted), strict=True):
            close(mine.detach(), other.detach(), 1e-5)


def test_frozen_weights_get_no_gradient_of_their_norms():
    frozen, weight = draw((4, 3)), draw((4, 3), seed=1).requires_grad_()
    kernels.norms([frozen, weight]).sum().backward()
    assert frozen.grad is None
    close(weight.grad, 2 * weight.detach(), 1e-6)


# ---------------------------------------------------------------------------------------------- launches


class Kernel:
    """As much of what `triton.jit` makes as launches use: it writes down how it is called."""

    def __init__(self):
        self.asked, self.launched = [], []

    def __getitem__(self, grid):
        def ask(*arguments, num_warps):
            self.asked.append((grid, arguments, num_warps))
            return Compiled(self.launched)

        return ask


class Compiled:
    run = None

    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.launched.append((grid, arguments, stream))


def test_triton_is_asked_once_for_each_alignment_and_then_launched_directly(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
    kernel, tensors = Kernel(), (draw((16,)), draw((16,), seed=1))
    launch = Launch(kernel, (2, 3, 1), (7, True), warps=8)
    launch(*tensors)
    assert kernel.asked == [((2, 3, 1), (*tensors, 7, True), 8)]
    launch(*tensors)
    pointers = [tensor.data_ptr() for tensor in tensors]
    assert kernel.launched == [((2, 3, 1), (*pointers, 7, True), "stream")]
    for view in (tensors[0][1:], tensors[0][2:]):  # neither starts at a multiple of 16 bytes
        launch(view, tensors[1])
    assert (len(kernel.asked), len(kernel.launched)) == (2, 2)
    launch(tensors[0], tensors[1][1:])
    assert (len(kernel.asked), len(kernel.launched)) == (3, 2)


def test_nothing_is_launched_over_an_empty_grid():
    kernel = Kernel()
    Launch(kernel, (0, 3, 1), ())(draw((0,)))
    assert not kernel.asked


# ---------------------------------------------------------------------------------------------- operators


def drawn_layer(shape, out, dtype, masked):
    """The input of a layer, its weight and which rows count."""
    x, weight = draw(shape, dtype), draw((out, shape[-1]), dtype, 2)
    return x, weight, draw(shape[:-1], seed=5) > 0 if masked else None


def columns_of_both(x, weight, mask):
    return plain.columns(x.double(), None, mask), plain.columns(weight.double())


LAYERS = [((3, 5, 7), 4), ((0, 4, 8), 3), ((129, 130), 150), ((2, 40), 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("shape", "out"), LAYERS)
def test_the_incoherent_operator_is_registered_soundly(shape, out, dtype, masked):
    x, weight, mask = drawn_layer(shape, out, dtype, masked)
    leaves = x.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(torch.ops.explicit_dropout.incoherent.default, (*leaves, mask))
    columns, norms = torch.ops.explicit_dropout.incoherent(*leaves, mask)
    own, other = columns_of_both(x.detach(), weight.detach(), mask)
    close(columns.detach(), own.to(columns.dtype), 1e-5)
    close(norms.detach(), other.to(norms.dtype), 1e-5)
    slopes = draw(columns.shape, columns.dtype, 3), draw(norms.shape, norms.dtype, 4)
    first, second = (2 * slope.double() for slope in slopes)
    expected = first * plain.deviation(x.detach().double(), None, mask), second * weight.detach().double()
    for found, right in zip(torch.autograd.grad((columns, norms), leaves, slopes), expected, strict=True):
        close(found, right.to(dtype), 1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_second_derivatives_of_the_incoherent_operator_are_right():
    leaves = draw((5, 40), torch.float64).requires_grad_(), draw((3, 40), torch.float64, 2).requires_grad_()
    torch.autograd.gradcheck(lambda x, w: torch.ops.explicit_dropout.incoherent(x, w, None), leaves)
    torch.autograd.gradgradcheck(lambda x, w: torch.ops.explicit_dropout.incoherent(x, w, None), leaves)


@fused
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["even", "transposed weight", "part of a wider input"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("shape", "out"), [*LAYERS, ((6, 700, 33), 300)])
def test_the_incoherent_kernels_equal_plain_torch_and_repeat_themselves(shape, out, masked, layout, dtype):
    from explicit_dropout.kernels.triton_incoherent import incoherent_of

    x, weight, mask = drawn_layer(shape, out, dtype, masked)
    if layout == "transposed weight":
        weight = weight.mT.contiguous().mT
    elif layout == "part of a wider input":
        x = torch.cat([x, x], -1)[..., shape[-1] :]
    flags = None if mask is None else mask.reshape(-1).view(torch.uint8)
    found = incoherent_of(x, weight, flags)
    own, other = columns_of_both(x, weight, mask)
    close(found[0], own.float(), 1e-5)
    close(found[1], other.float(), 1e-5)
    for first, second in zip(found, incoherent_of(x, weight, flags), strict=True):
        assert torch.equal(first, second)


SAMPLES = [(3, 5, 7), (0, 4, 8), (5, 0, 3), (4, 130, 150), (2, 65, 384)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SAMPLES)
def test_the_squares_of_samples_are_registered_soundly(shape, dtype):
    x = draw(shape, dtype).requires_grad_()
    torch.library.opcheck(torch.ops.explicit_dropout.squares.default, (x,))
    found = torch.ops.explicit_dropout.squares(x)
    close(found.detach(), x.detach().double().square().sum(1).to(found.dtype), 1e-5)
    slopes = draw(found.shape, found.dtype, 3)
    expected = 2 * slopes.double().unsqueeze(1) * x.detach().double()
    close(torch.autograd.grad(found, x, slopes)[0], expected.to(dtype), 1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_second_derivatives_of_the_squares_of_samples_are_right():
    x = draw((2, 3, 5), torch.float64).requires_grad_()
    torch.autograd.gradcheck(torch.ops.explicit_dropout.squares, x)
    torch.autograd.gradgradcheck(torch.ops.explicit_dropout.squares, x)


@fused
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["even", "tokens first", "part of a wider input"])
@pytest.mark.parametrize("shape", SAMPLES)
def test_the_kernel_of_the_squares_of_samples_equals_plain_torch_and_repeats_itself(shape, layout, dtype):
    from explicit_dropout.kernels.triton_incoherent import squares_of

    x = draw(shape, dtype)
    if layout == "tokens first":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "part of a wider input":
        x = torch.cat([x, x], -1)[..., shape[-1] :]
    found = squares_of(x)
    close(found, x.double().square().sum(1).float(), 1e-5)
    assert torch.equal(found, squares_of(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_incoherent_operator_compiles_whole(backend):
    def function(x, weight):
        columns, norms = torch.ops.explicit_dropout.incoherent(x.sin(), weight, None)
        return (columns * norms * 0.5).sum()

    leaves = draw((6, 40)).requires_grad_(), draw((7, 40), seed=2).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert_close(torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(function(*leaves), leaves))


def incoherent_alone(x, key):
    columns, norms = torch.ops.explicit_dropout.incoherent(x, key.flatten(0, 1)[:80], None)
    return columns * norms


def scores_alone(x, key):
    return torch.ops.explicit_dropout.scores(x, key, None, None, 2, False)


def spreads_alone(x, key):
    return torch.ops.explicit_dropout.spread([x, key.flatten(0, 1)[:64], key.float().square().sum(1)], 2)[0]


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler has some for the user of small matrices
@pytest.mark.parametrize("function", [incoherent_alone, scores_alone, spreads_alone])
def test_compiled_code_launches_the_kernels_itself_for_any_number_of_samples(function):
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, key: (function(x.sin(), key) * 0.5).sum(), fullgraph=True, dynamic=True)
    code = ""
    for samples in (6, 9, 1000):
        x, key = (draw((samples, 40, 64), torch.bfloat16, seed).requires_grad_() for seed in (1, 2))
        leaves = [x, key]

        def gradients(x=x, key=key, leaves=leaves):
            return torch.autograd.grad(compiled(x, key), leaves)

        found, codes = run_and_get_code(gradients)
        code += "".join(codes)
        for a, b in zip(found, torch.autograd.grad((function(x.sin(), key) * 0.5).sum(), leaves), strict=True):
            close(a, b, 2**-6)
    assert "_column_squares" in code or "_scores" in code or "_spread_energies" in code
    assert "ops.explicit_dropout" not in code


# ---------------------------------------------------------------------------------------------- scores

SIDES = [(2, 5, 5, 3, 8), (1, 70, 70, 2, 20), (2, 130, 130, 1, 33), (2, 65, 40, 2, 32), (0, 4, 4, 2, 8)]
if DEVICE == "cuda":
    SIDES += [(4, 197, 197, 12, 64), (8, 65, 65, 12, 32), (2, 1024, 1024, 3, 64), (2, 300, 300, 2, 128)]


def sides(shape, dtype, biases):
    """Queries as a part of a fused projection, keys, and biases of the one, the other, or both."""
    batch, tokens, context, heads, width = shape
    left, right = draw((batch, tokens, 3 * heads * width), dtype, 1)[..., : heads * width], None
    right = draw((batch, context, heads * width), dtype, 2)
    return left, right, *(draw((heads * width,), seed=3 + n) if n in biases else None for n in range(2))


def score_results(function, given, heads, causal, dtype=None):
    leaves = [None if x is None else (x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in given]
    energies = function(*leaves, heads, causal)
    weights = draw(energies.shape, seed=6).to(energies.dtype)
    return [energies.detach(), *torch.autograd.grad(energies, [leaf for leaf in leaves if leaf is not None], weights)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biases", [(), (0,), (1,)])
def test_score_energies_and_their_gradients_equal_plain_torch(biases, causal, dtype):
    for shape in SIDES if dtype == torch.bfloat16 else SIDES[:4]:
        if not causal or shape[1] == shape[2]:
            given = sides(shape, dtype, biases)
            found = score_results(kernels.scores, given, shape[3], causal)
            wanted = score_results(plain.scores, given, shape[3], causal, torch.float64)
            for a, b, leaf in zip(found, wanted, [None, *(x for x in given if x is not None)], strict=True):
                close(
                    a, b.to(torch.float32 if leaf is None else leaf.dtype), 2**-7 if dtype == torch.bfloat16 else 1e-4
                )


def test_scores_have_the_same_bits_every_time_and_second_derivatives():
    given = sides((2, 70, 70, 2, 20), torch.float32, (0,))
    first, again = (score_results(kernels.scores, given, 2, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    found = []
    for function in (kernels.scores, plain.scores):
        leaf = given[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf, *given[1:], 2, True).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), leaf)[0])
    close(*found, 1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biases", [(), (0,), (0, 1)])
def test_the_scores_operators_are_registered_soundly(biases, causal):
    given = [None if x is None else x.detach().requires_grad_() for x in sides((2, 5, 5, 3, 8), torch.float32, biases)]
    operators = torch.ops.explicit_dropout
    torch.library.opcheck(operators.scores.default, (*given, 3, causal))
    detached = [None if x is None else x.detach() for x in given]
    torch.library.opcheck(operators.score_gradients.default, (*detached, 3, causal, draw((2, 3))))
    found, wanted = (score_results(f, given, 3, causal) for f in (operators.scores, plain.scores))
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-4)


SPREADS = [(3, 20, 2, 8, 12), (5, 33, 3, 16, 70), (9, 70, 1, 33, 130), (1, 1, 2, 20, 5), (0, 4, 2, 8, 6)]
if DEVICE == "cuda":
    SPREADS += [(33, 197, 12, 64, 768), (40, 65, 12, 32, 384), (3, 65, 2, 128, 300)]
LAYOUTS = ["even", "parts of fused ones", "Conv1D's"]


def spread_plainly(keys, first, squares, queries, second, other_squares, heads):
    """What is incoherent in the scores of all pairs under dropout before the first, the second and both projections."""
    k, q = (torch.unflatten(side, -1, (heads, -1)).transpose(1, 2) for side in (keys, queries))
    by_head = [torch.unflatten(weight, 0, (heads, -1)) for weight in (first, second)]
    one, other = (
        torch.einsum("hec,bc,hfc->bhef", rows, of, rows)
        for rows, of in zip(by_head, (squares, other_squares), strict=True)
    )
    return (k.mT @ k * one).sum((2, 3)), (q.mT @ q * other).sum((2, 3)), (one * other).sum((2, 3))


def spread_sides(shape, dtype, layout="even"):
    """The tensors of both sides, in the order of `joint_spread`."""
    batch, tokens, heads, width, inputs = shape
    features = heads * width
    if layout == "even":
        keys, queries = (draw((batch, tokens, features), dtype, seed) for seed in (1, 2))
        weights = [draw((features, inputs), seed=seed) for seed in (3, 4)]
    else:
        keys, queries = draw((batch, tokens, 2 * features), dtype, 1).split(features, -1)
        fused = (
            draw((inputs, 2 * features), seed=3).mT if layout == "Conv1D's" else draw((2 * features, inputs), seed=3)
        )
        weights = fused.split(features)
    squares = [draw((batch, inputs), seed=seed).square() for seed in (5, 6)]
    return [keys, weights[0], squares[0], queries, weights[1], squares[1]]


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=fused), True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SPREADS)
def test_spreads_and_their_gradients_equal_plain_torch(shape, layout, dtype, compiled):
    heads = shape[2]
    given = spread_sides(shape, dtype, layout)
    weighting = [draw((shape[0], heads), seed=seed) for seed in (7, 8, 9, 10)]

    def fused(*sides):
        return (*kernels.joint_spread(*sides, heads), kernels.spread(*sides[:3], heads))

    def plainly(*sides):
        found = spread_plainly(*sides, heads)
        return (*found, found[0])

    torch._dynamo.reset()
    rounding = 2e-2 if kernels.energy.interpreted() else 1e-2  # Triton's interpreter cuts off where it should round
    mine = torch.compile(fused, fullgraph=True, backend="aot_eager") if compiled else fused
    found = []
    for function, precision in ((mine, None), (plainly, torch.float64)):
        leaves = [(x if precision is None else x.to(precision)).detach().requires_grad_() for x in given]
        results = function(*leaves)
        loss = sum((energy * each).sum() for energy, each in zip(results, weighting, strict=True))
        found.append([*(energy.detach() for energy in results), *torch.autograd.grad(loss, leaves)])
    for mine, other in zip(*found, strict=True):
        assert mine.shape == other.shape
        assert (mine.double() - other).norm() < rounding * other.norm() or not other.norm()


@fused
@pytest.mark.parametrize("shape", [(9, 70, 2, 16, 40), *SPREADS[-3:]])
def test_spreads_are_the_same_bits_every_time_and_have_no_second_derivative(shape):
    heads = shape[2]
    leaves = [x.requires_grad_() for x in spread_sides(shape, torch.bfloat16)]
    first, *others = (
        (*energies, *torch.autograd.grad(sum(e.sum() for e in energies), leaves))
        for energies in (kernels.joint_spread(*leaves, heads) for _ in range(4))
    )
    assert all(all(map(torch.equal, first, other)) for other in others)
    with pytest.raises(RuntimeError, match="no second derivative in half precision"):
        torch.autograd.grad(kernels.spread(*leaves[:3], heads).sum(), leaves[0], create_graph=True)


@fused
def test_spreads_leave_the_range_of_float16():
    others, weight = 8 * draw((1, 1024, 32), torch.float16, 1), draw((32, 16), seed=2)
    squares = torch.full((1, 16), 7e4, device=DEVICE)
    with torch.autocast(DEVICE, torch.float16):
        found = kernels.joint_spread(others, weight, squares, others, weight, squares, 2)
    assert all(energies.isfinite().all() for energies in found)


def test_the_operators_of_spreads_are_registered_soundly():
    operators = torch.ops.explicit_dropout
    sides = spread_sides((3, 20, 2, 8, 12), torch.bfloat16)
    slopes = [draw((3, 2), seed=seed) for seed in (7, 8, 9)]
    for count in (3, 6):
        torch.library.opcheck(operators.spread_gradients.default, (sides[:count], 2, slopes[: 2 * count // 3 - 1]))
    leaves = [tensor.detach().requires_grad_() for tensor in sides]
    for count in (3, 6):
        torch.library.opcheck(operators.spread.default, (leaves[:count], 2))


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=fused), True])
def test_nothing_is_kept_for_spreads_but_what_there_is(compiled):
    given = [x.requires_grad_() for x in spread_sides((3, 20, 2, 8, 12), torch.bfloat16)]
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    torch._dynamo.reset()
    function = partial(kernels.joint_spread, heads=2)
    function = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*given)
    for tensor in given:
        kept.pop(tensor.data_ptr(), None)
    lowered = [(weight.shape, torch.bfloat16) for weight in (given[1], given[4])]  # as the model keeps them
    assert [(tensor.shape, tensor.dtype) for tensor in kept.values()] in ([], lowered)


on_cpu = pytest.mark.skipif(
    kernels.by_triton(torch.zeros(1, device=DEVICE)), reason="only a CPU without Triton has these in float32"
)


@on_cpu
def test_spreads_of_a_cpu_are_exact_and_keep_no_more_than_matrices_of_heads():
    given, kept = [x.requires_grad_() for x in spread_sides((5, 33, 3, 16, 70), torch.float32)], {}
    assert kernels.serves_spread(given[0], 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        found = kernels.joint_spread(*given, heads=3)
    own = {tensor.data_ptr() for tensor in given}
    assert sorted(tuple(x.shape) for place, x in kept.items() if place not in own) == [(5, 3, 16, 16)] * 4
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = spread_plainly(*exact, heads=3)
    gradients = torch.autograd.grad(sum(energy.square().sum() for energy in found), given)
    for mine, other in zip(
        (*found, *gradients),
        (*wanted, *torch.autograd.grad(sum(energy.square().sum() for energy in wanted), exact)),
        strict=True,
    ):
        assert (mine.double() - other).norm() < 1e-5 * other.norm()


@on_cpu
def test_spreads_of_a_cpu_have_second_derivatives():
    given = [x.double().requires_grad_() for x in spread_sides((2, 5, 2, 3, 4), torch.float32)]
    first = torch.autograd.grad(sum(e.sum() for e in spread_plainly(*given, heads=2)), given, create_graph=True)
    wanted = torch.autograd.grad(sum(g.square().sum() for g in first), given)
    own = [x.detach().float().requires_grad_() for x in given]
    first = torch.autograd.grad(sum(e.sum() for e in kernels.joint_spread(*own, heads=2)), own, create_graph=True)
    found = torch.autograd.grad(sum(g.square().sum() for g in first), own)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine.double() - other).norm() < 1e-5 * other.norm()


@on_cpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("component", ["query", "key", "query_key"])
def test_incoherent_scores_of_a_model_on_a_cpu_keep_no_matrices_and_are_those_of_plain_torch(component, autocast):
    def run_once(served):
        model, kept = small_vit(), {}
        reg = xd.ExplicitDropout(model, xd.inverted(0.3), **{component: 0.3})
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if not served:
                patch.setattr(kernels, "serves_spread", lambda *_: False)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: kept.setdefault(x.data_ptr(), x.numel()) and x, lambda x: x
            ):
                run(model)
                penalty = reg()
        penalty.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return penalty.detach(), gradients, sum(kept.values())

    (mine, gradients, small), (other, others, large) = run_once(True), run_once(False)
    rounding = 2e-2 if autocast else 1e-5
    assert torch.isclose(mine, other, rtol=rounding)
    assert len(gradients) == len(others) > 4
    whole = max(b.norm() for b in others)  # some parameters have next to no gradient, made of rounding
    assert all((a - b).norm() <= rounding * (b.norm() + whole) for a, b in zip(gradients, others, strict=True))
    assert small < 0.8 * large


REACHES = [(2, 20, 2, 8, 12), (3, 70, 3, 16, 70), (1, 1, 2, 20, 5), (0, 4, 2, 8, 6), (2, 130, 1, 33, 130)]
if DEVICE == "cuda":
    REACHES += [(4, 1024, 12, 64, 768), (5, 515, 3, 128, 200)]


def reached_plainly(queries, keys, first, x, second, y, heads):
    """What is incoherent in causal scores under dropout before the first, the second and both projections."""
    q, k = (torch.unflatten(side, -1, (heads, -1)).transpose(1, 2) for side in (queries, keys))
    weights = [torch.unflatten(weight, 0, (heads, -1)) for weight in (first, second)]
    later = x.square().flip(1).cumsum(1).flip(1)
    earlier = y.square().cumsum(1)
    both = (weights[0].mT @ weights[1]).square().sum(0)
    return (
        (later[:, None] * (k @ weights[0]).square()).sum((1, 2, 3)),
        (earlier[:, None] * (q @ weights[1]).square()).sum((1, 2, 3)),
        ((later @ both) * y.square()).sum((1, 2)),
    )


def reached(queries, keys, first, x, second, y, heads):
    return (
        kernels.reach(keys, first, x, heads, True),
        kernels.reach(queries, second, y, heads, False),
        kernels.joint_reach(first, x, second, y, heads),
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", REACHES)
def test_what_reaches_causal_scores_and_its_gradients_equal_plain_torch(shape, dtype, compiled):
    batch, tokens, heads, width, inputs = shape
    features = heads * width
    queries, keys = (draw((batch, tokens, features), dtype, seed) for seed in (1, 2))
    keys = torch.cat([keys, keys], -1)[..., features:]  # a part of a fused projection
    first, second = (0.01 * draw((features, inputs), seed=seed) for seed in (3, 4))  # or float16 has no gradient
    x, y = (draw((batch, tokens, inputs), dtype, seed) for seed in (5, 6))
    weighting = draw((batch,), seed=7)
    torch._dynamo.reset()
    mine = torch.compile(reached, fullgraph=True, backend="aot_eager") if compiled else reached
    found = []
    for function, precision in ((mine, None), (reached_plainly, torch.float64)):
        given = queries, keys, first, x, second, y
        leaves = [(g if precision is None else g.to(precision)).detach().requires_grad_() for g in given]
        results = function(*leaves, heads)
        loss = sum((energy * weighting).sum() for energy in results)
        found.append([*(energy.detach() for energy in results), *torch.autograd.grad(loss, leaves)])
    for mine, other in zip(*found, strict=True):
        assert mine.shape == other.shape
        assert (mine.double() - other).norm() <= 1e-2 * other.norm()


@fused
@pytest.mark.parametrize("later", [False, True])
def test_sums_along_tokens_do_not_cancel(later):
    from explicit_dropout.kernels.triton_along import sums

    x = draw((2, 200, 5), torch.bfloat16)
    x[:, 3] *= 1000
    x[:, 190] *= 1000
    ordered = x.double().square().flip(1) if later else x.double().square()
    expected = ordered.cumsum(1).flip(1) if later else ordered.cumsum(1)
    assert_close(sums(x, later).double(), expected, rtol=2**-7, atol=0.0)


def test_what_reaches_causal_scores_is_the_same_bits_every_time_and_has_no_second_derivative():
    given = [draw((2, 70, 48), torch.bfloat16, 1), draw((48, 40), seed=2), draw((2, 70, 40), torch.bfloat16, 3)]
    leaves = [g.requires_grad_() for g in given]
    results = []
    for _ in range(2):
        energies = kernels.reach(*leaves, 3, True)
        results.append((energies, *torch.autograd.grad(energies.sum(), leaves)))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    with pytest.raises(RuntimeError, match="no second derivative in half precision"):
        torch.autograd.grad(kernels.reach(*leaves, 3, True).sum(), leaves, create_graph=True)


def test_nothing_is_kept_for_what_reaches_causal_scores_but_what_there_is():
    given = [draw((2, 70, 48), torch.bfloat16, 1), draw((48, 40), seed=2), draw((2, 70, 40), torch.bfloat16, 3)]
    others, weight, x = (g.requires_grad_() for g in given)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        kernels.reach(others, weight, x, 3, False)
        kernels.joint_reach(weight, x, weight, x, 3)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in given}


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU says how much memory there was")
def test_products_with_all_heads_are_never_whole_on_a_gpu():
    x, weight = draw((2, 2048, 768), torch.bfloat16, 1).requires_grad_(), draw((768, 768), seed=2).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.reach(x, weight, x, 12, True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * x.numel() * 4  # the products of 12 heads alone


def test_the_operators_of_what_reaches_causal_scores_are_registered_soundly():
    operators, told = torch.ops.explicit_dropout, (2, True)
    others, weight, x = draw((3, 20, 16), torch.bfloat16), draw((16, 12), seed=2), draw((3, 20, 12), torch.bfloat16, 3)
    other, slopes = draw((16, 12), seed=4), draw((3,), seed=5)
    torch.library.opcheck(operators.reach_gradients.default, (others, weight, x, *told, slopes))
    torch.library.opcheck(operators.joint_reach_gradients.default, (weight, x, other, x, 2, slopes))
    leaves = [tensor.requires_grad_() for tensor in (others, weight, x, other)]
    torch.library.opcheck(operators.reach.default, (*leaves[:3], *told))
    torch.library.opcheck(operators.joint_reach.default, (leaves[1], leaves[2], leaves[3], x.detach().clone(), 2))


# ---------------------------------------------------------------------------------------------- attended values


def attended_sides(dtype, samples=3, tokens=7, context=7, width=4, inputs=5):
    """What values are made of, the value weight, queries and keys of two heads."""
    features = 2 * width
    shapes = (samples, context, inputs), (features, inputs), (samples, tokens, features), (samples, context, features)
    return [draw(shape, dtype, seed).requires_grad_() for seed, shape in enumerate(shapes)]


def attended_plainly(x, weight, queries, keys, causal):
    """The incoherent part of J_av from attention weights that are there."""
    q, k = (side.unflatten(-1, (2, -1)).transpose(1, 2) for side in (queries, keys))
    scores = 0.3 * q @ k.mT
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    noise = xd.gaussian(2.0)
    return xd.functional.attended_value(x, weight, scores.softmax(-1), noise, heads=2, reduction="none")


def attended_agrees(given, causal):
    """Values and all gradients are those of plain torch in float64."""
    found = kernels.attended_spread(*given, heads=2, scale=0.3, causal=causal)
    exact = [side.detach().double().requires_grad_() for side in given]
    expected = attended_plainly(*exact, causal)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-6}[given[2].dtype]
    weights = draw((len(found),), seed=9).double()
    close(0.5 * 4 * found.double(), expected, rounding)
    slopes = torch.autograd.grad((2 * found.double() * weights).sum(), given)
    for mine, theirs in zip(slopes, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        # a token that attends to nothing but itself has no gradient, save for rounding
        bound = rounding * ((theirs.abs().max().item() if theirs.numel() else 0.0) or 1.0)
        assert_close(mine.double(), theirs, rtol=rounding, atol=bound)


@pytest.mark.parametrize("part", [1, 60, 2**20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_attended_values_and_their_gradients_equal_plain_torch(dtype, causal, part, monkeypatch):
    for name in ("PART", "PART_ON_CPU"):
        monkeypatch.setattr(kernels.attended, name, part)
    shapes = [{}, {"samples": 0}, {"tokens": 1, "context": 1}] + ([] if causal else [{"tokens": 4}])
    for shape in shapes:
        attended_agrees(attended_sides(dtype, **shape), causal)


ATTENDED = [(2, 65, 65, 20, 70), (3, 33, 33, 16, 130), (1, 300, 300, 3, 9), (1, 40, 40, 80, 5), (2, 9, 9, 130, 5)]
ATTENDED += [(1, tokens, tokens, width, 5) for tokens, width in ((16, 64), (17, 3), (18, 16), (64, 17), (66, 8))]
ACROSS = [(2, 33, 70, 20, 9), (2, 70, 1, 4, 9), (2, 1, 65, 32, 9), (2, 0, 5, 4, 9), (1, 7, 280, 5, 4)]
if DEVICE == "cuda":
    ATTENDED += [(32, 65, 65, 32, 40), (5, 197, 197, 64, 40), (2, 1024, 1024, 64, 33), (2, 515, 515, 128, 9)]
    ATTENDED += [(8, 197, 197, 4, 768)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "causal"),
    [*((shape, causal) for shape in ATTENDED for causal in (False, True)), *((shape, False) for shape in ACROSS)],
)
def test_attended_values_of_any_number_of_tokens_equal_plain_torch(shape, causal, dtype):
    attended_agrees(attended_sides(dtype, *shape), causal)


def test_attended_values_may_have_a_precision_of_their_own():
    x, weight, queries, keys = attended_sides(torch.float16, tokens=33, context=33)
    attended_agrees([x.detach().float().requires_grad_(), weight, queries, keys], False)
    attended_agrees([x, weight.detach().float().requires_grad_(), queries, keys], False)


def test_attended_values_have_gradients_where_hardly_more_than_one_token_is_attended_to():
    x, weight, queries, keys = attended_sides(torch.float16, tokens=40, context=40, width=16)
    attended_agrees([x, weight, (10 * queries).detach().requires_grad_(), keys], False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 65, 65, 20, 70), (1, 300, 300, 3, 9), (2, 9, 9, 130, 5), (0, 5, 5, 4, 9)])
def test_energies_of_attention_weights_equal_plain_torch(shape, causal, dtype):
    _, _, queries, keys = attended_sides(dtype, *shape)
    values = draw((*keys.shape[:2], 2 * 6), dtype, 7).requires_grad_()
    found = kernels.weights_spread(values, queries, keys, heads=2, scale=0.3, causal=causal)
    exact = [side.detach().double().requires_grad_() for side in (values, queries, keys)]
    own, *sides = (side.unflatten(-1, (2, -1)).transpose(1, 2) for side in exact)
    scores = 0.3 * sides[0] @ sides[1].mT
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    expected = xd.functional.attention_weights(scores.softmax(-1), own, xd.gaussian(2.0), reduction="none")
    rounding = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-6}[dtype]
    close(0.5 * 4 * found.double(), expected, rounding)
    slopes = torch.autograd.grad(2 * found.sum(), (values, queries, keys))
    for mine, theirs in zip(slopes, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert mine.dtype == dtype
        assert_close(
            mine.double(), theirs, rtol=rounding, atol=rounding * (theirs.abs().max().item() if theirs.numel() else 1)
        )


@pytest.mark.parametrize("scale", [-30.0, 0.0, 30.0])
def test_scores_of_any_size_have_attended_values(scale):
    x, weight, queries, keys = (side.detach() for side in attended_sides(torch.float32, tokens=40, context=40))
    found = kernels.attended_spread(x, weight, queries, keys, heads=2, scale=scale, causal=True)
    expected = attended_plainly(x.double(), weight.double(), scale / 0.3 * queries.double(), keys.double(), True)
    close(2 * found.double(), expected, 1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["fused", "transposed", "swapped"])
def test_attended_values_take_any_layout_of_memory(layout, causal):
    x, weight, queries, keys = (side.detach() for side in attended_sides(torch.float16, tokens=33, context=33))

    def laid(side):
        if layout == "fused":
            return torch.cat([torch.ones_like(side), side, torch.ones_like(side)], -1).chunk(3, -1)[1]
        return side.mT.contiguous().mT if layout == "transposed" else side.transpose(0, 1).contiguous().transpose(0, 1)

    found = []
    for sides in ((x, queries, keys), (laid(x), laid(queries), laid(keys))):
        leaves = [side.requires_grad_() for side in (sides[0], weight, *sides[1:])]
        spread = kernels.attended_spread(*leaves, heads=2, scale=0.3, causal=causal)
        found.append((spread, *torch.autograd.grad(spread.sum(), leaves)))
    for mine, other in zip(*found, strict=True):
        close(mine, other, ROUNDING[torch.float16])


def test_gradients_of_attended_values_may_have_any_layout():
    x, _, queries, keys = attended_sides(torch.float32, tokens=33, context=40)
    norms = draw((2, 5), seed=7).square().requires_grad_()
    pieces = (
        (kernels.attended._Columns, (queries, keys, 2, 0.3, False), (queries, keys)),
        (kernels.attended._Squares, (x, norms), (x, norms)),
    )
    for function, given, leaves in pieces:
        made = function.apply(*given)
        constant = draw((), seed=8).expand(made.shape)
        drawn = draw((made.shape[2], made.shape[0], made.shape[1]), seed=8).permute(1, 2, 0)
        for slope in (constant, drawn):
            found = torch.autograd.grad(made, leaves, slope, retain_graph=True)
            expected = torch.autograd.grad(made, leaves, slope.clone(memory_format=torch.contiguous_format), True)
            for mine, other in zip(found, expected, strict=True):
                close(mine, other, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operators_of_attended_values_are_registered_soundly(causal, dtype):
    x, weight, queries, keys = attended_sides(dtype, tokens=20, context=20)
    norms = torch.unflatten(weight.detach().float(), 0, (2, -1)).square().sum(1).requires_grad_()
    operators, told = torch.ops.explicit_dropout, (2, 0.3, causal)
    # Shapes that vary have kernels of their own, which round in other places.
    check = partial(torch.library.opcheck, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    check(operators.attended_columns.default, (queries, keys, *told))
    check(operators.attended_squares.default, (x, norms))
    columns, levels = operators.attended_columns(queries, keys, *told)
    squares = operators.attended_squares(x, norms)
    detached = [side.detach() for side in (queries, keys)]
    slopes = draw(columns.shape, seed=7)
    check(operators.attended_column_gradients.default, (*detached, *told, levels.detach(), slopes))
    check(operators.attended_square_gradients.default, (x.detach(), norms.detach(), slopes))
    leaves = (x, norms, queries, keys)
    found = torch.autograd.grad((columns * squares).sum(), leaves)
    both = kernels.attended._Columns.apply(queries, keys, *told), kernels.attended._Squares.apply(x, norms)
    for mine, other in zip(found, torch.autograd.grad((both[0] * both[1]).sum(), leaves), strict=True):
        close(mine, other, 1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_attended_values_have_the_same_bits_every_time(causal):
    results = []
    for _ in range(2):
        given = attended_sides(torch.float16, tokens=65, context=65)
        spread = kernels.attended_spread(*given, heads=2, scale=0.3, causal=causal)
        results.append((spread, *torch.autograd.grad(spread.sum(), given)))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_attended_values_have_second_derivatives(causal):
    given = attended_sides(torch.float64, samples=2, tokens=3, context=3)

    def spread(*sides):
        return kernels.attended_spread(*sides, heads=2, scale=0.3, causal=causal)

    assert torch.autograd.gradcheck(spread, given)
    assert torch.autograd.gradgradcheck(spread, given)


@pytest.mark.parametrize("causal", [False, True])
def test_attended_values_in_float32_have_the_second_derivatives_of_plain_torch(causal):
    given = attended_sides(torch.float32, tokens=9, context=9)
    exact = [side.detach().double().requires_grad_() for side in given]
    mine = 2 * kernels.attended_spread(*given, heads=2, scale=0.3, causal=causal)
    second = []
    for spread, leaves in ((mine, given), (attended_plainly(*exact, causal), exact)):
        first = torch.autograd.grad(spread.sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(slope.square().sum() for slope in first), leaves))
    for found, expected in zip(*second, strict=True):
        close(found.double(), expected, 1e-4)


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU says how much memory there was")
def test_no_attention_weights_are_ever_whole_on_a_gpu():
    given = attended_sides(torch.bfloat16, samples=1, tokens=4096, context=4096)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.attended_spread(*given, heads=2, scale=0.3, causal=True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4096 * 4096


def test_no_attention_weights_are_kept_for_attended_values():
    given = attended_sides(torch.float32, samples=2, tokens=50, context=50)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        kernels.attended_spread(*given, heads=2, scale=0.3, causal=False)
    assert max(kept) < 2 * 50 * 50


# ---------------------------------------------------------------------------------------------- whole models


def small_vit():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config).to(DEVICE).train()


def small_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=80, vocab_size=50, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(DEVICE).train()


CUTS = "SliceBackward0", "SplitWithSizesBackward0"


def nodes(value):
    """All functions that the backward pass of a value calls."""
    seen, left = set(), [value.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return seen


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.inverted(0.2)])
@pytest.mark.parametrize("component", ["query", "key", "query_key", "attended_value"])
def test_both_slices_of_a_fused_output_have_one_gradient(component, noise):
    model = small_gpt2()
    model.set_attn_implementation("sdpa")
    reg = xd.ExplicitDropout(model, noise, **{component: 0.3}, layers=[0])
    model(torch.arange(16, device=DEVICE).reshape(2, 8))
    cuts = [node._saved_self_sym_sizes for node in nodes(reg()) if type(node).__name__ in CUTS]
    whole = 2, 8, 3 * 32
    assert cuts.count(whole) == (component != "attended_value" or noise.variance > 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (slice(0, 4), slice(4, 8)), (slice(8, 12), slice(2, 5)),
        (slice(None, 3), slice(3, None)), (slice(-2, None), slice(0, 1)),
    ],
)  # fmt: skip
def test_two_parts_that_are_cut_at_once_are_the_slices(first, second):
    x = draw((2, 5, 12), torch.float64).requires_grad_()
    slopes = [draw((2, 5, x[..., rows].shape[-1]), torch.float64, 1) for rows in (first, second)]
    found, expected = apart(x, first, second), (x[..., first], x[..., second])
    gradients = []
    for pair, other in zip(found, expected, strict=True):
        assert torch.equal(pair, other)
    for pair in (found, expected):
        gradients += torch.autograd.grad(pair, x, slopes)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, slice(0, 4)), (slice(0, 5), slice(4, 8)), (slice(0, 8, 2), slice(8, 12)), ((0, 1), (2, 3))],
)
def test_other_parts_are_not_cut_at_once(first, second):
    assert apart(draw((2, 5, 12)), first, second) is None


def run(model, runner=None):
    if type(model).__name__.startswith("ViT"):
        inputs = {"pixel_values": draw((3, 3, 16, 16), seed=7)}
    else:
        inputs = {"input_ids": torch.arange(140, device=DEVICE).reshape(2, 70) % 50}
    return (model if runner is None else runner)(**inputs).logits.float().square().mean()


def trained(model, noise, components, runner=None, autocast=False):
    """Gradients and terms of the second of two steps: the first is careful about what models do in place."""
    reg = xd.ExplicitDropout(model, noise, **dict.fromkeys(components, 0.3))
    runner = model if runner is None else runner(model)
    for _ in range(2):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = run(model, runner)
        (loss + reg()).backward()
    terms = reg.terms()
    reg.remove()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, terms


COMPONENTS = {
    "paper": (xd.paper(0.2), ("value", "attended_value", "query", "key", "feed_forward")),
    "inverted": (xd.inverted(0.2), ("value", "attended_value", "query", "key", "query_key", "feed_forward")),
    "bernoulli": (xd.bernoulli(0.2), ("value", "attended_value", "feed_forward")),
}


def agree(found, expected, rounding):
    """Gradients, then terms, within rounding of the largest of them: some are zero but for rounding."""
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        bound = rounding * max(tensor.abs().max().item() for tensor in other.values())
        for name in other:
            assert_close(mine[name], other[name], rtol=rounding, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("law", COMPONENTS)
@pytest.mark.parametrize("make", [small_vit, small_gpt2])
def test_a_model_on_the_kernels_equals_one_in_plain_torch(make, law, autocast, monkeypatch):
    noise, components = COMPONENTS[law]
    found = trained(make(), noise, components, autocast=autocast)
    with monkeypatch.context() as patch:
        for module in (kernels, kernels.energy, kernels.gram):
            patch.setattr(module, "serves", lambda _: False)
        expected = trained(make(), noise, components, autocast=autocast)
    agree(found, expected, 5e-2 if autocast else 1e-4)  # Triton's interpreter cuts off where it should round


@pytest.mark.parametrize(("law", "more"), [("paper", 2), ("inverted", 0)])
def test_activations_that_the_model_does_not_keep_are_kept_only_where_a_gradient_needs_them(law, more):
    """Of the three outputs that V+FF takes the energies of, the model keeps those of value and first layer itself."""
    model, kept = small_vit(), []
    reg = xd.ExplicitDropout(model, COMPONENTS[law][0], value=0.3, feed_forward=0.3)

    def activations(model):
        found = set()

        def keep(tensor):
            if tensor.numel() >= 3 * 17 * 32:  # batch, tokens, width
                found.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return run(model), len(found)

    for _ in range(2):  # the first pass is careful about what models do in place
        loss, number = activations(model)
        kept.append(number)
        (loss + reg()).backward()
    reg.remove()
    assert kept[1] == activations(model)[1] + more


@pytest.mark.parametrize("law", COMPONENTS)
def test_a_penalty_has_second_derivatives_in_every_pass(law, monkeypatch):
    noise, _ = COMPONENTS[law]

    def products():
        model, found = small_vit(), []
        model.config._attn_implementation = "eager"  # torch's fused attention has no second derivative
        reg = xd.ExplicitDropout(model, noise, **dict.fromkeys(("value", "feed_forward"), 0.3))
        leaves = [p for name, p in model.named_parameters() if "layer" in name and p.ndim == 2]
        for _ in range(2):
            first = torch.autograd.grad(1e-3 * run(model) + reg(), leaves, create_graph=True, materialize_grads=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, materialize_grads=True)
            found.append({str(number): gradient for number, gradient in enumerate(second)})
        reg.remove()
        return found

    found = products()
    with monkeypatch.context() as patch:
        for module in (kernels, kernels.energy, kernels.gram):
            patch.setattr(module, "serves", lambda _: False)
        expected = products()
    agree(found, expected, 1e-4)


class Watched:
    """The compiler without its last part, that looks at what it is given."""

    def __init__(self):
        torch._dynamo.reset()
        self.targets, self.masks = [], []

    def __call__(self, graph, inputs):
        nodes = list(graph.graph.nodes)
        self.targets.extend(str(node.target) for node in nodes)
        self.masks.extend(node.kwargs.get("attn_mask") for node in nodes if "dot_product" in str(node.target))
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    def has(self, operator):
        return any(f"explicit_dropout.{operator}" in target for target in self.targets)

    @property
    def straight(self):
        """Whether no mask is a tensor, which only the plain form reads. transformers gives a compiled decoder its
        causal mask as one, some versions also an encoder."""
        return self.masks == [None] * len(self.masks)


@pytest.mark.parametrize("law", COMPONENTS)
@pytest.mark.parametrize("make", [small_vit, small_gpt2])
def test_a_compiled_model_has_the_operators_in_its_one_graph_and_agrees(make, law, monkeypatch):
    noise, components = COMPONENTS[law]
    expected = trained(make(), noise, components)
    monkeypatch.setattr(kernels.energy, "serves_compiled", lambda _: True)
    backend = Watched()
    found = trained(make(), noise, components, lambda m: torch.compile(m, fullgraph=True, backend=backend))
    agree(found, expected, 1e-4)
    assert backend.has("incoherent") == bool(noise.variance)
    for name in ("attended_columns", "attended_squares"):
        assert backend.has(name) == (bool(noise.variance) and backend.straight)
    assert backend.has("scores") == (law == "paper" and backend.straight)


def decoder_without_mask():
    from hosts import fused as without_mask

    return without_mask(small_gpt2())


@pytest.mark.parametrize("component", ["query", "key", "query_key"])
@pytest.mark.parametrize(
    ("make", "serves", "operator"),
    [(small_vit, "serves_spread", "spread"), (decoder_without_mask, "serves_reach", "reach")],
)
def test_a_compiled_model_in_half_precision_has_its_incoherent_scores_by_operators(
    make, serves, operator, component, monkeypatch
):
    monkeypatch.setattr(kernels.energy, "serves_compiled", lambda _: True)
    results = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(kernels, serves, lambda *_: False)
        backend = Watched()

        def compiled(model, backend=backend):
            return torch.compile(model, fullgraph=True, backend=backend)

        results.append(trained(make(), xd.inverted(0.2), (component,), compiled, autocast=True))
        assert backend.has(operator) == (own and backend.straight)
        joint = component == "query_key" and operator == "reach"  # the operator of spreads takes both sides
        assert backend.has(f"joint_{operator}") == (own and backend.straight and joint)
    agree(*results, 2e-2)


@fused
@pytest.mark.parametrize("component", ["query", "key", "query_key"])
def test_a_decoder_in_half_precision_has_its_incoherent_scores_by_kernels(component, monkeypatch):
    calls, reach, results = [], kernels.reach, []
    monkeypatch.setattr(kernels, "reach", lambda *given: calls.append(given) or reach(*given))
    for serves in (kernels.serves_reach, lambda *_: False):
        monkeypatch.setattr(kernels, "serves_reach", serves)
        results.append(trained(small_gpt2(), xd.inverted(0.2), (component,), autocast=True))
    assert len(calls) == 2 * 2 * (1 + (component == "query_key"))  # steps, layers, sides
    agree(*results, 2e-2)


class FewQueries(torch.nn.Module):
    """Attention that calls itself causal, and is given other keys than queries."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (torch.nn.Linear(32, 32, device=DEVICE) for _ in "qkvo")

    def forward(self, x, context):
        made = self.q_proj(x), self.k_proj(context), self.v_proj(context)
        q, k, v = (side.unflatten(-1, (2, -1)).transpose(1, 2) for side in made)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


@xd.register_rule(FewQueries)
def few_queries(module):
    sides = (xd.Projection(side) for side in (module.q_proj, module.k_proj, module.v_proj))
    return xd.Attention(module, *sides, output=module.out_proj, heads=2, causal=True, weights="compute")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("law", [xd.paper(0.2), xd.inverted(0.2)])
@pytest.mark.parametrize("component", ["query", "key", "attended_value"])
def test_no_kernel_takes_a_causal_call_of_more_keys_than_queries(component, law, autocast):
    if component == "attended_value" and not law.variance:
        pytest.skip("the energy of what is attended needs no pairs")
    model = torch.nn.ModuleDict({"attention": FewQueries()}).train()
    xd.ExplicitDropout(model, law, **{component: 1.0})
    refused = pytest.raises(xd.UnsupportedSiteError, match="8 queries and 20 keys")
    with refused, torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        model["attention"](draw((2, 8, 32)), draw((2, 20, 32)))


def test_compiled_code_has_hardly_a_kernel_more_under_a_law_without_variance():
    """Energies are parts of kernels that are there anyway, and a bias has no gradient of its own."""
    from torch._inductor.utils import run_and_get_code

    def counted(penalised):
        torch._dynamo.reset()
        model = small_vit()
        reg = xd.ExplicitDropout(model, xd.paper(0.2), value=0.3, feed_forward=0.3) if penalised else None
        compiled = torch.compile(model, fullgraph=True)

        def step():
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = run(model, compiled)
            (loss if reg is None else loss + reg()).backward()

        _, (forward, backward) = run_and_get_code(step)
        called = re.compile(r"^\s+(cpp_fused|triton_)\w+(\.run)?\(", re.MULTILINE)
        return len(called.findall(forward)), len(called.findall(backward))

    for found, expected in zip(counted(True), counted(False), strict=True):
        assert 0 < found <= expected + 2


KEPT = [
    (small_vit, xd.paper(0.2), "value", 1.0), (small_vit, xd.paper(0.2), "attended_value", 1.0),
    (small_vit, xd.inverted(0.2), "value", 0.0), (small_vit, xd.inverted(0.2), "attended_value", 0.75),
    (small_vit, xd.inverted(0.2), "query", 0.1), (small_vit, xd.inverted(0.2), "query_key", 0.2),
    (small_gpt2, xd.paper(0.2), "value", 1.0), (small_gpt2, xd.inverted(0.2), "value", 0.0),
]  # fmt: skip
"""How much more a layer keeps, in tensors of the residual stream: the output of its feed-forward network, which nothing
else needs; numbers for every head and token, or column and sample, which are many in a model so narrow."""


@pytest.mark.parametrize(("make", "noise", "component", "more"), KEPT)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler has some for the user of small matrices
def test_compiled_code_keeps_little_more_for_its_backward_pass(make, noise, component, more, monkeypatch):
    from hosts import fused as without_mask

    monkeypatch.setattr(kernels.energy, "serves_compiled", lambda _: True)
    given = draw((64, 3, 16, 16)) if make is small_vit else torch.arange(64 * 17, device=DEVICE).reshape(64, 17) % 50

    def kept(penalised):
        torch._dynamo.reset()
        model, sizes = without_mask(make()), {}
        reg = xd.ExplicitDropout(model, noise, **{component: 0.3}, feed_forward=0.3) if penalised else None
        compiled = torch.compile(model, fullgraph=True)

        def keep(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = 0 if isinstance(tensor, torch.nn.Parameter) else storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast(DEVICE, torch.bfloat16):
            loss = compiled(given).logits.float().square().mean()
        (loss if reg is None else loss + reg()).backward()
        return sum(sizes.values())

    stream = len(given) * 17 * 32 * 2
    assert kept(True) - kept(False) < 2 * stream * (more + 0.1)
