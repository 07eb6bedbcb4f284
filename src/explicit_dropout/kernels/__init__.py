"""Energies of tensors that are in flight anyway, each in one pass forward and one backward.

Plain autograd makes a float32 copy of a tensor, keeps it, and adds its gradient in passes of its own. Here the tensor
is read once as it is, sums are float32, nothing is kept that the model does not keep for itself, and the gradient is
added to the one that passes by. Sums are made in a fixed order, without atomics: the same bits in every run.

    energy     Σ (x − b)², whole or by column, of a tensor that passes through
    norms      Σ W_ij² for every column of many weights at once
    incoherent Σ_i x_ij² and Σ_i W_ij² for every column of a layer's input and weight, for compiled code;
               Σ_i x_sij² for every sample and column
    gram       Σ (q_i · k_j)² over all pairs or the causal ones, by head, from Gram matrices
    activated  an activation, with the energies of its input and of its output
    attended   Σ_ia A_ia² x_a of attention weights that are not kept, x_a made of the input of values or of values
    spreads    ⟨KᵀK, W diag(s) Wᵀ⟩, what is incoherent in the scores of all pairs, from matrices of a head
    reach      Σ_a Σ_c Y_ac (k_a · W_:c)², what is incoherent in causal scores, Y_a the squares that reach a
    plain      the same in plain torch: in float64, under function transforms, and to compare with

On a GPU they are Triton kernels, with products of torch between them in reach; on a CPU energy, gram, spreads and
attended have counterparts in torch, and norms are torch everywhere. Compiled code reaches them as operators
(`torch.ops.explicit_dropout`) and fuses the pointwise rest; into those of reach the compiler does not look, the kernels
of the others it launches itself (`inlining`).
"""

from explicit_dropout.kernels import plain
from explicit_dropout.kernels.activated import activated, activation_of, serves_activated
from explicit_dropout.kernels.attended import attended_spread, serves_attended, weights_spread
from explicit_dropout.kernels.energy import by_triton, columns, lowered, passing, passing_to, serves
from explicit_dropout.kernels.gram import scores, serves_scores
from explicit_dropout.kernels.incoherent import incoherent, serves_incoherent, squares
from explicit_dropout.kernels.norms import norms
from explicit_dropout.kernels.reach import joint_reach, reach, serves_reach
from explicit_dropout.kernels.spreads import joint_spread, serves_spread, spread

__all__ = [
    "activated",
    "activation_of",
    "attended_spread",
    "by_triton",
    "columns",
    "incoherent",
    "joint_reach",
    "joint_spread",
    "lowered",
    "norms",
    "passing",
    "passing_to",
    "plain",
    "reach",
    "scores",
    "serves",
    "serves_activated",
    "serves_attended",
    "serves_incoherent",
    "serves_reach",
    "serves_scores",
    "serves_spread",
    "spread",
    "squares",
    "weights_spread",
]
