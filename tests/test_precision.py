"""Sums are float32 at least, whatever comes in; half precision neither overflows nor drifts."""

import pytest
import torch
from torch.testing import assert_close

import explicit_dropout as xd
from cases import CASES, LAWS
from explicit_dropout import functional as F

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
HALF = {torch.bfloat16: 0.03, torch.float16: 0.004}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_the_sum_is_float32_or_wider_and_close_to_float64(case, dtype, device):
    case, noise = CASES[case], LAWS["bernoulli"]
    leaves = case.leaves(dtype=dtype, device=device)
    penalty = case.closed_form(leaves, noise)
    assert penalty.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert penalty.device.type == device
    # The inputs as they were rounded, computed exactly; only arithmetic may differ, except where the call itself
    # computes in half precision (a softmax, a layer's own output).
    exact = case.closed_form({name: leaf.double() for name, leaf in leaves.items()}, noise)
    assert_close(penalty.double(), exact, rtol=HALF.get(dtype, 1e-5), atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["query", "key causal", "query_key masked", "linear", "conv 2d", "attended_value"])
def test_mixed_precision_is_computed_in_the_wider_type(case, device):
    case = CASES[case]
    leaves = case.leaves(device=device)
    mixed = {n: leaf.to(torch.bfloat16 if i == 0 else torch.float64) for i, (n, leaf) in enumerate(leaves.items())}
    assert case.closed_form(mixed, LAWS["inverted"]).dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"attention_mask": torch.ones(64, 64, dtype=torch.bool)}])
@pytest.mark.parametrize("form", [F.query, F.key, F.query_key])
@pytest.mark.parametrize("noise", LAWS.values(), ids=LAWS)
def test_fp16_scores_of_ten_thousand_do_not_overflow(form, noise, options, device):
    """‖S‖² of such scores is beyond 65504 for a single pair."""
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    x = torch.full((2, 64, 16), 10.0, device=device).half().requires_grad_()
    weight = torch.full((16, 16), 0.16, device=device).half().requires_grad_()
    assert ((x @ weight.mT) @ (x @ weight.mT).mT > 1e4).all()
    penalty = form(x, weight, weight, noise, **options)
    exact = form(x.double(), weight.double(), weight.double(), noise, **options)
    assert_close(penalty.double(), exact, rtol=1e-4, atol=0)
    gradients = torch.autograd.grad(penalty * 1e-6, (x, weight))
    assert all(g.isfinite().all() and g.any() for g in gradients)


@pytest.mark.parametrize("noise", LAWS.values(), ids=LAWS)
def test_a_large_bf16_input_is_summed_without_loss(noise):
    """Two million numbers: a bf16 sum would have stopped growing after a few hundred."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    for reduction in ("token", "sample"):
        penalty = F.linear(x, weight, noise, reduction=reduction)
        exact = F.linear(x.double(), weight.double(), noise, reduction=reduction)
        assert_close(penalty.double(), exact, rtol=1e-5, atol=0)


def test_large_bf16_activations_do_not_overflow():
    x = torch.full((4, 2048, 64), 1e4, dtype=torch.bfloat16)
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    for form in (F.query, F.key, F.query_key):
        assert form(x, weight, weight, xd.bernoulli(0.2)).isfinite()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_autocast_changes_nothing(case, dtype, device):
    case = CASES[case]
    leaves = case.leaves(dtype=torch.float32, device=device)
    args, options = case.call(leaves)
    form = getattr(F, case.site)
    expected = form(*args, LAWS["bernoulli"], **options)
    with torch.autocast(device, dtype=dtype):
        assert torch.equal(form(*args, LAWS["bernoulli"], **options), expected)
        assert torch.is_autocast_enabled(device)


@pytest.mark.parametrize("case", ["query", "query_key masked", "linear with its output", "attended_value with heads"])
def test_strides_do_not_matter(case):
    case = CASES[case]
    leaves = case.leaves()
    strided = {n: torch.stack((t, t), -1)[..., 0] for n, t in leaves.items()}
    assert not any(t.is_contiguous() for t in strided.values())
    assert_close(case.closed_form(strided, LAWS["bernoulli"]), case.closed_form(leaves, LAWS["bernoulli"]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_every_device_gives_the_number_of_the_reference(case, device):
    case = CASES[case]
    penalty = case.closed_form(case.leaves(device=device), LAWS["inverted"])
    assert_close(penalty.cpu(), case.literal(case.leaves(), LAWS["inverted"]), rtol=1e-10, atol=1e-10)
