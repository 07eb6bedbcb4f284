"""What is checked of a rule, what was found wrong, and what was shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from explicit_dropout.errors import ExplicitDropoutError

Check = Literal[
    "fires", "projection", "values", "pairs", "weights", "scores", "exact", "gradient", "compile", "deepcopy", "pickle"
]
CHECKS: tuple[Check, ...] = get_args(Check)
TOLERANCE = 2e-3
"""Relative error up to which two ways of computing one tensor agree in single precision."""


@dataclass(frozen=True)
class Failure:
    """One check that failed at one place: a site (path:component), or the path of a layer."""

    check: Check
    site: str
    reason: str

    def __str__(self) -> str:
        return f"{self.check} failed for {self.site}: {self.reason}"


class RuleError(ExplicitDropoutError, AssertionError):
    """A rule does not describe the model. `failures` says which checks failed for which sites."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("\n".join(map(str, failures)))
        self.failures = tuple(failures)


@dataclass
class Report:
    """What `check_rule` has shown: which checks each site has had, which it should have had and has not, and why."""

    sites: list[str]
    had: dict[str, set[Check]] = field(default_factory=dict)
    missed: dict[str, set[Check]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    unclaimed: str | None = None

    @property
    def passed(self) -> list[Check]:
        """The checks that some site has had, and no site has missed."""
        whole = set().union(*self.had.values()).difference(*self.missed.values())
        return [check for check in CHECKS if check in whole]

    @property
    def proved(self) -> list[str]:
        """The sites whose closed form was compared, and that have missed no check but those of the model as a whole."""
        whole = {"compile", "deepcopy", "pickle"}  # which no site is to blame for: models of a notebook have no pickle
        return [
            site for site in self.sites
            if "exact" in self.had.get(site, ()) and self.missed.get(site, set()) <= whole
        ]  # fmt: skip

    def done(self, check: Check, sites: Iterable[str]) -> None:
        for site in sites:
            self.had.setdefault(site, set()).add(check)

    def skip(self, checks: Mapping[Check, Iterable[str]], reason: str | None = None) -> None:
        for check, sites in checks.items():
            for site in sites:
                self.missed.setdefault(site, set()).add(check)
        self.skipped += [reason] if reason and reason not in self.skipped else []

    def __str__(self) -> str:
        of = "" if len(self.proved) == len(self.sites) else f" of {len(self.sites)}"
        lines = [f"{len(self.proved)}{of} sites proved: {', '.join(self.passed) or 'no check was made of all'}."]
        lines += [f"Not checked: {reason}" for reason in self.skipped]
        return "\n".join(lines + ([self.unclaimed] if self.unclaimed else []))


def stop_at(failures: Sequence[Failure]) -> None:
    if failures:
        raise RuleError(failures)


def close(values: Tensor, target: float) -> bool:
    return bool(((values - target).abs() < TOLERANCE).all())
