"""The library attached to the model of a family, beside what plain hooks see of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from torch import Tensor, nn

import explicit_dropout as xd
import families
from family import truth as known
from family.table import Family
from family.truth import Call, Truth

FAMILIES = families.all_families()
LAWS = {
    "paper": xd.paper(0.3),
    "bernoulli": xd.bernoulli(0.3),
    "inverted": xd.inverted(0.3),
    "gaussian": xd.gaussian(0.4),
}


@cache
def model_of(name: str) -> nn.Module:
    return known.build(FAMILIES[name])


@cache
def seen(name: str) -> dict[str, Call]:
    args, kwargs = FAMILIES[name].call()
    return known.record(model_of(name), args, kwargs)


def truths(name: str) -> Iterator[Truth]:
    for spec in FAMILIES[name].attention:
        yield known.truth(model_of(name), FAMILIES[name], spec, seen(name))


def run(name: str, noise: xd.Noise, *components: str) -> tuple[xd.ExplicitDropout, Tensor]:
    model, (args, kwargs) = model_of(name), FAMILIES[name].call()
    with xd.ExplicitDropout(model, noise, **dict.fromkeys(components, 1.0)) as reg:
        model(*args, **kwargs)
        return reg, reg()


def supported(family: Family, component: str, law: str) -> bool:
    laws = family.laws(component)
    return laws == "every law" or (laws == "paper" and law == "paper")
