"""Where dropout can act in a model: its attention and feed-forward layers, as rules describe them.

A rule looks at one module and says what it is: an `Attention`, a `FeedForward`, or nothing. Rules are kept by class (or
by the full name of a class, so that no library has to be imported to have rules for it); the first that answers along
the class's bases wins, and a generic rule tries the usual names on whatever is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from explicit_dropout.errors import InputError, UnsupportedSiteError
from explicit_dropout.weights import acting, adapter_obstacle

Component = Literal["query", "key", "query_key", "value", "attended_value", "feed_forward"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
OF_ATTENTION: tuple[Component, ...] = tuple(name for name in COMPONENTS if name != "feed_forward")
SCORES = ("query", "key", "query_key")
"""Those that are measured at the attention scores."""

ADDED = re.compile(r"bias|alibi|rel(ative)?_pos|padding")
"""Names of arguments that tell of something added to the scores."""

Call = Mapping[str, Any]
"""The arguments of a module's forward call, by name."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map x ↦ x Wᵀ + b inside a model: a layer, or some rows of a fused one.

    Args:
        module: what holds the parameters; where it is called, a hook on it sees x and the output.
        rows: which outputs belong to it: a slice from the front without a step, or indices; None for all.
        weight, bias: the names of the parameters in the module, dotted if need be.
        bias_rows: which elements of the bias belong to it, where that differs from `rows`.
        transposed: True where the weight is stored (in, out), as in the Conv1D of GPT-2.
        called: False where the model computes with the parameters without calling the module.
    """

    module: nn.Module
    rows: slice | tuple[int, ...] | None = None
    weight: str = "weight"
    bias: str = "bias"
    bias_rows: slice | Literal["as rows"] | None = "as rows"
    transposed: bool = False
    called: bool = True
    _indices: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        rows = self.rows
        if isinstance(rows, slice) and (rows.step not in (None, 1) or min(rows.start or 0, rows.stop or 0) < 0):
            raise InputError("rows", "a slice from the front without a step, a tuple of indices, or None", rows)

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """W (out, in) and b, as they act now: adapters such as LoRA included."""
        weight = _attribute(self.module, self.weight)
        if weight is None:
            raise InputError("module", f"one with a parameter {self.weight!r}", type(self.module).__name__)
        weight = acting(self.module, weight)
        return self.of(weight.mT if self.transposed else weight, 0), self.offset()

    @property
    def held(self) -> Tensor | None:
        """The parameter itself that the module holds now, of which W is a part."""
        return _attribute(self.module, self.weight)

    @property
    def adapted(self) -> bool:
        """Whether adapters (of peft) sit on the module, which may be switched between one call of it and the next."""
        return "base_layer" in self.module._modules

    def offset(self) -> Tensor | None:
        """b alone, as it acts now."""
        if self.adapted and (obstacle := adapter_obstacle(self.module)):
            raise UnsupportedSiteError(obstacle)
        bias = _attribute(self.module, self.bias)
        if bias is not None and self.bias_rows == "as rows":
            return self.of(bias, 0)
        return bias[self.bias_rows] if bias is not None and isinstance(self.bias_rows, slice) else bias

    def of(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The part of the module's output (or of a parameter) that belongs to this projection."""
        if self.rows is None:
            return tensor
        if isinstance(self.rows, slice):
            return tensor.narrow(dim, self.rows.start or 0, _length(self.rows, tensor.shape[dim]))
        return tensor.index_select(dim, self._index(self.rows, tensor))

    def _index(self, rows: tuple[int, ...], tensor: Tensor) -> Tensor:
        """The indices on the device of a tensor, kept there: bringing them would make a GPU wait."""
        if torch.compiler.is_compiling() or type(tensor) not in (Tensor, nn.Parameter):
            return torch.tensor(rows, device=tensor.device)
        found = self._indices.get(tensor.device)
        if found is None:
            with torch.inference_mode(False):
                found = self._indices[tensor.device] = torch.tensor(rows, device=tensor.device)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        weight = _attribute(self.module, self.weight)
        if weight is None and self.adapted:
            weight = _attribute(self.module, f"base_layer.{self.weight}")
        if weight is None or weight.ndim != 2:
            raise InputError("module", f"one with a matrix {self.weight!r}", type(self.module).__name__)
        out, width = reversed(weight.shape) if self.transposed else weight.shape
        if isinstance(self.rows, slice):
            return _length(self.rows, out), width
        return out if self.rows is None else len(self.rows), width


@dataclass(frozen=True, eq=False)
class Pairs:
    """Which tokens are real and which query may see which key, in one call of an attention module.

    mask (*batch, token) and context_mask (*batch, context) mark real tokens; allowed broadcasts to
    (*batch, heads, token, context); None is everything. All are True where something counts. bias is what the model
    adds to the scores before the softmax, for where A has to be computed; `visible` tells which pairs it leaves.
    """

    mask: Tensor | None = None
    context_mask: Tensor | None = None
    allowed: Tensor | None = None
    causal: bool = False
    bias: Tensor | None = None


NEVER_SEEN = -1e3
"""What is added to a score so that its key is not seen: this or less, −1e4, −1e9 and finfo.min like −∞."""


def visible(added: Tensor, never: float = NEVER_SEEN) -> Tensor:
    """Which pairs an additive mask leaves to be seen; a boolean one, True where they are, is that already.

    e^−1000 is 0 even in float64, so no weight is left below that unless other scores of the row are some hundreds
    smaller. What is added by position (ALiBi, relative positions) stays above it, or has no weight either.
    A query from which every key is hidden counts none of them.
    """
    return added if added.dtype == torch.bool else added > never


def pairs_of(mask: Tensor) -> Pairs:
    """What a mask over pairs says: a boolean one, True where they are seen, or one that is added to the scores."""
    return Pairs(allowed=visible(mask), bias=None if mask.dtype == torch.bool else mask)


def every_pair(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    """For attention that knows no masks. Refuses a call that passes one: its meaning would be a guess."""
    del x, context
    for name, given in call.items():
        if _hides(attention, name, given):
            others = "use value or feed_forward here" if attention.value.called else "leave this layer out by layers="
            raise InputError(
                name,
                f"understood: no rule says what it means to {type(attention.module).__name__}; give its rule a "
                f"`pairs` (@xd.register_rule, xd.Pairs), or {others}",
                f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given),
            )
    return Pairs(causal=attention.causal)


def _hides(attention: Attention, name: str, given: Any) -> bool:
    """Whether an argument of a call, by its name, says which query sees which key, or how well."""
    if isinstance(given, bool) and name in ("causal", "is_causal"):
        return given is not attention.causal
    return given is not None and ("mask" in name or (isinstance(given, Tensor) and ADDED.search(name) is not None))


@dataclass(frozen=True, eq=False)
class Dropout:
    """A stochastic dropout of the model: a module's rate under this name, p of `nn.Dropout` or a float attribute."""

    module: nn.Module
    name: str = "p"


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention module, as a rule describes it.

    Args:
        module: the module whose call is one attention; everything below happens inside that call.
        query, key, value: the three projections.
        output: the output projection, whose input is A V; None where `module` itself returns A V (first, if a tuple).
        heads, key_heads: numbers of query heads and of key/value heads (None: the same).
        scale: factor on the scores; None for 1/√(head width).
        causal: whether a query sees only keys up to its own position when the call says nothing else.
        cross: whether keys and values come from another sequence.
        pairs: reads the masks of a call.
        inputs: where projections are not called, the arguments that hold the inputs of query, key and value.
        batch_first: whether those inputs are (batch, token, width) or (token, batch, width).
        rotary: makes of a call the rotation of projected heads by their position (see `functional.ScoreOptions`).
        weights: where A can be had for laws with a variance: "output" (the module returns it as second), "compute"
            (softmax of the scores is all there is to it), a module whose input is A, or None.
        obstacle: why scores do not depend linearly on queries and keys (a normalisation between them), if so.
        weights_obstacle: what to do so that A can be had, where `weights` is None.
        refused: components whose penalty cannot be exact here under any law, each with the reason.
        dropouts: the stochastic dropout that acts inside.
        unconfirmed: what a trial has found that speaks against the roles that names give to the projections.
        departs: asked at every step why scores and weights are not those described any more, if so.
    """

    module: nn.Module
    query: Projection
    key: Projection
    value: Projection
    heads: int
    output: nn.Module | None = None
    key_heads: int | None = None
    scale: float | None = None
    causal: bool = False
    cross: bool = False
    pairs: Callable[[Attention, Call, Tensor, Tensor], Pairs] = every_pair
    inputs: tuple[str, str, str] | None = None
    batch_first: bool = True
    rotary: Callable[[Attention, Call], Callable[[Tensor], Tensor] | None] | None = None
    weights: Literal["output", "compute"] | nn.Module | None = None
    obstacle: str | None = None
    weights_obstacle: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    dropouts: tuple[Dropout, ...] = ()
    unconfirmed: str | None = None
    departs: Callable[[Attention], str | None] | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def score_scale(self) -> float:
        return (self.query.shape[0] / self.heads) ** -0.5 if self.scale is None else self.scale


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The linear layers of a feed-forward network.

    Args:
        layers: its projections, in order.
        module: the module whose call is the network, if its arguments tell padding.
        padding: makes of a call the mask of real tokens, (*batch, token), or None.
        batch_first: whether the layers see (batch, token, width) or (token, batch, width).
        flattened: where they see (batch · token, width): the argument of the module that still has both axes.
        dropouts: the stochastic dropout that acts inside.
        obstacle: why its penalty cannot be exact, if so; it then needs a module, but no layers.
    """

    layers: tuple[Projection, ...]
    module: nn.Module | None = None
    padding: Callable[[Call], Tensor | None] | None = None
    dropouts: tuple[Dropout, ...] = ()
    obstacle: str | None = None
    batch_first: bool = True
    flattened: str | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The layers: what attention calls its own by the same name."""
        return self.layers


Described = Attention | FeedForward
Rule = Callable[[Any], "Described | list[Described] | None"]
_RULES: dict[type | str, Rule] = {}
_Decorated = TypeVar("_Decorated", bound=Rule)


def register_rule(*classes: type | str) -> Callable[[_Decorated], _Decorated]:
    """Decorate a function that describes modules of these classes (or full class names) as attention or feed-forward.

        @xd.register_rule(MyAttention)
        def my_attention(module):
            return xd.Attention(module, xd.Projection(module.q), xd.Projection(module.k), xd.Projection(module.v),
                                output=module.proj, heads=module.heads)

    Subclasses follow the rule of their nearest base. A rule may return None to pass a module over.
    """
    for known in classes:
        if not isinstance(known, type | str):
            raise InputError("classes", "module classes or their full names", repr(known))

    def register(rule: _Decorated) -> _Decorated:
        for known in classes:
            _RULES[known] = rule
        return rule

    return register


def rule_for(module: nn.Module) -> Rule | None:
    for base in type(module).__mro__:
        rule = _RULES.get(base) or _RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            return rule
    return None


@dataclass(frozen=True, eq=False)
class Layer:
    """A description with its place in the model."""

    index: int
    path: str
    described: Described
    layer_paths: tuple[str, ...] = ()  # of the layers of a feed-forward network


@dataclass(frozen=True, eq=False)
class Site:
    """One component of one layer: a place where dropout can act and whose penalty has a strength of its own.

    Attributes:
        layer: index of the Transformer layer, counted through the model.
        component: query, key, query_key, value, attended_value or feed_forward.
        path: dotted path of the module it sits at.
        shape: (out, in) of its projection.
        heads, key_heads: numbers of heads, where it has any.
        cross: whether it belongs to cross-attention.
        name: path and component, which together are unique.
    """

    layer: int
    component: Component
    path: str
    shape: tuple[int, int]
    heads: int | None = None
    key_heads: int | None = None
    cross: bool = False
    name: str = field(repr=False, init=False)
    source: Layer = field(repr=False, kw_only=True)
    projection: Projection | None = field(repr=False, kw_only=True, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.path}:{self.component}")


def sites_of(layer: Layer) -> Iterator[Site]:
    described = layer.described
    if isinstance(described, FeedForward):
        if described.obstacle:
            yield Site(layer.index, "feed_forward", layer.path, (0, 0), source=layer)
        for projection, path in zip(described.layers, layer.layer_paths, strict=True):
            yield Site(layer.index, "feed_forward", path, projection.shape, source=layer, projection=projection)
        return
    projections = {
        "query": described.query,
        "key": described.key,
        "query_key": described.query,
        "value": described.value,
        "attended_value": described.value,
    }
    for component, projection in projections.items():
        yield Site(
            layer.index,
            component,  # type: ignore[arg-type]
            layer.path,
            projection.shape,
            described.heads,
            described.key_heads or described.heads,
            described.cross,
            source=layer,
            projection=projection,
        )


def projection_of(site: Site) -> Projection:
    if site.projection is None:
        raise UnsupportedSiteError(f"{site.name} has no linear projection")
    return site.projection


def samples_first(described: Attention | FeedForward, x: Tensor) -> Tensor:
    """What a layer is given or makes, with samples in front of tokens; of such a tensor, as the layer has it."""
    return x if described.batch_first or x.ndim < 3 else x.transpose(0, 1)


def _length(rows: slice, size: int) -> int:
    """How many of so many rows a slice from the front takes. (torch 2.11 does not compile `slice.indices`.)"""
    return (size if rows.stop is None else min(rows.stop, size)) - (rows.start or 0)


def _attribute(module: nn.Module, dotted: str) -> Tensor | None:
    value: Any = module
    if "." in dotted:  # hooks ask at every call, and nearly all names are plain
        for name in dotted.split("."):
            value = getattr(value, name, None)
    else:
        value = getattr(module, dotted, None)
    return value if isinstance(value, Tensor) else None
