"""LossLevelDropout: where it must say no, and what it says."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import explicit_dropout as xd
from classifiers import Classifier, Linear, Network, classifier, inputs


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attended_value": 1.0}, "use value"),
        ({"query_key": 1.0}, "use query and key together"),
        ({"valeu": 1.0}, "closest is 'value'"),
        ({}, "at least one of query, key, value, feed_forward"),
        ({"value": 1.0, "loss": "hinge"}, "loss"),
        ({"value": 1.0, "draws": 0}, "draws"),
        ({"value": 1.0, "generator": 3}, "generator"),
        ({"value": 1.0, "require_all": 1}, "require_all"),
        ({"value": 1.0, "disable_dropout": None}, "disable_dropout"),
        ({"value": 1.0, "noise": xd.paper(0.2)}, "without a mean"),
        ({"value": 1.0, "noise": xd.bernoulli(0.2)}, "without a mean"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    model = classifier()
    with pytest.raises(xd.InputError, match=words):
        xd.LossLevelDropout(model, **{"noise": xd.inverted(0.2), **settings})
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda o: o.detach(), "without gradients"),
        (lambda o: o.sum(), "shape ()"),
        (lambda o: o.unflatten(0, (2, 2)), r"draws=1 takes outputs of any shape. Got shape \(2, 2, 3\) for 4 samples"),
        (lambda o: o[:2], r"shape \(2, 3\) for 4 samples"),
        (lambda _: "logits", "str"),
        (lambda o: o.round().long(), "int64"),
    ],
)
def test_bad_outputs_are_refused(given, words):
    model = classifier()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        outputs = model(inputs())
        with pytest.raises(xd.InputError, match=words):
            reg(given(outputs))


def test_a_mask_of_the_wrong_kind_is_refused():
    model = classifier()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        for mask in (torch.ones(4), torch.ones(3, dtype=torch.bool), torch.ones(4, 3, dtype=torch.bool)):
            with pytest.raises(xd.InputError, match="mask"):
                reg(model(inputs()), mask=mask)


def test_outputs_of_another_pass_are_refused():
    model = classifier()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        first = model(inputs())
        reg.discard()
        model(inputs())
        with pytest.raises(xd.CollectionError, match="no site of the last forward pass has led to these outputs"):
            reg(first)
        model(inputs())
        second = model(inputs())
        with pytest.raises(xd.CollectionError, match="2 forward passes"):
            reg(second)
        with pytest.raises(xd.CollectionError, match="forward pass"):
            reg(second)
    with pytest.raises(xd.CollectionError, match="removed"):
        reg(first)


class Normalised(Classifier):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x).mean(1)))


def test_samples_that_mix_are_refused_and_drawn():
    torch.manual_seed(0)
    model = Normalised().train()
    with (
        xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg,
        pytest.raises(xd.InputError, match="batch normalisation"),
    ):
        reg(model(inputs()))
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, draws=1) as reg:
        assert reg(model(inputs())).item() > 0


class InPlace(Linear):
    def forward(self, x):
        out = self.fc2(F.gelu(self.fc1(x)))
        x.mul_(2)
        return out + x


def test_an_input_that_is_changed_in_place_is_refused():
    model = Network()
    model.mlp = InPlace()
    with xd.LossLevelDropout(model.train(), xd.inverted(0.2), feed_forward=1.0) as reg:
        outputs = model(torch.randn(3, 6))
        with pytest.raises(xd.CollectionError, match=r"mlp.fc1:feed_forward.*in place"):
            reg(outputs)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(_, gradient):
        return 2 * gradient


class OnceNetwork(Network):
    def forward(self, x):
        return Once.apply(self.mlp(x))


def test_what_cannot_be_differentiated_twice_is_refused():
    model = OnceNetwork().train()
    with xd.LossLevelDropout(model, xd.inverted(0.2), feed_forward=1.0) as reg:
        outputs = model(torch.randn(3, 6))
        with pytest.raises(xd.CollectionError, match=r"differentiated twice: .*once_differentiable"):
            reg(outputs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("what", ["model", "layer", "step"])
def test_compiled_models_are_refused(what):
    torch._dynamo.reset()
    model = classifier()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0) as reg:

        def step(x):
            return reg(called(x))

        called = torch.compile(model, backend="eager") if what == "model" else model
        if what == "layer":
            model.encoder.layers[1].compile(backend="eager")
        if what == "step":
            step = torch.compile(step, backend="eager")
        for _ in range(2):
            with pytest.raises(xd.CollectionError, match=r"encoder\.layers\.[01].* is compiled"):
                step(inputs())


def test_reentrant_checkpointing_is_refused():
    model = classifier()
    layer = model.encoder.layers[0]
    forward = layer.forward
    layer.forward = lambda x, **_: checkpoint(forward, x, use_reentrant=True)
    with (
        xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg,
        pytest.raises(xd.CollectionError, match="use_reentrant=False"),
    ):
        model(inputs().requires_grad_())
    assert reg.calls == 0


def test_a_second_regulariser_is_refused():
    model = classifier()
    with xd.ExplicitDropout(model, xd.inverted(0.2), value=1.0), pytest.raises(xd.ExplicitDropoutError):
        xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0)


def test_sites_that_do_not_fire_are_named():
    model = classifier()
    skipping = nn.Identity()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        layer, model.encoder.layers[1].forward = model.encoder.layers[1], lambda x, **_: skipping(x)
        with pytest.raises(xd.CollectionError, match=r"encoder\.layers\.1\.self_attn:value"):
            reg(model(inputs()))
        del layer.forward


def test_trainers_that_call_it_without_outputs_refuse_it():
    from explicit_dropout.integrations.huggingface import ExplicitDropoutTrainer
    from explicit_dropout.integrations.lightning import ExplicitDropoutCallback

    model = classifier()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        for refused in (
            lambda: ExplicitDropoutTrainer(model, regulariser=reg),
            lambda: ExplicitDropoutCallback(reg),
        ):
            with pytest.raises(xd.InputError, match="ExplicitDropout, or what convert_dropout returned"):
                refused()


class Attends(nn.Module):
    """Attention that no rule can see, of the kernel that torch prefers."""

    def forward(self, x):
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def test_checkpointed_attention_that_no_rule_finds_is_refused():
    model = classifier()
    model.encoder.layers[1] = nn.Module()
    model.encoder.layers[1].forward = lambda x, *_: x + Attends()(x)
    model.checkpointed = True
    with (
        xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg,
        pytest.raises(xd.CollectionError, match="checkpoint"),
    ):
        reg(model(inputs()))
