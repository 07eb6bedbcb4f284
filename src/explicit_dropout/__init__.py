"""Dropout without the dice: its regularising effect as a deterministic term of the loss."""

from explicit_dropout import functional, reference
from explicit_dropout.errors import ExplicitDropoutError, InputError
from explicit_dropout.noise import Noise, bernoulli, gaussian, inverted, paper

__version__ = "0.1.0"

__all__ = [
    "ExplicitDropoutError",
    "InputError",
    "Noise",
    "bernoulli",
    "functional",
    "gaussian",
    "inverted",
    "paper",
    "reference",
]
