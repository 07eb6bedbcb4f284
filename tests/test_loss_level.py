"""LossLevelDropout: against masks that are drawn, against itself by draws, and in use."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import explicit_dropout as xd
from classifiers import CLASSES, Network, classifier, inputs
from explicit_dropout import curvature
from explicit_dropout.strengths import linear
from plain import images, llama, tokens, vit


def step(model, reg, x, **options):
    model.zero_grad()
    outputs = model(x)
    (F.cross_entropy(outputs, torch.arange(len(outputs)) % CLASSES) + reg(outputs, **options)).backward()
    return reg.terms(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(one, other, **tolerance):
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert_close(mine[name], theirs[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


# ---------------------------------------------------------------------------------------------- what it stands for


@pytest.mark.parametrize("component", ["query", "key", "value", "feed_forward"])
def test_it_is_the_mean_divergence_that_small_noise_causes(component):
    """KL(prediction ‖ prediction under masks), over masks that are drawn, at sites that a plain hook masks."""
    model, noise, draws = vit().double(), xd.gaussian(0.02), 4000
    with torch.no_grad():
        model.head.weight.mul_(20)
    x = images(2).double()
    with xd.LossLevelDropout(model, noise, **{component: {1: 1.0}}) as reg:
        penalty = reg(model(x)).item()
    block, generator = model.blocks[1], torch.Generator().manual_seed(3)
    rows = {"query": slice(0, 16), "key": slice(16, 32), "value": slice(32, 48), "feed_forward": slice(None)}[component]

    def masked(layer, args, output):
        output = output.clone()
        mask = noise.draw(args[0].shape, generator=generator, dtype=torch.float64)
        output[..., rows] = layer.forward(args[0] * mask)[..., rows]
        return output

    layers = [block.mlp.fc1, block.mlp.fc2] if component == "feed_forward" else [block.attn.qkv]
    handles = [layer.register_forward_hook(masked) for layer in layers]
    with torch.no_grad():
        moved = model(x.repeat(draws, 1, 1, 1)).log_softmax(-1).unflatten(0, (draws, -1))
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        clean = model(x).log_softmax(-1)
    divergences = (clean.exp() * (clean - moved)).sum(-1).mean(-1)
    mean, error = divergences.mean().item(), (divergences.std() / draws**0.5).item()
    assert 0 < error < 0.1 * mean, "too few draws to tell"
    assert abs(penalty - mean) < 4 * error, f"{penalty:.4g} is not {mean:.4g} ± {error:.2g}"


def test_it_is_the_mean_increase_of_the_loss_under_real_masks_over_many_inputs_of_which_none_moves_much():
    """nn.Dropout itself, and labels that the model's own predictions weigh."""
    torch.manual_seed(0)
    model, masks = Network(hidden=512).double().train(), 20_000
    x = torch.randn(1, 6, dtype=torch.float64)
    with xd.LossLevelDropout(model, xd.inverted(0.1), feed_forward=1.0) as reg:
        clean = model(x)
        reg(clean)
    with torch.no_grad():
        dropped = F.dropout(F.gelu(model.mlp.fc1(x)).expand(masks, -1), 0.1)
        increase = (clean.softmax(-1) * (clean.log_softmax(-1) - model.mlp.fc2(dropped).log_softmax(-1))).sum(-1)
    mean, error = increase.mean().item(), (increase.std() / masks**0.5).item()
    assert error < 0.02 * mean, "too few masks to tell"
    assert abs(reg.terms()["mlp.fc2:feed_forward"].item() - mean) < 4 * error


def test_with_a_linear_way_to_a_squared_error_it_is_all_that_dropout_adds():
    """At any rate, not only a small one: E mse(masked) − mse, by every mask that there is."""
    torch.manual_seed(0)
    model, p = Network().double().train(), 0.4
    x, y = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    law = xd.inverted(p)
    with xd.LossLevelDropout(model, law, feed_forward=1.0, loss="mse") as reg:
        outputs = model(x)
        reg(outputs)
    with torch.no_grad():
        hidden = F.gelu(model.mlp.fc1(x))
        increase = torch.zeros((), dtype=torch.float64)
        for number in range(2**8):
            kept = torch.tensor([number >> place & 1 for place in range(8)], dtype=torch.float64)
            probability = ((1 - p) ** kept * p ** (1 - kept)).prod()
            increase += probability * F.mse_loss(model.mlp.fc2(hidden * kept / (1 - p)), y)
        increase -= F.mse_loss(outputs, y)
    assert_close(reg.terms()["mlp.fc2:feed_forward"], increase.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy", "mse"])
def test_roots_of_the_hessian_are_roots_of_torchs_own(loss):
    z = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    of = {
        "cross_entropy": lambda z: F.cross_entropy(z, y),
        "binary_cross_entropy": lambda z: F.binary_cross_entropy_with_logits(z, y, reduction="sum"),
        "mse": lambda z: F.mse_loss(z, y, reduction="sum"),
    }[loss]
    root = curvature.columns(z[None], loss)[:, 0].T
    assert_close(root @ root.T, torch.autograd.functional.hessian(of, z))


def test_certain_predictions_have_gradients():
    model = classifier()
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([300.0, 0.0, 0.0]))
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        terms, gradients = step(model, reg, inputs())
    assert all(term == 0 for term in terms.values())
    assert all(gradient.isfinite().all() for gradient in gradients.values())


# ---------------------------------------------------------------------------------------------- draws


def test_draws_have_the_exact_term_and_gradient_as_their_mean():
    model, x = classifier(), inputs()
    generator = torch.Generator().manual_seed(0)
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0) as reg:
        terms, gradients = step(model, reg, x)
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0, draws=2, generator=generator) as reg:
        results = [step(model, reg, x) for _ in range(400)]
    for kind, exact in enumerate((terms, gradients)):
        deviations, mistaken = [], []
        for name, known in exact.items():
            drawn = torch.stack([result[kind][name] for result in results]).double()
            error = drawn.std(0) / len(results) ** 0.5
            moved = error > 1e-8
            deviations.append((drawn.mean(0) - known)[moved].abs() / error[moved])
            mistaken.append((0.25 * known)[moved].abs() / error[moved])
        assert torch.cat(deviations).max() < 5
        assert torch.cat(mistaken).max() > 8, "too few draws to tell if a quarter were missing"


def test_draws_follow_every_token_of_a_language_model():
    """(sample, token, word): each position has a loss, and depends on earlier ones. Against position by position."""
    model, x, v = llama(vocab_size=7), tokens(2, 4) % 7, xd.inverted(0.2).variance
    real = torch.tensor([[True, True, True, False], [True, True, True, True]])
    generator = torch.Generator().manual_seed(0)
    with xd.LossLevelDropout(model, xd.inverted(0.2), feed_forward={1: 1.0}, draws=500, generator=generator) as reg:
        found = reg(model(x), mask=real).item()
    layer = model.model.layers[1].mlp.down_proj
    seen = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    expected = 0.0
    logits = model(x).logits
    handle.remove()
    for sample, position in real.nonzero().tolist():
        z = logits[sample, position]
        p = z.softmax(-1)
        rows = torch.stack([torch.autograd.grad(one, seen[0], retain_graph=True)[0] for one in z]) * seen[0]
        hessian = torch.diag(p) - torch.outer(p, p)
        expected += v / 2 * torch.einsum("c...,cd,d...->", rows, hessian, rows).item() / real.sum().item()
    term = reg.terms()["model.layers.1.mlp.down_proj:feed_forward"].item()
    assert 0 < term < found
    assert abs(term / expected - 1) < 0.15


def test_draws_repeat_with_their_generator():
    model, found = classifier(), []
    for seed in (0, 0, 1):
        generator = torch.Generator().manual_seed(seed)
        with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, draws=1, generator=generator) as reg:
            found.append(reg(model(inputs())).item())
    assert found[0] == found[1] != found[2]


# ---------------------------------------------------------------------------------------------- in use


def test_strengths_and_schedules_weigh_the_terms():
    model = classifier()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=[0.5, 0.0], feed_forward=linear(0, 2.0, 2)) as reg:
        assert [site.name for site in reg.sites if site.component == "value"] == ["encoder.layers.0.self_attn:value"]
        for number in range(3):
            weights = reg.strengths()
            penalty = reg(model(inputs()))
            assert_close(penalty, sum(weights[name] * term for name, term in reg.terms().items()))
            assert weights["encoder.layers.1.linear1:feed_forward"] == min(number, 2)
        assert "LossLevelDropout on Classifier: 5 sites, loss='cross_entropy', all outputs" in reg.summary()


def test_masked_rows_do_not_count():
    model, x = classifier(), inputs()
    mask = torch.tensor([True, False, True, True])
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        masked = reg(model(x), mask=mask)
        assert_close(masked, reg(model(x[mask])))
        assert reg(model(x), mask=torch.zeros(4, dtype=torch.bool)).item() == 0


def test_what_stands_in_padding_does_not_count():
    """Attention leaves padded tokens out, and so does the mean over the others: nothing of them leads to the loss."""
    model, padded = classifier(), torch.arange(5) >= torch.tensor([[5], [3], [4], [2]])

    def pooled(x):
        hidden = x
        for layer in model.encoder.layers:
            hidden = layer(hidden, src_key_padding_mask=padded)
        return model.head((hidden * ~padded.unsqueeze(-1)).sum(1) / (~padded).sum(1, keepdim=True))

    model.forward = pooled
    x, terms = inputs(), []
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0) as reg:
        for other in (x, x + 3 * padded.unsqueeze(-1)):
            reg(model(other))
            terms.append(reg.terms())
    assert all(term > 0 for term in terms[0].values())
    assert_close(*terms)


def test_gradients_of_parts_of_a_batch_add_up_to_those_of_the_whole():
    model, x = classifier(), inputs()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0) as reg:
        _, whole = step(model, reg, x)
        model.zero_grad()
        for start in (0, 2):
            outputs = model(x[start : start + 2])
            labels = torch.arange(start, start + 2) % CLASSES
            ((F.cross_entropy(outputs, labels) + reg(outputs)) / 2).backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inside", [False, True])
def test_under_autocast_it_is_the_same_within_the_precision_of_activations(inside):
    model, x = classifier(), inputs()
    with xd.LossLevelDropout(model, xd.inverted(0.2), query=1.0, value=1.0, feed_forward=1.0) as reg:
        terms, gradients = step(model, reg, x)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x)
            if inside:
                penalty = reg(outputs)
        if not inside:
            penalty = reg(outputs)
        assert outputs.dtype == torch.bfloat16
        assert penalty.dtype == torch.float32
        (F.cross_entropy(outputs.float(), torch.arange(4) % CLASSES) + penalty).backward()
        assert_close(reg.terms(), terms, rtol=0.03, atol=1e-6)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = torch.cat([gradients[name].flatten() for name, _ in model.named_parameters()])
    assert F.cosine_similarity(found, expected, dim=0) > 0.999


@pytest.mark.parametrize("given", [True, False], ids=["input with gradients", "input without"])
def test_checkpointed_layers_count_once(given):
    plain, checkpointed = classifier(), classifier(checkpointed=True)
    steps = []
    for model in (plain, checkpointed):
        with xd.LossLevelDropout(model, xd.inverted(0.2), query=1.0, value=1.0, feed_forward=1.0) as reg:
            steps.append(step(model, reg, inputs().requires_grad_(given)))
    assert_same_step(*steps, rtol=1e-5, atol=1e-7)


def test_a_layer_that_is_shared_counts_as_often_as_it_is_used():
    shared = classifier()
    shared.encoder.layers[1] = shared.encoder.layers[0]
    twice = classifier()
    twice.encoder.layers[1].load_state_dict(twice.encoder.layers[0].state_dict())
    with xd.LossLevelDropout(shared, xd.inverted(0.2), feed_forward=1.0) as reg:
        found = reg(shared(inputs()))
    with xd.LossLevelDropout(twice, xd.inverted(0.2), feed_forward=1.0) as reg:
        assert_close(found, reg(twice(inputs())))


def test_frozen_layers_are_followed_to_the_loss():
    model = classifier()
    free = classifier()
    model.encoder.requires_grad_(False)
    for one in (model, free):
        with xd.LossLevelDropout(one, xd.inverted(0.2), value=1.0, feed_forward=1.0) as reg:
            reg(one(inputs())).backward()
            terms = reg.terms()
        if one is model:
            found = terms
    assert_close(found, terms)
    assert_close(model.head.weight.grad, free.head.weight.grad)
    assert model.encoder.layers[0].linear1.weight.grad is None


def test_a_fused_layer_that_is_frozen_with_all_before_it_is_followed_to_the_loss():
    terms, x = [], images(2)
    for frozen in (False, True):
        model = vit().requires_grad_(not frozen)
        model.head.requires_grad_()
        with xd.LossLevelDropout(model, xd.inverted(0.2), query=1.0, value=1.0) as reg:
            reg(model(x)).backward()
            terms.append(reg.terms())
    assert all(term > 0 for term in terms[0].values())
    assert_close(*terms)
    assert model.head.weight.grad.abs().sum() > 0
    assert model.blocks[0].attn.qkv.weight.grad is None


def test_models_are_copied_and_saved_with_their_hooks():
    model = classifier()
    reg = xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0)
    other = copy.deepcopy(model)
    expected = model(inputs())
    reg(expected)
    assert_close(other(inputs()), expected)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_close(torch.load(buffer, weights_only=False)(inputs()), expected)
    assert_close(pickle.loads(pickle.dumps(model))(inputs()), expected)
    with pytest.raises(xd.CollectionError, match="copies are not attached"):
        copy.deepcopy(reg)(expected)
    reg.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_attention_has_its_own_kernel_again_afterwards():
    def chosen():
        backends = torch.backends.cuda
        return backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()

    model, before = classifier(), chosen()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        reg(model(inputs()))
        assert chosen() == before
        with pytest.raises(AssertionError, match="embedding dimension"):
            model(inputs()[..., :3])
        assert chosen() == before
        assert reg(model(inputs())).item() > 0


def test_evaluation_and_passes_without_gradients_leave_nothing():
    model = classifier()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        outputs = model(inputs())
        with torch.no_grad():
            model(inputs(seed=2))
        model.eval()(inputs())
        assert reg(outputs).item() > 0
        model.train()


def test_stochastic_dropout_is_off_until_it_is_removed():
    model = vit(drop_rate=0.0, proj_drop_rate=0.3)
    with xd.LossLevelDropout(model, xd.inverted(0.3), feed_forward=1.0) as reg:
        assert model.blocks[0].mlp.drop1.p == 0
        assert "switched off" in reg.summary()
    assert model.blocks[0].mlp.drop1.p == 0.3


def test_it_goes_on_where_its_state_was_taken():
    model = classifier()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0) as reg:
        reg(model(inputs()))
        state = reg.state_dict()
    with xd.LossLevelDropout(model, xd.inverted(0.2), value=linear(0, 1, 4)) as reg:
        reg.load_state_dict(state)
        assert set(reg.strengths().values()) == {0.25}
