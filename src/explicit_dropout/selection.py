"""Which sites of a model are regularised, each with its law and its strength, and whose dice stop meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from explicit_dropout.errors import InputError
from explicit_dropout.finding import find_layers
from explicit_dropout.noise import Noise
from explicit_dropout.refusals import check_components, chosen_layers, laws, refuse_second, unmatched
from explicit_dropout.sites import Component, Dropout, Layer, Site, sites_of
from explicit_dropout.stochastic import AttentionTreatment
from explicit_dropout.strengths import Schedule, Strength, by_layer


@dataclass(frozen=True)
class Selection:
    """All layers of a model, the chosen sites by layer, the schedule of each by its name, and each component's law."""

    layers: list[Layer]
    places: list[tuple[Layer, list[Site]]]
    schedules: dict[str, Schedule]
    laws: dict[Component, Noise]

    @property
    def sites(self) -> list[Site]:
        return [site for _, sites in self.places for site in sites]


def select(
    model: nn.Module,
    noise: Noise | Mapping[str, Noise],
    strengths: Mapping[Component, Strength | None],
    layers: int | Iterable[int] | None,
) -> Selection:
    """The sites of a model that has no regulariser yet whose strength is ever above 0. Strengths may be None: off."""
    given = {component: strength for component, strength in strengths.items() if strength is not None}
    if not given:
        raise InputError("strengths", f"given for at least one of {', '.join(strengths)}", "none")
    by_component = laws(noise, given)
    refuse_second(model)
    found = find_layers(model)
    if not found:
        raise unmatched(model)
    check_components(model, found, given)
    number = found[-1].index + 1
    chosen = chosen_layers(layers, number)
    of_layers = {component: by_layer(component, strength, number) for component, strength in given.items()}
    places: list[tuple[Layer, list[Site]]] = []
    schedules: dict[str, Schedule] = {}
    for layer in found:
        wanted = {
            site: of_layers[site.component][layer.index]
            for site in sites_of(layer)
            if site.component in of_layers and layer.index in chosen
        }
        active = [site for site, schedule in wanted.items() if not schedule.is_off]
        schedules |= {site.name: wanted[site] for site in active}
        if active:
            places.append((layer, active))
    return Selection(found, places, schedules, by_component)


class Silenced(list[tuple[Dropout, float]]):
    """Stochastic dropout that is switched off for a while, and the rates it has had."""

    def switch_off(self, dropout: Dropout) -> None:
        rate = getattr(dropout.module, dropout.name, 0.0)
        if rate:
            self.append((dropout, rate))
            setattr(dropout.module, dropout.name, 0.0)

    def switch_off_at(self, sites: Iterable[Site]) -> None:
        """All that the layers of these sites hold."""
        for site in sites:
            for dropout in site.source.described.dropouts:
                self.switch_off(dropout)

    def switch_on(self) -> None:
        for dropout, rate in self:
            setattr(dropout.module, dropout.name, rate)
        self.clear()

    def lines(self, model: nn.Module) -> list[str]:
        """What to say of it in a summary."""
        if not self:
            return []
        paths = {module: path for path, module in model.named_modules()}
        places = [f"{paths.get(dropout.module) or '(model)'}.{dropout.name} = {rate:g}" for dropout, rate in self]
        more = ", …" if len(places) > 4 else ""
        return [
            f"Stochastic dropout switched off at {len(places)} places until remove(): {', '.join(places[:4])}{more}"
        ]


RATES = ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "layerdrop", "dropout_p")
"""Names of rates that modules keep for functions of dropout, as those of transformers do."""


def still_random(model: nn.Module) -> list[str]:
    """What to say in a summary of dropout that no penalty has switched off."""
    rates: dict[str, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd | AttentionTreatment):
            rates[path] = module.p
        elif isinstance(module, nn.MultiheadAttention):
            rates[path] = module.dropout
        elif is_drop_path(module):
            rates[path] = (drop_path_rate(module) or ("", 0.0))[1]
        else:  # of functions
            rates |= {f"{path}.{name}": vars(module)[name] for name in RATES if type(vars(module).get(name)) is float}
    places = [f"{path or '(model)'} ({rate:g})" for path, rate in rates.items() if rate]
    if not places:
        return []
    more = f", … ({len(places)} places)" if len(places) > 4 else ""
    return [f"Still random: {', '.join(places[:4])}{more}; convert_dropout replaces such dropout by penalties, too."]


def is_drop_path(module: nn.Module) -> bool:
    """Whether a module is one of stochastic depth, by the name of its class."""
    return type(module).__name__.endswith(("DropPath", "StochasticDepth"))


def drop_path_rate(module: nn.Module) -> tuple[str, float] | None:
    """The rate of a module of stochastic depth, and the name it is kept under; None if it is none, or draws nothing."""
    if not is_drop_path(module):
        return None
    for name in ("drop_prob", "p"):
        rate = getattr(module, name, None)
        if isinstance(rate, float | int):
            return (name, float(rate)) if rate else None
    return None
