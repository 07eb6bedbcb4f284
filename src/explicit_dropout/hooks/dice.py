"""Every dropout that a model draws while it runs, seen where torch is called, whatever module or function calls it.

Inside a training forward pass of the whole model each call of a dropout function returns its input, and is noted as a
`Draw` together with what the model does with the result. So the dice are off everywhere, also where they are no modules
(`F.dropout`, `dropout_p` of fused attention), and no rule for a model family is needed.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from types import FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.functional.batch import without_autocast
from explicit_dropout.kernels.plain import wide

Kind = Literal["linear", "attention_weights", "hidden", "drop_path"]
Others = Literal["refuse", "keep"]

DROPOUTS = (F.dropout, torch.dropout)
TIED = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
"""Whole channels at once: what they are tied to does not show in the energy of the tensor itself."""
ATTENTION = F.scaled_dot_product_attention
MULTIHEAD = F.multi_head_attention_forward
PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
SAME = (
    Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.to, Tensor.type_as, Tensor.flatten, Tensor.unflatten,
    Tensor.float, Tensor.half, Tensor.bfloat16, torch.reshape, torch.flatten, torch.unflatten,
)  # fmt: skip
"""After which a tensor still holds the same rows, as long as they are as wide."""
WEIGHING = (*SAME, Tensor.masked_fill, torch.masked_fill, Tensor.mul, torch.mul, Tensor.__mul__, torch.nan_to_num)
"""After which attention weights are still some."""
RANDOM = (
    torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm,
    torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, torch.rrelu, torch.alpha_dropout,
    Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_,
    Tensor.cauchy_, Tensor.log_normal_, Tensor.geometric_, Tensor.multinomial, torch.dropout_, torch.alpha_dropout_,
    torch.native_dropout, torch.feature_alpha_dropout, F.alpha_dropout, F.feature_alpha_dropout, F.gumbel_softmax,
)  # fmt: skip
"""Other dice, which have no twin here."""


@dataclass(eq=False)
class Use:
    """One thing that a model does with a dropped tensor: a linear map of it, or anything else (None)."""

    kind: Kind | None
    x: Tensor | None = None
    other: Tensor | None = None
    """The weight of a linear layer, or the values that attention weights are multiplied with."""
    versions: Versions = ()

    def __post_init__(self) -> None:
        self.versions = versions(self.x, self.other)

    @property
    def changed(self) -> bool:
        """Whether the model has changed one of them in place since."""
        return changed(self.versions, self.x, self.other)


@dataclass(eq=False)
class Draw:
    """A call of a dropout function: where, at which rate, what it would have dropped from, and what it returned."""

    path: str
    rate: float
    x: Tensor
    passed: Tensor
    kind: Kind | None = None
    """What it is whatever the model does with the result; None where that decides."""
    rescaled: bool = True
    """Whether what is left is divided by 1 − p."""
    axis: int | None = None
    """That of the width, where the function tells."""
    weights: bool = False
    """Whether it is attention weights that are dropped from: a softmax."""
    uses: list[Use] = field(default_factory=list)
    versions: Versions = ()

    def __post_init__(self) -> None:
        self.versions = versions(self.x, self.passed)

    @classmethod
    def of(cls, path: str, rate: float, x: Tensor, *, in_place: bool = False, **facts: Any) -> Draw:
        """A draw whose result is a tensor of its own, as that of dropout is, unless it is asked to be none."""
        kept = x.clone() if in_place or torch.compiler.is_compiling() else x  # versions cannot be read there
        return cls(path, rate, kept, x if in_place else x.clone(), **facts)

    @property
    def untouched(self) -> bool:
        """Whether the model has left the result as it was."""
        return not changed(self.versions[1:], self.passed)

    def clean(self) -> Tensor:
        """What would have been dropped from, from whichever tensor still holds it."""
        if self.untouched and self.versions[1] is not None:
            return self.passed
        if not changed(self.versions[:1], self.x):
            return self.x
        raise UnsupportedSiteError(
            f"{self.path or 'the model'}: the model changes both the input and the result of this dropout in place, so "
            "what would have been dropped from is lost. Let it write a new tensor instead."
        )


Versions = tuple[int | None, ...]
"""How often tensors were changed in place; None where that cannot be known, in code that was compiled."""


def versions(*tensors: Tensor | None) -> Versions:
    compiling = torch.compiler.is_compiling()
    return tuple(None if compiling or tensor is None else tensor._version for tensor in tensors)


def changed(before: Versions, *tensors: Tensor | None) -> bool:
    """Whether one of the tensors was changed in place since, as far as that can be known."""
    pairs = zip(before, versions(*tensors), strict=True)
    return any(old is not None and new is not None and old != new for old, new in pairs)


@dataclass(eq=False)
class Weighed:
    """A call of fused attention that would have dropped from its weights."""

    path: str
    rate: float
    call: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None]]
    """Queries, keys and values, (*batch, heads, token, width); what is added to scores, or may be seen; whether causal
    order is asked for; the scale."""
    tensors: tuple[Tensor, ...]
    """What these are made of."""
    versions: Versions = ()

    def __post_init__(self) -> None:
        self.versions = versions(*self.tensors)

    @property
    def changed(self) -> bool:
        return changed(self.versions, *self.tensors)


class Interception(TorchFunctionMode):
    """Turns dropout off while it is entered, and notes the draws of a training pass."""

    def __init__(self, model: nn.Module, others: Others) -> None:
        super().__init__()
        self.others = others
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.rates = {rate for module in model.modules() for rate in vars(module).values() if type(rate) is float}
        """Numbers that modules have, rates of dropout among them: a compiler may take those for variables."""
        self.collecting = False
        self.places: list[str] = []
        """The parts of the model that are running, outermost first, as far as hooks on them say: for compiled code."""
        self.draws: list[Draw | Weighed] = []
        self.dropped: list[tuple[Tensor, Draw]] = []
        """What dropout functions have returned, and the same rows in another shape."""
        self.known: dict[int, Draw] = {}
        """The same by id, of those that no compiled code has made."""
        self.weights: list[Tensor] = []
        """What a softmax has made, as it is or masked."""

    def enter(self, collecting: bool) -> None:
        self._clear()
        self.collecting, self.draws = collecting, []
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        if torch.compiler.is_compiling() or _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def take(self, output: object) -> list[Draw | Weighed]:
        """The draws of the pass, now that it is over: what it returns is used by somebody.

        Attention weights are returned to be looked at (output_attentions): what acts is their product with values.
        """
        for item in _tensors((output,), {}) if self.dropped else ():
            draw = self._of(item)
            if draw is not None and not draw.weights:
                draw.uses.append(Use(None))
        draws, self.collecting, self.draws = self.draws, False, []
        self._clear()
        return draws

    def _clear(self) -> None:
        self.places, self.dropped, self.known, self.weights = [], [], {}, []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in DROPOUTS or func in TIED:
            return self._dropout(func, args, given)
        if func is ATTENTION:
            return self._attention(args, given)
        if func is MULTIHEAD:
            return self._multihead(args, given)
        if func in RANDOM and self.others == "refuse":
            self._refuse(func, args, given)
        result = self._using(func, args, given) if self.dropped else func(*args, **given)
        if self.collecting and (func in SOFTMAX or (func in WEIGHING and args and self._is_weights(args[0]))):
            self.weights.append(result)
        return result

    def _is_weights(self, tensor: object) -> bool:
        return any(tensor is found for found in self.weights[-8:])

    # ------------------------------------------------------------------------------------------ dice

    def _dropout(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = _bound(func, args, kwargs)
        x, rate = call["input"], self._rate(call["p"])
        training = call["training"] if "training" in call else call["train"]
        path = self.here() if training and rate else None
        if path is None:
            return self._using(func, args, kwargs)
        self._note_uses(args, kwargs, None)
        in_place = bool(call.get("inplace", False))
        if not self._counts():
            return x if in_place else x.clone()
        self._check(path, rate)
        tied = {"kind": "hidden", "axis": _channels(func, x)} if func in TIED else {}
        draw = Draw.of(path, rate, x, in_place=in_place, weights=self._is_weights(x), **tied)
        self.draws.append(draw)
        self._mark(draw.passed, draw)
        return draw.passed

    def _rate(self, given: float) -> float:
        """A rate as a plain number, also where code is compiled for any value of it."""
        if torch.compiler.is_compiling():
            for rate in self.rates:
                if given == rate:
                    return rate
        return float(given)

    def _attention(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = _bound(ATTENTION, args, kwargs)
        self._note_uses(args, kwargs, None)
        rate = self._rate(call["dropout_p"])
        path = self.here() if rate else None
        if path is None:
            return ATTENTION(*args, **kwargs)
        if self._counts():
            self._check(path, rate)
            q, k, v = call["query"], call["key"], call["value"]

            def seen() -> Any:
                shared = q.shape[-3] // k.shape[-3] if call["enable_gqa"] else 1
                keys, values = (t if shared == 1 else t.repeat_interleave(shared, -3) for t in (k, v))
                return q, keys, values, call["attn_mask"], call["is_causal"], call["scale"]

            self.draws.append(Weighed(path, rate, seen, tuple(_tensors((), call))))
        return ATTENTION(**{**call, "dropout_p": 0.0})

    def _multihead(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = _bound(MULTIHEAD, args, kwargs)
        self._note_uses(args, kwargs, None)
        rate = self._rate(call["dropout_p"])
        path = self.here() if rate and call["training"] else None
        if path is None:
            return MULTIHEAD(*args, **kwargs)
        if self._counts():
            self._check(path, rate)
            if call["bias_k"] is not None or call["add_zero_attn"] or call["static_k"] is not None:
                raise UnsupportedSiteError(
                    f"{path}: bias_k, add_zero_attn and static keys append to what is attended, and the twin of its "
                    "dropout does not know them. Build the module without them, or with dropout=0."
                )
            self.draws.append(Weighed(path, rate, lambda: _multihead_parts(call), tuple(_tensors((), call))))
        return MULTIHEAD(**{**call, "dropout_p": 0.0})

    def _counts(self) -> bool:
        """Whether a draw has a twin: not where the model itself runs a part without gradients, such as a teacher."""
        return self.collecting and (torch.is_grad_enabled() or _is_checkpointing())

    def _check(self, path: str, rate: float) -> None:
        where = path or "the model"
        if rate >= 1:
            raise UnsupportedSiteError(f"{where}: dropout at rate {rate:g} leaves nothing, and has no expectation.")
        if _is_checkpointing():
            raise UnsupportedSiteError(
                f"{where}: activation checkpointing would run it again in the backward pass, with its dice. Switch "
                "checkpointing off, or build the model with rate 0 and attach xd.ExplicitDropout, which knows it."
            )

    def _refuse(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = getattr(func, "__name__", str(func))
        call = kwargs if "training" in kwargs else dict(zip(("input", "p", "training"), args, strict=False))
        if "dropout" in name and call.get("training") is False:
            return
        path = self.here()
        if path is None:
            return
        raise UnsupportedSiteError(
            f"{path or 'the model'} draws random numbers by {name}, which has no deterministic twin here. If it is "
            "meant to stay random (or is drawn for nothing, as for LayerDrop at rate 0): others='keep'."
        )

    def here(self) -> str | None:
        """The path of the innermost module of the model that is running; None if none is: a pass was interrupted.

        Compiled code has no frames to look at, and knows the innermost model or layer of torch.nn alone.
        """
        if torch.compiler.is_compiling():
            return self.places[-1] if self.places else ""
        frame: FrameType | None = sys._getframe(1)  # not this one: what it holds would hold it, as garbage does
        while frame is not None:
            path: str | None = self.paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
            frame = frame.f_back
        return None

    # ------------------------------------------------------------------------------------------ what is done with it

    def _using(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and note it if it makes something of a dropped tensor."""
        if not any(self._of(item) is not None for item in _tensors(args, kwargs)):
            return func(*args, **kwargs)
        first = self._of(args[0]) if args and isinstance(args[0], Tensor) else None
        result = func(*args, **kwargs)
        if first is not None and func in SAME and result.shape[-1:] == args[0].shape[-1:]:
            self._mark(result, first)
        elif func is Tensor.__setitem__ or any(made.requires_grad for made in _tensors((result,), {})):
            self._note_uses(args, kwargs, func)  # and not what only looks at it
        return result

    def _note_uses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], func: Any) -> None:
        for item in _tensors(args, kwargs):
            draw = self._of(item)
            if draw is not None:
                draw.uses.append(_use(item, func, args, kwargs))

    def _mark(self, tensor: Tensor, draw: Draw) -> None:
        self.dropped.append((tensor, draw))  # which keeps it, so that its id stays
        if not torch.compiler.is_compiling():
            self.known[id(tensor)] = draw

    def _of(self, item: Tensor) -> Draw | None:
        """The draw that a tensor is the result of."""
        if not torch.compiler.is_compiling():
            found = self.known.get(id(item))
            if found is not None or len(self.known) == len(self.dropped):
                return found
        for tensor, draw in self.dropped:
            if tensor is item:
                return draw
        return None


def _use(item: Tensor, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Use:
    """What a function does with a dropped tensor."""
    if func is F.linear:
        call = _bound(F.linear, args, kwargs)
        return Use("linear", item, call["weight"]) if item is call["input"] else Use(None)
    if func is torch.addmm:
        call = _bound(torch.addmm, args, kwargs)
        return Use("linear", item, call["mat2"].mT * call["alpha"]) if item is call["mat1"] else Use(None)
    if func in PRODUCTS:
        call = _bound(torch.matmul, args, kwargs)
        other = call.get("other", call.get("mat2"))
        if item is call["input"] and isinstance(other, Tensor) and other is not item:
            return Use("linear", item, other.mT) if other.ndim == 2 else _product(item, other)
    if func is torch.einsum:
        return _einsum(item, *args)
    return Use(None)


def _product(weights: Tensor, values: Tensor) -> Use:
    return Use("attention_weights", weights, values) if weights.ndim == values.ndim > 2 else Use(None)


def _einsum(item: Tensor, equation: object, *operands: Any) -> Use:
    """A sum over one index that turns rows of weights into rows of values: bhij,bhjd->bhid, in any order of axes."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return Use(None)
    inputs, made = equation.replace(" ", "").split("->")
    names = inputs.split(",")
    first = 0 if operands[0] is item else 1
    own, other = names[first], names[1 - first]
    together = [name for name in own if name in other and name in made]
    summed = [name for name in own if name in other and name not in made]
    rows = [name for name in own if name not in other and name in made]
    wide = [name for name in other if name not in own and name in made]
    whole = len(summed) == len(wide) == 1 and len(own) == len(together) + len(rows) + 1 == len(other) + len(rows) - 1
    if not whole or len(rows) not in (1, 2) or operands[0] is operands[1]:
        return Use(None)
    weights = item.permute([own.index(name) for name in (*together, *rows, *summed)])
    values = operands[1 - first].permute([other.index(name) for name in (*together, *summed, *wide)])
    return _product(weights, values if len(rows) == 1 else values.unsqueeze(-3))  # one head of values for all of them


def _channels(func: Any, x: Tensor) -> int:
    """The axis of the channels that a function drops as a whole."""
    alone = {F.dropout1d: 2, F.dropout3d: 4}  # axes of a sample without a batch
    return 0 if x.ndim == alone.get(func) else 1


_SIGNATURES: dict[Any, tuple[tuple[str, ...], dict[str, Any]]] = {
    ATTENTION: (
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
    ),
    F.linear: (("input", "weight", "bias"), {"bias": None}),
    torch.matmul: (("input", "other"), {}),
    torch.addmm: (("input", "mat1", "mat2"), {"alpha": 1}),
    torch.dropout: (("input", "p", "train"), {}),
    torch.feature_dropout: (("input", "p", "train"), {}),
}
for _function in (*DROPOUTS, *TIED, MULTIHEAD):
    if _function not in _SIGNATURES:
        _parameters = inspect.signature(_function).parameters
        _SIGNATURES[_function] = (
            tuple(_parameters),
            {name: one.default for name, one in _parameters.items() if one.default is not one.empty},
        )


def _bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    names, defaults = _SIGNATURES[func]
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists and mappings included."""
    for item in (*args, *kwargs.values()):
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Mapping):
            yield from _tensors(tuple(item.values()), {})
        elif isinstance(item, list | tuple):
            yield from _tensors(tuple(item), {})
        elif is_dataclass(item) and not isinstance(item, type):
            yield from _tensors(tuple(vars(item).values()), {})


def _multihead_parts(call: Mapping[str, Any]) -> Any:
    """Queries, keys and values of nn.MultiheadAttention by head, and its masks as one that is added or boolean."""
    query, key, value = (t.unsqueeze(1) if t.ndim == 2 else t for t in (call["query"], call["key"], call["value"]))
    if call["use_separate_proj_weight"]:
        weights = call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"]
    else:
        weights = call["in_proj_weight"].chunk(3)
    biases = (None, None, None) if call["in_proj_bias"] is None else call["in_proj_bias"].chunk(3)
    heads = call["num_heads"]
    parts = []
    with without_autocast(query):  # by now that of the model's own call may be over
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
            made = F.linear(wide(x), wide(weight), None if bias is None else wide(bias))
            parts.append(torch.unflatten(made, -1, (heads, -1)).permute(1, 2, 0, 3))
    mask, padding = call["attn_mask"], call["key_padding_mask"]
    if mask is not None:
        mask = torch.unflatten(mask, 0, (-1, heads)) if mask.ndim == 3 else mask
        mask = ~mask if mask.dtype == torch.bool else mask
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        padding = ~padding if padding.dtype == torch.bool else padding
    both = mask is not None and padding is not None
    return *parts, _joined(mask, padding) if both else mask if padding is None else padding, False, None


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Two masks as one: both boolean, or added."""
    if first.dtype == second.dtype == torch.bool:
        return first & second
    return _added(first) + _added(second)


def _added(mask: Tensor) -> Tensor:
    return (
        torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
    )


def dice_thrown(device: torch.device) -> tuple[Any, ...]:
    """Where generators stand: those of torch, of Python and, where it is used, of numpy."""
    states: list[Any] = [torch.get_rng_state(), hash(random.getstate())]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(device))
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        _, words, position, *_ = numbers.get_state()
        states += [words.tobytes(), position]
    return tuple(states)


def same_states(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn in between."""
    pairs = zip(before, after, strict=False)  # while a graph is captured there is one less
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _is_checkpointing() -> bool:
    """Whether activation checkpointing runs this, of either kind."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():  # the reentrant kind has no gradients the first time
        return any("checkpoint.py" in code.co_filename and "torch" in code.co_filename for code in _codes())
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")


def _codes() -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


ELEMENTWISE = re.compile(
    r"(Relu|Gelu|Silu|Mish|Hardswish|Hardtanh|Elu|LeakyRelu|Sigmoid|Tanh|Add|Sub|Mul|Div|Clone|ToCopy|Alias|Clamp|"
    r"NativeDropout|ViewAs)Backward"
)
CHANNELS_SECOND = re.compile(
    r"(Convolution|BatchNorm|GroupNorm|InstanceNorm|Pool\dD?|Upsample\w*)Backward", re.IGNORECASE
)
WIDTH_LAST = re.compile(r"(Addmm|Mm|Bmm|LayerNorm|Embedding|Linear|RmsNorm)Backward", re.IGNORECASE)


def axis_by_history(x: Tensor, most: int = 24) -> int | None:
    """Which axis of a tensor is its width, by the layer that made it; None if none of a known kind did."""
    return _axis(x.grad_fn, x.ndim, most)


def _axis(node: Any, ndim: int, most: int) -> int | None:
    if node is None or not most:
        return None
    name = node.name()
    if CHANNELS_SECOND.search(name):
        return 1
    if WIDTH_LAST.search(name):
        return ndim - 1
    if "Permute" in name or name.startswith("Transpose"):
        order = list(range(ndim))
        if "Permute" in name:
            order = [_signed(dim) % ndim for dim in node._saved_dims]
        else:
            first, second = (_signed(dim) % ndim for dim in (node._saved_dim0, node._saved_dim1))
            order[first], order[second] = order[second], order[first]
        before = _axis(node.next_functions[0][0], ndim, most - 1)
        return None if before is None or len(order) != ndim else order.index(before)
    if "View" in name and "ViewAs" not in name:  # how a linear layer of many axes ends
        before = len(node._saved_self_sym_sizes)
        return ndim - 1 if _axis(node.next_functions[0][0], before, most - 1) == before - 1 else None
    if not ELEMENTWISE.search(name):
        return None
    found = {_axis(following, ndim, most - 1) for following, _ in node.next_functions if following is not None} - {None}
    return found.pop() if len(found) == 1 else None


def _signed(dim: int) -> int:
    """A dimension as autograd keeps it: negative ones as very large numbers."""
    return dim - 2**64 if dim > 2**63 else dim
