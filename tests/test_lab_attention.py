"""Attention over few tokens: the kernels against explicit weights in float64. Needs a GPU, or TRITON_INTERPRET=1."""

import copy

import pytest
import torch
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout.kernels.energy import HAS_TRITON, interpreted
from explicit_dropout.lab.attention import attention, bits, short_attention
from explicit_dropout.stochastic import AttentionDropout, AttentionTreatment, DropAttention, DropHead, DropKey

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # Triton's interpreter cannot multiply bfloat16
kernels = pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or interpreted()), reason="needs Triton and a GPU"
)
SHAPES = [
    (3, 65, 4, 32),
    (2, 64, 3, 16),
    (2, 7, 2, 24),
    (1, 120, 2, 12),
    (2, 128, 1, 64),
    (2, 1, 2, 8),
    (2, 17, 2, 16),
    (0, 9, 2, 16),
]
TREATMENTS = [
    None, AttentionDropout(0.3), DropKey(0.4), DropKey(0.99), DropAttention(0.3, mode="column", span=2), DropHead(0.5),
]  # fmt: skip


def sides(shape: tuple[int, ...]) -> list[torch.Tensor]:
    samples, tokens, heads, width = shape
    random = torch.Generator().manual_seed(sum(shape))
    drawn = [torch.randn(samples, tokens, heads * width, generator=random) for _ in range(4)]
    return [x.to(DEVICE, HALF) for x in drawn]


def exact(q, k, v, heads: int, treatment: AttentionTreatment | None, dropped: torch.Tensor | None) -> torch.Tensor:
    """The formula of `AttentionTreatment`, in float64, with a mask that is given."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    if treatment is not None and dropped is not None:
        kept = (~dropped).expand(weights.shape).double()
        if treatment.renormalise:
            kept = torch.where(kept.sum(-1, keepdim=True) == 0, 1.0, kept)
            weights = kept * weights / (kept * weights).sum(-1, keepdim=True)
        else:
            weights = kept * weights / (1 - treatment.p)
    return (weights @ v).transpose(1, 2).flatten(2)


@kernels
@pytest.mark.parametrize("treatment", TREATMENTS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_explicit_weights(shape, treatment):
    heads = shape[2]
    q, k, v, gradient = sides(shape)
    torch.manual_seed(1)
    dropped = None if treatment is None else treatment.dropped((shape[0], heads, shape[1], shape[1]), DEVICE)
    expected = [x.double().requires_grad_() for x in (q, k, v)]
    out = exact(*expected, heads, treatment, dropped)
    out.backward(gradient.double())
    given = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(1)
    found = attention(*given, heads, treatment)
    found.backward(gradient)
    for mine, theirs in zip([found, *(x.grad for x in given)], [out, *(x.grad for x in expected)], strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == HALF
        error = (mine.double() - theirs).norm() / theirs.norm().clamp(min=1e-3)  # of one token, q and k have none
        assert error < 1.2e-2 or not theirs.numel()


@kernels
def test_the_same_bits_every_time_and_any_layout():
    q, k, v, gradient = sides((4, 65, 4, 32))
    strided = torch.cat([q, k, v], -1).requires_grad_()
    found = []
    for _ in range(2):
        strided.grad = None
        out = attention(*strided.chunk(3, -1), 4)
        out.backward(gradient)
        found.append((out, strided.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][0], attention(q, k, v, 4))


@kernels
@pytest.mark.parametrize("treatment", [None, DropKey(0.3), DropHead(0.5)], ids=repr)
def test_the_operator_is_registered_soundly(treatment):
    q, k, v, _ = sides((2, 20, 2, 16))
    dropped = None if treatment is None else bits(treatment.dropped((2, 2, 20, 20), DEVICE), 20)
    settings = (2, dropped, treatment is not None and treatment.renormalise, 0.3)
    torch.library.opcheck(short_attention, (*(x.requires_grad_() for x in (q, k, v)), *settings))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_used_inside_one_compiled_graph():
    q, k, v, _ = sides((2, 65, 4, 32))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, 4).float() * 2, fullgraph=True)
    assert_close(compiled(q, k, v), attention(q, k, v, 4).float() * 2)


@pytest.mark.parametrize("treatment", [None, DropKey(0.3), AttentionDropout(0.3)], ids=repr)
def test_in_float64_on_a_cpu_it_is_the_formula(treatment):
    q, k, v = (torch.randn(2, 9, 12, dtype=torch.float64) for _ in range(3))
    torch.manual_seed(1)
    dropped = None if treatment is None else treatment.dropped((2, 3, 9, 9))
    torch.manual_seed(1)
    assert_close(attention(q, k, v, 3, treatment), exact(q, k, v, 3, treatment, dropped))


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 65, 128])
def test_bits_are_those_of_the_mask(keys):
    dropped = torch.rand(3, 2, keys) < 0.5
    words = bits(dropped, keys)
    assert words.dtype == torch.int32
    assert words.shape == (3, 2, -(-keys // 32))
    key = torch.arange(keys)
    assert torch.equal(((words[..., key // 32] >> (key % 32)) & 1).bool(), dropped)
    whole = torch.tensor([[True], [False]])
    assert torch.equal(bits(whole, keys), bits(whole.expand(2, keys), keys))


class Attending(torch.nn.Module):
    def __init__(self, treatment: AttentionTreatment) -> None:
        super().__init__()
        self.treatment = treatment
        self.project = torch.nn.Linear(16, 48, device=DEVICE, dtype=HALF)

    def forward(self, x):
        return attention(*self.project(x).chunk(3, -1), 2, self.treatment)


@pytest.mark.parametrize("treatment", [AttentionDropout(0.3), DropHead(0.3)], ids=repr)
def test_twins_see_the_weights_that_a_kernel_would_keep_to_itself(treatment):
    model, x = Attending(treatment), sides((3, 9, 2, 8))[0]
    clean = copy.deepcopy(model).eval()
    twins = xd.convert_dropout(model, 1.0)
    assert_close(model(x), clean(x), rtol=1e-2, atol=1e-2)
    q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2).float() for x in model.project(x).chunk(3, -1))
    weights = (q @ k.mT * 8**-0.5).softmax(-1)
    if isinstance(treatment, DropHead):
        wanted = xd.functional.hidden(weights @ v, xd.inverted(0.3), reduction="none").sum() / 27
    else:
        wanted = xd.functional.attention_weights(weights, v, xd.inverted(0.3))
    assert_close(twins(), wanted, rtol=1e-2, atol=0)
