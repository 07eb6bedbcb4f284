"""What a regulariser notices by itself: penalties that reach no loss, frozen layers, masks that say the opposite."""

import gc
import io
import pickle
import threading
import warnings
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.optim import optimizer

import explicit_dropout as xd
from explicit_dropout.hooks import steps

X = torch.randn(3, 5, 8)
PADDING = torch.zeros(3, 5, dtype=torch.bool)
PADDING[0, 3:] = PADDING[1, 4:] = True


def encoder(dropout=0.0):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def attached(model):
    return xd.ExplicitDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0)


ATTACHED = {
    "ExplicitDropout": attached,
    "twins": lambda model: xd.convert_dropout(model, 1.0),
    "LossLevelDropout": lambda model: xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, draws=1),
}


WAYS = {
    "ExplicitDropout": lambda model: xd.ExplicitDropout(model, xd.inverted(0.2), value=1.0),
    "twins": ATTACHED["twins"],
}


def step(model, optimiser, penalty=None):
    loss = model(X).square().mean()
    loss = loss if penalty is None else loss + penalty()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


# ---------------------------------------------------------------------------------------------- steps without a penalty


@pytest.mark.parametrize("attach", ATTACHED.values(), ids=ATTACHED)
@pytest.mark.parametrize("fused", [False, True])
def test_a_second_step_without_the_penalty_is_warned_of(attach, fused):
    model = encoder(0.1)
    attach(model)
    optimiser = torch.optim.AdamW(model.parameters(), fused=fused)
    step(model, optimiser)
    with pytest.warns(RuntimeWarning, match="AdamW has made 2 steps without a call of the regulariser"):
        step(model, optimiser)
    step(model, optimiser)  # once is enough


@pytest.mark.parametrize("fused", [False, True])
def test_a_pass_that_an_optimiser_has_overtaken_is_an_error_fused_or_not(fused):
    model = encoder()
    reg = attached(model)
    optimiser = torch.optim.AdamW(model.parameters(), fused=fused)
    step(model, optimiser)
    with pytest.raises(xd.CollectionError, match="has made a step since a forward pass"):
        reg()
    step(model, optimiser, reg)


def test_a_batch_that_is_discarded_is_no_batch_without_a_penalty():
    model = encoder()
    reg = attached(model)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(X)
        reg.discard()
        optimiser.step()
        step(model, optimiser, reg)


@pytest.mark.parametrize("attach", WAYS.values(), ids=WAYS)
def test_a_pass_that_was_differentiated_before_its_penalty_is_an_error_that_says_so(attach):
    model = encoder(0.1)
    reg = attach(model)
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)  # in search of an adversarial example
    model(x)
    with pytest.raises(xd.CollectionError, match="has gone through a forward pass of TransformerEncoder that waits"):
        reg()
    torch.autograd.grad(model(x).sum(), x)
    reg.discard()
    loss = model(x).mean() + reg()
    loss.backward()
    model(x).mean().backward()
    with pytest.raises(xd.CollectionError, match="differentiate loss \\+ reg\\(\\) at once"):
        reg()


class Probed(nn.Module):
    """With a first output that is trained by itself."""

    def __init__(self):
        super().__init__()
        self.encoder, self.probe = encoder(0.1), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.encoder(x)
        return {"probe": self.probe(hidden.detach()), "hidden": hidden}


@pytest.mark.parametrize("attach", WAYS.values(), ids=WAYS)
def test_an_output_that_does_not_share_the_graph_may_be_differentiated_first(attach):
    model = Probed()
    reg = attach(model)
    found = model(X)
    found["probe"].square().mean().backward()
    (found["hidden"].mean() + reg()).backward()


def test_passes_of_other_threads_are_not_taken_for_ones_own():
    model = encoder()
    reg = attached(model)
    ready, done, errors = threading.Event(), threading.Event(), []

    def careless():
        model(X).sum().backward()
        ready.set()
        done.wait()
        try:
            reg()
        except xd.CollectionError as error:
            errors.append(str(error))

    other = threading.Thread(target=careless)
    other.start()
    ready.wait()
    (model(X).sum() + reg()).backward()
    done.set()
    other.join()
    assert len(errors) == 1
    assert "has freed its graph" in errors[0]


def test_after_too_many_passes_the_next_step_is_as_any_other():
    model = encoder()
    reg = attached(model)
    for _ in range(64):
        model(X).sum().backward()
    with pytest.raises(xd.CollectionError, match="wait for a call of the regulariser"):
        model(X)
    (model(X).sum() + reg()).backward()


@pytest.mark.parametrize("attach", WAYS.values(), ids=WAYS)
def test_a_pass_whose_graph_was_kept_has_its_penalty(attach):
    model = encoder(0.1)
    reg = attach(model)
    x = X.clone().requires_grad_()
    loss = model(x).square().mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    (loss + reg()).backward()
    first = model(x).mean()
    penalty = reg()
    model(x)
    (first + penalty).backward()  # of the pass before, while another waits
    reg().backward()


def test_steps_of_another_model_do_not_count():
    model, other = encoder(), nn.Linear(8, 8)
    reg = attached(model)
    optimiser = torch.optim.SGD(other.parameters(), 0.1)
    hidden = model(X)
    for _ in range(3):
        step(other, optimiser)
    assert (reg() + hidden.mean()).isfinite()


def test_after_remove_steps_are_nobodys_business():
    model = encoder()
    reg = attached(model)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    reg.remove()
    for _ in range(4):
        step(model, optimiser)


def test_a_model_and_its_regulariser_can_be_forgotten():
    gc.collect()
    before = len(steps._watched)
    model = encoder()
    gone = weakref.ref(model)
    attached(model)
    assert len(steps._watched) == before + 1
    del model
    gc.collect()
    assert gone() is None
    assert len(steps._watched) == before


def test_models_may_be_forgotten_while_an_optimiser_steps():
    handle = optimizer.register_optimizer_step_post_hook(lambda *_: gc.collect())
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    gc.disable()
    try:
        for _ in range(3):
            model = encoder()
            model.reg = attached(model)  # a cycle, which only a collection ends
            del model
        torch.optim.SGD([weight], 0.1).step()
    finally:
        gc.enable()
        handle.remove()


@pytest.mark.parametrize("attach", ATTACHED.values(), ids=ATTACHED)
def test_a_module_that_holds_a_regulariser_can_be_saved(attach):
    system = nn.Module()
    system.model = encoder(0.1)
    system.reg = attach(system.model)
    torch.save(system, io.BytesIO())
    pickle.dumps(system.reg)


@pytest.mark.parametrize("attach", WAYS.values(), ids=WAYS)
def test_a_step_without_gradients_changes_nothing(attach):
    model = encoder(0.1)
    reg = attach(model)
    optimiser = torch.optim.AdamW(model.parameters())
    for number in range(4):
        optimiser.zero_grad()
        loss = model(X).square().mean()
        if number % 2:
            (loss + reg()).backward()
        optimiser.step()


def test_a_step_of_parts_that_the_penalty_is_not_made_of_overtakes_nothing():
    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = encoder(), nn.Linear(8, 1)

        def forward(self, x):
            hidden = self.actor(x)
            return hidden, self.critic(hidden.detach())

    model = ActorCritic()
    reg = attached(model)
    of_actor, of_critic = (torch.optim.AdamW(part.parameters(), fused=True) for part in (model.actor, model.critic))
    for _ in range(3):
        hidden, value = model(X)
        of_critic.zero_grad()
        value.square().mean().backward()
        of_critic.step()
        of_actor.zero_grad()
        (hidden.square().mean() + reg()).backward()
        of_actor.step()


# ---------------------------------------------------------------------------------------------- frozen layers


def test_a_penalty_that_no_parameter_moves_is_warned_of_once():
    model = nn.Sequential(encoder(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    reg = attached(model)
    model(X)
    with pytest.warns(RuntimeWarning, match="no parameter of Sequential that learns moves this penalty"):
        assert reg() > 0
    model(X)
    reg()


def test_layers_that_are_frozen_in_part_are_no_reason_to_warn():
    model = encoder()
    model.layers[0].requires_grad_(False)
    reg = attached(model)
    model(X)
    assert reg().requires_grad


def test_schedules_that_begin_at_0_are_no_reason_to_warn():
    model = encoder().requires_grad_(False)
    reg = xd.ExplicitDropout(model, xd.inverted(0.2), value=xd.strengths.warm_up(1.0, 10))
    model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reg() == 0


# ---------------------------------------------------------------------------------------------- masks


class Own(nn.Module):
    """A model whose attention_mask means what a test says."""

    def __init__(self, true_is_padding):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.num_heads, self.dropout, self.true_is_padding = 1, nn.Dropout(0.2), true_is_padding

    def forward(self, x, attention_mask=None):
        padding = attention_mask if self.true_is_padding else ~attention_mask
        scores = self.query(x) @ self.key(x).mT / 8**0.5
        weights = scores.masked_fill(padding[:, None], -torch.inf).softmax(-1)
        return self.out(self.dropout(weights @ self.value(x)).relu())


@pytest.mark.parametrize("attach", WAYS.values(), ids=WAYS)
def test_a_boolean_mask_that_means_padding_is_an_error_where_it_shows(attach):
    model = Own(true_is_padding=True)
    attach(model)
    with pytest.raises(xd.CollectionError, match="marks no token at all of some samples"):
        model(X, attention_mask=PADDING)


@pytest.mark.parametrize("padding", [None, lambda _path, _x: ~PADDING])
def test_a_mask_that_nobody_reads_may_mean_what_it_likes(padding):
    for attach in (
        lambda model: xd.ExplicitDropout(model, xd.inverted(0.2), value=1.0, padding=padding),
        lambda model: xd.convert_dropout(model, 1.0, padding=padding),
    ):
        model = Own(true_is_padding=True)
        reg = attach(model)
        model(X, attention_mask=PADDING)
        assert reg() > 0


def test_a_sample_that_fills_up_the_batch_is_no_reason_to_doubt_a_mask():
    model = Own(true_is_padding=False)
    reg = WAYS["twins"](model)
    real = ~PADDING
    real[2] = False
    model(X, attention_mask=real)
    reg.discard()


@pytest.mark.parametrize("attach", WAYS.values(), ids=WAYS)
def test_a_boolean_mask_of_real_tokens_is_taken(attach):
    model = Own(true_is_padding=False)
    reg = attach(model)
    model(X, attention_mask=~PADDING)
    found = reg()
    with torch.no_grad():
        X[0, 3:] += 5.0
    model(X, attention_mask=~PADDING)
    torch.testing.assert_close(reg(), found)


# ---------------------------------------------------------------------------------------------- what is still random


def test_a_summary_names_the_dropout_that_stays():
    model = nn.Sequential(nn.Dropout(0.3), encoder(0.1))
    reg = xd.ExplicitDropout(model, xd.inverted(0.2), feed_forward=1.0)
    last = reg.summary().splitlines()[-1]
    assert last.startswith("Still random: 0 (0.3), 1.layers.0.self_attn (0.1), 1.layers.0.dropout1 (0.1)")
    assert "1.layers.0.dropout (" not in last  # between the layers, where a penalty is
    assert "7 places" in last
    reg.remove()
    assert "Still random" not in reg.summary()


def test_a_summary_names_the_rates_of_functions():
    config = transformers.BartConfig(
        vocab_size=50, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.1, max_position_embeddings=20,
    )  # fmt: skip
    reg = attached(transformers.BartModel(config))
    assert "encoder.dropout (0.1)" in reg.summary().splitlines()[-1]


def test_a_summary_says_nothing_of_dice_where_there_are_none():
    assert "random" not in attached(encoder()).summary()
