"""Models inside a model: each knows its own padding and its own samples, whatever is around it has been told."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertModel,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    CLIPConfig,
    CLIPModel,
    OPTConfig,
)

import explicit_dropout as xd

NOISE = xd.inverted(0.2)
REAL = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])


def bert(kind=BertModel):
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=50,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return kind(config).train()


def numbers(*shape):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(0))


def terms(model, *args, reduction="token", **kwargs):
    with xd.ExplicitDropout(model, NOISE, value=1.0, feed_forward=1.0, reduction=reduction) as reg:
        model(*args, **kwargs)
        reg()
        return reg.terms()


def under(found, path):
    """The terms of a model inside, by their own names."""
    return {name.removeprefix(path + "."): term for name, term in found.items() if name.startswith(path + ".")}


class Pair(nn.Module):
    """Two encoders; the mask of the first has the name that models of transformers have for theirs."""

    def __init__(self):
        super().__init__()
        self.query, self.passage = bert(), bert()

    def forward(self, input_ids, attention_mask, passage, passage_mask):
        return self.query(input_ids, attention_mask), self.passage(passage, passage_mask)


@pytest.mark.parametrize("swapped", [False, True])
def test_two_encoders_have_a_mask_each(swapped):
    masks = (torch.ones_like(REAL), REAL)[:: -1 if swapped else 1]
    found = terms(Pair().train(), numbers(2, 8), masks[0], numbers(2, 8), masks[1])
    for path, mask in zip(("query", "passage"), masks, strict=True):
        torch.testing.assert_close(under(found, path), terms(bert(), numbers(2, 8), mask))


def test_a_mask_ends_with_the_call_that_had_it():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = bert()

        def forward(self, x, mask):
            return self.encoder(x, mask), self.encoder(x)

    class Whole(Twice):
        def forward(self, x, mask):
            return self.encoder(x, mask), self.encoder(x, torch.ones_like(mask))

    args = numbers(2, 8), REAL
    torch.testing.assert_close(terms(Twice().train(), *args), terms(Whole().train(), *args))


def test_choices_are_rows_of_the_model_inside():
    model, ids = bert(BertForMultipleChoice), numbers(2, 3, 8)
    mask = REAL[:, None].repeat(1, 3, 1)
    found = under(terms(model, ids, mask), "bert")
    assert found
    torch.testing.assert_close(found, terms(model.bert, ids.flatten(0, 1), mask.flatten(0, 1)))
    torch.testing.assert_close(found, under(terms(model, ids.where(mask.bool(), 7), mask), "bert"))


def test_a_decoder_beside_an_encoder_of_images_leaves_padding_out():
    torch.manual_seed(0)
    vision = Blip2VisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
        attention_dropout=0.0,
    )  # fmt: skip
    queries = Blip2QFormerConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, encoder_hidden_size=16,
        vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    text = OPTConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, ffn_dim=24, num_attention_heads=2, dropout=0.0,
        attention_dropout=0.0, max_position_embeddings=32, word_embed_proj_dim=16,
    )  # fmt: skip
    config = Blip2Config(
        vision_config=vision.to_dict(), qformer_config=queries.to_dict(), text_config=text.to_dict(),
        num_query_tokens=2, image_token_index=3,
    )  # fmt: skip
    model = Blip2ForConditionalGeneration(config).train()
    images, ids = torch.randn(2, 3, 8, 8), numbers(2, 8)
    ids[ids == 3] = 4
    ids[:, :2] = 3  # where the images stand
    found = []
    for padding in (5, 6):
        with xd.ExplicitDropout(model, NOISE, feed_forward=1.0) as reg:
            model(pixel_values=images, input_ids=ids.where(REAL.bool(), padding), attention_mask=REAL)
            reg()
            found.append({name: term for name, term in reg.terms().items() if "language" in name})
    assert found[0]
    torch.testing.assert_close(*found)


def test_a_mask_of_pairs_is_read_for_one_sample_as_for_two():
    ids, mask = numbers(1, 8), REAL[:1, None, None].bool()
    one = terms(bert(), ids, mask)
    torch.testing.assert_close(one, terms(bert(), ids.repeat(2, 1), mask.repeat(2, 1, 1, 1)))
    torch.testing.assert_close(one, terms(bert(), ids, REAL[:1]))


@pytest.mark.parametrize("images_first", [False, True])
def test_texts_and_images_are_counted_each_for_themselves(images_first):
    torch.manual_seed(0)
    shared = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=shared | {"vocab_size": 50, "max_position_embeddings": 16},
        vision_config=shared | {"image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    model = CLIPModel(config).train()
    given = {"input_ids": numbers(3, 8), "pixel_values": torch.randn(6, 3, 8, 8)}
    call = dict(reversed(given.items())) if images_first else given
    found = terms(model, reduction="sample", **call)
    for path, name in (("text_model", "input_ids"), ("vision_model", "pixel_values")):
        alone = terms(getattr(model, path), reduction="sample", **{name: given[name]})
        torch.testing.assert_close(under(found, path), alone)


class Wrapped(nn.Module):
    def __init__(self, forward):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.way = forward

    def forward(self, *given):
        return self.way(self.encoder, *given)


@pytest.mark.parametrize(
    ("way", "given"),
    [
        (lambda encoder, x: encoder(x.transpose(0, 1)), lambda x: (x.transpose(0, 1),)),
        (lambda encoder, prompts, x: encoder(x) + prompts.sum(), lambda x: (torch.ones(5, 3, 8), x)),
        (lambda encoder, batch: encoder(batch["x"]), lambda x: ({"x": x},)),
    ],
    ids=["tokens first", "prompts first", "a mapping"],
)
def test_samples_are_those_that_layers_have(way, given):
    torch.manual_seed(0)
    x = torch.randn(2, 9, 8)
    model = Wrapped(way).train()
    alone = terms(model.encoder, x, reduction="sample")
    torch.testing.assert_close(under(terms(model, *given(x), reduction="sample"), "encoder"), alone)


def test_a_layer_that_was_replaced_is_noticed():
    from peft import LoraConfig, get_peft_model

    model = bert()
    reg = xd.ExplicitDropout(model, NOISE, value=1.0)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["value"])).train()
    adapted(numbers(2, 8))
    with pytest.raises(
        xd.CollectionError, match=r"encoder\.layer\.0\.attention\.self\.value was Linear .* attach it after"
    ):
        reg()
    reg.remove()
    with xd.ExplicitDropout(adapted, NOISE, value=1.0) as reg:
        adapted(numbers(2, 8))
        assert reg() > 0
