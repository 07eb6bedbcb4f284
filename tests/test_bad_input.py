"""Whatever does not fit is refused by one exception type that names the argument, what was expected and what came."""

import math

import pytest
import torch

import explicit_dropout as xd
from explicit_dropout import functional as F

NOISE = xd.bernoulli(0.2)
X, W, B = torch.ones(2, 5, 6), torch.ones(4, 6), torch.ones(4)
ATTENTION, VALUES = torch.ones(2, 2, 5, 5) / 5, torch.ones(2, 2, 5, 3)
MAPS, KERNEL = torch.ones(2, 4, 7, 7), torch.ones(6, 2, 3, 3)
MASK = torch.ones(2, 5, dtype=torch.bool)
PAIRS = torch.ones(5, 5, dtype=torch.bool)
CONTEXT = torch.ones(2, 3, 6)


def scores(**overrides):
    arguments = {"x": X, "query_weight": W, "key_weight": W, "noise": NOISE, **overrides}
    return [lambda form=form: form(**arguments) for form in (F.query, F.key, F.query_key)]


def one(form, *args, **options):
    return [lambda: form(*args, **options)]


BAD = {
    # shapes that do not fit
    "x without tokens": (one(F.linear, torch.ones(6), W, NOISE), "x"),
    "weight of another width": (one(F.linear, X, torch.ones(4, 5), NOISE), "weight"),
    "weight of one axis": (one(F.linear, X, torch.ones(6), NOISE), "weight"),
    "bias of another length": (one(F.linear, X, W, NOISE, bias=torch.ones(5)), "bias"),
    "output of another shape": (one(F.linear, X, W, NOISE, output=torch.ones(2, 5, 3)), "output"),
    "value weight": (one(F.value, X, torch.ones(4, 5), NOISE), "weight"),
    "fewer weights than inputs": (one(F.feed_forward, [X, X], [W], NOISE), "weights"),
    "fewer biases than inputs": (one(F.feed_forward, [X, X], [W, W], NOISE, biases=[B]), "biases"),
    "fewer outputs than inputs": (one(F.feed_forward, [X, X], [W, W], NOISE, outputs=[None]), "outputs"),
    "no feed-forward layer": (one(F.feed_forward, [], [], NOISE), "inputs"),
    "query weight": (scores(query_weight=torch.ones(4, 5)), "query_weight"),
    "key weight": (scores(key_weight=torch.ones(4, 5)), "key_weight"),
    "key weight of other width than the query's": (scores(key_weight=torch.ones(6, 6)), "key_weight"),
    "query bias": (scores(query_bias=torch.ones(3)), "query_bias"),
    "key bias": (scores(key_bias=torch.ones(3)), "key_bias"),
    "queries": (scores(queries=torch.ones(2, 5, 5)), "queries"),
    "keys": (scores(keys=torch.ones(2, 4, 4)), "keys"),
    "context of another batch": (scores(context=torch.ones(3, 5, 6)), "context"),
    "context of another width": (scores(context=torch.ones(2, 5, 7)), "key_weight"),
    "attention of another length": (one(F.attended_value, X, W, torch.ones(2, 2, 5, 4), NOISE, heads=2), "attention"),
    "attention without heads": (one(F.attended_value, X, W, torch.ones(2, 5, 5), NOISE), "attention"),
    "attended of another width": (
        one(F.attended_value, X, W, ATTENTION, NOISE, heads=2, attended=torch.ones(2, 5, 3)), "attended",
    ),
    "attended of another length": (
        one(F.attended_value, X, W, ATTENTION, NOISE, heads=2, attended=torch.ones(2, 4, 4)), "attended",
    ),
    "value bias": (one(F.attended_value, X, W, ATTENTION, NOISE, heads=2, value_bias=torch.ones(3)), "value_bias"),
    "flat attention": (one(F.attention_weights, torch.ones(5, 5), VALUES, NOISE), "attention"),
    "values of another length": (one(F.attention_weights, ATTENTION, torch.ones(2, 2, 4, 3), NOISE), "values"),
    "kernel of one axis": (one(F.conv, MAPS, torch.ones(6), NOISE), "weight"),
    "kernel of another depth": (one(F.conv, MAPS, KERNEL, NOISE), "weight"),
    "map of too few axes": (one(F.conv, torch.ones(7, 7), KERNEL, NOISE), "x"),
    "map smaller than the kernel": (one(F.conv, torch.ones(4, 2, 2), KERNEL, NOISE, groups=2),
                                    "stride, padding, dilation"),
    "stride of zero": (one(F.conv, MAPS, KERNEL, NOISE, groups=2, stride=0), "stride, padding, dilation"),
    "padding by an unknown word": (one(F.conv, MAPS, KERNEL, NOISE, groups=2, padding="some"),
                                   "stride, padding, dilation"),
    "output of a map": (one(F.conv, MAPS, KERNEL, NOISE, groups=2, output=torch.ones(2, 6, 4, 4)), "output"),
    # heads that do not divide
    "heads that do not divide": (scores(heads=3), "heads"),
    "key heads that do not divide the heads": (scores(heads=4, key_heads=3), "key_heads"),
    "key heads that the weight does not have": (scores(heads=4, key_heads=2), "key_weight"),
    "no heads": (scores(heads=0), "heads"),
    "half a head": (scores(heads=1.5), "heads"),
    "true heads": (scores(heads=True), "heads"),
    "heads of values": (one(F.attended_value, X, W, torch.ones(2, 3, 5, 5), NOISE, heads=3), "heads"),
    "value heads that do not divide": (
        one(F.attended_value, X, W, torch.ones(2, 4, 5, 5), NOISE, heads=4, key_heads=3), "key_heads",
    ),
    "values of too many heads": (one(F.attention_weights, ATTENTION, torch.ones(2, 3, 5, 3), NOISE), "values"),
    "heads of DropHead": (one(F.drop_head, X, W, NOISE, heads=4), "heads"),
    "groups": (one(F.conv, MAPS, KERNEL, NOISE, groups=3), "groups"),
    # masks of another type or shape
    "float mask": (one(F.linear, X, W, NOISE, mask=torch.ones(2, 5)), "mask"),
    "integer mask": (one(F.hidden, X, NOISE, mask=torch.ones(2, 5, dtype=torch.long)), "mask"),
    "mask that is a list": (one(F.hidden, X, NOISE, mask=[[True] * 5] * 2), "mask"),
    "mask of another length": (scores(mask=MASK[:, :4]), "mask"),
    "mask of another batch": (scores(mask=MASK[0]), "mask"),
    "context mask without context": (scores(context_mask=MASK), "context_mask"),
    "context mask of another length": (scores(context=CONTEXT, context_mask=MASK), "context_mask"),
    "additive attention mask": (scores(attention_mask=torch.zeros(5, 5)), "attention_mask"),
    "attention mask of another length": (scores(attention_mask=PAIRS[:, :4]), "attention_mask"),
    "attention mask of one axis": (scores(attention_mask=PAIRS[0]), "attention_mask"),
    "attention mask of too many axes": (scores(attention_mask=PAIRS[None, None, None]), "attention_mask"),
    "attention mask of other heads": (scores(heads=2, attention_mask=PAIRS.expand(2, 4, 5, 5)), "attention_mask"),
    "mask of the context alone": (one(F.attended_value, X, W, ATTENTION, NOISE, heads=2, context_mask=MASK), "mask"),
    "query mask of another length": (
        one(F.attended_value, X, W, ATTENTION, NOISE, heads=2, mask=MASK[:, :3]), "mask",
    ),
    "mask of a map": (one(F.conv, MAPS, KERNEL, NOISE, groups=2, mask=MASK), "mask"),
    "output beside the mask of a map": (
        one(F.conv, MAPS, KERNEL, NOISE, groups=2, mask=torch.ones(2, 7, 7, dtype=torch.bool),
            output=torch.ones(2, 6, 5, 5)), "output",
    ),
    "causal across lengths": (scores(context=CONTEXT, causal=True), "causal"),
    # types and devices
    "integer tensor": (one(F.linear, X.long(), W, NOISE), "x"),
    "integer weight": (scores(query_weight=W.int()), "query_weight"),
    "complex tensor": (one(F.hidden, X + 0j, NOISE), "x"),
    "eight-bit floats": (one(F.hidden, X.to(torch.float8_e4m3fn), NOISE), "x"),
    "no weight": (one(F.linear, X, None, NOISE), "weight"),
    "no input": (one(F.hidden, None, NOISE), "x"),
    "no key weight": (scores(key_weight=None), "key_weight"),
    "no values": (one(F.attention_weights, ATTENTION, None, NOISE), "values"),
    "no kernel": (one(F.conv, MAPS, None, NOISE), "weight"),
    "no input of the second layer": (one(F.feed_forward, [X, None], [W, W], NOISE), "x of layer 1"),
    "a tensor for a list of inputs": (one(F.feed_forward, X, [W, W], NOISE), "inputs"),
    "array": (one(F.hidden, [[1.0]], NOISE), "x"),
    "weight on another device": (one(F.linear, X, W.to("meta"), NOISE), "weight"),
    "key weight on another device": (scores(key_weight=W.to("meta")), "key_weight"),
    "mask on another device": (one(F.hidden, X, NOISE, mask=MASK.to("meta")), "mask"),
    "attention mask on another device": (scores(attention_mask=PAIRS.to("meta")), "attention_mask"),
    # numbers and choices
    "NaN strength": (one(F.linear, X, W, NOISE, strength=math.nan), "strength"),
    "negative strength": (one(F.hidden, X, NOISE, strength=-1), "strength"),
    "infinite strength": (scores(strength=math.inf), "strength"),
    "strength in words": (one(F.hidden, X, NOISE, strength="1e-3"), "strength"),
    "strength beyond all floats": (one(F.hidden, X, NOISE, strength=10**400), "strength"),
    "causal in words": (scores(causal="no"), "causal"),
    "a tensor for causal": (scores(causal=PAIRS), "causal"),
    "one mask in words": (one(F.query_key, X, W, W, NOISE, shared_mask="no"), "shared_mask"),
    "a truth value for a rotation": (scores(noise=xd.paper(0.2), rotary=True), "rotary"),
    "a rotation that loses width": (scores(noise=xd.paper(0.2), rotary=lambda heads: heads[..., :1]), "rotary"),
    "NaN scale": (scores(scale=math.nan), "scale"),
    "zero scale": (scores(scale=0), "scale"),
    "unknown reduction": (one(F.hidden, X, NOISE, reduction="mean"), "reduction"),
    "unhashable reduction": (one(F.hidden, X, NOISE, reduction=["token"]), "reduction"),
    "a rate for a noise": (one(F.linear, X, W, 0.2), "noise"),
    "a rate for a noise in scores": (scores(noise=0.2), "noise"),
    "a rate for a noise in attention": (one(F.attended_value, X, W, ATTENTION, 0.2, heads=2), "noise"),
    # what cannot be computed
    "no attention and no output": (one(F.attended_value, X, W, None, xd.paper(0.2), heads=2), "attention"),
    "variance without attention": (
        one(F.attended_value, X, W, None, NOISE, heads=2, attended=torch.ones(2, 5, 4)), "attention",
    ),
    "one mask for two inputs": (one(F.query_key, X, W, W, NOISE, shared_mask=True, context=CONTEXT), "shared_mask"),
    "one mask of unknown law": (one(F.query_key, X, W, W, xd.Noise(0.1, 0.2), shared_mask=True), "noise"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    calls, argument = BAD[name]
    for call in calls:
        with pytest.raises(xd.InputError) as caught:
            call()
        assert caught.value.argument == argument
        assert str(caught.value).startswith(f"`{argument}` must be ")
        assert ". Got " in str(caught.value)


def test_the_message_holds_what_was_expected_and_what_was_given():
    with pytest.raises(xd.InputError) as caught:
        F.query(X, W, W, NOISE, heads=3)
    assert str(caught.value) == "`heads` must be a divisor of the 4 outputs of the query projection. Got 3."


def test_it_is_a_value_error_and_one_of_ours():
    with pytest.raises(ValueError, match="strength") as caught:
        F.hidden(X, NOISE, strength=-1)
    assert isinstance(caught.value, xd.ExplicitDropoutError)


def test_an_option_that_does_not_exist_is_refused_by_name():
    with pytest.raises(TypeError, match="head_count"):
        F.query(X, W, W, NOISE, head_count=2)


def test_inputs_are_left_as_they_were():
    leaves = [X.clone(), W.clone(), W.clone()]
    mask = MASK.clone()
    mask[0, 3:] = False
    F.query_key(*leaves, NOISE, heads=2, mask=mask, attention_mask=PAIRS, shared_mask=True)
    assert all(torch.equal(a, b) for a, b in zip(leaves, (X, W, W), strict=True))


def test_errors_survive_pickling():
    import pickle

    error = xd.InputError("heads", "a whole number ≥ 1", 0)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
