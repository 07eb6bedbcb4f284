"""A model as it is called for a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.regulariser import ExplicitDropout


@dataclass(frozen=True)
class Host:
    """A model and what it is called with."""

    model: nn.Module
    inputs: Sequence[Any]
    keywords: Mapping[str, Any]

    def run(self, model: nn.Module | None = None) -> Any:
        return (self.model if model is None else model)(*self.inputs, **self.keywords)

    def penalty(self, reg: ExplicitDropout, model: nn.Module | None = None) -> Tensor:
        """In training mode, after a forward pass of this model, or of another that shares its hooks."""
        torch.manual_seed(0)
        self.model.train() if model is None else model.train()
        self.run(model)
        return reg()
