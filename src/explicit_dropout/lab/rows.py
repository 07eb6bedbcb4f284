"""The rows of the paper's tables by name, and what else is worth a row."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any, get_args

from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import AttentionTreatment, FeedForwardTreatment, LawName, Treatment, has_strength
from explicit_dropout.lab.experiment import Question

STOCHASTIC = ("drop_attention+implicit", "drop_key+implicit", "none+implicit")
PRIOR = ("arora_q+explicit", "arora_k+explicit", "arora_v+explicit", "none+arora")
EXPLICIT = (
    "none+explicit",
    "explicit_q+explicit",
    "explicit_k+explicit",
    "explicit_v+explicit",
    "explicit_av+explicit",
)
PAPER_ROWS = (*STOCHASTIC, *PRIOR, *EXPLICIT)
"""The twelve rows of Tables 1 to 4."""

CONTROLS = ("none+none", "none+activation_l2", "none+weight_decay")
"""No regulariser at all, activation L2, weight decay alone."""

BASELINE = "none+implicit"
EXACT: tuple[LawName, ...] = ("bernoulli", "inverted")
"""Laws that are no approximation."""

COINCIDENCE = (
    "drop_attention and drop_key are one computation where weights are dropped one by one and rows renormalised: with "
    "the same masks their rows coincide."
)
"""A note for every table that has both."""


def treatments(row: str, strengths: Iterable[float], *, law: LawName = "paper", **settings: Any) -> Iterator[Treatment]:
    """The treatments of a row: one for each strength λ; a single one where the row has nothing that λ could be of.

    Args:
        row: <attention treatment>+<feed-forward treatment>, as in the paper's tables.
        settings: other fields of `Treatment`, such as rate or twins; `reduction` is left out where no penalty is
            reduced.
    """
    attention, _, feed_forward = row.partition("+")
    for name, options in ((attention, get_args(AttentionTreatment)), (feed_forward, get_args(FeedForwardTreatment))):
        if name not in options:
            close = difflib.get_close_matches(name, options, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InputError(
                "row", f"<attention>+<feed-forward>, the part {name!r} one of {', '.join(options)}{hint}", row
            )
    base: dict[str, Any] = {"attention": attention, "feed_forward": feed_forward, **settings}
    if attention.startswith("explicit") or feed_forward == "explicit":
        base["law"] = law
    twins = bool(settings.get("twins"))
    averaged = "none" if feed_forward in ("weight_decay", "loss") else feed_forward
    if attention.startswith("loss_") or not has_strength(attention, averaged):
        base.pop("reduction", None)
    for strength in strengths:
        if twins or has_strength(attention, feed_forward):
            yield Treatment(**base, strength=strength)
        else:
            yield Treatment(**base)
            return


def paper_treatments(strengths: Iterable[float], **settings: Any) -> Iterator[Treatment]:
    """All rows of a table: the paper's twelve, the controls, and the explicit ones under the exact laws, too."""
    strengths = tuple(strengths)
    for row in (*PAPER_ROWS, *CONTROLS):
        yield from treatments(row, strengths, **settings)
    for law in EXACT:
        for row in EXPLICIT:
            yield from treatments(row, strengths, law=law, **settings)


def named(row: str, **settings: Any) -> str:
    """What a row of the paper is called here under some settings: `explicit_v+explicit [token sums]`."""
    return next(treatments(row, [1.0], **settings)).row


def paper_questions(**settings: Any) -> tuple[Question, ...]:
    """What the paper's tables are asked here, of rows under some settings."""
    explicit = {row: named(row, **settings) for row in EXPLICIT}
    values = explicit["explicit_v+explicit"]
    return (
        Question(
            "Does explicit dropout match or beat stochastic dropout?",
            tuple((explicit[f"{site}+explicit"], BASELINE) for site in ("explicit_v", "explicit_av", "none")),
        ),
        Question(
            "Does stochastic dropout itself help, against no regulariser at all?",
            tuple((row, "none+none") for row in (BASELINE, "drop_key+implicit")),
        ),
        Question(
            "Are the rows of queries and keys the same under `paper`? By the algebra they are, but for biases.",
            ((explicit["explicit_q+explicit"], explicit["explicit_k+explicit"]),),
            same_settings=True,
        ),
        Question(
            "Do exact laws beat the paper's approximation?",
            tuple((named(row, law=law, **settings), explicit[row]) for row in EXPLICIT for law in EXACT),
        ),
        Question(
            "Does it beat plain activation L2, and no regulariser at all?",
            (
                *((values, named(row, **settings)) for row in ("none+activation_l2", "none+weight_decay")),
                *((row, "none+none") for row in explicit.values()),
            ),
        ),
    )


def paper_numbers(table: str, **settings: Any) -> dict[str, Any]:
    """The numbers of a table of the paper, in percent: by row, or for table5 by component, learning rate and λ.

    `settings` are those under which a table of ours reads the paper's rows, and which show in their names here.
    """
    tables = json.loads(files("explicit_dropout.lab").joinpath("paper.json").read_text())
    if table not in tables:
        raise InputError(
            "table", f"one of {', '.join(name for name in tables if name.startswith('table'))}", repr(table)
        )
    found: dict[str, Any] = tables[table]
    if "rows" not in found:
        return dict(found["cells"])
    return {named(row, **settings): numbers for row, numbers in found["rows"].items()}
