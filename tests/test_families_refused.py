"""What libraries offer beyond plain attention: refused by name where a penalty could not be exact, and only there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explicit_dropout as xd
from family.attached import LAWS
from family.huggingface import WORDS, hf_model, text, uncached_text
from family.patterns import IDS, REAL, numbers
from family.refused import GROUPED, HUGGING_FACE, X_OPTIONS, Refused, attended, scores
from family.table import COMPONENTS
from family.timm import timm_model

SMALL_VIT = {"img_size": 32, "embed_dim": 48, "depth": 1, "num_heads": 3}


def attempt(model: nn.Module, call: Any, noise: xd.Noise, component: str) -> dict[str, Tensor]:
    args, kwargs = call
    with xd.ExplicitDropout(model, noise, **{component: 1.0}) as reg:
        model(*args, **kwargs)
        reg().backward()
        return reg.terms()


def check(model: nn.Module, call: Any, refused: Refused, components: tuple[str, ...] = COMPONENTS) -> None:
    """The refused raise with the name of a site, the reason and a way out; everything else works under every law."""
    model = model.train()
    sites = {site.name for site in xd.find_sites(model)}
    for component in components:
        laws, reason = refused.get(component, ("no law", ""))
        for noise in LAWS.values():
            if laws == "every law" or (laws == "variance" and noise.variance):
                with pytest.raises(xd.UnsupportedSiteError, match=reason) as caught:
                    attempt(model, call, noise, component)
                assert any(name in str(caught.value) for name in sites if name.endswith(f":{component}"))
                assert re.search(r"[Uu]se |[Ll]eave |load |build |set ", str(caught.value)), "no way out"
            else:
                terms = attempt(model, call, noise, component)
                assert terms
                assert all(term > 0 for term in terms.values())


# ---------------------------------------------------------------------------------------------- torch.nn


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_multihead_attention_appends_are_refused(option: str) -> None:
    x = numbers(2, 7, 32).float()
    model = nn.MultiheadAttention(32, 4, batch_first=True, **{option: True})
    check(model, ((x, x, x), {}), {**scores("append"), **attended("append")}, COMPONENTS[:5])


# ---------------------------------------------------------------------------------------------- timm


def picture() -> Any:
    return (numbers(2, 3, 32, 32).float(),), {}


def test_timm_with_normalised_queries_keeps_what_does_not_need_the_scores() -> None:
    model = timm_model("vit_tiny_patch16_224", qk_norm=True, **SMALL_VIT)
    check(model, picture(), {**scores("q_norm"), **attended("fused_attn = False", "variance")})
    for block in model.blocks:
        block.attn.fused_attn = False
    check(model, picture(), scores("q_norm"))


def test_the_cosine_scores_of_swin_v2_are_refused() -> None:
    options = {"img_size": 32, "embed_dim": 24, "depths": (1,), "num_heads": (2,), "window_size": 4}
    model = timm_model("swinv2_tiny_window8_256", **options)
    check(model, picture(), scores("cosines"))


def test_swin_with_the_fused_kernel_tells_how_to_get_its_weights() -> None:
    options = {"img_size": 32, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "window_size": 4}
    model = timm_model("swin_tiny_patch4_window7_224", **options)
    for block in model.layers[0].blocks:
        block.attn.fused_attn = True
    check(model, picture(), attended("fused_attn = False", "variance"))


def test_a_subclass_of_timm_attention_with_a_forward_of_its_own_is_not_guessed_at() -> None:
    from timm.layers.attention import Attention

    class Mine(Attention):
        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            return super().forward(x, attn_mask, is_causal).tanh()

    model = timm_model("vit_tiny_patch16_224", attn_layer=Mine, **SMALL_VIT)
    refused = {**scores("Mine"), **attended("Mine"), "value": ("every law", "Mine")}
    check(model, picture(), refused)


def test_attention_of_timm_that_nobody_has_read_is_not_guessed_at() -> None:
    model = timm_model("vit_tiny_patch16_224", attn_layer="diff", **SMALL_VIT)
    refused = {**scores("DiffAttention"), **attended("DiffAttention"), "value": ("every law", "DiffAttention")}
    check(model, picture(), refused)


# ---------------------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_what_families_of_transformers_do_to_scores_is_refused_by_name(name: str) -> None:
    build, refused = HUGGING_FACE[name]
    torch.manual_seed(0)
    check(build(), uncached_text(), refused)


def test_a_bert_with_relative_positions_in_its_scores_would_be_refused() -> None:
    """transformers 4 had position_embedding_type; its attention modules kept it as an attribute."""
    model = hf_model("Bert", **WORDS)
    for layer in model.encoder.layer:
        layer.attention.self.position_embedding_type = "relative_key"
    check(model, text(), {**scores("relative_key"), **attended("eager", "variance")})


def test_keys_from_a_cache_or_prefix_are_refused_where_scores_would_miss_them() -> None:
    import transformers

    model = hf_model("Llama", **GROUPED).train()
    for component in ("query", "key", "query_key", "attended_value"):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=IDS[:, :3], past_key_values=cache, use_cache=True)
        call = (), {"input_ids": IDS, "past_key_values": cache, "use_cache": True}
        with pytest.raises(xd.UnsupportedSiteError, match="cache or prefix") as caught:
            attempt(model, call, xd.paper(0.3), component)
        assert f"layers.0.self_attn:{component}" in str(caught.value)


def test_a_sliding_window_inside_flash_attention_is_refused() -> None:
    """There is no flash attention here to run; the rule is asked as its hook would ask it."""
    model = hf_model("Mistral", sliding_window=3, **GROUPED)
    model.config._attn_implementation = "flash_attention_2"
    attention = next(s for s in xd.find_sites(model) if s.component == "query").source.described
    x = numbers(2, 7, 32)
    with pytest.raises(xd.UnsupportedSiteError, match="sliding window inside flash_attention_2"):
        attention.pairs(attention, {"attention_mask": None}, x, x)


def test_a_subclass_follows_its_base_until_it_writes_a_forward_of_its_own() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    class Named(LlamaAttention):
        pass

    class Changed(LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    followed, own = scores("rotary", "variance"), {**scores("Changed"), **attended("Changed")}
    for kind, refused in ((Named, followed), (Changed, own)):
        model = hf_model("Llama", **GROUPED)
        for layer in model.layers:
            layer.self_attn.__class__ = kind
        check(model, uncached_text(), refused)


# ---------------------------------------------------------------------------------------------- x-transformers


@pytest.mark.parametrize("option", X_OPTIONS)
def test_what_x_transformers_offers_is_exact_or_refused_by_name(option: str) -> None:
    from x_transformers import Decoder, TransformerWrapper

    settings, refused = X_OPTIONS[option]
    stack = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, verbose=False, **settings)
    model = TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=stack)
    check(model, ((IDS,), {"mask": REAL}), refused)


# ---------------------------------------------------------------------------------------------- one's own


class Own(nn.Module):
    def __init__(self, **extra: nn.Module) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out_proj = nn.Linear(32, 32)
        for name, module in extra.items():
            setattr(self, name, module)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Turned(Own):
    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        del rope
        return super().forward(x)


X = numbers(2, 7, 32).float()
WEIGHTS = attended("weights=", "variance")


def test_names_that_tell_of_norms_or_rotations_are_heeded() -> None:
    own = COMPONENTS[:5]
    check(Own(), ((X,), {}), WEIGHTS, own)
    check(Own(q_norm=nn.LayerNorm(8)), ((X,), {}), {**scores("q_norm"), **WEIGHTS}, own)
    check(Own(rotary_emb=nn.Identity()), ((X,), {}), {**scores("rotary"), **WEIGHTS}, own)
    check(Turned(), ((X, X), {}), {**scores("rotary"), **WEIGHTS}, own)


def test_a_mask_that_no_rule_explains_is_refused() -> None:
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    refused = {**scores("mask"), "attended_value": ("every law", "mask|weights=")}
    check(Own(), ((X, mask), {}), refused, ("query", "key", "query_key"))
