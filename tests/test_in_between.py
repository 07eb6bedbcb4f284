"""What happens to a model between its forward pass and the call of the regulariser, and what others hook into it.

Every number is compared with one that is made without such an incident, or by hand.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout import kernels
from explicit_dropout.errors import CollectionError, UnsupportedSiteError
from plain import llama, tokens

INVERTED = xd.inverted(0.3)
LAWS = [xd.paper(0.3), xd.bernoulli(0.3), INVERTED]


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train()


def batch(seed=0):
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------- weights that change


def adapted():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["v_proj", "up_proj"], init_lora_weights=False))
    return model.train()


@pytest.mark.filterwarnings("ignore:no parameter of PeftModel that learns")  # where adapters are switched off
def test_a_pass_has_the_adapters_that_it_ran_with():
    model = adapted()
    reg = xd.ExplicitDropout(model, INVERTED, value=1.0, feed_forward=1.0)
    with model.disable_adapter():
        model(input_ids=tokens())
        without = reg()
    model(input_ids=tokens())
    adapters = reg()
    assert not torch.isclose(without, adapters)
    with model.disable_adapter():
        model(input_ids=tokens())
    assert_close(reg(), without)
    with model.disable_adapter():
        model(input_ids=tokens())
    model(input_ids=tokens())
    both = reg()
    assert_close(both, (without + adapters) / 2)
    both.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name and "v_proj" in name)


@pytest.mark.parametrize("noise", LAWS, ids=str)
def test_a_weight_that_changed_after_the_pass_is_an_error_and_the_next_pass_is_not(noise):
    model = layer()
    reg = xd.ExplicitDropout(model, noise, value=1.0, feed_forward=1.0)
    model(batch())
    with torch.no_grad():
        model.linear1.weight *= 3
    with pytest.raises(CollectionError, match=r"linear1:feed_forward: its weight was changed after a forward pass"):
        reg()
    model(batch())
    assert reg().isfinite()


@pytest.mark.parametrize("noise", LAWS, ids=str)
def test_a_step_without_its_penalty_is_named_where_it_is_missed(noise):
    model = layer()
    reg = xd.ExplicitDropout(model, noise, query_key=1.0, feed_forward=1.0)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    model(batch()).square().mean().backward()
    optimiser.step()
    loss = model(batch()).square().mean()
    with pytest.raises(CollectionError, match=r"discard\(\) passes that are not to be regularised"):
        loss + reg()


def test_passes_can_be_discarded():
    model = layer()
    reg = xd.ExplicitDropout(model, INVERTED, value=1.0, feed_forward=xd.strengths.warm_up(1.0, 4))
    model(batch())
    expected = reg()
    again = xd.ExplicitDropout(layer(), INVERTED, value=1.0, feed_forward=xd.strengths.warm_up(1.0, 4))
    again.model(batch() * torch.nan)
    again.discard()
    assert again.calls == 0
    again.model(batch())
    assert_close(again(), expected)
    again.discard()  # nothing to discard is no error
    with pytest.raises(CollectionError, match="no training forward pass"):
        again()


# ---------------------------------------------------------------------------------------------- others' hooks


def double(module, args):
    del module
    return (2 * args[0],)


@pytest.mark.parametrize(
    ("component", "noise"),
    [
        ("attended_value", LAWS[0]),  # others need the weights of attention, which this model does not show
        *((component, law) for component in ("query", "query_key", "value", "feed_forward") for law in LAWS),
    ],
    ids=str,
)
def test_hooks_that_come_later_change_the_penalty_as_those_that_were_there(component, noise):
    found = []
    for early in (True, False):
        torch.manual_seed(0)
        model = Attends().train()
        watched = {"feed_forward": model.fc1, "attended_value": model.out_proj, "value": model.v_proj}
        module = watched.get(component, model.q_proj)
        if early:
            module.register_forward_pre_hook(double)
        reg = xd.ExplicitDropout(model, noise, **{component: 1.0})
        if not early:
            module.register_forward_pre_hook(double)
        model(batch())
        penalty = reg()
        found.append((penalty, *torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


@pytest.mark.parametrize("noise", LAWS, ids=str)
def test_a_layer_may_be_pruned_after_attaching(noise):
    found = []
    for early in (True, False):
        model = layer()
        if early:
            prune.l1_unstructured(model.linear1, "weight", 0.5)
        reg = xd.ExplicitDropout(model, noise, feed_forward=1.0)
        if not early:
            prune.l1_unstructured(model.linear1, "weight", 0.5)
        for _ in range(2):  # the second step has a weight of its own
            model.zero_grad()
            (model(batch()).square().mean() + reg()).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_close(*found)


# ---------------------------------------------------------------------------------------------- unusual models


class Attends(nn.Module):
    """Attention and feed-forward layers by their usual names; with a memory, keys are made in two calls."""

    def __init__(self, memory=False):
        super().__init__()
        self.num_heads, self.memory = 2, memory
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.memory:
            past = x.flip(1)
            k, v = torch.cat([self.k_proj(past), k], 1), torch.cat([self.v_proj(past), v], 1)
        heads = [torch.unflatten(part, -1, (2, -1)).transpose(1, 2) for part in (q, k, v)]
        attended = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out_proj(attended)
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


@pytest.mark.parametrize("component", ["query", "key", "query_key"])
@pytest.mark.parametrize("noise", LAWS, ids=str)
def test_scores_of_a_projection_that_is_called_twice_are_refused(component, noise):
    model = Attends(memory=True).train()
    xd.ExplicitDropout(model, noise, **{component: 1.0})
    with pytest.raises(UnsupportedSiteError, match=rf":{component}: the model calls its key projection more than once"):
        model(batch())


def test_values_of_a_projection_that_is_called_twice_add_up_and_attended_ones_are_what_they_are():
    model, x = Attends(memory=True).train(), batch()
    reg = xd.ExplicitDropout(model, INVERTED, value=1.0, reduction="sample")
    model(x)
    columns = x.square().sum((0, 1)) * 2 / len(x)
    expected = 0.5 * INVERTED.variance * (columns * model.v_proj.weight.square().sum(0)).sum()
    assert_close(reg(), expected)
    reg.remove()
    reg = xd.ExplicitDropout(model, xd.paper(0.3), attended_value=1.0, reduction="sample")
    seen = Seen(model.out_proj)
    model(x)
    attended = seen.x - model.v_proj.bias
    assert_close(reg(), 0.5 * 0.3**2 * attended.square().sum() / len(x))


class Writes(nn.Module):
    """A model that leaves its output in its input."""

    def __init__(self):
        super().__init__()
        self.layer = layer()

    def forward(self, given):
        given["out"] = self.layer(given["x"])


def test_a_model_that_returns_nothing_has_not_failed():
    torch.manual_seed(0)
    model, given = Writes().train(), {"x": batch()}
    reg = xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
    model(given)
    penalty = reg()
    alone = xd.ExplicitDropout(layer(), INVERTED, feed_forward=1.0)
    alone.model(batch())
    assert_close(penalty, alone())
    with pytest.raises(AttributeError):
        model({"x": None})
    with pytest.raises(CollectionError, match="no training forward pass"):
        reg()


# ---------------------------------------------------------------------------------------------- masks of other lengths


class Seen:
    """The input of a layer at its last call."""

    def __init__(self, module):
        self.weight = module.weight
        module.register_forward_hook(self)

    def __call__(self, module, args, output):
        del module, output
        self.x = args[0].detach()

    def penalty(self, real):
        """½ v Σ_j mean of x_j² over real tokens · ‖W_:j‖²."""
        columns = self.x[real].square().mean(0)
        return 0.5 * INVERTED.variance * (columns * self.weight.detach().square().sum(0)).sum()


def until(lengths, tokens):
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


def test_a_mask_of_sound_counts_the_tokens_that_its_model_makes_of_it():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_kernel=(4, 3), conv_stride=(2, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer", apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    model = Wav2Vec2Model(config).train()
    reg = xd.ExplicitDropout(model, INVERTED, value=1.0, feed_forward=1.0)
    seen = Seen(model.encoder.layers[0].attention.v_proj)
    model(torch.randn(2, 64), attention_mask=until([64, 40], 64).long())
    reg()
    # (64 − 4) // 2 + 1 = 31, (31 − 3) // 2 + 1 = 15; (40 − 4) // 2 + 1 = 19, (19 − 3) // 2 + 1 = 9
    assert_close(reg.terms()["encoder.layers.0.attention:value"], seen.penalty(until([15, 9], 15)))


def test_a_mask_of_frames_counts_the_tokens_of_whisper_and_what_its_decoder_looks_at():
    from transformers import WhisperConfig, WhisperModel

    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=8, max_target_positions=16,
        vocab_size=50, pad_token_id=1, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
        apply_spec_augment=False,
    )  # fmt: skip
    model = WhisperModel(config).train()
    reg = xd.ExplicitDropout(model, INVERTED, value=1.0)
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    sound, context = Seen(encoder.self_attn.v_proj), Seen(decoder.encoder_attn.v_proj)
    ids = torch.randint(5, 50, (2, 5))
    model(input_features=torch.randn(2, 8, 16), attention_mask=until([16, 9], 16).long(), decoder_input_ids=ids)
    reg()
    real = until([8, 5], 8)
    assert_close(reg.terms()["encoder.layers.0.self_attn:value"], sound.penalty(real))
    assert_close(reg.terms()["decoder.layers.0.encoder_attn:value"], context.penalty(real))


def test_a_mask_that_counts_virtual_tokens_as_well_says_which_of_the_others_are_real():
    from peft import PrefixTuningConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).train()
    reg = xd.ExplicitDropout(model, INVERTED, value=1.0)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    path = "base_model.model.layers.0.self_attn"
    seen = Seen(model.get_submodule(f"{path}.v_proj"))
    model(input_ids=ids, attention_mask=mask)
    reg()
    assert_close(reg.terms()[f"{path}:value"], seen.penalty(mask.bool()))


def replaced_by_one_that_was_changed_as_often(model):
    """So that only its being another one tells."""
    weight = model.linear1.weight
    other = nn.Parameter(2 * weight.detach())
    with torch.no_grad():
        while other._version < weight._version:
            other.add_(0)
    assert other._version == weight._version
    model.linear1.weight = other


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_weight_that_is_another_one_when_the_penalty_is_read_is_an_error(law):
    for change in (
        lambda model: prune.l1_unstructured(model.linear1, "weight", amount=0.5),
        lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True),
        replaced_by_one_that_was_changed_as_often,
    ):
        model = layer()
        reg = xd.ExplicitDropout(model, law, feed_forward=1.0)
        model(batch())
        change(model)
        with pytest.raises(CollectionError, match="weight was changed after a forward pass"):
            reg()
        model(batch())
        assert reg() > 0


# ---------------------------------------------------------------------------------------------- layers that are others


class Adapted(nn.Linear):
    """LoRA as a kind of nn.Linear, as some libraries have it."""

    def __init__(self, width, out):
        super().__init__(width, out)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


def test_a_linear_layer_with_a_forward_of_its_own_is_refused_where_its_weight_enters():
    model = layer()
    model.linear1 = Adapted(16, 32)
    for law in LAWS[1:]:
        with pytest.raises(UnsupportedSiteError, match=r"linear1:feed_forward: Adapted .* forward of its own"):
            xd.ExplicitDropout(model, law, feed_forward=1.0)
        assert not model.linear2._forward_hooks
    reg = xd.ExplicitDropout(model, LAWS[0], feed_forward=1.0)
    seen = {}
    model.linear1.register_forward_hook(lambda m, _, out: seen.update(energy=(out - m.bias).square().sum(-1).mean()))
    model(batch())
    reg()
    assert_close(reg.terms()["linear1:feed_forward"], 0.5 * 0.3**2 * seen["energy"].detach())


def test_a_forward_that_a_function_has_replaced_is_refused_where_its_weight_enters():
    model = layer()
    model.linear1.forward = lambda x: nn.functional.linear(x, 2 * model.linear1.weight)
    for law in LAWS[1:]:
        with pytest.raises(UnsupportedSiteError, match="linear1:feed_forward: the forward of this Linear was"):
            xd.ExplicitDropout(model, law, feed_forward=1.0)
    xd.ExplicitDropout(model, LAWS[0], feed_forward=1.0).remove()


def test_a_forward_that_accelerate_has_replaced_moves_weights_and_is_taken():
    hooks, model, x = pytest.importorskip("accelerate.hooks"), layer(), batch()
    reg = xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
    model(x)
    wanted = reg()
    reg.remove()
    for part in (model.linear1, model.linear2):
        hooks.add_hook_to_module(part, hooks.AlignDevicesHook("cpu"))
    assert "forward" in vars(model.linear1)
    reg = xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
    model(x)
    assert_close(reg(), wanted)


def test_a_linear_layer_that_only_has_another_name_is_taken():
    class Named(nn.Linear):
        pass

    model = layer()
    model.linear1 = Named(16, 32)
    reg = xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
    model(batch())
    assert reg() > 0


# ---------------------------------------------------------------------------------------------- calls inside calls


class TwoViews(nn.Module):
    """Looks at what it is given by a second call of itself."""

    def __init__(self, gradients):
        super().__init__()
        self.inner, self.gradients = layer(), gradients

    def forward(self, x, twin=None):
        if twin is not None:
            with torch.set_grad_enabled(self.gradients):
                x = x + self(twin)
        return self.inner(x)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_model_that_calls_itself_is_refused_and_works_from_outside(gradients):
    model = TwoViews(gradients)
    reg = xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
    with pytest.raises(CollectionError, match="TwoViews calls itself inside its own forward pass"):
        model(batch(), batch(1))
    model(batch())
    alone = reg()
    model(batch())
    assert_close(reg(), alone)
    reg.remove()
    around = nn.Sequential(model)
    reg = xd.ExplicitDropout(around, INVERTED, feed_forward=1.0)
    around(batch())
    assert_close(reg(), alone)


def test_a_pass_that_was_interrupted_is_no_call_under_way():
    model = layer()
    reg = xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
    model(batch())
    right = reg()

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.linear2.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    handle.remove()
    model(batch())
    assert_close(reg(), right)


# ---------------------------------------------------------------------------------------------- hooks of others


@pytest.mark.parametrize("component", ["query", "value", "attended_value"])
def test_what_a_later_hook_makes_of_the_input_of_attention_is_what_counts(component):
    values = []
    for first in (True, False):
        model = layer()
        attached = None if first else xd.ExplicitDropout(model, INVERTED, **{component: 1.0})
        model.self_attn.register_forward_pre_hook(lambda _, args: tuple(3 * x for x in args[:3]))
        attached = attached or xd.ExplicitDropout(model, INVERTED, **{component: 1.0})
        model(batch())
        values.append(attached())
    assert_close(*values)


def test_padding_that_a_later_hook_gives_a_layer_is_left_out():
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[:, 3:] = True
    values = []
    for first in (True, False):
        model = nn.TransformerEncoder(layer(), 1, enable_nested_tensor=False)
        attached = None if first else xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
        model.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "src_key_padding_mask": mask}), with_kwargs=True
        )
        attached = attached or xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
        model(batch())
        values.append(attached())
    assert_close(*values)


class InPlaceLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.in_place = layer(), False
        self.inner.linear2.register_forward_hook(lambda *call: call[-1].mul_(2) if self.in_place else None)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("law", LAWS[:2], ids=str)
def test_an_output_that_begins_to_be_changed_in_place_costs_one_step_and_says_so(law):
    model = InPlaceLater()
    reg = xd.ExplicitDropout(model, law, feed_forward=1.0)
    (model(batch()).sum() + reg()).backward()
    model.in_place = True
    with pytest.raises(CollectionError, match=r"linear2:feed_forward: .* changed the output .* in place"):
        model(batch())
    (model(batch()).sum() + reg()).backward()


# ---------------------------------------------------------------------------------------------- torch's defaults


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_penalties_do_not_depend_on_the_default_precision(law, dtype):
    model, x = layer(), torch.randn(40, 50, 16, generator=torch.Generator().manual_seed(0))  # above what is small
    reg = xd.ExplicitDropout(model, law, feed_forward=1.0)
    model(x)
    right = reg()
    kernels.torch_energy.room.kept = torch.empty(0)
    torch.set_default_dtype(dtype)
    try:
        model(x)
        assert_close(reg(), right, rtol=1e-6, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_with_a_padding_function_can_be_saved(tmp_path):
    model = layer()
    xd.ExplicitDropout(model, INVERTED, value=1.0, padding=lambda _, x: torch.ones(x.shape[:-1], dtype=torch.bool))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_close(again.eval()(batch()), model.eval()(batch()))


@pytest.mark.parametrize("component", ["query", "value", "attended_value", "feed_forward"])
def test_a_model_without_storage_has_a_penalty_without_storage(component):
    model = layer().to("meta")
    reg = xd.ExplicitDropout(model, INVERTED, **{component: 1.0})
    model(batch().to("meta"))
    assert reg().device.type == "meta"


def test_nested_tensors_are_refused_by_name():
    model = nn.Sequential(nn.Linear(16, 16), Network())
    reg = xd.ExplicitDropout(model, INVERTED, feed_forward=1.0)
    parts = [torch.randn(length, 16) for length in (2, 3)]
    with pytest.raises(CollectionError, match=r"fc1: .* nested tensor"):
        model(torch.nested.nested_tensor(parts, layout=torch.jagged))
    model(batch())
    assert reg() > 0


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class SharedInPlace(nn.Module):
    """One layer twice, whose output is changed in place after its second call."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = layer(), 0
        self.inner.linear2.register_forward_hook(lambda *call: call[-1].mul_(2) if self.second() else None)

    def second(self):
        self.calls += 1
        return self.calls % 2 == 0

    def forward(self, x):
        return self.inner(self.inner(x))


def test_a_shared_layer_may_have_some_of_its_outputs_changed_in_place():
    model = SharedInPlace()
    reg = xd.ExplicitDropout(model, LAWS[0], feed_forward=1.0)
    for _ in range(2):
        (model(batch()).sum() + reg()).backward()
