"""Dropout without the dice: its regularising effect as a deterministic term of the loss."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from explicit_dropout import functional, reference, stochastic, strengths
from explicit_dropout.errors import (
    CollectionError,
    ExplicitDropoutError,
    InputError,
    UnmatchedModelError,
    UnsupportedSiteError,
)
from explicit_dropout.finding import find_sites
from explicit_dropout.loss_level import LossLevelDropout
from explicit_dropout.noise import Noise, bernoulli, gaussian, inverted, paper
from explicit_dropout.regulariser import ExplicitDropout
from explicit_dropout.sites import (
    Attention,
    Dropout,
    FeedForward,
    Pairs,
    Projection,
    Site,
    register_rule,
    visible,
)
from explicit_dropout.twins import convert_dropout

if TYPE_CHECKING:
    from explicit_dropout import testing

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "CollectionError",
    "Dropout",
    "ExplicitDropout",
    "ExplicitDropoutError",
    "FeedForward",
    "InputError",
    "LossLevelDropout",
    "Noise",
    "Pairs",
    "Projection",
    "Site",
    "UnmatchedModelError",
    "UnsupportedSiteError",
    "bernoulli",
    "convert_dropout",
    "find_sites",
    "functional",
    "gaussian",
    "inverted",
    "paper",
    "reference",
    "register_rule",
    "stochastic",
    "strengths",
    "testing",
    "visible",
]


def __getattr__(name: str) -> ModuleType:
    """`xd.testing`, imported when it is first asked for."""
    if name == "testing":
        return import_module("explicit_dropout.testing")
    raise AttributeError(f"module 'explicit_dropout' has no attribute {name!r}")
