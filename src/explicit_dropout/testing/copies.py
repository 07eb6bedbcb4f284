"""Whether a model with its hooks can be compiled, copied and saved, and says the same then."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from explicit_dropout.errors import ExplicitDropoutError
from explicit_dropout.noise import Noise
from explicit_dropout.regulariser import ExplicitDropout
from explicit_dropout.sites import Site
from explicit_dropout.testing.host import Host
from explicit_dropout.testing.measuring import unit_strengths
from explicit_dropout.testing.repeating import steady
from explicit_dropout.testing.report import close


def _quiet(model: nn.Module) -> nn.Module:
    """A copy without random modules, so that two ways of running it can be compared."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def compiled(host: Host, noise: Noise, sites: Sequence[Site]) -> str | None:
    def in_one_graph(module: nn.Module) -> Any:
        torch.compiler.reset()
        return torch.compile(module, fullgraph=True, backend="aot_eager")

    with torch.random.fork_rng():
        try:
            host.run(in_one_graph(_quiet(host.model).train()))
        except Exception as error:
            return f"the model itself does not compile in one graph ({type(error).__name__})"
        quiet = _quiet(host.model)
        with ExplicitDropout(quiet, noise, padding=None, **unit_strengths(sites)) as reg:
            expected = host.penalty(reg, quiet)
            found = host.penalty(reg, in_one_graph(quiet))
            found.backward()  # type: ignore[no-untyped-call]
    torch.compiler.reset()
    if not close(found.detach() / expected.detach(), 1.0):
        raise ExplicitDropoutError(f"the compiled penalty is {found:.6g}, the eager one {expected:.6g}")
    return None


def copied(host: Host, noise: Noise, sites: Sequence[Site]) -> None:
    _twinned(host, noise, sites, copy.deepcopy, "copied")


def pickled(host: Host, noise: Noise, sites: Sequence[Site]) -> str | None:
    def saved(model: nn.Module) -> Any:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=False)

    try:
        torch.save(host.model, io.BytesIO())
    except Exception as error:
        return f"the model itself cannot be pickled ({type(error).__name__})"
    _twinned(host, noise, sites, saved, "saved")
    return None


def _twinned(host: Host, noise: Noise, sites: Sequence[Site], twin: Callable[[nn.Module], Any], how: str) -> None:
    """A twin of the model can be made while terms are live, runs, and adds nothing to the penalty of the model."""
    with ExplicitDropout(host.model, noise, padding=None, **unit_strengths(sites)) as reg, steady(host.model):
        before = host.penalty(reg)
        host.run()  # live terms are in the collector now
        other = twin(host.model)
        after = reg()
        host.run(other)
        if not close(after.detach() / before.detach(), 1.0):
            raise ExplicitDropoutError(f"the penalty changed from {before:.6g} to {after:.6g} when the model was {how}")
