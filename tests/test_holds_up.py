"""An attached regulariser holds up: compiled, in half precision, checkpointed, copied, in threads, interrupted.

Every test compares terms and gradients with a plain computation (tests/plain.py), or with the same without the library.
"""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import explicit_dropout as xd
from explicit_dropout.regulariser import MOST_FORWARDS
from plain import (
    COMPONENTS,
    assert_same,
    encoder,
    encoder_penalties,
    gradients,
    images,
    llama,
    llama_penalties,
    plain_step,
    recorded,
    step,
    tokens,
    vit,
    vit_penalties,
)

NOISE = xd.bernoulli(0.2)
ALL = dict.fromkeys(COMPONENTS, 1.0)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's, of activations
LINEAR = {"value": 1.0, "feed_forward": 1.0}
LLAMA = {"query": 1.0, **LINEAR}
SCORES_AND_LINEAR = {c: 1.0 for c in COMPONENTS if c != "attended_value"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run_images(model):
    return model(images()).square().sum()


def vit_plain(model, components=COMPONENTS, noise=NOISE, run=run_images, **options):
    return plain_step(model, run, lambda calls: vit_penalties(model, calls, noise, components, **options))


def run_tokens(model):
    return model(tokens(), labels=tokens()).loss


def llama_plain(model, noise, components, run=run_tokens, **options):
    return plain_step(model, run, lambda calls: llama_penalties(model, calls, noise, components, **options))


# ---------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("attached", ["before compiling", "after compiling", "to the compiled model"])
def test_a_compiled_vit_is_exact_whenever_it_is_attached(attached):
    model = vit(depth=2 if attached == "before compiling" else 1)
    expected = vit_plain(model)
    if attached == "before compiling":
        reg = xd.ExplicitDropout(model, NOISE, **ALL)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        reg = xd.ExplicitDropout(compiled if "to the" in attached else model, NOISE, **ALL)
    assert_same(step(model, reg, run_images, compiled), expected)


def test_the_default_compiler_is_exact():
    model, few = vit(depth=1), {"query": 1.0, **LINEAR}
    expected = vit_plain(model, few)
    reg = xd.ExplicitDropout(model, NOISE, **few)
    compiled = torch.compile(model, fullgraph=True)
    assert_same(step(model, reg, run_images, compiled), expected, rtol=1e-3, atol=1e-5)


def test_a_model_compiled_block_by_block_is_exact():
    model, few = vit(), {"query": 1.0, **LINEAR}
    expected = vit_plain(model, few)
    reg = xd.ExplicitDropout(model, NOISE, **few)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    assert_same(step(model, reg, run_images), expected)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(step(model, reg, run_images), expected)


def test_a_model_compiled_in_place_is_exact():
    model = vit(depth=1)
    expected = vit_plain(model, LINEAR)
    reg = xd.ExplicitDropout(model, NOISE, **LINEAR)
    model.compile(fullgraph=True, backend="aot_eager")
    assert_same(step(model, reg, run_images), expected)


def test_a_compiled_function_that_calls_the_regulariser_is_exact_and_compiled_once():
    model = vit(depth=1)
    expected = vit_plain(model, LINEAR)
    falling = xd.strengths.linear(1.0, 0.0, 9)
    reg = xd.ExplicitDropout(model, NOISE, value=falling, feed_forward=falling)

    @torch.compile(backend="aot_eager")
    def objective(x):
        return model(x).square().sum() + reg()

    model.zero_grad()
    objective(images()).backward()
    assert_same((gradients(model), reg.terms()), expected)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(10):
            value = objective(images())
    assert reg.calls == 11
    assert_close(value, run_images(model))


class Broken(nn.Module):
    """A ViT whose forward pass the compiler has to break in two."""

    def __init__(self):
        super().__init__()
        self.body = vit(depth=1)

    def forward(self, x):
        x = self.body(x)
        torch._dynamo.graph_break()
        return x


class EagerInside(nn.Module):
    """A ViT whose blocks the compiler must leave alone."""

    def __init__(self):
        super().__init__()
        self.body = vit(depth=1)

    def forward(self, x):
        return torch.compiler.disable(self.body.__call__)(2 * x)


@pytest.mark.parametrize("host", [Broken, EagerInside])
def test_a_model_that_is_compiled_in_parts_is_exact(host):
    model = host()
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    expected = step(model, reg, run_images)
    assert_same(step(model, reg, run_images, torch.compile(model, backend="aot_eager")), expected)


def test_attaching_after_the_first_compiled_call_is_an_error_and_no_silent_zero():
    model = vit(depth=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(images())
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    compiled(images())
    with pytest.raises(xd.CollectionError, match=r"compiled and called before the regulariser was attached"):
        reg()


def test_schedules_and_waiting_forward_passes_never_recompile():
    model = vit(depth=1)
    reg = xd.ExplicitDropout(model, NOISE, value=xd.strengths.linear(1.0, 0.0, 5), query=xd.strengths.warm_up(2.0, 3))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    step(model, reg, run_images, compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(6):
            step(model, reg, run_images, compiled)
        for _ in range(3):
            compiled(images())
        reg()
        step(model, reg, run_images, compiled)
    model.eval()
    compiled(images())
    with pytest.raises(xd.CollectionError, match="no training forward"):
        reg()


def test_several_compiled_forward_passes_are_one_batch():
    model, whole = vit(depth=1), images(6)
    expected = vit_plain(model, LINEAR, run=lambda m: m(whole).square().sum())
    reg = xd.ExplicitDropout(model, NOISE, **LINEAR)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    got = step(model, reg, lambda m: m(whole[:2]).square().sum() + m(whole[2:]).square().sum(), compiled)
    assert_same(got, expected)


def test_a_removed_regulariser_leaves_compiled_code():
    model = vit(depth=1)
    reg = xd.ExplicitDropout(model, NOISE, feed_forward=1.0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    step(model, reg, run_images, compiled)
    reg.remove()
    assert torch.equal(compiled(images()), model(images()))
    again = xd.ExplicitDropout(model, NOISE, **LINEAR)
    compiled(images())
    with pytest.raises(xd.CollectionError, match="compile it again"):
        again()


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_torch_encoder_is_exact(padded):
    model = encoder(layers=1)
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(5) < torch.tensor([[5], [3], [4]])) if padded else None

    def run(model):
        return model(x, src_key_padding_mask=None if mask is None else ~mask).square().sum()

    expected = plain_step(model, run, lambda calls: encoder_penalties(model, calls, NOISE, SCORES_AND_LINEAR, mask))
    reg = xd.ExplicitDropout(model, NOISE, **SCORES_AND_LINEAR)
    assert_same(step(model, reg, run), expected)
    assert_same(step(model, reg, run, torch.compile(model, fullgraph=True, backend="aot_eager")), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_llama_is_exact(padded):
    model, noise = llama(layers=2 if padded else 1), xd.paper(0.2)
    mask = (torch.arange(6) < torch.tensor([[6], [3], [4]])) if padded else None
    labels = tokens() if mask is None else tokens().masked_fill(~mask, -100)

    def run(model):
        given = {} if mask is None else {"attention_mask": mask.long()}
        return model(tokens(), labels=labels, **given).loss

    expected = llama_plain(model, noise, LLAMA, run, mask=mask)
    reg = xd.ExplicitDropout(model, noise, **LLAMA)
    assert_same(step(model, reg, run), expected)
    assert_same(step(model, reg, run, torch.compile(model, fullgraph=True, backend="aot_eager")), expected)


# ---------------------------------------------------------------------------------------------- half precision


@pytest.mark.parametrize(
    ("dtype", "compiled"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
)
def test_autocast_with_a_gradient_scaler_equals_the_plain_computation(dtype, compiled):
    model = vit(depth=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)

    def autocast(model):
        with torch.autocast("cpu", dtype=dtype):
            return model(images()).float().square().sum()

    with recorded(model) as calls:
        loss = autocast(model)
    terms = vit_penalties(model, calls, NOISE, LINEAR)
    model.zero_grad()
    scaler.scale(loss + torch.stack(list(terms.values())).sum()).backward()
    expected = gradients(model), {name: term.detach() for name, term in terms.items()}
    reg = xd.ExplicitDropout(model, NOISE, **LINEAR)
    called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    model.zero_grad()
    loss = autocast(called)
    with torch.autocast("cpu", dtype=dtype):
        penalty = reg()
    assert penalty.dtype == torch.float32
    scaler.scale(loss + penalty).backward()
    assert all(term.dtype == torch.float32 for term in reg.terms().values())
    assert_same((gradients(model), reg.terms()), expected, rtol=0.02, atol=0.02 * (256 if scaler.is_enabled() else 1))


def test_every_component_is_float32_and_finite_in_half_precision():
    model = vit()
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    full = step(model, reg, run_images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images())
        reg()
    for name, term in reg.terms().items():
        assert_close(term, full[1][name], rtol=0.05, atol=1e-3)


def test_gradient_accumulation_adds_up():
    model, whole = vit(), images(4)
    expected = vit_plain(model, run=lambda m: m(whole).square().mean())
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    model.zero_grad()
    for half in whole.chunk(2):
        ((model(half).square().mean() + reg()) / 2).backward()
    for name, gradient in expected[0].items():
        assert_close(gradients(model)[name], gradient, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------- checkpointing


def test_timm_checkpointing_is_exact():
    model = vit()
    expected = vit_plain(model)
    model.set_grad_checkpointing(True)
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    assert_same(step(model, reg, run_images), expected)


def test_transformers_checkpointing_is_exact_also_with_padding():
    model, noise = llama(), xd.paper(0.2)
    mask = torch.arange(6) < torch.tensor([[6], [3], [4]])
    labels = tokens().masked_fill(~mask, -100)

    def run(model):
        return model(tokens(), attention_mask=mask.long(), labels=labels).loss

    expected = llama_plain(model, noise, LLAMA, run, mask=mask)
    model.gradient_checkpointing_enable()
    reg = xd.ExplicitDropout(model, noise, **LLAMA)
    assert_same(step(model, reg, run), expected)
    model.eval()
    loss = run(model.train())
    penalty = reg()
    with torch.no_grad():
        run(model.eval())  # between forward and backward pass, without padding of its own
    model.train().zero_grad()
    (loss + penalty).backward()
    assert_same((gradients(model), reg.terms()), expected)


def test_checkpointing_with_the_padding_of_another_pass_is_refused():
    model = llama()
    model.gradient_checkpointing_enable()
    reg = xd.ExplicitDropout(model, xd.paper(0.2), **LLAMA)
    masks = (torch.arange(6) < torch.tensor([[6], [n], [4]]) for n in (3, 5))
    loss = sum(model(tokens(), attention_mask=mask.long()).logits.sum() for mask in masks)
    with pytest.raises(xd.CollectionError, match="recomputed a layer with the padding of a later forward pass"):
        (loss + reg()).backward()


def test_reentrant_checkpointing_is_refused():
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    reg = xd.ExplicitDropout(model, xd.paper(0.2), **LLAMA)
    with pytest.raises(xd.CollectionError, match="use_reentrant=False"):
        run_tokens(model)
    with pytest.raises(xd.CollectionError, match="no training forward"):
        reg()


class Checkpointed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        x = self.model.patch_embed(x)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpointing_keeps_nothing_of_the_recomputed_layers():
    model = Checkpointed(vit())
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    loss = run_images(model) + reg()
    loss.backward()
    slot = reg._collector.own()
    assert not slot.observed
    assert not slot.pending.items()


def test_compiled_checkpointing_is_exact():
    model, few = vit(), {"query": 1.0, **LINEAR}
    expected = vit_plain(model, few)
    model.set_grad_checkpointing(True)
    reg = xd.ExplicitDropout(model, NOISE, **few)
    assert_same(step(model, reg, run_images, torch.compile(model, backend="aot_eager")), expected)


# ---------------------------------------------------------------------------------------------- copies and files


def test_copies_neither_collect_nor_hold_terms():
    model = vit()
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    loss = run_images(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    twin = copy.deepcopy(model)
    for other in (average.module, twin):
        live = [hook.collector for m in other.modules() for hook in m._forward_pre_hooks.values()]
        assert live
        assert all(collector.inert for collector in live)
        other.train()(images(seed=3)).sum().backward()
        assert all(not collector.own().pending.items() for collector in live)
    model.zero_grad()
    (loss + reg()).backward()
    got = gradients(model), reg.terms()
    reg.remove()
    assert_same(got, vit_plain(model))
    assert_same(step(twin, xd.ExplicitDropout(twin, NOISE, **ALL), run_images), vit_plain(model))
    average.update_parameters(model)


def test_a_copy_of_the_regulariser_says_that_it_is_one():
    model = vit(depth=1)
    reg = xd.ExplicitDropout(model, NOISE, **LINEAR)
    twin = copy.deepcopy(reg)
    twin.model(images())
    with pytest.raises(xd.CollectionError, match="copy"):
        twin()
    twin.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.model.modules())
    assert any(m._forward_hooks for m in model.modules())


def test_a_model_is_saved_and_loaded_with_its_hooks():
    model = encoder()
    x = torch.randn(2, 5, 16)
    reg = xd.ExplicitDropout(model, NOISE, **SCORES_AND_LINEAR)
    output = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_close(loaded(x), output, rtol=0, atol=0)
    (output.sum() + reg()).backward()
    again = xd.ExplicitDropout(loaded, NOISE, **SCORES_AND_LINEAR)
    loaded(x)
    assert_close(again().detach(), sum(reg.terms().values()))


# ---------------------------------------------------------------------------------------------- calls


class Twice(nn.Module):
    """One block used for two layers, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.body = vit(depth=1)

    def forward(self, x):
        x = self.body.patch_embed(x)
        return self.body.blocks(self.body.blocks(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_shared_layer_adds_up(compiled):
    model, few = Twice(), LINEAR if compiled else ALL

    def penalties(calls):
        calls = {path.removeprefix("body."): values for path, values in calls.items()}
        firings = [vit_penalties(model.body, calls, NOISE, few, firing=firing) for firing in (0, 1)]
        return {f"body.{name}": firings[0][name] + firings[1][name] for name in firings[0]}

    expected = plain_step(model, run_images, penalties)
    reg = xd.ExplicitDropout(model, NOISE, **few)
    called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    assert_same(step(model, reg, run_images, called), expected)


def test_several_forward_passes_are_one_batch():
    model, whole = vit(), images(6)
    expected = vit_plain(model, run=lambda m: m(whole).square().sum())
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    assert_same(step(model, reg, lambda m: sum(m(part).square().sum() for part in whole.split([1, 2, 3]))), expected)


def test_a_loop_that_never_calls_the_regulariser_is_stopped():
    model, x = encoder(layers=1), torch.zeros(1, 2, 16)
    reg = xd.ExplicitDropout(model, NOISE, feed_forward=1.0)
    for _ in range(MOST_FORWARDS):
        model(x)
    with pytest.raises(xd.CollectionError, match=r"64 forward passes .* torch.no_grad\(\)"):
        model(x)
    assert not reg._collector.own().complete.items()
    model(x)
    reg()
    for _ in range(MOST_FORWARDS + 2):
        with torch.no_grad():
            model(x)
    for _ in range(MOST_FORWARDS + 2):
        model.eval()(x)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fails = vit(), False

    def forward(self, x):
        x = self.body(x)
        if self.fails:
            raise RuntimeError("out of memory")
        return x


def test_a_failed_forward_pass_leaves_no_trace():
    model = Failing()
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    expected = step(model, reg, run_images)
    model.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        model(images(2, seed=5))
    slot = reg._collector.own()
    assert not slot.open
    assert not slot.pending.items()
    with pytest.raises(xd.CollectionError, match="no training forward"):
        reg()
    with torch.no_grad():
        model.body(images())  # parts of the model may run by themselves
    model.fails = False
    assert_same(step(model, reg, run_images), expected)


def test_a_failure_inside_attention_leaves_no_trace():
    model = vit()
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    expected = step(model, reg, run_images)
    handle = model.blocks[1].attn.proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(images(2, seed=5))
    handle.remove()
    assert not reg._collector.own().observed
    assert_same(step(model, reg, run_images), expected)


@pytest.mark.parametrize("way", ["eval", "no_grad", "inference_mode"])
def test_evaluation_collects_nothing_and_keeps_no_graph(way):
    model = vit()
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    if way == "eval":
        output = model.eval()(images())
    else:
        with torch.no_grad() if way == "no_grad" else torch.inference_mode():
            output = model(images())
    slot = reg._collector.own()
    assert not slot.complete.items()
    assert not slot.pending.items()
    assert not slot.observed
    with pytest.raises(xd.CollectionError, match="train mode and with gradients"):
        reg()
    reg.remove()
    model.train(way != "eval")
    with torch.set_grad_enabled(way == "eval"):
        assert torch.equal(output, model(images()))


def test_a_call_in_inference_mode_leaves_nothing_behind_that_training_trips_over():
    model = encoder(dim_feedforward=1024)
    reg = xd.ExplicitDropout(model, xd.inverted(0.2), **LINEAR)
    x = torch.randn(2, 5, 16)
    model(x)
    with torch.inference_mode():
        told = reg()
    other = encoder(dim_feedforward=1024)
    for trained, own in ((model, reg), (other, xd.ExplicitDropout(other, xd.inverted(0.2), **LINEAR))):
        loss = trained(x).square().mean()
        penalty = own()
        (loss + penalty).backward()
        assert_close(penalty.detach(), told.clone())


def test_evaluation_between_forward_pass_and_call_changes_nothing():
    model = vit()
    expected = vit_plain(model)
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    model.zero_grad()
    loss = run_images(model)
    model.eval()(images(seed=9))
    model.train()
    (loss + reg()).backward()
    assert_same((gradients(model), reg.terms()), expected)


# ---------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_adapter_with_a_bias_is_refused_when_it_is_switched_on(dtype):
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)).to(dtype)
    config = {"r": 2, "target_modules": ["linear1"], "init_lora_weights": False}
    model = peft.get_peft_model(base, peft.LoraConfig(**config))
    reg = xd.ExplicitDropout(model, xd.paper(0.2), feed_forward=1.0)
    x = torch.randn(2, 3, 8, dtype=dtype)
    model(x)
    assert reg() > 0
    model.add_adapter("biased", peft.LoraConfig(**config, lora_bias=True))
    model.set_adapter("biased")
    with pytest.raises(xd.UnsupportedSiteError, match=r"'biased' .* is no plain LoRA"):
        model(x)


def test_lora_counts_with_its_effective_weight():
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "up_proj"]
    config = LoraConfig(r=2, lora_alpha=6, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
    model = get_peft_model(llama(), config).train()

    def effective(layer):
        if not hasattr(layer, "lora_A"):
            return layer.weight
        scaled = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        return layer.base_layer.weight + scaled

    for noise, strengths in ((xd.paper(0.2), LLAMA), (xd.bernoulli(0.2), LINEAR), (xd.inverted(0.2), LINEAR)):
        expected = llama_plain(model, noise, strengths, prefix="base_model.model.model.", weight_of=effective)
        with xd.ExplicitDropout(model, noise, **strengths) as reg:
            got = step(model, reg, run_tokens)
        assert_same(got, expected)
        assert got[0]
        assert all("lora_" in name for name in got[0])


# ---------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("lock_step", [True, False])
def test_threads_get_their_own_terms(lock_step):
    model = vit()
    names = [name for name, _ in model.named_parameters()]
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    batches = [images(2, seed=0), images(5, seed=1)]
    expected = []
    for batch in batches:
        total = model(batch).square().sum() + reg()
        expected.append((total.detach(), torch.autograd.grad(total, list(model.parameters()))))
    barrier, found = threading.Barrier(2), [[], []]

    def work(number):
        for _ in range(4):
            if lock_step:
                barrier.wait(30)
            loss = model(batches[number]).square().sum()
            if lock_step:
                barrier.wait(30)
            total = loss + reg()
            found[number].append((total.detach(), torch.autograd.grad(total, list(model.parameters()))))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert len(found[number]) == 4
        for total, grads in found[number]:
            assert_close(total, expected[number][0], rtol=1e-4, atol=1e-6)
            for name, gradient, wanted in zip(names, grads, expected[number][1], strict=True):
                assert_close(gradient, wanted, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


class InPlace(nn.Module):
    """Attention and a feed-forward network that change outputs of their linear layers in place."""

    def __init__(self, scale_in_place):
        super().__init__()
        self.num_heads, self.scale_in_place = 2, scale_in_place
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.scale_in_place:
            q *= 2
        x = self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.fc2(self.fc1(x).relu_())


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_outputs_that_the_model_changes_in_place_are_taken_as_the_layer_made_them(dtype, rounding):
    torch.manual_seed(0)
    model, x = InPlace(scale_in_place=False).to(dtype), torch.randn(2, 5, 8, dtype=dtype)
    reg = xd.ExplicitDropout(model, xd.bernoulli(0.2), feed_forward=1.0)
    inputs = {}
    for layer in (model.fc1, model.fc2):
        layer.register_forward_pre_hook(lambda module, args: inputs.__setitem__(module, args[0]))
    for _ in range(3):
        model(x)
        penalty = reg()
        plain = sum(xd.functional.linear(h, layer.weight, xd.bernoulli(0.2)) for layer, h in inputs.items())
        torch.testing.assert_close(penalty.to(dtype), plain, rtol=rounding, atol=0)
        weights = [model.fc1.weight, model.fc2.weight]
        penalties = torch.autograd.grad(penalty, weights, retain_graph=True), torch.autograd.grad(plain, weights)
        torch.testing.assert_close(*penalties, rtol=rounding, atol=1e-3 * rounding)


def test_function_transforms_see_through_the_penalty():
    model = vit(depth=1)
    expected, _ = vit_plain(model, LINEAR, xd.paper(0.2))
    reg = xd.ExplicitDropout(model, xd.paper(0.2), **LINEAR)

    def objective(parameters):
        return torch.func.functional_call(model, parameters, (images(),)).square().sum() + reg()

    found = torch.func.grad(objective)({name: p.detach() for name, p in model.named_parameters()})
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_function_transforms_see_through_padding_too():
    model, x = encoder(layers=1), torch.randn(2, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    reg = xd.ExplicitDropout(model, NOISE, **LINEAR)

    def objective(parameters):
        output = torch.func.functional_call(model, parameters, (x,), {"src_key_padding_mask": padding})
        return output.square().sum() + reg()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(objective)(parameters)
    (model(x, src_key_padding_mask=padding).square().sum() + reg()).backward()
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_queries_that_the_model_changes_in_place_are_refused():
    model = InPlace(scale_in_place=True)
    xd.ExplicitDropout(model, xd.bernoulli(0.2), query=1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="in place"):
        model(torch.randn(2, 5, 8))


class Outer(nn.Module):
    """A model of one's own around the one that is regularised."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.inner(x))


def two_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("around", [nn.Identity, Outer])
def test_all_forward_passes_count_whatever_is_compiled_around_the_model(around):
    """Of equal shapes, so that the same compiled code runs for each."""
    xs = [scale * torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(scale)) for scale in (1, 2, 3)]
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = two_layers()
        reg = xd.ExplicitDropout(model, xd.bernoulli(0.2), value=0.5, feed_forward=0.5)
        whole = model if around is nn.Identity else around(model)
        run = torch.compile(whole, backend="aot_eager") if compiled else whole
        for _ in range(2):
            model.zero_grad()
            for x in xs:
                run(x)
            penalty = reg()
            penalty.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append((penalty.detach(), gradients))
    assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_compiled_and_an_eager_pass_are_one_batch():
    """They leave their terms in other orders."""
    x, y = (torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    penalties = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = two_layers()
        reg = xd.ExplicitDropout(model, xd.bernoulli(0.2), value=0.5, feed_forward=0.5)
        (torch.compile(model, backend="aot_eager") if compiled else model)(x)
        model(y)
        penalties.append(reg().detach())
    assert_close(*penalties)
