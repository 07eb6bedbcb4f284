"""Hugging Face transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from family.patterns import (
    GROUPED,
    IDS,
    Q_K_V,
    REAL,
    ROTARY_LIMITS,
    SELF,
    TARGET_REAL,
    alibi_bias,
    fused,
    hf_rotation,
    interleaved,
    layers,
    networks,
    numbers,
    separate,
    t5_bias,
    within,
)
from family.table import SCORES, Attention, Family, Linear, Part

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = {**SMALL, "vocab_size": 50}


def hf_model(name: str, *, model: str | None = None, implementation: str = "sdpa", **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the fused kernel for experts knows no float64
    return getattr(transformers, model or f"{name}Model")(config)


def text() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"input_ids": IDS, "attention_mask": REAL.long()}


def uncached_text() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"input_ids": IDS, "attention_mask": REAL.long(), "use_cache": False}


def translation() -> tuple[tuple[Any, ...], dict[str, Any]]:
    targets = {"decoder_input_ids": IDS[:, :5], "decoder_attention_mask": TARGET_REAL.long()}
    return (), {"input_ids": IDS, "attention_mask": REAL.long(), "use_cache": False, **targets}


def pixels() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"pixel_values": numbers(2, 3, 16, 16)}


TEXT = {"padding": {"main": REAL}}


def llama_like(
    name: str,
    config: str,
    attention: dict[str, Any] | None = None,
    linear: tuple[Linear, ...] | None = None,
    **options: Any,
) -> Family:
    spec = {
        "parts": separate(*Q_K_V), "shapes": GROUPED, "key_heads": 2, "output": "o_proj", "causal": True,
        "rotation": hf_rotation, **SELF, **(attention or {}),
    }  # fmt: skip
    ff = networks(2, *(f"layers.{{}}.mlp.{n}_proj" for n in ("gate", "up", "down")), real="main")
    return Family(
        name, "transformers", lambda: hf_model(config, **{**WORDS, "num_key_value_heads": 2, **options}), uncached_text,
        layers(2, "layers.{}.self_attn", **spec), ff if linear is None else linear, limits=ROTARY_LIMITS, **TEXT,
    )  # fmt: skip


def bert_like(name: str, config: str, implementation: str = "sdpa") -> Family:
    return Family(
        name, "transformers", lambda: hf_model(config, implementation=implementation, **WORDS), text,
        layers(2, "encoder.layer.{}.attention.self", parts=separate("query", "key", "value"), **SELF),
        networks(2, "encoder.layer.{}.intermediate.dense", "encoder.layer.{}.output.dense", real="main"), **TEXT,
    )  # fmt: skip


def bart_like(name: str, config: str, call: Any, padding: dict[str, Tensor], options: dict[str, Any]) -> Family:
    sides = {"d_model": 32, "vocab_size": 50, "pad_token_id": 1}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    common = {"parts": separate(*Q_K_V), "output": "out_proj"}
    return Family(
        name, "transformers", lambda: hf_model(config, **{**sides, **options}), call,
        layers(2, "encoder.layers.{}.self_attn", **common, **SELF)
        + layers(2, "decoder.layers.{}.self_attn", 2, causal=True, real="target", context="target", **common)
        + layers(2, "decoder.layers.{}.encoder_attn", 2, cross=True, real="target", context="main", **common),
        networks(2, "encoder.layers.{}.fc1", "encoder.layers.{}.fc2", real="main")
        + networks(2, "decoder.layers.{}.fc1", "decoder.layers.{}.fc2", first=2, real="target"),
        padding,
    )  # fmt: skip


def t5_like(name: str, implementation: str, activation: str) -> Family:
    common = {"parts": separate("q", "k", "v"), "output": "o", "scale": 1.0, "bias": t5_bias}
    inner = ["DenseReluDense.wi_0", "DenseReluDense.wi_1"] if activation.startswith("gated") else ["DenseReluDense.wi"]
    inner.append("DenseReluDense.wo")
    return Family(
        name, "transformers",
        lambda: hf_model(
            "T5", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50, feed_forward_proj=activation,
            implementation=implementation,
        ),
        translation,
        layers(2, "encoder.block.{}.layer.0.SelfAttention", **common, **SELF)
        + layers(
            2, "decoder.block.{}.layer.0.SelfAttention", 2, causal=True, real="target", context="target", **common
        )
        + layers(2, "decoder.block.{}.layer.1.EncDecAttention", 2, cross=True, real="target", context="main", **common),
        networks(2, *(f"encoder.block.{{}}.layer.1.{n}" for n in inner), real="main")
        + networks(2, *(f"decoder.block.{{}}.layer.2.{n}" for n in inner), first=2, real="target"),
        {"main": REAL, "target": TARGET_REAL},
    )  # fmt: skip


def gpt2_family(cross: bool) -> Family:
    conv = {"transposed": True}
    attention = layers(
        2, "h.{}.attn", parts=fused("c_attn", 32, 32, 32, **conv), output="c_proj", causal=True, **SELF
    )  # fmt: skip
    call, padding = uncached_text, {"main": REAL}
    if cross:
        parts = (Part("q_attn", **conv), Part("c_attn", slice(0, 32), **conv), Part("c_attn", slice(32, 64), **conv))
        attention += layers(
            2, "h.{}.crossattention", parts=parts, output="c_proj", cross=True, real="main", context="other"
        )
        padding = {"main": REAL, "other": TARGET_REAL}

        def call() -> Any:
            other = {"encoder_hidden_states": numbers(2, 5, 32), "encoder_attention_mask": TARGET_REAL.long()}
            return (), {**uncached_text()[1], **other}

    linear = networks(2, "h.{}.mlp.c_fc", "h.{}.mlp.c_proj", wide=128, real="main", transposed=True)
    return Family(
        "GPT-2 with cross-attention" if cross else "GPT-2", "transformers",
        lambda: hf_model(
            "GPT2", n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64, add_cross_attention=cross
        ),
        call, attention, linear, padding,
    )  # fmt: skip


def vision_like(name: str, config: str, call: Any = pixels, **options: Any) -> Family:
    return Family(
        name, "transformers",
        lambda: hf_model(config, **SMALL, **(options or {"image_size": 16, "patch_size": 4})), call,
        layers(2, "layers.{}.attention", parts=separate(*Q_K_V), output="o_proj"),
        networks(2, "layers.{}.mlp.fc1", "layers.{}.mlp.fc2"),
    )  # fmt: skip


def falcon_family(kind: str, **options: Any) -> Family:
    groups = {"grouped": 2, "multi-query": 1, "plain": 4}[kind]
    width = 8 * groups
    alibi = bool(options.get("alibi"))
    implementation = options.pop("implementation", "sdpa")
    spec: dict[str, Any] = {"bias": falcon_alibi} if alibi else {"rotation": hf_rotation}
    return Family(
        f"Falcon, {kind}" + (", ALiBi" if alibi else ""), "transformers",
        lambda: hf_model(
            "Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50, bias=True,
            implementation=implementation, **options,
        ),
        uncached_text,
        layers(
            2, "h.{}.self_attention", parts=interleaved("query_key_value", groups, 4 // groups, 8), output="dense",
            shapes=((32, 32), (width, 32), (width, 32)), key_heads=groups, causal=True, **SELF, **spec,
        ),
        networks(2, "h.{}.mlp.dense_h_to_4h", "h.{}.mlp.dense_4h_to_h", wide=128, real="main"),
        limits={} if alibi else ROTARY_LIMITS, **TEXT,
    )  # fmt: skip


def falcon_alibi(module: Any, call: dict[str, Any], length: int, width: int) -> Tensor:
    return alibi_bias(module, call, length, width) * module.inv_norm_factor


def hf_families() -> list[Family]:
    clip = {**SMALL, "vocab_size": 50}
    clip_vision = {**SMALL, "image_size": 16, "patch_size": 4}
    speech = {
        **SMALL, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (4, 4), "num_feat_extract_layers": 2,
        "layerdrop": 0.0, "mask_time_prob": 0.0, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    }  # fmt: skip
    whisper = {
        "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 1, "bos_token_id": 2,
        "eos_token_id": 3, "decoder_start_token_id": 2,
    }  # fmt: skip
    sounds = {
        "input_features": numbers(2, 8, 16), "decoder_input_ids": IDS[:, :5],
        "decoder_attention_mask": TARGET_REAL.long(), "use_cache": False,
    }  # fmt: skip
    text_layers = {"parts": separate(*Q_K_V), "output": "out_proj"}
    return [
        bert_like("BERT", "Bert"),
        bert_like("BERT, eager attention", "Bert", "eager"),
        bert_like("RoBERTa", "Roberta"),
        bert_like("XLM-RoBERTa", "XLMRoberta"),
        bert_like("ELECTRA", "Electra"),
        bert_like("CamemBERT", "Camembert"),
        Family(
            "DistilBERT", "transformers",
            lambda: hf_model("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=50), text,
            layers(
                2, "transformer.layer.{}.attention", parts=separate("q_lin", "k_lin", "v_lin"), output="out_lin", **SELF
            ),
            networks(2, "transformer.layer.{}.ffn.lin1", "transformer.layer.{}.ffn.lin2", real="main"), **TEXT,
        ),
        vision_like("ViT", "ViT"),
        vision_like("DeiT", "DeiT"),
        vision_like(
            "AST", "AST", lambda: ((), {"input_values": numbers(2, 32, 16)}), max_length=32, num_mel_bins=16,
            patch_size=8, frequency_stride=8, time_stride=8,
        ),
        Family(
            "CLIP", "transformers", lambda: hf_model("CLIP", text_config=clip, vision_config=clip_vision),
            lambda: ((), {**text()[1], **pixels()[1]}),
            layers(2, "text_model.encoder.layers.{}.self_attn", causal=True, **SELF, **text_layers)
            + layers(2, "vision_model.encoder.layers.{}.self_attn", 2, **text_layers),
            networks(
                2, "text_model.encoder.layers.{}.mlp.fc1", "text_model.encoder.layers.{}.mlp.fc2", real="main"
            )
            + networks(2, "vision_model.encoder.layers.{}.mlp.fc1", "vision_model.encoder.layers.{}.mlp.fc2", first=2),
            **TEXT,
        ),
        bart_like(
            "BART", "Bart", translation, {"main": REAL, "target": TARGET_REAL}, {"max_position_embeddings": 64}
        ),
        bart_like(
            "mBART", "MBart", translation, {"main": REAL, "target": TARGET_REAL}, {"max_position_embeddings": 64}
        ),
        Family(
            "SigLIP, vision", "transformers",
            lambda: hf_model("SiglipVision", vision_use_head=False, **clip_vision), pixels,
            layers(2, "encoder.layers.{}.self_attn", **text_layers),
            networks(2, "encoder.layers.{}.mlp.fc1", "encoder.layers.{}.mlp.fc2"),
        ),
        t5_like("T5", "sdpa", "relu"),
        t5_like("T5 v1.1, gated, eager attention", "eager", "gated-gelu"),
        gpt2_family(cross=False),
        gpt2_family(cross=True),
        Family(
            "OPT", "transformers",
            lambda: hf_model(
                "OPT", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=50,
                word_embed_proj_dim=32, max_position_embeddings=64,
            ),
            uncached_text,
            layers(2, "decoder.layers.{}.self_attn", causal=True, **SELF, **text_layers),
            networks(2, "decoder.layers.{}.fc1", "decoder.layers.{}.fc2", real="main", flattened=True), **TEXT,
        ),
        llama_like("Llama", "Llama"),
        llama_like("Gemma", "Gemma", head_dim=8),
        llama_like("Mistral", "Mistral"),
        llama_like("Mistral, sliding window", "Mistral", {"pairs": within(3)}, sliding_window=3),
        llama_like("Qwen2", "Qwen2"),
        llama_like(
            "Phi-3", "Phi3", {"parts": fused("qkv_proj", 32, 16, 16)},
            networks(2, "layers.{}.mlp.gate_up_proj", "layers.{}.mlp.down_proj", packed=2, real="main"), pad_token_id=1,
        ),
        replace(
            llama_like("Gemma 2, capped scores", "Gemma2", {"weights": "()"}, head_dim=8, implementation="eager"),
            limits=dict.fromkeys(SCORES, ("refused", "softcapping")),
        ),
        replace(
            llama_like("Qwen3, normalised queries and keys", "Qwen3", head_dim=8),
            limits={**dict.fromkeys(SCORES, ("refused", "q_norm")), "attended_value": ("paper", "eager")},
            note="under attn_implementation='eager' attended values have every law.",
        ),
        replace(
            llama_like("Qwen3, eager attention", "Qwen3", {"weights": "()"}, head_dim=8, implementation="eager"),
            limits=dict.fromkeys(SCORES, ("refused", "q_norm")),
        ),
        replace(
            llama_like("Mixtral", "Mixtral", None, (), num_local_experts=2),
            limits={**ROTARY_LIMITS, "feed_forward": ("refused", "experts")},
            note="its experts are packed into parameters of three axes.",
        ),
        Family(
            "GPT-NeoX, partial rotary", "transformers", lambda: hf_model("GPTNeoX", **WORDS), uncached_text,
            layers(
                2, "layers.{}.attention", parts=interleaved("query_key_value", 4, 1, 8), output="dense", causal=True,
                rotation=hf_rotation, **SELF,
            ),
            networks(2, "layers.{}.mlp.dense_h_to_4h", "layers.{}.mlp.dense_4h_to_h", real="main"),
            limits=ROTARY_LIMITS, **TEXT,
        ),
        Family(
            "ModernBERT, local layers", "transformers",
            lambda: hf_model("ModernBert", **WORDS, pad_token_id=1, local_attention=4), text,
            (
                *layers(
                    1, "layers.{}.attn", parts=fused("Wqkv", 32, 32, 32), output="Wo", rotation=hf_rotation, **SELF
                ),
                Attention(
                    "layers.1.attn", 1, 4, fused("Wqkv", 32, 32, 32), output="Wo", rotation=hf_rotation,
                    pairs=within(3), **SELF,
                ),
            ),
            networks(2, "layers.{}.mlp.Wi", "layers.{}.mlp.Wo", packed=2, real="main"), limits=ROTARY_LIMITS, **TEXT,
        ),
        Family(
            "Wav2Vec2", "transformers", lambda: hf_model("Wav2Vec2", **speech),
            lambda: ((), {"input_values": numbers(2, 160)}),
            layers(2, "encoder.layers.{}.attention", **text_layers),
            networks(
                2, "encoder.layers.{}.feed_forward.intermediate_dense", "encoder.layers.{}.feed_forward.output_dense"
            ),
        ),
        Family(
            "HuBERT", "transformers", lambda: hf_model("Hubert", **speech),
            lambda: ((), {"input_values": numbers(2, 160)}),
            layers(2, "encoder.layers.{}.attention", **text_layers),
            networks(
                2, "encoder.layers.{}.feed_forward.intermediate_dense", "encoder.layers.{}.feed_forward.output_dense"
            ),
        ),
        bart_like("Whisper", "Whisper", lambda: ((), sounds), {"target": TARGET_REAL}, whisper),
        Family(
            "BLOOM", "transformers", lambda: hf_model(
                "Bloom", implementation="eager", hidden_size=32, n_layer=2, n_head=4, vocab_size=50
            ),
            uncached_text,
            layers(
                2, "h.{}.self_attention", parts=interleaved("query_key_value", 4, 1, 8), output="dense", causal=True,
                bias=alibi_bias, **SELF,
            ),
            networks(2, "h.{}.mlp.dense_h_to_4h", "h.{}.mlp.dense_4h_to_h", wide=128, real="main"), **TEXT,
        ),
        falcon_family("grouped", new_decoder_architecture=True, num_kv_heads=2),
        falcon_family("multi-query", multi_query=True, new_decoder_architecture=False),
        falcon_family("plain", multi_query=False, new_decoder_architecture=False, alibi=True),
    ]  # fmt: skip
