"""Dropout without the dice: its regularising effect as a deterministic term of the loss."""

from explicit_dropout import functional, reference, strengths
from explicit_dropout.errors import (
    CollectionError,
    ExplicitDropoutError,
    InputError,
    UnmatchedModelError,
    UnsupportedSiteError,
)
from explicit_dropout.noise import Noise, bernoulli, gaussian, inverted, paper
from explicit_dropout.regulariser import ExplicitDropout
from explicit_dropout.sites import Attention, FeedForward, Projection, Site, find_sites, register_rule

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "CollectionError",
    "ExplicitDropout",
    "ExplicitDropoutError",
    "FeedForward",
    "InputError",
    "Noise",
    "Projection",
    "Site",
    "UnmatchedModelError",
    "UnsupportedSiteError",
    "bernoulli",
    "find_sites",
    "functional",
    "gaussian",
    "inverted",
    "paper",
    "reference",
    "register_rule",
    "strengths",
]
