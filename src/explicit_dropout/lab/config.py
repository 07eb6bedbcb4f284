"""What a training run is: frozen dataclasses, JSON both ways, and a name made of the content.

A `Run` holds everything that decides its numbers (data, model, treatment, training, seed) and nothing that does not:
folders, devices and engines belong to `Execution`. Two runs with the same settings have the same `key` on every
machine, and a field that stands at its default does not enter the key, so that a new option leaves old results valid.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from explicit_dropout.errors import InputError

Metric = Literal["accuracy", "mean_average_precision"]
Augmentation = Literal["none", "crop_flip", "autoaugment"]
AttentionTreatment = Literal[
    "none", "implicit_v", "dropout", "drop_attention", "drop_attention_column", "drop_key", "drop_head",
    "explicit_q", "explicit_k", "explicit_qk", "explicit_v", "explicit_av", "arora_q", "arora_k", "arora_v",
    "loss_q", "loss_k", "loss_v",
]  # fmt: skip
STOCHASTIC_ATTENTION = ("dropout", "drop_attention", "drop_attention_column", "drop_key", "drop_head")
RENORMALISED_ATTENTION = ("drop_attention", "drop_attention_column", "drop_key")
"""Stochastic treatments without a deterministic twin."""
FeedForwardTreatment = Literal[
    "none", "implicit", "implicit_inputs", "explicit", "arora", "loss", "activation_l2", "weight_decay",
]  # fmt: skip
LawName = Literal["paper", "bernoulli", "inverted"]


class Settings:
    """A frozen dataclass that checks its own fields and can be written as JSON and read back."""

    def __post_init__(self) -> None:
        hints = self._types()
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if not _fits(value, hints[entry.name]):
                raise InputError(self._place(entry.name), _words(hints[entry.name]), repr(value))
            if isinstance(value, int) and _is_float(hints[entry.name]) and not isinstance(value, bool):
                object.__setattr__(self, entry.name, float(value))

    @classmethod
    @cache
    def _types(cls) -> dict[str, Any]:
        """Of all fields. Looked up once: a sweep makes settings by the thousand."""
        return get_type_hints(cls)

    @classmethod
    def _place(cls, name: str) -> str:
        return f"{cls.__name__.lower()}.{name}"

    @classmethod
    def _range(cls, name: str, value: float, low: float, high: float = math.inf, *, open_high: bool = False) -> None:
        if not low <= value <= high or (open_high and value == high):
            bounds = (
                f"at least {low:g}" if high == math.inf else f"from {low:g} to {'below ' if open_high else ''}{high:g}"
            )
            raise InputError(cls._place(name), bounds, repr(value))

    def to_json(self, *, omit_defaults: bool = False) -> dict[str, Any]:
        """Plain dictionaries, lists, numbers and strings."""
        written: dict[str, Any] = {}
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if isinstance(value, Settings):
                inner = value.to_json(omit_defaults=omit_defaults)
                if inner or not omit_defaults:
                    written[entry.name] = inner
            elif not (omit_defaults and value == entry.default):
                written[entry.name] = list(value) if isinstance(value, tuple) else value
        return written

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Self:
        """What `to_json` wrote. Unknown or ill-typed fields are errors; missing ones take their defaults."""
        if not isinstance(written, Mapping):
            raise InputError(cls.__name__.lower(), "a JSON object", type(written).__name__)
        hints = cls._types()
        known = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(written) - known)
        if unknown:
            raise InputError(cls._place(unknown[0]), f"one of {', '.join(sorted(known))}", "an unknown field")
        values: dict[str, Any] = {}
        for name, value in written.items():
            kind = hints[name]
            if is_dataclass(kind) and isinstance(kind, type) and issubclass(kind, Settings):
                values[name] = kind.from_json(value)
            else:
                values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


@dataclass(frozen=True)
class Data(Settings):
    """Which examples a run sees. Where the files are is no part of it.

    Args:
        name: digits, cifar10, cifar100, gtzan, gtzan_yamnet, thumos14_kinetics, thumos14_activitynet, thumos14_i3d,
            images or features; `explicit-dropout data` lists them.
        folder: for images and features: their folder or file, relative to the data root.
        size: for images: the side, in pixels, that they are cropped and resized to; None if all have one size already.
        split: the seed of the split into training, validation and, where none is fixed, test examples.
        validation: the share of the examples at hand that validates; None for the protocol's own share.
        examples: keep only so many training examples; None for all.
        augmentation: what is done to training images.
        label_noise: the share of training labels that are replaced by a class drawn at random.
    """

    name: str = "digits"
    folder: str | None = None
    size: int | None = None
    split: int = 0
    validation: float | None = None
    examples: int | None = None
    augmentation: Augmentation = "none"
    label_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._range("split", self.split, 0)
        if self.size is not None:
            self._range("size", self.size, 1)
        if self.validation is not None:
            self._range("validation", self.validation, 0.01, 0.9)
        if self.examples is not None:
            self._range("examples", self.examples, 1)
        self._range("label_noise", self.label_noise, 0, 1)

    @property
    def material(self) -> Data:
        """The same data before they are divided, thinned out or augmented: what a fingerprint is of."""
        return Data(self.name, self.folder, self.size)

    @property
    def divided(self) -> Data:
        """The same data before they are augmented or labelled wrongly: what a division is of."""
        return replace(self, augmentation="none", label_noise=0.0)

    @property
    def words(self) -> str:
        """What they are called in sentences: images (folder flowers, size 32)."""
        settings = {name: value for name, value in self.to_json(omit_defaults=True).items() if name != "name"}
        said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
        return self.name + (f" ({said})" if said else "")


@dataclass(frozen=True)
class Model(Settings):
    """A Transformer encoder. The defaults are the paper's ViT for CIFAR: 6.27 million parameters.

    Args:
        patch: side of the square patches that images are cut into; None for data that are sequences already.
        read: the token that the classifier sees: an extra one in front ("class"), the last, or the mean of all.
        norm: LayerNorm before each branch ("pre") or after each sum ("post").
        qkv_bias: whether query, key and value projections have a bias.
        residual: what the layers add to, in float32 or, lowered, in the precision that they compute in.
    """

    layers: int = 7
    width: int = 384
    heads: int = 12
    hidden: int = 384
    patch: int | None = 4
    read: Literal["class", "last", "mean"] = "class"
    norm: Literal["pre", "post"] = "pre"
    qkv_bias: bool = True
    residual: Literal["float32", "lowered"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "width", "heads", "hidden"):
            self._range(name, getattr(self, name), 1)
        if self.patch is not None:
            self._range("patch", self.patch, 1)
        if self.width % self.heads:
            raise InputError("model.heads", f"a divisor of the width {self.width}", self.heads)


@dataclass(frozen=True)
class Treatment(Settings):
    """How a model is regularised: one row of the paper's tables.

    Args:
        attention: none; stochastic: implicit_v (`nn.Dropout` on the input of the value projection), dropout (of
            attention weights), drop_attention (renormalised), the same by column, drop_key, drop_head; or a penalty:
            explicit_{q,k,qk,v,av}, arora_{q,k,v}, loss_{q,k,v} (of dropout on its input, followed to the loss).
        feed_forward: none, implicit (`nn.Dropout` after the activation and at the end), implicit_inputs (on the inputs
            of both layers, where explicit stands for it), explicit, arora, loss; or a control for the whole model:
            activation_l2 (of everything that a residual branch adds) and weight_decay (by the optimiser).
        rate: the drop rate p.
        strength: λ, shared by the penalties of attention and feed-forward, or by all twins.
        law: the moments of explicit penalties.
        reduction: penalties as a mean over tokens, or as a sum over tokens and a mean over samples.
        reading: scores as the model has them, or the paper's formulas taken literally.
        span: for drop_attention: how many neighbouring keys are dropped together.
        drop_path: the rate at which whole residual branches are dropped, rising from 0 to this over depth.
        extra_dropout: rate of an `nn.Dropout` in the feed-forward that is used beside explicit penalties.
        decreasing: for stochastic attention: the rate falls to 0 over depth.
        twins: whatever the treatment would draw is replaced by its deterministic twin (`convert_dropout`).
    """

    attention: AttentionTreatment = "none"
    feed_forward: FeedForwardTreatment = "none"
    rate: float = 0.2
    strength: float = 0.0
    law: LawName = "paper"
    reduction: Literal["token", "sample"] = "token"
    reading: Literal["model", "paper"] = "model"
    span: int = 1
    drop_path: float = 0.0
    extra_dropout: float = 0.0
    decreasing: bool = False
    twins: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rate", "drop_path", "extra_dropout"):
            self._range(name, getattr(self, name), 0, 1, open_high=True)
        self._range("strength", self.strength, 0)
        self._range("span", self.span, 1)
        if self.twins:
            self._check_twins()
        if self.has_strength != (self.strength > 0):
            raise InputError(
                "treatment.strength", "above 0 with a penalty, and 0 without one", f"{self.strength:g} for {self.row}"
            )
        if self.is_loss_level and has_strength(*(_unless_loss(part) for part in (self.attention, self.feed_forward))):
            raise InputError(
                "treatment", "a penalty that is followed to the loss, or others, and not both at once", self.row
            )
        for name, applies in self._applying().items():
            default = next(entry.default for entry in fields(self) if entry.name == name)
            if getattr(self, name) != default and not applies:
                raise InputError(
                    self._place(name),
                    f"{default!r}, since it changes nothing here",
                    f"{getattr(self, name)!r} for {self.row}",
                )

    def _check_twins(self) -> None:
        """Twins are of dropout that is drawn, and has a twin, and not beside what λ is the strength of already."""
        draws = self.attention in (*STOCHASTIC_ATTENTION, "implicit_v") or self.feed_forward.startswith("implicit")
        drawn = (draws and self.rate > 0) or self.drop_path > 0 or self.extra_dropout > 0
        if self.attention in RENORMALISED_ATTENTION:
            raise InputError(
                "treatment.attention", "one that does not renormalise, since such weights have no twin", self.attention
            )
        if not drawn or has_strength(self.attention, self.feed_forward):
            raise InputError("treatment.twins", "false, or a treatment that draws, without a penalty", self.row)

    def _applying(self) -> dict[str, bool]:
        """Settings that act on some treatments only, and whether they act on this one."""
        stochastic = self.attention in STOCHASTIC_ATTENTION
        return {
            "law": self.is_explicit,
            "reading": self.is_explicit,
            "reduction": self.has_penalty and not self.is_loss_level and not self.twins,
            "span": self.attention.startswith("drop_attention"),
            "decreasing": stochastic,
            "extra_dropout": not self.feed_forward.startswith("implicit"),
        }

    @property
    def has_strength(self) -> bool:
        """Whether there is anything that λ is the strength of."""
        return self.twins or has_strength(self.attention, self.feed_forward)

    @property
    def has_penalty(self) -> bool:
        """Whether anything is added to the loss."""
        added = "none" if self.feed_forward == "weight_decay" else self.feed_forward
        return self.twins or has_strength(self.attention, added)

    @property
    def is_explicit(self) -> bool:
        """Whether the law matters."""
        return self.attention.startswith("explicit") or self.feed_forward == "explicit"

    @property
    def is_loss_level(self) -> bool:
        """Whether the penalty is followed to the loss: then it needs the outputs of the model."""
        return self.attention.startswith("loss_") or self.feed_forward == "loss"

    @property
    def row(self) -> str:
        """The name of the table row: the paper's, with what differs from the paper's settings in brackets."""
        treated = (self.attention, self.feed_forward) != ("none", "none")
        special = {
            self.law: self.is_explicit and self.law != "paper",
            f"p = {self.rate:g}": treated and self.rate != 0.2,
            f"span {self.span}": self.span > 1,
            "decreasing": self.decreasing,
            f"drop path {self.drop_path:g}": self.drop_path > 0,
            f"extra dropout {self.extra_dropout:g}": self.extra_dropout > 0,
            "token sums": self.has_penalty and self.reduction == "sample",
            "literal reading": self.is_explicit and self.reading == "paper",
            "twins": self.twins,
        }
        named = ", ".join(name for name, applies in special.items() if applies)
        return f"{self.attention}+{self.feed_forward}" + (f" [{named}]" if named else "")


def has_strength(attention: str, feed_forward: str) -> bool:
    """Whether a pair of treatments has anything that λ is the strength of."""
    kinds = ("explicit", "arora", "loss", "activation_l2", "weight_decay")
    return attention.startswith(("explicit", "arora", "loss")) or feed_forward in kinds


def _unless_loss(part: str) -> str:
    return "none" if part.startswith("loss") else part


@dataclass(frozen=True)
class Training(Settings):
    """How a model is trained.

    Args:
        optimiser: adam (with L2), adamw (with decoupled decay), or muon: orthogonal steps for the matrices of the
            layers, AdamW for all else.
        schedule: cosine to `final_learning_rate` after the warm-up; step: ÷ 10 after every epoch; or constant.
        select: the weights that are tested: those of the last epoch, or of the best on validation.
        clip: largest norm of the gradient; 0 for none.
        validate_every: epochs from one validation to the next; the last epoch always has one.
    """

    epochs: int = 30
    batch: int = 128
    optimiser: Literal["adam", "adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    warm_up_epochs: float = 0.0
    final_learning_rate: float = 0.0
    label_smoothing: float = 0.0
    clip: float = 0.0
    precision: Literal["float32", "bfloat16"] = "float32"
    select: Literal["last", "best"] = "last"
    validate_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch", "validate_every"):
            self._range(name, getattr(self, name), 1)
        for name in ("weight_decay", "warm_up_epochs", "final_learning_rate", "clip"):
            self._range(name, getattr(self, name), 0)
        self._range("label_smoothing", self.label_smoothing, 0, 1, open_high=True)
        if self.learning_rate <= 0:
            raise InputError("training.learning_rate", "above 0", self.learning_rate)
        if self.warm_up_epochs > self.epochs:
            raise InputError("training.warm_up_epochs", f"at most the {self.epochs} epochs", self.warm_up_epochs)


@dataclass(frozen=True)
class Run(Settings):
    """One training, from data to test score, with one seed."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    treatment: Treatment = field(default_factory=Treatment)
    training: Training = field(default_factory=Training)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._range("seed", self.seed, 0)

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits that stand for the content."""
        written = json.dumps(self.to_json(omit_defaults=True), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(written.encode()).hexdigest()[:16]

    @property
    def row(self) -> str:
        return self.treatment.row

    @property
    def configuration(self) -> Run:
        """The same run for any seed and split: what is selected on validation data."""
        return replace(self, seed=0, data=replace(self.data, split=0))


@dataclass(frozen=True)
class Execution(Settings):
    """How and where a run is carried out: no part of what it is.

    Results agree within rounding, but for what is drawn: compiled code draws other dropout masks, and every process of
    a run on several draws masks and augmentation of its own.

    Args:
        data_root: the folder of the datasets; None for $EXPLICIT_DROPOUT_DATA, or `data`.
        device: cpu, cuda, cuda:1, …; auto takes a GPU if there is one.
        compile: compile the training step by `torch.compile`.
        cuda_graphs: replay the training step as one CUDA graph, compiled or not.
        deterministic: the same bits every time on the same machine.
        threads: CPU threads of a run; None leaves torch's choice.
        checkpoint_seconds: least time between two checkpoints, which are made at the end of an epoch.
        keep_checkpoint: keep the final weights in the run's folder.
        tensorboard: write event files for TensorBoard into the run's folder, too.
    """

    data_root: str | None = None
    device: str = "auto"
    compile: bool = False
    cuda_graphs: bool = False
    deterministic: bool = False
    threads: int | None = None
    checkpoint_seconds: float = 20.0
    keep_checkpoint: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._range("checkpoint_seconds", self.checkpoint_seconds, 0)
        if self.threads is not None:
            self._range("threads", self.threads, 1)


# ---------------------------------------------------------------------------------------------- types of fields


def _fits(value: object, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(kind))
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _is_float(kind: Any) -> bool:
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return float in options


def _words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(option) for option in get_args(kind))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    names: dict[Any, str] = {
        float: "a finite number",
        int: "a whole number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")
