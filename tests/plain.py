"""Penalties the plain way, for comparison: record what layers were called with, then apply the closed forms.

Nothing here knows of sites, taps or rules: for each host, a few lines say by hand where its projections are.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.testing import assert_close

from explicit_dropout import functional

COMPONENTS = ("query", "key", "query_key", "value", "attended_value", "feed_forward")


@contextmanager
def recorded(model):
    """The arguments and the output of every call of every module, by path."""
    calls, handles = {}, []
    for path, module in model.named_modules():

        def record(_, args, kwargs, output, path=path):
            calls.setdefault(path, []).append((args, kwargs, output))

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def vit(depth=2, **settings):
    """A timm ViT, small; called with images of 16 × 16."""
    import timm

    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "num_classes": 3, "depth": depth}
    return timm.create_model("vit_tiny_patch16_224", **{**options, **settings}).train()


def images(batch=4, seed=0):
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def vit_penalties(model, calls, noise, components, firing=0, **options):
    """J of each site of a timm ViT, by the name that the library gives it."""
    terms = {}
    for layer, block in enumerate(model.blocks):
        (x, *_), _, _ = calls[f"blocks.{layer}.attn"][firing]
        weights, biases = block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3)
        heads = block.attn.num_heads
        scale = (weights[0].shape[0] // heads) ** -0.5
        sides = {"query_bias": biases[0], "key_bias": biases[1], "heads": heads, "scale": scale}
        for component in components:
            if component == "feed_forward":
                for name in ("fc1", "fc2"):
                    path = f"blocks.{layer}.mlp.{name}"
                    linear = getattr(block.mlp, name)
                    terms[f"{path}:feed_forward"] = functional.linear(
                        calls[path][firing][0][0], linear.weight, noise, **options
                    )
            elif component == "value":
                terms[f"blocks.{layer}.attn:value"] = functional.value(x, weights[2], noise, **options)
            elif component == "attended_value":
                queries, keys = (
                    torch.unflatten(nn.functional.linear(x, w, b), -1, (heads, -1)).transpose(1, 2)
                    for w, b in zip(weights[:2], biases[:2], strict=True)
                )
                attention = (scale * queries @ keys.mT).softmax(-1)
                terms[f"blocks.{layer}.attn:attended_value"] = functional.attended_value(
                    x, weights[2], attention, noise, heads=heads, **options
                )
            else:
                form = getattr(functional, component)
                terms[f"blocks.{layer}.attn:{component}"] = form(x, *weights[:2], noise, **{**sides, **options})
    return terms


def encoder(layers=2, **settings):
    torch.manual_seed(0)
    options = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    layer = nn.TransformerEncoderLayer(**{**options, **settings})
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).train()


def encoder_penalties(model, calls, noise, components, mask=None):
    """J of each site of an nn.TransformerEncoder; mask is True for real tokens."""
    terms, padding = {}, {} if mask is None else {"mask": mask}
    for number, layer in enumerate(model.layers):
        path = f"layers.{number}"
        (x, *_), _, _ = calls[f"{path}.self_attn"][0]
        attention = layer.self_attn
        (query, key, value), biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        for component in components:
            if component == "feed_forward":
                for name in ("linear1", "linear2"):
                    terms[f"{path}.{name}:feed_forward"] = functional.linear(
                        calls[f"{path}.{name}"][0][0][0], getattr(layer, name).weight, noise, **padding
                    )
            elif component == "value":
                terms[f"{path}.self_attn:value"] = functional.value(x, value, noise, **padding)
            else:
                heads = attention.num_heads
                terms[f"{path}.self_attn:{component}"] = getattr(functional, component)(
                    x, query, key, noise, query_bias=biases[0], key_bias=biases[1], heads=heads,
                    scale=(x.shape[-1] // heads) ** -0.5, **padding,
                )  # fmt: skip
    return terms


def llama(layers=2, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 31, "max_position_embeddings": 32, "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**options, **settings})).train()


def tokens(batch=3, length=6, seed=0):
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(seed))


def llama_penalties(model, calls, noise, components, mask=None, prefix="model.", weight_of=lambda layer: layer.weight):
    """J of each site of a Llama without padding, or with a mask of real tokens on the left of a batch."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    terms, padding = {}, {} if mask is None else {"mask": mask}
    modules = dict(model.named_modules())
    for number in range(model.config.num_hidden_layers):
        path = f"{prefix}layers.{number}"
        _, call, _ = calls[f"{path}.self_attn"][0]
        for component in components:
            if component == "feed_forward":
                for name in ("gate_proj", "up_proj", "down_proj"):
                    layer = f"{path}.mlp.{name}"
                    terms[f"{layer}:feed_forward"] = functional.linear(
                        calls[layer][0][0][0], weight_of(modules[layer]), noise, **padding
                    )
            elif component == "value":
                layer = f"{path}.self_attn.v_proj"
                terms[f"{path}.self_attn:value"] = functional.value(
                    calls[layer][0][0][0], weight_of(modules[layer]), noise, **padding
                )
            elif component == "query":
                attention = modules[f"{path}.self_attn"]
                x = calls[f"{path}.self_attn.q_proj"][0][0][0]
                cos, sin = call["position_embeddings"]
                q, k = (
                    torch.unflatten(x @ weight_of(getattr(attention, name)).mT, -1, (-1, attention.head_dim))
                    for name in ("q_proj", "k_proj")
                )
                q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
                k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
                scores = attention.scaling * q @ k.mT
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
                if mask is not None:
                    seen = seen & mask[:, None, None, :] & mask[:, None, :, None]
                counted = x.shape[0] * x.shape[1] if mask is None else mask.sum()
                energy = scores.masked_fill(~seen, 0).square().sum()
                terms[f"{path}.self_attn:query"] = 0.5 * noise.mean**2 * energy / counted
    return terms


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_step(model, run, penalties):
    """Gradients of loss + Σ J and the terms, without the library. `penalties(calls)` makes the terms."""
    model.zero_grad()
    with recorded(model) as calls:
        loss = run(model)
    terms = penalties(calls)
    (loss + torch.stack(list(terms.values())).sum()).backward()
    return gradients(model), {name: term.detach() for name, term in terms.items()}


def step(model, reg, run, called=None):
    """Gradients of loss + reg() and the terms."""
    model.zero_grad()
    loss = run(model if called is None else called)
    (loss + reg()).backward()
    return gradients(model), reg.terms()


def assert_same(step_result, plain_result, **tolerance):
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-6}
    assert set(step_result[1]) == set(plain_result[1])
    for name, term in plain_result[1].items():
        assert_close(step_result[1][name], term.float(), **tolerance, msg=lambda m, name=name: f"term {name}: {m}")
    assert set(step_result[0]) == set(plain_result[0])
    for name, gradient in plain_result[0].items():
        assert_close(step_result[0][name], gradient, **tolerance, msg=lambda m, name=name: f"gradient {name}: {m}")
