"""What families and options are refused, and a word of the reason that the error must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from family.huggingface import WORDS, hf_model
from family.table import SCORES

GROUPED = {**WORDS, "num_key_value_heads": 2}
Refused = Mapping[str, tuple[str, str]]
"""For a component: "every law" or "variance", and a word of the reason."""


def scores(reason: str, laws: str = "every law") -> dict[str, tuple[str, str]]:
    return dict.fromkeys(SCORES, (laws, reason))


def attended(reason: str, laws: str = "every law") -> dict[str, tuple[str, str]]:
    return {"attended_value": (laws, reason)}


HUGGING_FACE: dict[str, tuple[Callable[[], nn.Module], Refused]] = {
    "Gemma 3": (
        lambda: hf_model("Gemma3Text", head_dim=8, **GROUPED),
        {**scores("q_norm"), **attended("eager", "variance")},
    ),
    "GPT-OSS": (
        lambda: hf_model(
            "GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1, implementation="eager", **GROUPED
        ),
        {**scores("sinks"), **attended("sinks"), "feed_forward": ("every law", "experts")},
    ),
    "Cohere, which turns neighbouring dimensions": (
        lambda: hf_model("Cohere", pad_token_id=1, **GROUPED),
        {**scores("CohereAttention"), **attended("CohereAttention")},
    ),
    "GPT-J, which turns inside the module": (
        lambda: hf_model(
            "GPTJ", n_embd=32, n_layer=1, n_head=4, vocab_size=50, rotary_dim=4, n_positions=32, implementation="eager"
        ),
        {**scores("GPTJAttention"), **attended("GPTJAttention")},
    ),
}

X_OPTIONS: dict[str, tuple[dict[str, Any], Refused]] = {
    "qk_norm": ({"attn_qk_norm": True}, scores("qk_norm")),
    "qk_rmsnorm": ({"attn_qk_rmsnorm": True}, scores("q_rmsnorm")),
    "l2_distance": ({"attn_l2_distance": True}, scores("l2_distance")),
    "softclamp": ({"attn_softclamp_logits": True}, scores("softclamp_logits")),
    "pre_talking_heads": ({"attn_pre_talking_heads": True}, scores("pre_talking_heads")),
    "post_talking_heads": ({"attn_post_talking_heads": True}, attended("post_talking_heads")),
    "num_mem_kv": ({"attn_num_mem_kv": 2}, {**scores("num_mem_kv"), **attended("num_mem_kv")}),
    "add_zero_kv": ({"attn_add_zero_kv": True}, {**scores("add_zero_kv"), **attended("add_zero_kv")}),
    "head_learned_sink": ({"attn_head_learned_sink": True}, scores("head_learned_sink")),
    "selective": ({"attn_selective": True}, scores("selective")),
    "cog_signed": ({"attn_cog_signed": True}, scores("cog_signed")),
    "cope": ({"attn_use_cope": True}, scores("use_cope")),
    "value_rmsnorm": ({"attn_value_rmsnorm": True}, attended("value_rmsnorm")),
    "laser": ({"attn_laser": True}, attended("laser")),
    "gate_values": ({"attn_gate_values": True}, attended("gate_values")),
    "gate_value_heads": ({"attn_gate_value_heads": True}, attended("gate_value_heads")),
    "output_gate": ({"attn_output_gate": True}, attended("output_gate")),
    "head_scale": ({"attn_head_scale": True}, attended("head_scale")),
    "orthog": ({"attn_orthog_projected_values": True}, attended("orthog_projected_values")),
    "latent_q": ({"attn_use_latent_q": True, "attn_dim_latent_q": 16}, scores("use_latent_q")),
    "latent_kv": ({"attn_use_latent_kv": True, "attn_dim_latent_kv": 16}, scores("use_latent_kv")),
    "value_residual": ({"add_value_residual": True}, attended("add_value_residual")),
    "xpos": ({"rotary_xpos": True}, scores("rotary_xpos")),
    "polar": ({"polar_pos_emb": True}, scores("polar_pos_emb")),
    "sigmoid": ({"attn_sigmoid": True}, {}),
    "alibi": ({"alibi_pos_bias": True, "alibi_num_heads": 2}, {}),
    "max_attend_past": ({"attn_max_attend_past": 2}, {}),
    "one_kv_head": ({"attn_one_kv_head": True}, {}),
    "on_attn": ({"attn_on_attn": True}, {}),
}
"""Options of `x_transformers` (as arguments of `Decoder`)."""
