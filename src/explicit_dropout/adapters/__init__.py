"""Rules for the model families: torch.nn, timm, Hugging Face, vit-pytorch, x-transformers, and the usual names."""

from torch import nn

from explicit_dropout.adapters import generic, huggingface, lucidrains, timm, torch_nn
from explicit_dropout.sites import Described

__all__ = ["describe", "generic", "huggingface", "lucidrains", "timm", "torch_nn"]


def describe(module: nn.Module) -> Described | list[Described] | None:
    """What a module is that no rule claims, by the names inside it."""
    if type(module).__module__.startswith("transformers"):
        return huggingface.describe(module)
    return generic.describe(module)
