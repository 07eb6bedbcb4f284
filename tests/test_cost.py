"""No form stores an N×N matrix of scores or a d×d Gram matrix of inputs, forward or backward; cost is linear in N."""

import pytest
import torch
from measure import LiveTensors
from torch.utils.flop_counter import FlopCounterMode

import explicit_dropout as xd
from explicit_dropout import functional as F
from explicit_dropout import reference
from explicit_dropout.functional import pairs

TOKENS, WIDTH, HEADS = 768, 64, 8
SCORES = {"query": F.query, "key": F.key, "query_key": F.query_key}


def tracked(form, noise, tokens=TOKENS, **options):
    torch.manual_seed(0)
    x = torch.randn(1, tokens, WIDTH, requires_grad=True)
    wq, wk = torch.randn(2, WIDTH, WIDTH, requires_grad=True).unbind()
    with LiveTensors() as live:
        form(x, wq, wk, noise, **options).backward()
    return live


def test_the_tracker_sees_the_scores_that_a_plain_computation_stores():
    def plain(x, wq, wk, noise):
        return noise.mean * ((x @ wq.mT) @ (x @ wk.mT).mT).square().sum()

    assert tracked(plain, xd.paper(0.2)).largest_elements == TOKENS**2


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.bernoulli(0.2)])
@pytest.mark.parametrize("options", [{"heads": HEADS}, {"heads": HEADS, "causal": True}, {}])
@pytest.mark.parametrize("site", SCORES)
def test_no_tensor_is_as_large_as_the_scores(site, options, noise):
    assert tracked(SCORES[site], noise, **options).largest_elements < TOKENS**2 / 4


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.bernoulli(0.2)])
@pytest.mark.parametrize("site", SCORES)
def test_an_arbitrary_mask_is_worked_off_in_tiles(site, noise, monkeypatch):
    """All heads together have 8 N² scores; tiles bound what is alive, in the backward pass as well."""
    monkeypatch.setattr(pairs, "TILE_ELEMENTS", TOKENS * HEADS * 16)
    mask = torch.rand(TOKENS, TOKENS) < 0.5
    live = tracked(SCORES[site], noise, heads=HEADS, attention_mask=mask)
    assert live.largest_elements < TOKENS**2 / 4
    assert live.peak_bytes < 4 * HEADS * TOKENS**2 / 4


def test_tiles_do_not_change_the_result(monkeypatch):
    torch.manual_seed(0)
    x, mask = torch.randn(2, 33, 8, dtype=torch.float64), torch.rand(2, 1, 33, 33) < 0.5
    wq, wk = torch.randn(2, 8, 8, dtype=torch.float64)
    results = []
    for elements in (1, 500, 2**22):
        monkeypatch.setattr(pairs, "TILE_ELEMENTS", elements)
        leaf = x.clone().requires_grad_()
        penalty = F.query_key(leaf, wq, wk, xd.bernoulli(0.3), heads=2, attention_mask=mask)
        results.append((penalty.detach(), torch.autograd.grad(penalty, leaf)[0]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.bernoulli(0.2)])
@pytest.mark.parametrize("options", [{"heads": HEADS}, {"heads": HEADS, "causal": True}])
@pytest.mark.parametrize("site", SCORES)
def test_memory_grows_no_faster_than_the_tokens(site, options, noise):
    small, large = (tracked(SCORES[site], noise, tokens=n, **options).peak_bytes for n in (512, 2048))
    assert large < 4.2 * small


@pytest.mark.parametrize("site", SCORES)
def test_coherent_parts_need_no_gram_matrix_of_the_inputs(site):
    """A wide input, narrow heads: a d×d matrix would be the largest tensor of all."""
    x, weights = torch.randn(4, 1024), torch.randn(2, 8, 1024)
    with LiveTensors() as live:
        SCORES[site](x, *weights, xd.paper(0.2), heads=2)
    assert live.largest_elements < 1024**2 / 10
    with LiveTensors() as literal:
        getattr(reference, site if site != "query_key" else "query")(x, *weights, xd.paper(0.2), heads=2)
    assert literal.largest_elements == 1024**2


def test_a_layer_output_that_is_given_is_not_computed_again():
    x, weight = torch.randn(2, 64, 32), torch.randn(48, 32)
    output = x @ weight.mT
    with LiveTensors() as live:
        F.linear(x, weight, xd.paper(0.2), output=output)
    assert live.largest_elements == output.numel()  # its squares
    counted = FlopCounterMode(display=False)
    with counted:
        F.linear(x, weight, xd.paper(0.2), output=output)
    assert counted.get_total_flops() == 0
