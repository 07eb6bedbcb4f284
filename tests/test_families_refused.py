"""What libraries offer beyond plain attention: refused by name where a penalty could not be exact, and only there."""

from __future__ import annotations

import dataclasses
import functools
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


class Bare(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0].tanh()


class Kept(nn.MultiheadAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:  # type: ignore[override]
        return super().forward(query.roll(1, 1), key, value, **options)


class Named(nn.MultiheadAttention):
    pass


def test_a_subclass_of_multihead_attention_with_a_forward_of_its_own_is_not_guessed_at() -> None:
    x = numbers(2, 7, 32).float()
    for kind, args in ((Bare, (x,)), (Kept, (x, x, x))):
        reason = ("every law", f"no rule says what the forward of {kind.__name__} does.*register_rule")
        check(kind(32, 4, batch_first=True), (args, {}), dict.fromkeys(COMPONENTS[:5], reason), COMPONENTS[:5])
    check(Named(32, 4, batch_first=True), ((x, x, x), {}), {}, COMPONENTS[:5])


def test_an_encoder_layer_with_a_forward_of_its_own_keeps_its_linear_layers() -> None:
    class Layer(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(32, 4, 64, batch_first=True)
            self.self_attn = Bare(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = x + self.self_attn(x)
            return x + self._ff_block(x)

    x = numbers(2, 7, 32).float()
    check(nn.Sequential(Layer()), ((x,), {}), dict.fromkeys(COMPONENTS[:5], ("every law", "Bare")))


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


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_windows_that_swin_pads_are_refused(name: str) -> None:
    depth = 2 if name.startswith("swin_") else 1  # shifted windows of Swin V2 cannot be padded
    options = {"img_size": 40, "embed_dim": 24, "depths": (depth,), "num_heads": (2,), "window_size": 4}
    model = timm_model(name, **options)
    reason = ("every law", "its 10 × 10 patches are padded to whole windows of 4 × 4.*img_size")
    call = (numbers(2, 3, 40, 40).float(),), {}
    check(model, call, dict.fromkeys(COMPONENTS[:5], reason))
    model.set_input_size((32, 32), window_size=(4, 4))
    assert not any(site.source.described.refused for site in xd.find_sites(model) if site.component == "value")


def test_a_latent_that_is_the_query_itself_is_refused() -> None:
    from timm.layers import AttentionPoolLatent

    model = AttentionPoolLatent(32, num_heads=4, q_proj=False)
    check(model, ((numbers(2, 7, 32).float(),), {}), {**scores("latent"), **attended("latent")})


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


def test_experts_that_are_modules_are_refused_and_other_layers_are_not() -> None:
    model = hf_model(
        "SwitchTransformers", model="SwitchTransformersEncoderModel", d_model=32, d_kv=8, d_ff=64, num_layers=2,
        num_sparse_encoder_layers=1, num_heads=4, num_experts=4, vocab_size=50, implementation="eager",
    ).train()  # fmt: skip
    call = (), {"input_ids": IDS}
    with pytest.raises(xd.UnsupportedSiteError, match=r"mlp\.experts:feed_forward: its experts see different tokens"):
        attempt(model, call, xd.paper(0.3), "feed_forward")
    dense = next(s.layer for s in xd.find_sites(model) if s.component == "feed_forward" and "experts" not in s.path)
    with xd.ExplicitDropout(model, xd.paper(0.3), feed_forward={dense: 1.0}) as reg:
        model(**call[1])
        assert reg() > 0


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
    check(Own(), ((X,), {}), {}, own)
    check(Own(q_norm=nn.LayerNorm(8)), ((X,), {}), {**scores("q_norm"), **WEIGHTS}, own)
    check(Own(rotary_emb=nn.Identity()), ((X,), {}), {**scores("rotary"), **WEIGHTS}, own)
    check(Turned(), ((X, X), {}), {**scores("rotary"), **WEIGHTS}, own)


class RotaryEmbedding(nn.Module):
    pass


class VisionRoPE(nn.Module):
    pass


class DropEdge(nn.Module):
    pass


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))


@pytest.mark.parametrize(
    "extra",
    [{"pos_emb": RotaryEmbedding()}, {"positions": VisionRoPE()}, {"positions": nn.ModuleList([RotaryEmbedding()])}],
    ids=["child", "abbreviated", "grandchild"],
)
def test_classes_that_tell_of_rotations_are_heeded(extra: dict[str, nn.Module]) -> None:
    check(Own(**extra), ((X,), {}), {**scores("rotary embeddings"), **WEIGHTS}, COMPONENTS[:5])


@pytest.mark.parametrize("name", ["cos_cached", "sin_cached", "inv_freq", "cos"])
def test_angles_that_are_kept_tell_of_rotations(name: str) -> None:
    for persistent in (True, False):
        model = Own()
        model.register_buffer(name, torch.ones(7, 8), persistent=persistent)
        check(model, ((X,), {}), {**scores(name), **WEIGHTS}, COMPONENTS[:5])


@pytest.mark.parametrize("name", ["ln_q", "ln_k", "q_ln", "rms_q", "layernorm_q", "qk_q", "qnorm", "query_rms"])
def test_norms_that_are_named_for_queries_or_keys_are_heeded(name: str) -> None:
    for norm in (nn.LayerNorm(32), RMSNorm(32)):
        check(Own(**{name: norm}), ((X,), {}), {**scores(f"{name} .*normalises"), **WEIGHTS}, COMPONENTS[:5])


def test_norms_as_wide_as_a_head_are_heeded() -> None:
    for norm in (nn.LayerNorm(8), nn.RMSNorm(8, elementwise_affine=False), RMSNorm(8)):
        check(Own(inner=norm), ((X,), {}), {**scores("inner .*as wide as a head"), **WEIGHTS}, COMPONENTS[:5])
    named = Own(norms=nn.ModuleDict({"q": RMSNorm(8), "k": RMSNorm(8)}))
    check(named, ((X,), {}), {**scores("norms.q"), **WEIGHTS}, COMPONENTS[:5])


def test_norms_that_are_named_for_values_are_heeded() -> None:
    for name in ("v_norm", "ln_v", "value_norm"):
        check(Own(**{name: nn.LayerNorm(8)}), ((X,), {}), attended(f"{name} .*normalises values"), COMPONENTS[:5])


def test_what_is_neither_norm_of_heads_nor_rotation_is_not_refused() -> None:
    for extra in ({"norm": nn.LayerNorm(32)}, {"drop": DropEdge()}, {"q_drop": nn.Dropout(0.1)}):
        check(Own(**extra), ((X,), {}), {}, COMPONENTS[:5])
    one = Own(norm=nn.LayerNorm(32))
    one.num_heads = 1  # a head is as wide as everything else: no sign
    assert xd.find_sites(one)[0].source.described.obstacle is None


@pytest.mark.parametrize("pair", [("k_proj", "v_proj"), ("q_proj", "v_proj"), ("q_proj", "k_proj")])
def test_one_layer_that_is_called_twice_is_refused(pair: tuple[str, str]) -> None:
    model = Own()
    setattr(model, pair[1], getattr(model, pair[0]))
    reason = f"{pair[0]} and {pair[1]} are one layer.*two layers may have the same weight.*register_rule"
    refused: Refused = {**scores(reason), **WEIGHTS}
    if "v_proj" in pair:
        refused = dict.fromkeys(COMPONENTS[:5], ("every law", reason))
    check(nn.Sequential(model), ((X,), {}), refused, COMPONENTS[:5])
    tied = Own()
    getattr(tied, pair[1]).weight = getattr(tied, pair[0]).weight
    check(tied, ((X,), {}), {}, COMPONENTS[:5])


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu())


class Mixture(nn.Module):
    """Every token goes to one expert; a network beside them sees all."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.attn, self.router, self.shared_expert = Own(), nn.Linear(32, 2), Network()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        chosen, y = self.router(x).argmax(-1), self.shared_expert(x)
        for number, expert in enumerate(self.experts.children()):
            y = y.index_put((chosen == number,), expert(x[chosen == number]), accumulate=True)
        return y


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


@pytest.mark.parametrize(
    "experts",
    [
        lambda: nn.ModuleList([Network(), Network()]),
        lambda: nn.ModuleDict({"first": Network(), "second": Network()}),
        lambda: nn.ModuleList([sequence(), sequence()]),
    ],
    ids=["list", "dictionary", "sequences"],
)
def test_experts_of_ones_own_are_refused_and_what_sees_every_token_is_not(experts: Any) -> None:
    model = nn.Sequential(Mixture(experts()))
    found = [site.path for site in xd.find_sites(model) if site.component == "feed_forward"]
    assert sorted(found) == ["0.experts", "0.shared_expert.fc1", "0.shared_expert.fc2"]
    check(model, ((X,), {}), {"feed_forward": ("every law", "0.experts:feed_forward: its experts")})


def test_whole_models_in_a_list_of_experts_are_no_mixture() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Sequential(Own(), Network())])})
    assert [site.path for site in xd.find_sites(model)][-2:] == ["experts.0.1.fc1", "experts.0.1.fc2"]
    inside = nn.ModuleDict({"experts": nn.ModuleList([Mixture(nn.ModuleList([Network(), Network()]))])})
    assert [site.path for site in xd.find_sites(inside)][-1] == "experts.0.experts"


def test_experts_with_numbers_in_their_names_are_refused_too() -> None:
    model = nn.ModuleDict({"attn": Own(), "moe": nn.ModuleDict({"expert0": Network(), "expert_1": Network()})})
    assert [site.path for site in xd.find_sites(model)][-1] == "moe"


def test_a_mask_that_no_rule_explains_is_refused() -> None:
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    refused = {**scores("mask"), "attended_value": ("every law", "mask|weights=")}
    check(Own(), ((X, mask), {}), refused, ("query", "key", "query_key"))


def sigmoid_attention(module, query, key, value, mask, scaling=None, dropout=0.0, **unused):
    del module, mask, dropout, unused
    return ((query @ key.mT * scaling).sigmoid() @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("component", ["query", "key", "query_key", "attended_value"])
def test_attention_by_a_function_of_ones_own_is_refused_whenever_it_comes(component, when):
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("sigmoid", sigmoid_attention)
    transformers.AttentionMaskInterface.register("sigmoid", transformers.masking_utils.sdpa_mask)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    model, ids = transformers.BertModel(config).train(), torch.randint(50, (2, 6))
    words = r"sigmoid_attention, by which the model computes attention \('sigmoid'\), is no plain softmax"
    if when == "before":
        model.set_attn_implementation("sigmoid")
        with pytest.raises(xd.UnsupportedSiteError, match=words):
            xd.ExplicitDropout(model, xd.paper(0.2), **{component: 1.0})
    else:
        reg = xd.ExplicitDropout(model, xd.paper(0.2), **{component: 1.0})
        model(ids)
        assert reg() > 0
        model.set_attn_implementation("sigmoid")
        model(ids)
        with pytest.raises(xd.UnsupportedSiteError, match=words):
            reg()
        reg.remove()
    model.set_attn_implementation("sigmoid")
    reg = xd.ExplicitDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0)
    model(ids)
    assert reg() > 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_a_function_of_ones_own_that_is_a_softmax_is_taken(causal):
    transformers = pytest.importorskip("transformers")

    def fused(module, query, key, value, _mask, scaling=None, dropout=0.0, **_):
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=module.is_causal, scale=scaling
        )
        return attended.transpose(1, 2), None

    transformers.AttentionInterface.register("fused", fused)
    if causal:
        config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=4, embd_pdrop=0.0, resid_pdrop=0.0)
        model = transformers.GPT2Model(config)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
        model = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=1, num_attention_heads=4, **sizes))
    given = torch.randint(50, (2, 6)) if causal else torch.randn(2, 3, 8, 8)
    found = []
    for name in ("sdpa", "fused"):
        model.train().set_attn_implementation(name)
        reg = xd.ExplicitDropout(model, xd.inverted(0.2), query=1.0, attended_value=1.0)
        model(given)
        found.append(reg().detach())
        reg.remove()
    torch.testing.assert_close(*found)


def test_functions_are_judged_by_what_they_do_and_not_by_what_they_wrap():
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    @functools.wraps(sdpa_attention_forward)
    def doubled(*args, **kwargs):
        attended, weights = sdpa_attention_forward(*args, **kwargs)
        return 2 * attended, weights

    @dataclasses.dataclass
    class Unhashable:
        factor: float

        def __call__(self, *args, **kwargs):
            attended, weights = sdpa_attention_forward(*args, **kwargs)
            return self.factor * attended, weights

    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    model = transformers.ViTModel(config)
    for function, right in (
        (doubled, False), (Unhashable(2.0), False), (Unhashable(1.0), True),
        (functools.partial(sdpa_attention_forward), True),
    ):  # fmt: skip
        transformers.AttentionInterface.register("mine", function)
        model.set_attn_implementation("mine")
        if right:
            xd.ExplicitDropout(model, xd.inverted(0.2), attended_value=1.0).remove()
        else:
            with pytest.raises(xd.UnsupportedSiteError, match="is no plain softmax"):
                xd.ExplicitDropout(model, xd.inverted(0.2), attended_value=1.0)
