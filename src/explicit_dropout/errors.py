"""The errors of the library: each message says what was given, where, and what would work."""

from __future__ import annotations


class ExplicitDropoutError(Exception):
    """Base class of every error that the library raises on purpose."""


class InputError(ExplicitDropoutError, ValueError):
    """An argument that does not fit. `argument` holds its name; the message what was expected and what came."""

    def __init__(self, argument: str, expected: str, given: object) -> None:
        super().__init__(f"`{argument}` must be {expected}. Got {given}.")
        self.argument = argument
        self.expected = expected
        self.given = given

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, object]]:
        return type(self), (self.argument, self.expected, self.given)


class UnmatchedModelError(ExplicitDropoutError):
    """Nothing in the model answers to what was asked for."""


class UnsupportedSiteError(ExplicitDropoutError):
    """A site is there, but its penalty would not be exact."""


class CollectionError(ExplicitDropoutError):
    """The forward pass did not yield the terms that the penalty needs."""


class StoreError(ExplicitDropoutError):
    """The folder of a run cannot be read, or written, or is not what its name says."""


class StoreBusyError(StoreError):
    """Another process works on the same run."""


class DataError(ExplicitDropoutError):
    """A file of a dataset cannot be used: damaged, incomplete, or not what its name says."""


class MissingDataError(DataError):
    """A dataset is not there. The message says which files it needs, where to put them and how to get them."""
