"""The errors of the library: each message says what was given, where, and what would work."""

from __future__ import annotations


class ExplicitDropoutError(Exception):
    """Base class of every error that the library raises on purpose."""


class InputError(ExplicitDropoutError, ValueError):
    """An argument that does not fit. `argument` holds its name; the message what was expected and what came."""

    def __init__(self, argument: str, expected: str, given: object) -> None:
        super().__init__(argument, expected, given)
        self.argument = argument
        self.expected = expected
        self.given = given

    def __str__(self) -> str:
        return f"`{self.argument}` must be {self.expected}. Got {self.given}."


class UnmatchedModelError(ExplicitDropoutError):
    """Nothing in the model answers to what was asked for."""


class UnsupportedSiteError(ExplicitDropoutError):
    """A site is there, but its penalty would not be exact."""


class CollectionError(ExplicitDropoutError):
    """The forward pass did not yield the terms that the penalty needs."""
