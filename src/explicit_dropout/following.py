"""From a model's outputs back to where dropout acts: backward passes that can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from explicit_dropout.errors import CollectionError, InputError, UnsupportedSiteError
from explicit_dropout.hooks.calls import nodes_behind
from explicit_dropout.hooks.loss_level import Reached


def energies(outputs: Tensor, directions: Tensor, reached: Sequence[Reached]) -> list[Tensor]:
    """Σ_directions Σ_i x_i² (∂⟨direction, outputs⟩/∂x_i)² of every place that was reached.

    With the columns of L for directions, L Lᵀ = H, that is Σ_i x_i² (Jᵀ H J)_ii, summed over all samples.
    """
    edges = [one.edge for one in reached]
    found = [directions.new_zeros(()) for _ in reached]
    used = False
    for direction in directions.to(outputs.dtype):
        gradients = _gradients(outputs, edges, direction, create_graph=True)
        for number, (one, gradient) in enumerate(zip(reached, gradients, strict=True)):
            if gradient is not None:
                used = True
                found[number] = found[number] + one.effect(gradient).square().sum()
    if not used:
        raise CollectionError(
            "no site of the last forward pass has led to these outputs. Call the regulariser with what that pass "
            "returned, not detached and not from another pass."
        )
    return found


def refuse_mixed(outputs: Tensor, reached: Sequence[Reached]) -> None:
    """Refuse outputs of different samples that depend on one input: all samples are followed at once.

    The first row stands for all: it is compared with the others, in a direction in which no output cancels another.
    """
    edges = [one.edge for one in reached]
    uneven = torch.linspace(1, 2, outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    first = (torch.arange(len(outputs), device=outputs.device) == 0).unsqueeze(-1)
    moved = [_gradients(outputs, edges, uneven * rows, retain_graph=True) for rows in (first, ~first)]
    for one, of_first, of_others in zip(reached, *moved, strict=True):
        if of_first is not None and of_others is not None and (of_first.bool() & of_others.bool()).any():
            raise InputError(
                "outputs",
                "of samples that are apart, where all outputs are followed; draws=1 takes others, too",
                f"outputs of different samples that depend on the same input of {one.site}, as after batch "
                "normalisation or in a contrastive model",
            )


def refuse_once_differentiable(results: Iterable[Tensor]) -> None:
    """Look for operations whose backward pass has none of its own, before torch finds them without saying where."""
    for node in nodes_behind(result.grad_fn for result in results):
        if node.name() in ("torch::autograd::NotImplemented", "torch::autograd::Error"):
            try:
                node(*[None] * len(node._input_metadata))  # it raises an error, which says why
            except RuntimeError as error:
                raise CollectionError(
                    f"the model cannot be differentiated twice: {error}. Of attention, take the plain kernel (eager, "
                    "not flash); or use ExplicitDropout, which differentiates once."
                ) from error


def refuse_static_graph(outputs: Tensor) -> None:
    """DDP with a static graph takes the first backward pass for that of the loss, and shares gradients after it."""
    for node in nodes_behind([outputs.grad_fn]):
        around = getattr(node, "ddp_weakref", lambda: None)()
        if around is not None and around.static_graph:
            raise UnsupportedSiteError(
                "DistributedDataParallel(static_graph=True) would share gradients before the loss has any, since the "
                "penalty has backward passes of its own. Leave static_graph away."
            )


def _gradients(
    outputs: Tensor, edges: Sequence[GradientEdge], direction: Tensor, **graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradient of ⟨direction, outputs⟩ at every edge; None where it does not lead to these outputs."""
    try:
        return torch.autograd.grad(outputs, edges, direction, allow_unused=True, **graph)
    except CheckpointError as error:
        raise CollectionError(
            "checkpointing has run a layer again and found it to be another. Where an attention that no rule knows is "
            "the reason, describe it in a rule (@xd.register_rule), or take that layer out of checkpointing. "
            f"torch says: {str(error).splitlines()[0]}"
        ) from error
