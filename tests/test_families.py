"""The library attached to real models of every family, against what `family` says about them by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explicit_dropout as xd
import families
from explicit_dropout.finding import unclaimed
from family import truth as known
from family.attached import FAMILIES, LAWS, model_of, run, seen, supported, truths
from family.patterns import BATCH, TOKENS
from family.table import COMPONENTS, Family, Part
from family.truth import Truth

every_family = pytest.mark.parametrize("name", FAMILIES)


# ---------------------------------------------------------------------------------------------- what is found


@every_family
def test_the_right_sites_are_found(name: str) -> None:
    family = FAMILIES[name]
    found = {
        site.name: (site.layer, site.shape, site.heads, site.key_heads, site.cross)
        for site in xd.find_sites(model_of(name))
    }
    expected: dict[str, Any] = {}
    for spec in family.attention:
        keys = spec.key_heads or spec.heads
        for component in COMPONENTS[:5]:
            shape = spec.shapes[{"key": 1, "value": 2, "attended_value": 2}.get(component, 0)]
            expected[f"{spec.path}:{component}"] = (spec.layer, shape, spec.heads, keys, spec.cross)
    if family.laws("feed_forward") == "refused":
        found = {name: site for name, site in found.items() if not name.endswith(":feed_forward")}
    for linear in family.feed_forward:
        expected[f"{linear.path}:feed_forward"] = (linear.layer, linear.shape, None, None, False)
    assert found == expected


@every_family
def test_what_the_table_says_of_attention_is_what_the_model_computes(name: str) -> None:
    """softmax(scale · Q Kᵀ + bias) V, from weights sliced by hand, is what the model's own kernel put out."""
    for truth in truths(name):
        if FAMILIES[name].laws("query") == "refused" and truth.weights_seen is None:
            continue  # scores are more than Q Kᵀ, and nothing of the model tells A
        real = torch.ones(truth.attended.shape[:-1], dtype=torch.bool) if truth.mask is None else truth.mask
        torch.testing.assert_close(truth.computed_attended()[real], truth.attended[real], rtol=1e-5, atol=1e-6)


@every_family
def test_no_layer_of_a_family_is_said_to_be_left_over(name: str) -> None:
    """Embeddings, poolers, heads and whatever else a family has are no gaps; nor do the sites of a part make any."""
    model = model_of(name)
    assert unclaimed(model) == []
    assert unclaimed(nn.ModuleList([model, nn.Linear(32, 32)])) == []


# ---------------------------------------------------------------------------------------------- terms


def expected_terms(name: str, noise: xd.Noise, component: str, reduction: str = "token") -> dict[str, Tensor]:
    """Each term from tensors that plain hooks caught, by the pure functions."""
    family = FAMILIES[name]
    if component == "feed_forward":
        found = {}
        for linear in family.feed_forward:
            weight, _ = known.parameters(model_of(name), linear.path, Part(transposed=linear.transposed))
            x = seen(name)[linear.path].arguments[""].detach()
            x = x if linear.batch_first else x.transpose(0, 1)
            x = x.unflatten(0, (BATCH, TOKENS)) if linear.flattened else x
            mask = family.padding.get(linear.real or "")
            found[f"{linear.path}:feed_forward"] = xd.functional.linear(
                x, weight, noise, mask=mask, reduction=reduction
            )
        return found
    return {f"{t.spec.path}:{component}": expected_term(family, t, noise, component, reduction) for t in truths(name)}


def expected_term(family: Family, truth: Truth, noise: xd.Noise, component: str, reduction: str) -> Tensor:
    spec = truth.spec
    if component == "value":
        mask = None if family.value_counts_padding else truth.context_mask
        return xd.functional.value(truth.values, truth.weights[2], noise, mask=mask, reduction=reduction)
    if component == "attended_value":
        mask = truth.mask
        if truth.context_mask is not None and mask is None:
            mask = torch.ones(truth.x.shape[:-1], dtype=torch.bool)
        if noise.variance:
            return xd.functional.attended_value(
                truth.values, truth.weights[2], truth.attention(), noise, heads=spec.heads, key_heads=spec.key_heads,
                mask=mask, context_mask=truth.context_mask, reduction=reduction,
            )  # fmt: skip
        return xd.functional.attended_value(
            truth.values, truth.weights[2], None, noise, heads=spec.heads, key_heads=spec.key_heads,
            mask=mask, context_mask=truth.context_mask, reduction=reduction, attended=truth.attended,
            value_bias=truth.biases[2],
        )  # fmt: skip
    query_weight, query_bias = truth.weights[0], truth.biases[0]
    if spec.kv_order is not None:  # heads that share a key side by side
        order = sorted(range(spec.heads), key=lambda head: spec.kv_order[head])
        query_weight = query_weight.unflatten(0, (spec.heads, -1))[order].flatten(0, 1)
        assert query_bias is None
    return getattr(xd.functional, component)(
        truth.x, query_weight, truth.weights[1], noise, query_bias=query_bias, key_bias=truth.biases[1],
        context=truth.context, heads=spec.heads, key_heads=spec.key_heads, scale=truth.scale, mask=truth.mask,
        context_mask=truth.context_mask, attention_mask=truth.allowed, rotary=truth.rotation,
        reduction=reduction,
    )  # fmt: skip


@every_family
@pytest.mark.parametrize("law", LAWS)
def test_every_term_is_the_closed_form_of_what_plain_hooks_see(name: str, law: str) -> None:
    family, noise = FAMILIES[name], LAWS[law]
    there = [c for c in COMPONENTS if supported(family, c, law) and (c != "feed_forward" or family.feed_forward)]
    model = model_of(name)
    model.zero_grad()
    reg, total = run(name, noise, *there)
    terms = reg.terms()
    total.backward()
    expected = {site: value for c in there for site, value in expected_terms(name, noise, c).items()}
    assert set(terms) == set(expected)
    for site, value in expected.items():
        assert value > 0
        torch.testing.assert_close(
            terms[site].double(), value.double(), rtol=2e-5, atol=0, msg=lambda m, s=site: f"{s}: {m}"
        )
    weighted = sum(strength * expected[site].double() for site, strength in reg.strengths().items())
    torch.testing.assert_close(total.detach().double(), weighted.detach(), rtol=2e-5, atol=0)
    for site in reg.sites:
        weight = site.projection.module.get_parameter(site.projection.weight)
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0, site.name


@pytest.mark.parametrize("name", ["OPT", "nn.TransformerEncoder, norm last, token first", "timm ViT", "GPT-2"])
def test_samples_are_told_apart_however_a_family_lays_them_out(name: str) -> None:
    """OPT keeps the tokens of all samples in one row, torch.nn puts the token first."""
    model, (args, kwargs) = model_of(name), FAMILIES[name].call()
    noise = LAWS["bernoulli"]
    with xd.ExplicitDropout(model, noise, reduction="sample", **dict.fromkeys(COMPONENTS, 1.0)) as reg:
        model(*args, **kwargs)
        reg()
    expected = {site: v for c in COMPONENTS for site, v in expected_terms(name, noise, c, "sample").items()}
    for site, value in expected.items():
        torch.testing.assert_close(reg.terms()[site].double(), value, rtol=2e-5, atol=0)


@every_family
def test_what_cannot_be_exact_is_refused_by_name(name: str) -> None:
    family = FAMILIES[name]
    first = family.attention[0].path
    for component in COMPONENTS:
        for law, noise in LAWS.items():
            if supported(family, component, law):
                continue
            with pytest.raises(xd.UnsupportedSiteError, match=family.limits[component][1]) as caught:
                run(name, noise, component)
            assert (":feed_forward" if component == "feed_forward" else f"{first}:{component}") in str(caught.value)
            assert "se " in str(caught.value) or "eave " in str(caught.value)  # a way out


@every_family
def test_the_attention_dropout_of_the_model_is_silent_while_attached(name: str) -> None:
    """Its own attention module, with every dropout in it at ½, repeats itself then; without the library it does not."""
    model, (args, kwargs) = copy.deepcopy(model_of(name)), FAMILIES[name].call()
    modules = [model.get_submodule(spec.path) for spec in FAMILIES[name].attention]
    for module in modules:
        for child in module.modules():
            for attribute, value in list(vars(child).items()):
                is_rate = isinstance(value, float) and ("drop" in attribute or isinstance(child, nn.Dropout))
                if is_rate and attribute not in ("hidden_dropout",):  # of the residual stream, in BLOOM and Falcon
                    setattr(child, attribute, 0.5)

    def repeats() -> bool:
        torch.manual_seed(1)
        first = known.record(model, args, kwargs)
        second = known.record(model, args, kwargs)
        paths = [spec.path for spec in FAMILIES[name].attention]
        return all(torch.equal(flat(first[path].output), flat(second[path].output)) for path in paths)

    has_rates = not repeats()
    with xd.ExplicitDropout(model, xd.paper(0.3), value=1.0) as reg:
        assert repeats()
        assert "switched off" in reg.summary() or not has_rates
    assert repeats() is not has_rates
    without = ("your own", "vit-pytorch SimpleViT", "Falcon, grouped", "Falcon, multi-query")
    assert has_rates is not name.startswith(without)


SWITCHED_OFF = {
    "timm ViT": ({"attn_drop", "proj_drop"}, {"drop1", "drop2"}),
    "BERT": ({"attention.self.dropout"}, {"output.dropout"}),
    "DistilBERT": ({"attention.dropout"}, {"ffn.dropout"}),
    "GPT-2": ({"attn_dropout", "resid_dropout"}, {"mlp.dropout"}),
    "Wav2Vec2": ({"attention.dropout"}, {"intermediate_dropout", "output_dropout"}),
    "BART": ({"self_attn.dropout", "encoder_attn.dropout"}, {"activation_dropout"}),
    "T5": ({"SelfAttention.dropout", "EncDecAttention.dropout"}, {"DenseReluDense.dropout"}),
    "ModernBERT, local layers": ({"attn.attention_dropout"}, {"mlp.drop"}),
    "Llama": ({"self_attn.attention_dropout"}, set()),
    "nn.TransformerEncoder, norm first": ({"self_attn.dropout"}, {"layers.0.dropout", "layers.1.dropout"}),
    "torchvision ViT": ({"self_attention.dropout"}, {"mlp.2", "mlp.4"}),
    "vit-pytorch ViT": ({"dropout", "to_out.1"}, {"net.3", "net.5"}),
    "x-transformers Encoder": ({"attend.attn_dropout", "attend.dropout"}, {"ff.1"}),
}
"""The ends of the paths that attention components, and feed_forward, switch off: the table of docs/attach.md."""


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_what_is_switched_off_is_what_the_page_says(name: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "attach.md").read_text()
    model = model_of(name)
    paths = {module: path for path, module in model.named_modules()}
    for kind, ends in zip(("Attention", "FeedForward"), SWITCHED_OFF[name], strict=True):
        found = set()
        for site in xd.find_sites(model):
            described = site.source.described
            if type(described).__name__ == kind:
                found |= {f"{paths[d.module]}.{d.name}".removesuffix(".p") for d in described.dropouts}
        for path in found:
            assert any(path.endswith(f".{end}") or path == end for end in ends), path
        for end in ends:
            assert any(path.endswith(f".{end}") or path == end for path in found), end
            own = end.split(".")[-1]
            assert own.isdigit() or f"{own}`" in page or name.startswith(("T5", "ModernBERT", "Llama", "x-"))


def flat(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def test_the_support_page_is_what_the_table_says() -> None:
    page = Path(__file__).parents[1] / "docs" / "support.md"
    assert page.read_text() == families.page(), "run: python tests/families.py > docs/support.md"
