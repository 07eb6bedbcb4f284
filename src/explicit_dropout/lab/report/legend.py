"""Rows in words: what a treatment does, said from the treatment itself.

none+implicit                    nn.Dropout in feed-forward layers, p = 0.2
explicit_v+explicit [inverted]   penalty on values and on feed-forward layers, exact moments of nn.Dropout, p = 0.2
"""

from __future__ import annotations

from explicit_dropout.lab.config import Treatment
from explicit_dropout.lab.statistics import Analysis, Row

SITES = {"q": "queries", "k": "keys", "qk": "queries and keys together", "v": "values", "av": "attended values"}
PENALTIES = {"explicit": "penalty", "arora": "Arora et al.'s penalty", "loss": "loss-level penalty"}
LAWS = {
    "paper": "the paper's moments",
    "bernoulli": "exact moments of dropout that does not rescale",
    "inverted": "exact moments of nn.Dropout",
}
DRAWN = {
    "implicit_v": "nn.Dropout on the input of value projections",
    "dropout": "dropout of attention weights",
    "drop_attention": "DropAttention by weight",
    "drop_attention_column": "DropAttention by key",
    "drop_key": "DropKey in attention",
    "drop_head": "DropHead in attention",
    "implicit": "nn.Dropout in feed-forward layers",
    "implicit_inputs": "nn.Dropout on the inputs of feed-forward layers",
}
WHOLE = {"activation_l2": "L2 of all that residual branches add", "weight_decay": "λ as weight decay of the optimiser"}
"""Controls of the whole model, which stand in the place of a feed-forward treatment."""

CHOSEN = " chosen on validation data"


def legend(analysis: Analysis) -> list[tuple[str, str]]:
    """Every row of a table, and what it is."""
    return [(row.name, of_row(row)) for row in analysis.rows]


def of_row(row: Row) -> str:
    """What all configurations of a row do: those of a row that pools several may differ in more than λ."""
    tried = [parts(configuration.run.treatment) for configuration in row.configurations]
    shared = {name: value for name, value in tried[0].items() if all(name in other for other in tried)}
    alike = {name for name, value in shared.items() if all(other[name] == value for other in tried)}
    said = [name + (value if name in alike else CHOSEN) for name, value in shared.items()]
    if any(len(other) > len(shared) for other in tried):
        said.append("the rest" + CHOSEN)
    return ", ".join(said)


def parts(treatment: Treatment) -> dict[str, str]:
    """What a treatment does: names of its parts, and numbers where they have some. How strongly (λ) is none of them."""
    acts = [*_penalties(treatment), *(DRAWN[name] for name in _names(treatment) if name in DRAWN)]
    sizes = {
        "p": (treatment.rate, bool(acts)),
        "neighbouring keys dropped together": (treatment.span, treatment.span > 1),
        "drop path": (treatment.drop_path, treatment.drop_path > 0),
        "extra nn.Dropout in feed-forward layers": (treatment.extra_dropout, treatment.extra_dropout > 0),
    }
    facts = {
        LAWS[treatment.law]: treatment.is_explicit,
        WHOLE.get(treatment.feed_forward, ""): treatment.feed_forward in WHOLE,
        "rates falling to 0 over depth": treatment.decreasing,
        "sums over tokens": treatment.has_penalty and treatment.reduction == "sample",
        "the paper's formulas taken literally": treatment.is_explicit and treatment.reading == "paper",
        "each draw replaced by its deterministic twin": treatment.twins,
    }
    said = dict.fromkeys([*acts, *(name for name, applies in facts.items() if applies)], "")
    said |= {name: f" = {size:g}" for name, (size, applies) in sizes.items() if applies}
    return said or {"no dropout and no penalty": ""}


def _names(treatment: Treatment) -> tuple[str, str]:
    return treatment.attention, treatment.feed_forward


def _penalties(treatment: Treatment) -> list[str]:
    """Those of one kind together: penalty on values and on feed-forward layers."""
    places: dict[str, list[str]] = {}
    for name in _names(treatment):
        kind, _, site = name.partition("_")
        if kind in PENALTIES:
            places.setdefault(PENALTIES[kind], []).append(SITES.get(site, "feed-forward layers"))
    return [f"{penalty} on {' and on '.join(found)}" for penalty, found in places.items()]
