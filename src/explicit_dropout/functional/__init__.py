"""The closed forms: what dropout does to a Transformer on average, as pure functions of tensors.

Dropout replaces x by x ⊙ (1 − ε), with ε i.i.d. of mean μ and variance v (see `noise`). For any linear map T

    ½ E‖T(x ⊙ ε)‖² = ½ ( μ² ‖T(x)‖²  +  v Σ T∘²(x²) )          T∘²: T with its coefficients squared
                         coherent        incoherent

and every function here is that line for one place in a Transformer. The deviation is always measured at the output of
the site: scores for queries and keys, attention output for attended values, the layer's output for linear layers.

Conventions, the same for all forms:
    reduction   "token" (default): the sum over the batch divided by the number of output tokens that count.
                "sample": the sum over tokens, averaged over the batch; the paper's literal reading.
                "none": the sum over tokens for every sample, in the shape of the batch.
    strength    λ ≥ 0, a factor on the result.
    mask        boolean, (*batch, token), True for real tokens. Padded tokens count for nothing, whatever they contain.
    dtype       sums are float32 at least, whatever the inputs or autocast; float64 stays float64.
    batch       any leading shape, none at all included. An empty batch has penalty 0.
"""

from explicit_dropout.functional.attention import attended_value, attention_weights, drop_head
from explicit_dropout.functional.convolution import conv
from explicit_dropout.functional.layers import feed_forward, linear, value
from explicit_dropout.functional.outputs import drop_path, hidden
from explicit_dropout.functional.scores import ScoreOptions, key, query, query_key

__all__ = [
    "ScoreOptions",
    "attended_value",
    "attention_weights",
    "conv",
    "drop_head",
    "drop_path",
    "feed_forward",
    "hidden",
    "key",
    "linear",
    "query",
    "query_key",
    "value",
]
