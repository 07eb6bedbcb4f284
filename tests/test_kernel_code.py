"""Every kernel compiles for a Hopper GPU, be there one or not, and has what it works on in registers and shared memory.

Numbers with a point come as Triton takes them from Python, float32, and as torch's compiler hands them over: float64,
and constants while it looks for what a kernel writes to.
"""

import re
import subprocess

import pytest
import torch

from explicit_dropout.kernels.energy import HAS_TRITON, interpreted

if not HAS_TRITON or interpreted():
    pytest.skip("Triton is not there to compile", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from explicit_dropout.kernels import (
    triton_activated,
    triton_along,
    triton_attended,
    triton_energy,
    triton_gram,
    triton_incoherent,
    triton_reach,
    triton_spread,
)
from explicit_dropout.lab import triton_attention
from explicit_dropout.lab.data import augment, triton_augment

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
MEMORY = {90: 232448, 89: 101376}
"""Bytes of shared memory that a program may have, by the GPU's capability."""
FEW = 32
"""Bytes of registers that a thread may put into memory: no tile, only numbers."""
FLOATS = ("fp32", "fp64", "constexpr")
SHAPES = {
    "ViT-7": (512, 65, 12, 32, False, torch.bfloat16),
    "64 tokens of wide heads": (64, 64, 6, 64, True, torch.float16),
    "ViT-B in float32": (64, 197, 12, 64, False, torch.float32),
    "GPT-2": (8, 1024, 12, 64, True, torch.float16),
}


@pytest.fixture
def compiled(request, monkeypatch):
    """What is launched while a test runs is compiled instead, in every form; (name, form, bytes spilled) of each."""
    found, capability = [], getattr(request, "param", 90)

    def run(kernel, *arguments, grid, warmup, num_warps=4, enable_fp_fusion=True):
        del grid, warmup
        options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
        for floats in FLOATS if any(isinstance(value, float) for value in arguments) else FLOATS[:1]:
            target = GPUTarget("cuda", capability, 32)
            made = triton.compile(source(kernel, arguments, floats), target=target, options=options)
            assert made.metadata.shared <= MEMORY[capability], kernel.fn.__name__
            assert overwritten(made.asm["ttgir"]) == [], kernel.fn.__name__
            found.append((kernel.fn.__name__, floats, spilled(made.asm["ptx"], capability)))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def source(kernel, arguments, floats):
    """What Triton makes of arguments: the kind of each, constants, and which are multiples of 16."""
    kinds, constants, multiples = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        special = not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            kind, even = POINTERS[value.dtype], True
        elif parameter.is_constexpr or (value == 1 and special):
            kind, even = "constexpr", False
        elif isinstance(value, float):
            kind, even = floats, False
        else:
            kind, even = "i32" if value < 2**31 else "i64", value % 16 == 0 and special
        kinds[parameter.name] = kind
        if kind == "constexpr":
            constants[place,] = value
        if even:
            multiples[place,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, kinds, constants, multiples)


def spilled(code, capability):
    """Bytes of registers that are put into memory."""
    name = "sm_90a" if capability == 90 else f"sm_{capability}"
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name}", "-", "-o", "/dev/null"]
    told = subprocess.run(command, input=code, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", told)))


def overwritten(code, stages=3):
    """Buffers that a product may still read while its loop copies later operands into them.

    A loop copies as many rounds ahead as it has buffers. A product that the next round does not wait for needs one
    more, and Triton forgets it where a block is an operand in shared memory and is read into registers as well.
    """
    buffers, views, products, found = {}, {}, {}, []
    for line in code.splitlines():
        if made := re.search(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", line):
            buffers[made[1]], views[made[1]] = int(made[2]), made[1]
        elif made := re.search(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)", line):
            views[made[1]] = views.get(made[2])
        elif made := re.search(r"(%\w+) = ttng\.warp_group_dot (%\w+), (%\w+),", line):
            products[made[1]] = [views.get(made[2]), views.get(made[3])]
        elif made := re.search(r"ttng\.warp_group_dot_wait (%\w+).*pendings = [1-9]", line):
            found += [name for name in products.get(made[1], []) if name and buffers[name] < stages]
    return found


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_penalties(shape, compiled):
    batch, tokens, heads, width, causal, dtype = shape
    features = heads * width
    x, queries, keys = (empty(batch, tokens, features, dtype=dtype) for _ in range(3))
    bias, mask = empty(features), empty(batch * tokens, dtype=torch.uint8)
    for given in ((bias, mask, None, False), (None, None, None, True), (None, None, torch.bfloat16, True)):
        energies, of_bias, low = triton_energy.energies_of(x, *given)
        kept, by_column = x if low is None else low, given[-1]
        triton_energy.gradient_of(
            kept, of_bias, given[1], kept, energies, dtype, by_column, 0, features, bias.dtype if of_bias else None
        )
    triton_incoherent.incoherent_of(x, empty(4 * features, features), mask)
    triton_incoherent.incoherent_of(x, empty(features, 4 * features).mT, None)
    triton_incoherent.squares_of(x)
    energies = triton_gram.score_energies(queries, keys, bias, None, heads, causal)
    results = torch.empty_like(queries), torch.empty_like(keys)
    triton_gram.score_gradients(queries, keys, bias, None, heads, causal, energies, *results)
    columns, levels = triton_attended.columns(queries, keys, heads, width**-0.5, causal)
    triton_attended.column_gradients(queries, keys, heads, width**-0.5, causal, levels, columns)
    norms = empty(heads, features)
    triton_attended.square_gradients(x, norms, triton_attended.squares(x, norms))
    last = "_short_gradients" if dtype != torch.float32 and tokens <= 65 else "_attended_keys"
    assert {form for name, form, _ in compiled if name == last} == set(FLOATS)
    assert [found for found in compiled if found[2] > FEW] == []


@pytest.mark.parametrize("compiled", MEMORY, indirect=True)
@pytest.mark.parametrize("kind", triton_activated.KINDS)
@pytest.mark.parametrize("added", [True, False], ids=["with its bias", "without"])
def test_activations(added, kind, compiled):
    x, bias, mask = empty(25216, 3072, dtype=torch.bfloat16), empty(3072), empty(25216, dtype=torch.uint8)
    for coherent, by_column, own_mask in ((True, False, None), (False, True, mask), (True, True, mask)):
        _, energies, columns = triton_activated.activate(x, bias, own_mask, kind, added, coherent, by_column)
        given = energies if coherent else None, columns if by_column else None
        triton_activated.gradients(x, bias, own_mask, x, *given, kind, added)
    assert len(compiled) == 6
    assert [found for found in compiled if found[2] > FEW] == []


@pytest.mark.parametrize("compiled", MEMORY, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [3, 6, 12])
def test_what_reaches_causal_scores(heads, dtype, compiled):
    keys, weight = empty(8, 1024, 384, dtype=dtype), empty(384, 384, dtype=dtype)
    sums = empty(8, 1024, 384, dtype=torch.bfloat16)
    triton_reach.energies(keys, weight, sums, heads)
    triton_reach.squares(keys, weight, heads)
    triton_reach.gradients(keys, weight, sums, empty(8), heads)
    assert len(compiled) == 4
    triton_along.sums(keys, True)
    for order in (-1, 0, 1):
        triton_along.of_inputs(sums, keys, empty(8), order)
    assert len(compiled) == 8
    assert [found for found in compiled if found[2] > FEW] == []


@pytest.mark.parametrize("compiled", MEMORY, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [3, 6, 12])
def test_what_is_incoherent_in_scores_of_all_pairs(heads, dtype, compiled):
    weight, squares, slopes = empty(384, 384, dtype=torch.bfloat16), empty(8, 384), empty(8, heads)
    sides = [(empty(8, 197, 384, dtype=dtype), weight, squares) for _ in range(2)]
    for given in (sides[:1], sides):
        triton_spread.spread_energies(given, heads)
        triton_spread.spread_gradients(given, heads, [slopes] * 3)
    assert {name for name, *_ in compiled} == {"_spread_energies", "_spread_slopes", "_spread_weights"}
    assert [found for found in compiled if found[2] > FEW] == []


@pytest.mark.parametrize("renormalise", [None, True, False], ids=["no mask", "DropKey", "dropout of weights"])
def test_the_attention_of_the_laboratory(renormalise, compiled):
    q, k, v, out = (empty(512, 65, 384, dtype=torch.bfloat16) for _ in range(4))
    dropped = None if renormalise is None else empty(512, 12, 65, 3, dtype=torch.int32)
    triton_attention.attend(q, k, v, 12, dropped, bool(renormalise), 0.2)
    triton_attention.gradients(q, k, v, 12, dropped, bool(renormalise), 0.2, out)
    assert [found for found in compiled if found[2] > FEW] == []


def test_the_augmentation_of_the_laboratory(compiled):
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    triton_augment.autoaugment(images, augment.draw(4, "autoaugment"))
    assert len(compiled) == 2
    assert [found for found in compiled if found[2] > FEW] == []
