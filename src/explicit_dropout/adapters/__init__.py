"""Rules for the model families: torch.nn, timm, Hugging Face, vit-pytorch, x-transformers, and the usual names.

A module of a library is only taken for plain attention if it was read and tested: whatever else a library keeps under
the usual names has its projections found (they are linear layers in any case), and is refused where the penalty depends
on what happens between them. Modules of one's own are taken at their word, as far as a `trial` does not show otherwise.
"""

from collections.abc import Mapping

from torch import nn

from explicit_dropout.adapters import generic, huggingface, lucidrains, timm, torch_nn, verdict, windows
from explicit_dropout.adapters.places import Found, in_place
from explicit_dropout.sites import Attention, Described, rule_for

__all__ = ["describe", "describe_all", "generic", "huggingface", "lucidrains", "timm", "torch_nn", "trial", "windows"]

FOREIGN = {
    "diffusers", "open_clip", "timm", "torchaudio", "torchvision", "transformers", "vit_pytorch", "x_transformers",
}  # fmt: skip


def describe_all(paths: Mapping[nn.Module, str]) -> list[Described]:
    """What the modules of a model are, each with its path in it: by its rule, or else by the names inside it."""
    found = []
    for module in paths:
        rule = rule_for(module)
        described = (rule or describe)(module) or []
        items = described if isinstance(described, list) else [described]
        found += [Found(module, item, guessed=rule is None) for item in items]
    return [item.described for item in in_place(found, paths)]


def describe(module: nn.Module) -> Described | list[Described] | None:
    """What a module is that no rule claims, by the names inside it."""
    if generic.author(module).__module__.startswith("transformers"):
        return huggingface.describe(module)
    if any(base.__module__.partition(".")[0] in FOREIGN for base in type(module).__mro__):
        return generic.describe(module, **generic.unread(module))
    described = generic.describe(module)
    items = described if isinstance(described, list) else [] if described is None else [described]
    doubts = generic.doubts(module)
    return [verdict.tried(item, doubts) if isinstance(item, Attention) else item for item in items]
