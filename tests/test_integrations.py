"""Frameworks train for real and end with the weights of a plain loop: with accumulation, and resumed midway."""

import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

import explicit_dropout as xd
from launching import launched

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from explicit_dropout.integrations.huggingface import (  # noqa: E402
    STATE_FILE,
    ExplicitDropoutMixin,
    ExplicitDropoutTrainer,
)
from explicit_dropout.integrations.lightning import ExplicitDropoutCallback, join  # noqa: E402

ROOT = Path(__file__).parent.parent
RATE = 0.1
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
]


class Encoder(nn.Module):
    """Tokens in, two classes out; the loss is a mean over the batch, and no argument of the Trainer changes it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.encoder(self.embed(input_ids)).mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def classifier():
    torch.manual_seed(0)
    return Encoder()


def language_model():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=20, max_position_embeddings=8, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, dropout=0.0,
        num_hidden_layers=2, num_attention_heads=4, pad_token_id=0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def examples(causal, number=22):
    ids = torch.randint(1, 20, (number, 8), generator=torch.Generator().manual_seed(1))
    if causal:  # sequences of different length: padded labels do not count
        kept = torch.arange(8)[None] < 4 + torch.arange(number)[:, None] % 5
        return [{"input_ids": i, "labels": torch.where(k, i, -100)} for i, k in zip(ids, kept, strict=True)]
    return [{"input_ids": i, "labels": i.sum() % 2} for i in ids]


def attached(model):
    return xd.ExplicitDropout(
        model,
        xd.inverted(0.2),
        query=1e-2,
        value=xd.strengths.warm_up(0.1, 6),
        feed_forward=xd.strengths.cosine(0.1, 0, 9),
    )


def batches(data, size=4):
    return [
        {name: torch.stack([d[name] for d in data[start : start + size]]) for name in data[0]}
        for start in range(0, len(data), size)
    ]


def causal_loss(model, batch):
    """Summed over the tokens that count; the caller divides by their number in the whole update."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def plain_loop(model, data, accumulation, epochs, causal, partial="divides by what there is"):
    """The truth: an update is the mean loss of its tokens or samples, and the mean penalty of its batches."""
    reg = attached(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(epochs):
        micro = batches(data)
        for start in range(0, len(micro), accumulation):
            update = micro[start : start + accumulation]
            divisor = len(update) if partial == "divides by what there is" else accumulation
            tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in update) if causal else None
            for batch in update:
                loss = causal_loss(model, batch) / tokens if causal else model(**batch)["loss"] / divisor
                (loss + reg() / divisor).backward()
            optimiser.step()
            optimiser.zero_grad()
    reg.remove()
    return model


def same_weights(first, second, tolerance=1e-6):
    for (name, ours), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------------------------ Hugging Face


class InOrder(ExplicitDropoutTrainer):
    def _get_train_sampler(self, *_, **__):
        return SequentialSampler(self.train_dataset)


def arguments(folder, accumulation=1, **changes):
    settings = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation, "num_train_epochs": 2,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**settings, **changes})


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True], ids=["loss per batch", "loss per token of the update"])
def test_the_trainer_ends_with_the_weights_of_a_plain_loop(tmp_path, causal, accumulation):
    make = language_model if causal else classifier
    data = examples(causal)  # 6 batches: with 4 to an update, the last has 2
    model = make()
    trainer = InOrder(model, arguments(tmp_path, accumulation), train_dataset=data, regulariser=attached(model))
    assert trainer.model_accepts_loss_kwargs == causal
    trainer.train()
    same_weights(model, plain_loop(make(), data, accumulation, 2, causal))


def test_the_trainer_without_the_penalty_would_end_elsewhere():
    data = examples(False)
    with_penalty, without = plain_loop(classifier(), data, 1, 2, False), classifier()
    optimiser = torch.optim.SGD(without.parameters(), lr=RATE)
    for batch in batches(data) * 2:
        without(**batch)["loss"].backward()
        optimiser.step()
        optimiser.zero_grad()
    with pytest.raises(AssertionError):
        same_weights(with_penalty, without, tolerance=1e-4)


def test_the_trainer_logs_every_component_and_its_strength(tmp_path):
    model = classifier()
    trainer = InOrder(model, arguments(tmp_path, 2), train_dataset=examples(False), regulariser=attached(model))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 6
    for entry in logs:
        assert {"penalty", "penalty/query", "penalty/value", "penalty/feed_forward", "strength/value"} <= set(entry)
        expected = sum(
            float(entry[f"penalty/{c}"]) * float(entry[f"strength/{c}"]) for c in ("query", "value", "feed_forward")
        )
        assert float(entry["penalty"]) == pytest.approx(expected, rel=0.2)  # means of products over two batches
    assert float(logs[0]["strength/value"]) == pytest.approx(0.1 * 0.5 / 6)  # the mean of steps 0 and 1
    assert all(type(value) in (int, float) for entry in logs for value in entry.values())


def test_evaluation_reports_the_loss_without_the_penalty(tmp_path):
    model, data = classifier(), examples(False)
    reg = attached(model)
    trainer = InOrder(model, arguments(tmp_path), train_dataset=data, eval_dataset=data, regulariser=reg)
    trainer.train()
    calls = reg.calls
    found = trainer.evaluate()["eval_loss"]
    model.eval()
    with torch.no_grad():
        expected = model(**batches(data, len(data))[0])["loss"]
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert reg.calls == calls


def test_a_resumed_trainer_is_the_one_that_never_stopped(tmp_path):
    """AdamW, schedules of strengths, and a checkpoint in the middle of an epoch."""
    data = examples(True, 24)
    settings = {"optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}

    def trained(folder, **options):
        model = language_model()
        reg = attached(model)
        args = arguments(folder, 2, **settings)
        trainer = ExplicitDropoutTrainer(model, args, train_dataset=data, regulariser=reg)  # shuffled, by its seed
        trainer.train(**options)
        return model, reg

    whole, reg = trained(tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    assert json.loads((checkpoint / STATE_FILE).read_text()) == {"calls": 4}
    resumed, resumed_reg = trained(tmp_path / "again", resume_from_checkpoint=str(checkpoint))
    assert resumed_reg.calls == reg.calls == 12
    same_weights(whole, resumed, tolerance=0)


def test_a_checkpoint_without_a_regulariser_is_resumed_with_a_warning(tmp_path, caplog):
    model, data = classifier(), examples(False)
    args = arguments(tmp_path, save_strategy="steps", save_steps=6)
    InOrder(model, args, train_dataset=data, regulariser=attached(model)).train()
    checkpoint = tmp_path / "checkpoint-6"
    (checkpoint / STATE_FILE).unlink()
    model = classifier()
    reg = attached(model)
    InOrder(model, args, train_dataset=data, regulariser=reg).train(resume_from_checkpoint=str(checkpoint))
    assert "saved without a regulariser" in caplog.text
    assert reg.calls == 6


def test_the_mixin_fits_other_trainers_and_a_loss_of_ones_own(tmp_path):
    class Mine(ExplicitDropoutMixin, transformers.Seq2SeqTrainer):
        def _get_train_sampler(self, *_, **__):
            return SequentialSampler(self.train_dataset)

    def loss(outputs, labels, num_items_in_batch=None):
        summed = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return summed / num_items_in_batch

    data = examples(False, 24)
    model = classifier()
    args = arguments(tmp_path, 2)
    args = transformers.Seq2SeqTrainingArguments(**{
        name: getattr(args, name) for name in
        ("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
         "learning_rate", "lr_scheduler_type", "optim", "max_grad_norm", "save_strategy", "report_to", "use_cpu",
         "disable_tqdm", "dataloader_pin_memory")
    })  # fmt: skip
    Mine(model, args, train_dataset=data, compute_loss_func=loss, regulariser=attached(model)).train()
    same_weights(model, plain_loop(classifier(), data, 2, 2, False))


def test_a_regulariser_of_another_model_is_refused(tmp_path):
    with pytest.raises(xd.InputError, match="attached to the model that is trained"):
        ExplicitDropoutTrainer(classifier(), arguments(tmp_path), regulariser=attached(classifier()))
    with pytest.raises(xd.InputError, match="an ExplicitDropout"):
        ExplicitDropoutTrainer(classifier(), arguments(tmp_path), regulariser=None)
    with pytest.raises(xd.InputError, match="inside Module"):
        ExplicitDropoutCallback(attached(classifier())).setup(None, Module(classifier()), "fit")
    with pytest.raises(xd.InputError, match="an ExplicitDropout"):
        ExplicitDropoutCallback("reg")


def dropping():
    """A classifier with dice, which converted leaves none."""
    torch.manual_seed(0)
    return Encoder(dropout=0.3)


@pytest.mark.parametrize("framework", ["Trainer", "Lightning"])
def test_twins_of_dropout_go_where_a_regulariser_goes(tmp_path, framework):
    data, expected = examples(False), dropping()
    twins = xd.convert_dropout(expected, 0.1)
    optimiser = torch.optim.SGD(expected.parameters(), lr=RATE)
    for batch in batches(data) * 2:
        (expected(**batch)["loss"] + twins()).backward()
        optimiser.step()
        optimiser.zero_grad()
    model = dropping()
    twins = xd.convert_dropout(model, 0.1)
    if framework == "Trainer":
        trainer = InOrder(model, arguments(tmp_path), train_dataset=data, regulariser=twins)
        trainer.train()
        logged = trainer.state.log_history[-2]
    else:
        trainer = lightning_trainer(tmp_path, twins)
        trainer.fit(Module(model), DataLoader(data, 4))
        logged = trainer.callback_metrics
    assert {"penalty", "penalty/hidden", "penalty/linear", "strength/attention_weights"} <= set(logged)
    same_weights(model, expected)


# ------------------------------------------------------------------------------------------------ Lightning


class Module(lightning.LightningModule):
    def __init__(self, model, optimiser=torch.optim.SGD, rate=RATE):
        super().__init__()
        self.model, self.optimiser, self.rate = model, optimiser, rate

    def training_step(self, batch):
        loss = self.model(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.optimiser(self.model.parameters(), lr=self.rate)


def lightning_trainer(folder, reg, **options):
    settings = {
        "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder),
    }  # fmt: skip
    callbacks = [ExplicitDropoutCallback(reg), *options.pop("callbacks", [])]
    return lightning.Trainer(callbacks=callbacks, **{**settings, **options})


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_lightning_ends_with_the_weights_of_a_plain_loop(tmp_path, accumulation):
    data, model = examples(False), classifier()
    reg = attached(model)
    trainer = lightning_trainer(tmp_path, reg, accumulate_grad_batches=accumulation)
    trainer.fit(Module(model), DataLoader(data, 4))
    reg.remove()
    same_weights(model, plain_loop(classifier(), data, accumulation, 2, False, partial="divides by all"))
    logged = trainer.callback_metrics
    assert {"loss", "penalty", "penalty/query", "penalty/value", "strength/feed_forward"} <= set(logged)


def test_lightning_in_half_precision_scales_the_penalty_with_the_loss(tmp_path):
    """fp16 autocast and a GradScaler, against the same by hand."""
    data, model = examples(False), classifier()
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    reg = attached(model)
    lightning_trainer(tmp_path, reg, max_epochs=1, plugins=[precision]).fit(Module(model), DataLoader(data, 4))

    twin = classifier()
    reg, scaler = attached(twin), torch.amp.GradScaler("cpu", init_scale=64.0)
    optimiser = torch.optim.SGD(twin.parameters(), lr=RATE)
    for batch in batches(data):
        with torch.autocast("cpu", torch.half):
            loss = twin(**batch)["loss"]
        optimiser.zero_grad()
        scaler.scale(loss + reg()).backward()
        scaler.step(optimiser)
        scaler.update()
    same_weights(model, twin)


def test_lightning_resumed_is_the_one_that_never_stopped(tmp_path):
    data = examples(False)

    def trained(folder, epochs, **options):
        model = classifier()
        reg = attached(model)
        keep = ModelCheckpoint(str(folder), filename="{epoch}", save_top_k=-1)
        trainer = lightning_trainer(folder, reg, max_epochs=epochs, enable_checkpointing=True, callbacks=[keep])
        trainer.fit(Module(model, torch.optim.AdamW, 1e-2), DataLoader(data, 4), weights_only=False, **options)
        return model, reg

    whole, reg = trained(tmp_path / "whole", 3)
    trained(tmp_path / "part", 1)
    resumed, resumed_reg = trained(tmp_path / "part", 3, ckpt_path=str(tmp_path / "part" / "epoch=0.ckpt"))
    assert resumed_reg.calls == reg.calls == 18
    same_weights(whole, resumed, tolerance=0)


@pytest.mark.parametrize("search", ["Tuner", "LearningRateFinder", "BatchSizeFinder", "at the first epoch"])
def test_lightning_may_search_for_a_learning_rate_or_a_batch_size_first(tmp_path, search, recwarn):
    waiting = []

    class Searched(Module):
        def __init__(self, model):
            super().__init__(model)
            self.batch_size = 2

        def train_dataloader(self):
            return DataLoader(examples(False), self.batch_size)

        def training_step(self, batch):
            loss = super().training_step(batch)
            waiting.append(reg._collector.threads.slot.waiting)
            return loss

    module = Searched(classifier())
    reg = attached(module.model)
    finders = {
        "LearningRateFinder": [LearningRateFinder(num_training_steps=80, attr_name="rate")],
        "BatchSizeFinder": [BatchSizeFinder(max_trials=2)],
    }
    if search == "at the first epoch":

        class Later(LearningRateFinder):
            def on_fit_start(self, *args):
                del args

            def on_train_epoch_start(self, trainer, pl_module):
                if trainer.current_epoch == 0:
                    self.lr_find(trainer, pl_module)

        finders[search] = [Later(num_training_steps=20, attr_name="rate")]
    trainer = lightning_trainer(tmp_path, reg, max_epochs=-1, max_steps=3, callbacks=finders.get(search, []))
    if search == "Tuner":
        Tuner(trainer).lr_find(module, num_training=80, attr_name="rate")
    trainer.fit(module)
    assert reg.calls == 3
    assert max(waiting) == 1  # and nothing is kept meanwhile
    assert not [one for one in recwarn if "without a call of the regulariser" in str(one.message)]


class Manual(Module):
    """An RMSE by manual optimisation, and a loss of something else after it."""

    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False
        self.critic = nn.Linear(2, 1)

    def training_step(self, batch):
        optimiser = self.optimizers()
        optimiser.zero_grad()
        loss, logits = rmse(self.model, batch)
        value = loss.item()
        self.manual_backward(loss)
        assert loss.item() == value
        self.manual_backward(self.critic(logits.detach()).square().mean())
        optimiser.step()


def rmse(model, batch):
    """A root, whose derivative is made of its value."""
    found = model(**batch)
    return found["loss"].sqrt(), found["logits"]


def test_lightning_in_manual_optimisation_ends_with_the_weights_of_a_plain_loop(tmp_path):
    data, model = examples(False), classifier()
    reg = attached(model)
    trainer = lightning_trainer(tmp_path, reg, max_epochs=1)
    trainer.fit(Manual(model), DataLoader(data, 4))
    assert reg.calls == 6

    plain = classifier()
    plain_reg = attached(plain)
    optimiser = torch.optim.SGD(plain.parameters(), lr=RATE)
    for batch in DataLoader(data, 4):
        optimiser.zero_grad()
        (rmse(plain, batch)[0] + plain_reg()).backward()
        optimiser.step()
    same_weights(model, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_penalty_joins_any_loss_that_is_a_result_of_its_own(dtype):
    weight = torch.randn(3, requires_grad=True)
    for make in (torch.sqrt, torch.exp, lambda x: torch.stack((x, x))[0]):
        loss, penalty = make(weight.square().mean().to(dtype)), weight.pow(3).sum()
        (expected,) = torch.autograd.grad(loss.float() + penalty, weight, retain_graph=True)
        value = loss.item()
        join(loss, penalty)
        assert loss.item() == value
        (found,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(found, expected)
    for loss in (torch.ones((), requires_grad=True), (2 * weight).unbind()[0]):
        with pytest.raises(xd.InputError, match="a result of its own"):
            join(loss, weight.sum())


def test_a_manual_epoch_without_any_penalty_is_an_error(tmp_path):
    class Other(Module):
        def __init__(self, model):
            super().__init__(model)
            self.automatic_optimization, self.critic = False, nn.Linear(3, 1)

        def training_step(self, batch):
            del batch
            self.manual_backward(self.critic(torch.ones(3)).sum())

    module = Other(classifier())
    trainer = lightning_trainer(tmp_path, attached(module.model))
    with pytest.raises(xd.CollectionError, match="no training forward pass"):
        trainer.fit(module, DataLoader(examples(False), 4))


def test_lightning_needs_the_model_that_training_step_calls(tmp_path):
    """Attached to the LightningModule, whose own forward never runs: said so, not silently without a penalty."""

    class Whole(Module):
        def forward(self, **batch):
            return self.model(**batch)

    module = Whole(classifier())
    trainer = lightning_trainer(tmp_path, attached(module))
    with pytest.raises(xd.CollectionError, match="no training forward pass of Whole"):
        trainer.fit(module, DataLoader(examples(False), 4))


# ------------------------------------------------------------------------------------------------ accelerate


@pytest.fixture
def fresh_accelerate():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_ends_with_the_weights_of_a_plain_loop(accumulation):
    data, model = examples(False, 24), classifier()
    reg = attached(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    prepared, optimiser, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=RATE), DataLoader(data, 4)
    )
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch)["loss"] + reg())
                optimiser.step()
                optimiser.zero_grad()
    same_weights(model, plain_loop(classifier(), data, accumulation, 2, False))


# ------------------------------------------------------------------------------------------------ examples


RUN = "import sys, runpy; sys.path.insert(0, sys.argv.pop(1)); import conftest, torch; torch.set_num_threads(1); "
RUN += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run_example(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = launched(command, cwd=ROOT, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    "name", ["plain_loop", "timm_vit", "own_dropout", "hf_trainer", "lightning_module", "accelerate_loop"]
)
def test_the_example_runs(name):
    """As in its docstring, apart from what conftest does to torchvision here."""
    path = ROOT / "examples" / f"{name}.py"
    assert f"python examples/{name}.py" in path.read_text().split('"""')[1]
    assert "penalty" in run_example(sys.executable, "-c", RUN, str(ROOT / "tests"), str(path))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_distributed_example_runs_in_two_processes(name):
    path = ROOT / "examples" / f"{name}.py"
    assert f"torchrun --nproc-per-node 2 examples/{name}.py" in path.read_text().split('"""')[1]
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    assert "2 processes hold" in run_example(sys.executable, *launch, str(path))


def test_a_copy_of_a_model_trains_without_its_regulariser(tmp_path):
    model = classifier()
    reg = attached(model)
    twin = copy.deepcopy(Module(model))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(twin, DataLoader(examples(False), 4))
    with pytest.raises(xd.CollectionError, match="no training forward pass"):
        reg()


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_that_lightning_skips_is_left_out_of_the_penalty(fused, tmp_path):
    class Skipping(Module):
        def training_step(self, batch, number):
            loss = super().training_step(batch)
            return None if number == 0 else loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), fused=fused)

    model = classifier()
    reg = attached(model)
    lightning_trainer(tmp_path, reg).fit(Skipping(model), DataLoader(examples(False), 2))
    assert reg.calls == 2 * (len(examples(False)) // 2 - 1)
    reg.discard()
