"""Every dropout that a model draws while it runs, seen where torch is called, whatever module or function calls it.

Inside a training forward pass of the whole model each call of a dropout function returns its input, and is noted as a
`Draw` together with what the model does with the result. So the dice are off everywhere, also where they are no modules
(`F.dropout`, `dropout_p` of fused attention), and no rule for a model family is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from explicit_dropout.errors import CollectionError, UnsupportedSiteError

Kind = Literal["linear", "attention_weights", "hidden", "drop_path"]
Others = Literal["refuse", "keep"]

DROPOUTS = (F.dropout, torch.dropout)
TIED = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
"""Whole channels at once: what they are tied to does not show in the energy of the tensor itself."""
ATTENTION = F.scaled_dot_product_attention
MULTIHEAD = F.multi_head_attention_forward
PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
SAME = (
    Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.to, Tensor.type_as, Tensor.flatten, Tensor.unflatten,
    Tensor.float, Tensor.half, Tensor.bfloat16, torch.reshape, torch.flatten, torch.unflatten,
)  # fmt: skip
"""After which a tensor still holds the same rows, as long as they are as wide."""
RANDOM = (
    torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm,
    torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, torch.rrelu, torch.alpha_dropout,
    Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_,
    Tensor.cauchy_, Tensor.log_normal_, Tensor.geometric_, Tensor.multinomial, torch.dropout_, torch.alpha_dropout_,
    torch.native_dropout, torch.feature_alpha_dropout, F.alpha_dropout, F.feature_alpha_dropout, F.gumbel_softmax,
)  # fmt: skip
"""Other dice, which have no twin here."""

IN_PLACE = frozenset(
    getattr(Tensor, name)
    for name in dir(Tensor)
    if (name.endswith("_") and not name.startswith("_")) or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__")
)


@dataclass(eq=False)
class Use:
    """One thing that a model does with a dropped tensor: a linear map of it, or anything else (None)."""

    kind: Kind | None
    x: Tensor | None = None
    other: Tensor | None = None
    """The weight of a linear layer, or the values that attention weights are multiplied with."""


@dataclass(eq=False)
class Draw:
    """A call of a dropout function: where, at which rate, and what it would have dropped from."""

    path: str
    rate: float
    x: Tensor
    kind: Kind | None = None
    """What it is whatever the model does with the result; None where that decides."""
    rescaled: bool = True
    """Whether what is left is divided by 1 − p."""
    uses: list[Use] = field(default_factory=list)


@dataclass(eq=False)
class Weighed:
    """A call of fused attention that would have dropped from its weights."""

    path: str
    rate: float
    call: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None]]
    """Queries, keys and values, (*batch, heads, token, width); what is added to scores, or may be seen; whether causal
    order is asked for; the scale."""


class Interception(TorchFunctionMode):
    """Turns dropout off while it is entered, and notes the draws of a training pass."""

    def __init__(self, model: nn.Module, others: Others) -> None:
        super().__init__()
        self.others = others
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.collecting = False
        self.places: list[str] = []
        """The parts of the model that are running, outermost first, as far as hooks on them say: for compiled code."""
        self.draws: list[Draw | Weighed] = []
        self.dropped: list[tuple[Tensor, Draw]] = []
        """What dropout functions have returned, and the same rows in another shape."""
        self.known: dict[int, Draw] = {}
        """The same by id, of those that no compiled code has made."""

    def enter(self, collecting: bool) -> None:
        self.collecting, self.places, self.draws, self.dropped, self.known = collecting, [], [], [], {}
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def take(self) -> list[Draw | Weighed]:
        draws, self.collecting, self.draws, self.dropped, self.known = self.draws, False, [], [], {}
        return draws

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
        if self.dropped:
            return self._using(func, args, given)
        return func(*args, **given)

    # ------------------------------------------------------------------------------------------ dice

    def _dropout(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = _bound(func, args, kwargs)
        x, rate = call["input"], float(call["p"])
        training = call["training"] if "training" in call else call["train"]
        path = self.here() if training and rate else None
        if path is None:
            return self._using(func, args, kwargs)
        self._note_uses(args, kwargs, None)
        passed = x.view_as(x)
        if self.collecting:
            self._check(path, rate)
            draw = Draw(path, rate, x, "hidden" if func in TIED else None)
            self.draws.append(draw)
            self._mark(passed, draw)
        return passed

    def _attention(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = _bound(ATTENTION, args, kwargs)
        self._note_uses(args, kwargs, None)
        rate = float(call["dropout_p"])
        path = self.here() if rate else None
        if path is None:
            return ATTENTION(*args, **kwargs)
        if self.collecting:
            self._check(path, rate)
            q, k, v = call["query"], call["key"], call["value"]

            def seen() -> Any:
                shared = q.shape[-3] // k.shape[-3] if call["enable_gqa"] else 1
                keys, values = (t if shared == 1 else t.repeat_interleave(shared, -3) for t in (k, v))
                return q, keys, values, call["attn_mask"], call["is_causal"], call["scale"]

            self.draws.append(Weighed(path, rate, seen))
        return ATTENTION(**{**call, "dropout_p": 0.0})

    def _multihead(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = _bound(MULTIHEAD, args, kwargs)
        self._note_uses(args, kwargs, None)
        rate = float(call["dropout_p"])
        path = self.here() if rate and call["training"] else None
        if path is None:
            return MULTIHEAD(*args, **kwargs)
        if self.collecting:
            self._check(path, rate)
            if call["bias_k"] is not None or call["add_zero_attn"] or call["static_k"] is not None:
                raise UnsupportedSiteError(
                    f"{path}: bias_k, add_zero_attn and static keys append to what is attended, and the twin of its "
                    "dropout does not know them. Build the module without them, or with dropout=0."
                )
            self.draws.append(Weighed(path, rate, lambda: _multihead_parts(call)))
        return MULTIHEAD(**{**call, "dropout_p": 0.0})

    def _check(self, path: str, rate: float) -> None:
        if rate >= 1:
            raise UnsupportedSiteError(f"{path}: dropout at rate {rate:g} leaves nothing, and has no expectation.")
        if not torch.is_grad_enabled():
            raise CollectionError(
                f"{path} runs without gradients inside a training forward pass, so its penalty would have none. "
                "Reentrant activation checkpointing does that, and checkpointing is not understood here at all."
            )
        if not torch.compiler.is_compiling() and _is_checkpointing():
            raise UnsupportedSiteError(
                f"{path}: activation checkpointing would run it again in the backward pass, with its dice. Switch "
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
        frame = inspect.currentframe()
        while frame is not None:
            path: str | None = self.paths.get(id(frame.f_locals.get("self")))
            if path is not None and frame.f_code.co_name != "__torch_function__":
                return path
            frame = frame.f_back
        return None

    # ------------------------------------------------------------------------------------------ what is done with it

    def _using(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and note it if it makes something of a dropped tensor."""
        own = [draw for draw in map(self._of, _tensors(args, kwargs)) if draw is not None]
        if not own:
            return func(*args, **kwargs)
        if func in IN_PLACE:
            for draw in own:  # what was dropped from is gone after this
                draw.x = draw.x.clone()
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and func in SAME and result.shape[-1:] == own[0].x.shape[-1:]:
            self._mark(result, own[0])
        elif next(_tensors((result,), {}), None) is not None:
            self._note_uses(args, kwargs, func)
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
    if func is torch.addmm and item is args[1]:
        return Use("linear", item, args[2].mT)
    if func in PRODUCTS and item is args[0] and len(args) > 1 and isinstance(args[1], Tensor):
        if args[1].ndim == 2:
            return Use("linear", item, args[1].mT)
        if item.ndim == args[1].ndim in (3, 4):
            return Use("attention_weights", item, args[1])
    return Use(None)


_SIGNATURES: dict[Any, tuple[tuple[str, ...], dict[str, Any]]] = {
    ATTENTION: (
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
    ),
    F.linear: (("input", "weight", "bias"), {"bias": None}),
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
    """The tensors among arguments, those in lists included."""
    for item in (*args, *kwargs.values()):
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from (inner for inner in item if isinstance(inner, Tensor))


def _multihead_parts(call: Mapping[str, Any]) -> Any:
    """Queries, keys and values of nn.MultiheadAttention by head, and its masks as one that is added or boolean."""
    query, key, value = (t.unsqueeze(1) if t.ndim == 2 else t for t in (call["query"], call["key"], call["value"]))
    if call["use_separate_proj_weight"]:
        weights = call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"]
    else:
        weights = call["in_proj_weight"].chunk(3)
    biases = (None, None, None) if call["in_proj_bias"] is None else call["in_proj_bias"].chunk(3)
    heads = call["num_heads"]
    parts = [
        torch.unflatten(F.linear(x, weight, bias), -1, (heads, -1)).permute(1, 2, 0, 3)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]
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


def dice_thrown(device: torch.device) -> tuple[Tensor, ...]:
    """Where torch's generators stand: other than before, once random numbers were drawn of them."""
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(device))
    return tuple(states)


def _is_checkpointing() -> bool:
    """Whether what is saved for the backward pass goes to a hook of activation checkpointing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")
