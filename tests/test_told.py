"""What calls of models say about their batches: samples and real tokens, under whatever names, of whatever layers."""

import pytest
import timm
import torch
import transformers as tf
from torch import nn

import explicit_dropout as xd

NOISE = xd.inverted(0.2)
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def quiet(model):
    """The model in train mode, its own dropout off, its weights larger than they come."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=generator) / p[0].numel() ** 0.5)
    return model.train()


def terms(model, call, layers=None, **options):
    """The terms of values, in the layers whose path contains this."""
    chosen = {s.layer: 1.0 for s in xd.find_sites(model) if s.component == "value" and (layers or "") in s.path}
    with xd.ExplicitDropout(model, NOISE, value=chosen, require_all=False, **options) as reg:
        call()
        reg()
        return {name: term for name, term in reg.terms().items() if (layers or "") in name}


# ---------------------------------------------------------------------------------------------- samples


def qwen2_vl():
    positions = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**SMALL, "vocab_size": 99, "num_key_value_heads": 2, "rope_parameters": positions, "pad_token_id": 0}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    marks = {"image_token_id": 98, "vision_start_token_id": 97, "vision_end_token_id": 96, "video_token_id": 95}
    return tf.Qwen2VLModel(tf.Qwen2VLConfig(text_config=text, vision_config=vision, **marks))


@pytest.mark.parametrize("batch", [2, 6, 9])
def test_positions_of_three_kinds_are_no_samples(batch):
    """With images Qwen2-VL tells its language model of positions (3, batch, token) before anything else."""
    torch.manual_seed(0)
    model, ids, seen = quiet(qwen2_vl()), torch.randint(5, 60, (batch, 9)), []
    ids[:, 1:7] = torch.tensor([97, 98, 98, 98, 98, 96])
    images = {"pixel_values": torch.randn(16 * batch, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * batch)}
    kinds = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 98).long()}
    value = model.language_model.layers[0].self_attn.v_proj
    value.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))  # noqa: ARG005
    (found,) = terms(model, lambda: model(input_ids=ids, **images, **kinds), "language", reduction="sample").values()
    assert seen[0].shape[:2] == ids.shape
    torch.testing.assert_close(
        found, xd.functional.linear(seen[0], value.weight, NOISE, reduction="sample").detach(), rtol=1e-4, atol=0
    )


class Bi(nn.Module):
    """One encoder, called twice."""

    def __init__(self):
        super().__init__()
        self.bert = tf.BertModel(tf.BertConfig(**SMALL, vocab_size=99))

    def forward(self, first, second):
        return self.bert(**first).last_hidden_state.mean() * self.bert(**second).last_hidden_state.mean()


def tokens(batch, length, padded=0):
    ids = torch.randint(5, 60, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, length - padded :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("sizes", [(4, 12), (12, 4)])
def test_a_model_that_is_called_twice_has_the_samples_of_each_call(sizes):
    torch.manual_seed(0)
    model, batches = quiet(Bi()), [tokens(size, 6) for size in sizes]
    both = terms(model, lambda: model(*batches), reduction="sample")
    alone = [terms(model.bert, lambda batch=batch: model.bert(**batch), reduction="sample") for batch in batches]
    for name, term in both.items():
        torch.testing.assert_close(term, sum(each[name.removeprefix("bert.")] for each in alone))


def test_samples_in_one_row_are_counted_as_the_model_was_given_them():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

        def forward(self, x):
            return self.layer(x.reshape(1, -1, 8))

    model, x = Packed().train(), torch.randn(4, 5, 8)
    with xd.ExplicitDropout(model, NOISE, feed_forward=1.0, reduction="sample") as reg:
        model(x)
        four = reg()
        model(x.reshape(1, 20, 8))
        torch.testing.assert_close(4 * four, reg())


# ---------------------------------------------------------------------------------------------- padding


def test_patches_of_images_are_padded_by_a_name_of_their_own():
    torch.manual_seed(0)
    config = tf.Siglip2VisionConfig(**SMALL, num_patches=16, patch_size=2)
    model, x = quiet(tf.Siglip2VisionModel(config)), torch.randn(2, 16, 12)
    shapes = torch.tensor([[4, 4], [2, 2]])
    real = torch.arange(16) < torch.tensor([16, 4])[:, None]

    def call(rows, number):
        model(
            pixel_values=x[rows, :number], pixel_attention_mask=real[rows, :number].long(), spatial_shapes=shapes[rows]
        )

    whole, first, second = (
        terms(model, lambda rows=rows, number=number: call(rows, number), "encoder")
        for rows, number in ((slice(None), 16), (slice(1), 16), (slice(1, 2), 4))
    )
    assert len(whole) == 1
    for name, term in whole.items():
        torch.testing.assert_close(term, (16 * first[name] + 4 * second[name]) / 20)


def test_patches_of_timm_are_padded_by_a_mask_that_comes_with_them():
    torch.manual_seed(0)
    model = timm.create_model("naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=4, num_classes=3).train()
    extra = model.num_prefix_tokens
    x, places = torch.randn(2, 16, 768), torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, 16, 2).clone()
    places[1, :4] = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    real = torch.arange(16) < torch.tensor([16, 4])[:, None]

    def call(rows, number):
        cut = {"patches": x, "patch_coord": places, "patch_valid": real}
        model({name: tensor[rows, :number] for name, tensor in cut.items()})

    whole, first, second = (
        terms(model, lambda rows=rows, number=number: call(rows, number))
        for rows, number in ((slice(None), 16), (slice(1), 16), (slice(1, 2), 4))
    )
    assert len(whole) == 2
    for name, term in whole.items():
        weighed = (16 + extra) * first[name] + (4 + extra) * second[name]
        torch.testing.assert_close(term, weighed / (20 + 2 * extra))


def test_a_visual_layer_has_no_padding_of_words():
    torch.manual_seed(0)
    config = tf.LxmertConfig(
        vocab_size=99, hidden_size=32, num_attention_heads=4, intermediate_size=48, l_layers=1, x_layers=1, r_layers=1,
        visual_feat_dim=8,
    )  # fmt: skip
    model, words = quiet(tf.LxmertModel(config)), tokens(2, 36, padded=30)
    seen = {"visual_feats": torch.randn(2, 36, 8), "visual_pos": torch.rand(2, 36, 4)}
    found, whole = (
        terms(model, lambda mask=mask: model(words["input_ids"], attention_mask=mask, **seen), "r_layers")
        for mask in (words["attention_mask"], torch.ones(2, 36))
    )
    assert len(found) == 1
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("length", [5, 9])
def test_cross_attention_to_an_image_has_no_padding_of_words(length):
    """Of five image tokens and five words, one mask fits the other; of nine it does not, and nobody has passed one."""
    torch.manual_seed(0)
    text = {**SMALL, "vocab_size": 99, "encoder_hidden_size": 32, "sep_token_id": 2, "pad_token_id": 0}
    config = tf.BlipConfig(text_config=text, vision_config={**SMALL, "image_size": 16, "patch_size": 8})
    model, words = quiet(tf.BlipForConditionalGeneration(config)), tokens(2, length, padded=3)
    image, ids = torch.randn(2, 3, 16, 16), words["input_ids"]
    found, whole = (
        terms(model, lambda m=m: model(image, ids, attention_mask=m, labels=ids), "crossattention")
        for m in (words["attention_mask"], torch.ones_like(ids))
    )
    assert len(found) == 1
    torch.testing.assert_close(found, whole)


def test_an_expert_that_all_tokens_come_to_in_one_row_knows_which_are_real():
    torch.manual_seed(0)
    config = tf.Qwen2MoeConfig(
        **SMALL, vocab_size=99, num_key_value_heads=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model, words = quiet(tf.Qwen2MoeModel(config)), tokens(2, 6, padded=2)
    (layer,) = {site.layer for site in xd.find_sites(model) if "shared_expert" in site.path}

    def found(**batch):
        with xd.ExplicitDropout(model, NOISE, feed_forward={layer: 1.0}) as reg:
            model(**batch)
            reg()
            return reg.terms()

    whole = found(**words)
    first, second = (
        found(**{name: tensor[rows, :length] for name, tensor in words.items()})
        for rows, length in ((slice(1), 4), (slice(1, 2), 6))
    )
    assert len(whole) == 3
    for name, term in whole.items():
        torch.testing.assert_close(term, (4 * first[name] + 6 * second[name]) / 10)


class TwoSequences(nn.Module):
    """An encoder and a decoder under names of one's own, with the arguments that models of transformers have."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        for name in (first, second):
            setattr(self, name, nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True))

    def forward(self, x, y, attention_mask=None, decoder_attention_mask=None):  # noqa: ARG002
        return getattr(self, self.first)(x).mean() + getattr(self, self.second)(y).mean()


@pytest.mark.parametrize("names", [("src_layers", "tgt_layers"), ("enc", "dec"), ("text_encoder", "decoder_0")])
def test_names_of_ones_own_say_whose_mask_a_layer_has(names):
    torch.manual_seed(0)
    model, x, y = TwoSequences(*names).train(), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    first, second = torch.tensor([[1, 1, 0, 0, 0], [1] * 5]), torch.tensor([[1, 1, 1, 1, 0], [1] * 5])
    for masks in ((first, second), (first, None), (None, second)):
        found = terms(model, lambda given=masks: model(x, y, *given))
        for name, batch, mask in zip(names, (x, y), masks, strict=True):
            mask = torch.ones(2, 5, dtype=torch.bool) if mask is None else mask.bool()
            weight = getattr(model, name).self_attn.in_proj_weight[16:]
            torch.testing.assert_close(
                found[f"{name}.self_attn:value"], xd.functional.linear(batch[mask], weight, NOISE).detach()
            )


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_a_layer_that_may_have_either_mask_says_so(given):
    model, x = TwoSequences("one", "two").train(), torch.randn(2, 5, 8)
    masks = [torch.tensor([[1, 1, 0, 0, 0], [1] * 5]) if wanted else None for wanted in given]
    masks[1] = None if masks[1] is None else 1 - masks[1]
    with pytest.raises(xd.CollectionError, match="whether it is a part of the encoder or of the decoder"):
        terms(model, lambda: model(x, x, *masks))
    assert len(terms(model, lambda: model(x, x, *masks), padding=None)) == 2


# ---------------------------------------------------------------------------------------------- sound


def sew(**settings):
    config = tf.SEWConfig(
        **SMALL, conv_dim=(16, 16), conv_kernel=(3, 3), conv_stride=(2, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=5, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0,
        feat_extract_norm="layer", vocab_size=30, **settings,
    )  # fmt: skip
    return quiet(tf.SEWModel(config))


def test_sound_that_is_squeezed_before_the_layers_has_its_padding_squeezed():
    torch.manual_seed(0)
    model, x, seen = sew(squeeze_factor=2), torch.randn(2, 256), []
    mask = (torch.arange(256) < torch.tensor([256, 64])[:, None]).long()
    value = model.encoder.layers[0].attention.v_proj
    value.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))  # noqa: ARG005
    (found,) = terms(model, lambda: model(x, attention_mask=mask)).values()
    numbers = torch.stack([model._get_feat_extract_output_lengths(length) // 2 for length in mask.sum(1)])
    real = torch.arange(seen[0].shape[1]) < numbers[:, None]
    assert real.sum(1).tolist() == [seen[0].shape[1], 7]
    torch.testing.assert_close(found, xd.functional.linear(seen[0], value.weight, NOISE, mask=real).detach())


def test_a_model_whose_numbers_of_tokens_do_not_fit_its_layers_says_so():
    model = sew(squeeze_factor=2)
    model.config.squeeze_factor = 1  # what the layers do is not what the model says any more
    mask = (torch.arange(256) < torch.tensor([256, 64])[:, None]).long()
    with pytest.raises(xd.CollectionError, match=r"256 steps of sound become 63 tokens.*layers see 31.*padding=None"):
        terms(model, lambda: model(torch.randn(2, 256), attention_mask=mask))


def test_a_model_that_counts_tokens_of_one_sequence_at_a_time_is_asked_so():
    torch.manual_seed(0)
    config = tf.MoonshineConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
        encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model, x = quiet(tf.MoonshineForConditionalGeneration(config)), torch.randn(2, 6000)
    mask = (torch.arange(6000) < torch.tensor([6000, 4000])[:, None]).long()
    found = terms(model, lambda: model(x, attention_mask=mask, labels=torch.ones(2, 5).long()), "model.encoder")
    count = model.get_encoder()._get_feat_extract_output_lengths
    assert len(found) == 1
    x_alone = [x[:1], x[1:, :4000]]
    alone = [
        terms(model, lambda one=one: model(one, labels=torch.ones(1, 5).long()), "model.encoder") for one in x_alone
    ]
    numbers = [int(count(length)) for length in (6000, 4000)]
    for name, term in found.items():
        weighed = sum(n * each[name] for n, each in zip(numbers, alone, strict=True)) / sum(numbers)
        torch.testing.assert_close(term, weighed, rtol=2e-2, atol=0)  # the last token may hear a little of the padding


# ---------------------------------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("lengths", [(6, 6), (6, 9)])
def test_one_encoder_checkpointed_and_called_twice_says_what_to_do(lengths):
    model = quiet(Bi())
    model.bert.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = [tokens(4, length, padded=padded) for length, padded in zip(lengths, (2, 1), strict=True)]
    with xd.ExplicitDropout(model, NOISE, value=1e-3) as reg, pytest.raises(xd.CollectionError) as raised:
        (model(*batches) + reg()).backward()
    assert "checkpointing" in str(raised.value)
    assert "padding=None" in str(raised.value)
    with xd.ExplicitDropout(model, NOISE, value=1e-3, padding=None) as reg:
        (model(*batches) + reg()).backward()
