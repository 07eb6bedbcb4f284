"""The shapes written in the signatures are true: checked by jaxtyping on every case, and on a call that breaks them."""

import inspect
import types
import typing

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation

from cases import CASES, LAWS
from explicit_dropout import functional


def shape_checked(form):
    """A copy of the form with its annotations enforced; the library itself never imports jaxtyping."""
    plain = inspect.unwrap(form)
    copy = types.FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    names = {"Float": jaxtyping.Float, "Bool": jaxtyping.Bool}
    hints = typing.get_type_hints(plain, {**plain.__globals__, **names})
    copy.__annotations__ = {name: hint for name, hint in hints.items() if name != "options"}
    return jaxtyping.jaxtyped(typechecker=beartype)(copy)


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_the_shapes_that_the_signature_promises(case):
    case = CASES[case]
    args, options = case.call(case.leaves())
    for reduction in ("token", "none"):
        shape_checked(getattr(functional, case.site))(*args, LAWS["bernoulli"], **options, reduction=reduction)


def test_the_checker_sees_a_shape_that_does_not_fit():
    with pytest.raises((BeartypeCallHintViolation, jaxtyping.TypeCheckError)):
        shape_checked(functional.linear)(torch.ones(2, 5, 6), torch.ones(4, 5), LAWS["paper"])
