"""Every model family that the library supports, and the page about it in the documentation.

`family/` holds, for every family, how to build a small one and what is in it, written down by hand: paths, rows of
fused weights, masks, scales and rotations are those of the families' own source, and nothing there asks the library
where sites are. The tests compare the library with it. The support table in the documentation is made of the same:

    python tests/families.py > docs/support.md
"""

from __future__ import annotations

from family.huggingface import hf_families
from family.lucidrains import lucidrains_families
from family.own import own_families
from family.refused import HUGGING_FACE, X_OPTIONS, Refused
from family.table import COMPONENTS, Family
from family.timm import timm_families
from family.torch_nn import torch_families


def all_families() -> dict[str, Family]:
    found = [*torch_families(), *timm_families(), *hf_families(), *lucidrains_families(), *own_families()]
    return {family.name: family for family in found}


# ---------------------------------------------------------------------------------------------- the page

TITLES = {
    "torch.nn": "torch.nn",
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "Hugging Face transformers",
    "vit-pytorch": "vit-pytorch",
    "x-transformers": "x-transformers",
    "generic": "Your own, under the usual names",
}
CELLS = {"every law": "every law", "paper": "`paper`", "refused": "refused"}
INTRODUCTION = """# What is supported

This page is made by `python tests/families.py > docs/support.md` from the table that the tests run over, and a test
compares the two. Every cell is tested on a small random model of the real library: the sites that are found, terms
that equal the closed form of what plain hooks see, and gradients. Random masks on the inputs of the real model's own
projections, its own attention run again with them, agree with the terms of queries, keys, values and attended values.

*Every law*: `paper`, `bernoulli`, `inverted` and `gaussian`. *`paper`*: exact without variance only; other laws are
refused. *Refused*: an `UnsupportedSiteError` that names the site, the reason and a way out. A dash: no such site.

Under rotary embeddings the incoherent part of the scores depends on how far apart tokens are, so `query`, `key` and
`query_key` have `paper` alone there.
"""
BEYOND = """## Everything else

- Any other attention of timm, transformers, vit-pytorch or x-transformers: linear layers under the usual names are
  found (`value` with separate projections, `feed_forward`), and whatever depends on what happens between them is
  refused until a rule describes it (`xd.register_rule`). That holds for subclasses with a `forward` of their own, too;
  of `nn.MultiheadAttention`, which calls no layer, all of attention is refused then.
- Names of transformers 4 (`attention.attention.query` of ViT, DeiT and AST) are usual names as those of 5
  (`attention.q_proj`) are.
- Keys from a cache or a prefix (`past_key_values`), masks of flex attention and sliding windows inside flash attention
  are refused when the model runs.
- Attention of timm's Swin is refused in blocks whose windows do not divide their patches: what fills them up would
  count. A block tells by its `input_resolution`; images of another size than the model was built for are not noticed.
- In transformers, windows of Swin, Swin V2, Swin2SR, Donut, MaskFormer and CLAP may be filled up, and so may sequences
  of Longformer and LED: what fills them is left out. Their values are measured at the call of attention, by their
  weights: under FSDP2 that leaves laws without a mean.
- Experts that are modules of their own (a list or dictionary that is named for them, as in Switch Transformers) are
  refused for `feed_forward` as packed ones are: each sees other tokens at every step.
- Attention of your own under the usual names is tried: a copy of it, in eval mode, is given a sample of twenty random
  tokens, and what it attends to has to be softmax(scale · Q Kᵀ) V. That settles how a fused layer is laid out (q ‖ k
  ‖ v, or head by head), whether a query sees later keys, what a `scale` over 1 or a triangle that the module keeps is
  for, and which layer is the output projection. Where no such reading explains the call, because queries are turned
  or windows hide keys, scores are refused, and attended values too where something acts on these. So they are where
  other values of what else the module learns make it something else: gains that begin at 1, low-rank updates that
  begin at 0. Plain numbers such as `scale` are read when the regulariser is attached. A call needs arguments with
  names of tokens and none of anything else; masks and positions may be left out.
- What cannot be tried is taken at its word: plain attention, q ‖ k ‖ v, causal if `is_causal`, `causal` or the class
  name says so; then attended values have `paper` alone. (token, batch, width) is what `batch_first = False` says. Key
  heads of a fused layer are counted by the width of the output projection. Masks that depend on the length beyond
  twenty tokens are not noticed.
- Refused until a rule explains it, tried or not: a mask or a bias in the call, normalised queries, a rotary
  embedding, a mask that the module keeps other than a triangle, a `scale` that is a tensor. Normalisations are told
  by a q, k or v in their names or by being as wide as a head, rotary embeddings by the name of an argument, attribute
  or class. One layer that is called for two of query, key and value is refused, too.
- A feed-forward network is told by the usual names of two of its layers. Any linear layer beside them that has the
  shape of the first is a part of it, whatever its name: a gate.
- An `nn.Sequential` of two linear layers around an activation is a feed-forward network, too, if it gives back the
  width that it takes and stands beside attention; dropout anywhere and a normalisation before it do not matter. By
  whatever names, networks that change the width, make position biases or stand inside attention are none, nor are those
  of routers (`router`, `gate`) and normalisations.
"""


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def cell(family: Family, component: str) -> str:
    if component == "feed_forward" and not family.feed_forward and family.laws(component) != "refused":
        return "–"
    return CELLS[family.laws(component)]


def notes(families: list[Family]) -> list[str]:
    """One paragraph for each note, with the families it is about unless that is all of them."""
    lines = []
    for note in dict.fromkeys(family.note for family in families if family.note):
        names = [family.name for family in families if family.note == note]
        lines += [note if len(names) == len(families) else f"{'; '.join(names)}: {note}", ""]
    return lines


def described(refused: Refused) -> str:
    words = {"every law": "", "variance": " (laws with variance)"}
    return ", ".join(f"`{component}`{words[laws]}" for component, (laws, _) in refused.items()) or "nothing"


def page() -> str:
    lines = [INTRODUCTION]
    for library, title in TITLES.items():
        chosen = [family for family in all_families().values() if family.library == library]
        lines += [f"## {title}", "", row(["family", *(f"`{c}`" for c in COMPONENTS)]), row(["---"] * 7)]
        lines += [row([family.name, *(cell(family, c) for c in COMPONENTS)]) for family in chosen]
        lines += ["", *notes(chosen)]
        if library == "transformers":
            lines += ["Families and settings of which only a part is exact, tested too:", ""]
            lines += [row(["family", "refused"]), row(["---"] * 2)]
            lines += [row([name, described(refused)]) for name, (_, refused) in HUGGING_FACE.items()]
            lines += [""]
        if library == "x-transformers":
            lines += [
                "Options, as arguments of `Encoder` and `Decoder`:",
                "",
                row(["option", "refused"]),
                row(["---"] * 2),
            ]
            lines += [row([", ".join(f"`{o}`" for o in given), described(r)]) for given, r in X_OPTIONS.values()]
            lines += [""]
    return "\n".join([*lines, BEYOND])


if __name__ == "__main__":
    print(page(), end="")
