"""Datasets as a training run sees them: splits, subsets, label noise, windows, fingerprints."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explicit_dropout.errors import DataError, InputError, MissingDataError
from explicit_dropout.lab import data
from explicit_dropout.lab.config import Data
from explicit_dropout.lab.data.splits import apportion, choose, random_integers, shuffled

TINY = {"tokens": 5, "width": 3}


def write_sequences(path, n=60, k=3, dtype=np.float32, seed=0, **more):
    """A file of feature sequences; returns its arrays."""
    random = np.random.default_rng(seed)
    features = random.integers(0, 100, (n, TINY["tokens"], TINY["width"])).astype(dtype)
    arrays = {
        "features": features,
        "labels": np.arange(n) % k,
        "classes": np.array([f"c{name}" for name in range(k)]),
    }
    arrays |= more
    np.savez(path, **arrays)
    return arrays


def write_recordings(path, lengths=(70, 3, 40, 66), test_lengths=(5, 80), width=4, classes=2, **more):
    """Recordings whose feature 0 is the number of the step and feature 1 that of the recording."""
    arrays = {"classes": np.array([f"action{k}" for k in range(classes)]), "scale": np.array(0.5, dtype=np.float32)}
    for part, long in (("train", lengths), ("test", test_lengths)):
        steps = np.concatenate([np.arange(n) for n in long])
        video = np.repeat(np.arange(len(long)), long)
        features = np.zeros((len(steps), width), dtype=np.float32)
        features[:, 0], features[:, 1] = steps, video
        marks = np.stack([(steps % 5 == k) & (video % classes == k) for k in range(classes)], axis=1)
        arrays |= {
            f"{part}_features": features,
            f"{part}_labels": marks.astype(np.uint8),
            f"{part}_lengths": np.array(long),
            f"{part}_videos": np.array([f"{part}{k}" for k in range(len(long))]),
        }
    arrays |= more
    np.savez(path, **arrays)
    return arrays


def rows(split):
    """Examples as bytes, to compare sets of them."""
    return [split.inputs(torch.tensor(i)).numpy().tobytes() for i in range(len(split))]


# ------------------------------------------------------------------------------------------------ digits


def test_digits_are_there_without_any_file():
    digits = data.load("digits")
    assert digits.shape == (1, 8, 8)
    assert digits.classes == tuple("0123456789")
    assert [len(digits.train), len(digits.validation), len(digits.test)] == [1007, 431, 359]
    assert digits.metric == "accuracy"
    assert digits.official is True


def test_every_class_has_its_share_of_every_split():
    digits = data.load("digits")
    whole = sum(torch.bincount(split.labels) for split in (digits.train, digits.validation, digits.test))
    for split, share in ((digits.train, 0.56), (digits.validation, 0.24), (digits.test, 0.2)):
        assert ((torch.bincount(split.labels) - share * whole).abs() <= 2).all()


def test_a_batch_is_normalised_float_and_raw_is_bytes():
    split = data.load("digits").train
    everything = torch.arange(len(split))
    inputs, targets = split.batch(everything)
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert abs(inputs.mean()) < 1e-5
    assert abs(inputs.std() - 1) < 1e-3
    assert split.raw(everything).dtype == torch.uint8
    assert split.raw(everything).max() == 255
    assert torch.equal(split.normalise(split.raw(everything)), inputs)


def test_an_index_of_any_shape_gives_a_batch_of_that_shape():
    split = data.load("digits").train
    inputs, targets = split.batch(torch.arange(12).view(3, 4))
    assert inputs.shape == (3, 4, 1, 8, 8)
    assert targets.shape == (3, 4)
    assert torch.equal(inputs[1, 2], split.inputs(torch.tensor(6)))


def test_validation_and_test_images_are_normalised_as_training_images_are():
    digits = data.load("digits")
    assert torch.equal(digits.train.mean, digits.test.mean)
    assert torch.equal(digits.train.deviation, digits.validation.deviation)


def test_the_seed_decides_the_split_and_nothing_else_does():
    first, again, other = (data.load(Data("digits", split=seed)) for seed in (3, 3, 4))
    assert rows(first.train) == rows(again.train)
    assert rows(first.test) == rows(again.test)
    assert set(rows(first.test)) != set(rows(other.test))
    assert first.fingerprint == other.fingerprint


def test_splits_are_the_same_on_every_machine():
    assert shuffled(8, 0, "test").tolist() == [6, 2, 5, 4, 7, 3, 1, 0]
    assert random_integers(2, 7, "x").tolist() == [17818351491562758773, 4414982255932975918]


def test_the_share_that_validates_can_be_chosen():
    digits = data.load(Data("digits", validation=0.1))
    assert len(digits.validation) == round(0.1 * (1797 - 359))
    assert len(digits.train) + len(digits.validation) == 1797 - 359


def test_fewer_examples_are_a_balanced_part_of_the_training_examples():
    whole, part = data.load("digits"), data.load(Data("digits", examples=100))
    assert len(part.train) == 100
    inside = {image.numpy().tobytes() for image in whole.train.raw(torch.arange(len(whole.train)))}
    assert all(image.numpy().tobytes() in inside for image in part.train.raw(torch.arange(100)))
    assert torch.bincount(part.train.labels).min() >= 9
    assert len(part.validation) == len(whole.validation)


def test_more_examples_than_there_are_is_an_error():
    with pytest.raises(InputError, match=r"`data.examples` must be at most 1007"):
        data.load(Data("digits", examples=1008))


def test_label_noise_replaces_its_share_of_training_labels_and_no_others():
    clean, noisy = data.load("digits"), data.load(Data("digits", label_noise=0.5))
    assert torch.equal(clean.test.labels, noisy.test.labels)
    assert torch.equal(clean.validation.labels, noisy.validation.labels)
    changed = (clean.train.labels != noisy.train.labels).sum().item()
    assert abs(changed - 0.5 * 0.9 * 1007) < 40  # a tenth of the classes drawn is the right one
    again = data.load(Data("digits", label_noise=0.5))
    assert torch.equal(noisy.train.labels, again.train.labels)
    everything = data.load(Data("digits", label_noise=1.0))
    assert torch.bincount(everything.train.labels).min() > 60


def test_a_dataset_moves_as_a_whole():
    moved = data.load("digits").to("meta")
    assert {moved.train.device.type, moved.validation.device.type, moved.test.device.type} == {"meta"}
    assert moved.train.pixels.device.type == "meta"


def test_an_unknown_name_lists_the_known():
    with pytest.raises(InputError, match="digits, cifar10, cifar100"):
        data.load("mnist")


def test_a_folder_is_for_images_and_features_only():
    with pytest.raises(InputError, match=r"data\.folder"):
        data.load(Data("digits", folder="x"))
    with pytest.raises(InputError, match=r"data\.size"):
        data.load(Data("digits", size=8))


# ------------------------------------------------------------------------------------------------ choices


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any), st.data())
def test_apportioned_numbers_add_up_and_are_within_one_of_their_share(weights, more):
    total = more.draw(st.integers(0, sum(weights)))
    quotas = apportion(np.array(weights), total)
    assert quotas.sum() == total
    assert (np.abs(quotas - np.array(weights) * total / sum(weights)) < 1).all()
    assert (quotas <= np.array(weights)).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 5), st.floats(0, 1))
def test_chosen_groups_are_whole_and_never_too_many(groups, seed, share):
    groups = np.array(groups)
    total = round(share * len(groups))
    mask = choose(groups % 3, groups, total, seed, "x")
    assert mask.sum() <= total
    for group in set(groups.tolist()):
        assert len(set(mask[groups == group].tolist())) == 1
    left_out = [int((groups == g).sum()) for g in set(groups.tolist()) if not mask[groups == g][0]]
    assert all(size > total - mask.sum() for size in left_out)


# ------------------------------------------------------------------------------------------------ sequences


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32])
def test_features_are_stored_as_in_the_file_and_scaled_in_the_batch(tmp_path, dtype):
    scale = np.array([0.5, 1, 2], dtype=np.float32)
    arrays = write_sequences(tmp_path / "some.npz", dtype=dtype, scale=scale)
    dataset = data.load(Data("features", folder="some.npz"), tmp_path)
    assert dataset.shape == (5, 3)
    assert dataset.classes == ("c0", "c1", "c2")
    assert dataset.sources == ("some.npz",)
    assert dataset.train.features.dtype == torch.from_numpy(arrays["features"]).dtype
    expected = {(row.astype(np.float32) * scale).tobytes() for row in arrays["features"]}
    for split in (dataset.train, dataset.validation, dataset.test):
        assert set(rows(split)) <= expected
    assert len(dataset.train) + len(dataset.validation) + len(dataset.test) == 60


def test_no_group_lies_on_both_sides_of_a_split(tmp_path):
    groups = np.arange(60) // 4
    write_sequences(tmp_path / "f.npz", groups=groups, labels=(groups % 3))
    features = np.load(tmp_path / "f.npz")["features"]
    of = {row.tobytes(): group for row, group in zip(features, groups, strict=True)}
    for seed in range(5):
        dataset = data.load(Data("features", folder="f.npz", split=seed), tmp_path)
        sides = [{of[row] for row in rows(split)} for split in (dataset.train, dataset.validation, dataset.test)]
        assert sum(map(len, sides)) == len(sides[0] | sides[1] | sides[2])
        assert [4 * len(side) for side in sides] == [len(dataset.train), len(dataset.validation), len(dataset.test)]


def test_a_file_can_say_which_examples_test(tmp_path):
    parts = np.array(["train", "train", "validation", "test"] * 15)
    arrays = write_sequences(tmp_path / "f.npz", parts=parts)
    dataset = data.load(Data("features", folder="f.npz"), tmp_path)
    assert rows(dataset.test) == [row.tobytes() for row in arrays["features"][3::4]]
    assert rows(dataset.validation) == [row.tobytes() for row in arrays["features"][2::4]]
    with pytest.raises(InputError, match=r"`data\.validation` must be null"):
        data.load(Data("features", folder="f.npz", validation=0.5), tmp_path)


def test_gtzan_embeddings_are_split_72_18_10(tmp_path):
    write_sequences(tmp_path / "gtzan_yamnet.npz", n=100, k=10)
    dataset = data.load("gtzan_yamnet", tmp_path)
    assert [len(dataset.train), len(dataset.validation), len(dataset.test)] == [72, 18, 10]
    assert torch.bincount(dataset.test.labels).tolist() == [1] * 10


def test_sequences_cannot_be_augmented(tmp_path):
    write_sequences(tmp_path / "f.npz")
    split = data.load(Data("features", folder="f.npz"), tmp_path).train
    with pytest.raises(InputError, match="no images"):
        split.raw(torch.arange(2))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"labels": np.arange(60)}, "`labels` must be from 0 to 2"),
        ({"labels": np.zeros(59, dtype=int)}, "`labels` must be 60 whole numbers"),
        ({"labels": np.zeros(60)}, "`labels` must be 60 whole numbers"),
        ({"features": np.zeros((60, 5), dtype=np.float32)}, "`features` must be (examples, tokens, features)"),
        ({"features": np.zeros((60, 5, 3))}, "`features` must be of uint8, int8, float16, float32"),
        ({"features": np.full((60, 5, 3), np.nan, dtype=np.float32)}, "NaN or infinite values, first at example 0"),
        ({"scale": np.ones(4)}, "`scale` must be finite numbers of shape () or (3,)"),
        ({"scale": np.array(np.inf)}, "`scale` must be finite"),
        ({"classes": np.arange(3)}, "`classes` must be text"),
        ({"groups": np.zeros(3, dtype=int)}, "`groups` must be 60 whole numbers"),
        ({"parts": np.array(["spare"] * 60)}, "`parts` must be of train, validation, test. Found 'spare'"),
        ({"features": np.array([{}] * 60, dtype=object)}, "no readable .npz file"),
    ],
)
def test_a_wrong_array_is_named_with_its_file(tmp_path, change, complaint):
    write_sequences(tmp_path / "wrong.npz", **change)
    with pytest.raises(DataError) as raised:
        data.load(Data("features", folder="wrong.npz"), tmp_path)
    assert "wrong.npz" in str(raised.value)
    assert complaint in str(raised.value)


def test_a_missing_array_is_named_with_those_that_are_there(tmp_path):
    np.savez(tmp_path / "f.npz", labels=np.zeros(3, dtype=int))
    with pytest.raises(DataError, match="has no array `features`; it has labels"):
        data.load(Data("features", folder="f.npz"), tmp_path)


def test_a_truncated_feature_file_is_named(tmp_path):
    write_sequences(tmp_path / "gtzan_yamnet.npz")
    whole = (tmp_path / "gtzan_yamnet.npz").read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 30):
        (tmp_path / "gtzan_yamnet.npz").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"gtzan_yamnet\.npz is no readable \.npz file"):
            data.load("gtzan_yamnet", tmp_path)


def test_paths_outside_the_root_are_refused(tmp_path):
    for folder in ("../x.npz", str(tmp_path / "x.npz"), "a/../../x.npz"):
        with pytest.raises(InputError, match="relative to the data root"):
            data.load(Data("features", folder=folder), tmp_path)
    with pytest.raises(InputError, match=r"data\.folder"):
        data.load(Data("features"), tmp_path)
    with pytest.raises(MissingDataError, match=r"nowhere\.npz is not there"):
        data.load(Data("features", folder="nowhere.npz"), tmp_path)


def test_too_few_examples_are_an_error(tmp_path):
    write_sequences(tmp_path / "f.npz", n=2, k=1)
    with pytest.raises(DataError, match="no test examples are left of 2"):
        data.load(Data("features", folder="f.npz"), tmp_path)


# ------------------------------------------------------------------------------------------------ windows


def test_a_window_ends_at_its_step_and_never_leaves_its_recording(tmp_path):
    write_recordings(tmp_path / "thumos14_i3d.npz")
    dataset = data.load("thumos14_i3d", tmp_path)
    assert dataset.shape == (64, 4)
    assert dataset.classes == ("background", "action0", "action1")
    assert len(dataset.test) == 85
    for split in (dataset.train, dataset.validation, dataset.test):
        windows, _ = split.batch(torch.arange(len(split)))
        steps, video = windows[..., 0] * 2, windows[..., 1] * 2
        assert (video == video[:, -1:]).all()
        last = steps[:, -1:]
        expected = (last + torch.arange(-63, 1)).clamp(min=0)
        assert torch.equal(steps, expected)


def test_windows_are_split_by_recording(tmp_path):
    write_recordings(tmp_path / "w.npz", lengths=(10,) * 20)
    for seed in range(4):
        dataset = data.load(Data("features", folder="w.npz", split=seed), tmp_path)
        videos = [
            set(split.inputs(torch.arange(len(split)))[:, -1, 1].tolist())
            for split in (dataset.train, dataset.validation)
        ]
        assert not videos[0] & videos[1]
        assert [len(side) for side in videos] == [14, 6]


def test_a_step_counts_for_each_of_its_classes_and_for_background_if_it_has_none(tmp_path):
    marks = np.array([[1, 1], [0, 0], [0, 1]] * 20, dtype=np.uint8)
    write_recordings(tmp_path / "w.npz", lengths=(30, 30), test_lengths=(60,), test_labels=marks)
    dataset = data.load(Data("features", folder="w.npz"), tmp_path)
    assert dataset.metric == "mean_average_precision"
    assert dataset.background == 0
    assert dataset.scored_classes == [1, 2]
    assert dataset.test.labels[:3].tolist() == [[0, 1, 1], [1, 0, 0], [0, 0, 1]]
    assert dataset.positive(dataset.test.labels)[:3].tolist() == [[True, True], [False, False], [False, True]]
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(dataset.scores(logits), logits.softmax(1)[:, 1:])


def test_windows_are_gathered_not_stored(tmp_path):
    write_recordings(tmp_path / "w.npz", lengths=(500, 500), test_lengths=(100,))
    dataset = data.load(Data("features", folder="w.npz"), tmp_path)
    assert dataset.train.features.shape == (500, 4)
    assert len(dataset.train) == 500


def test_a_window_subset_keeps_what_lies_before_its_windows(tmp_path):
    write_recordings(tmp_path / "w.npz", lengths=(200, 200))
    dataset = data.load(Data("features", folder="w.npz", examples=9, label_noise=1.0), tmp_path)
    windows, targets = dataset.train.batch(torch.arange(9))
    steps = windows[..., 0] * 2
    assert torch.equal(steps, (steps[:, -1:] + torch.arange(-63, 1)).clamp(min=0))
    assert (targets.sum(1) == 1).all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train_lengths": np.array([70, 3, 40, 60])}, "`train_lengths` must be positive with the sum 179"),
        ({"train_labels": np.zeros((179, 3), dtype=np.uint8)}, "`train_labels` must be (179, 2) of 0 and 1"),
        ({"train_labels": np.full((179, 2), 2, dtype=np.uint8)}, "`train_labels` must be (179, 2) of 0 and 1"),
        ({"test_features": np.zeros((85, 5), dtype=np.float32)}, "`test_features` must be of 4 features"),
        ({"train_videos": np.array(["a"])}, "`train_videos` must be 4 texts"),
    ],
)
def test_wrong_recordings_are_named(tmp_path, change, complaint):
    write_recordings(tmp_path / "thumos14_i3d.npz", **change)
    with pytest.raises(DataError) as raised:
        data.load("thumos14_i3d", tmp_path)
    assert complaint in str(raised.value)


# ------------------------------------------------------------------------------------------------ roots and names


def test_the_root_is_the_argument_else_the_environment_else_data(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPLICIT_DROPOUT_DATA", str(tmp_path / "there"))
    assert data.data_root(tmp_path / "here") == tmp_path / "here"
    assert data.data_root() == tmp_path / "there"
    monkeypatch.delenv("EXPLICIT_DROPOUT_DATA")
    assert str(data.data_root()) == "data"


@pytest.mark.parametrize(
    "name", [name for name, source in data.SOURCES.items() if not source.asks_folder and name != "digits"]
)
def test_a_missing_dataset_says_what_it_needs_and_where(name, tmp_path):
    with pytest.raises(MissingDataError) as raised:
        data.load(name, tmp_path)
    message = str(raised.value)
    assert str(tmp_path) in message
    assert data.SOURCES[name].needs in message
    assert data.SOURCES[name].obtain in message
    assert ("--download" in message) == (name in ("cifar10", "cifar100"))


def test_the_fingerprint_follows_examples_and_labels(tmp_path):
    prints = set()
    for number, change in enumerate(({}, {"labels": (np.arange(60) + 1) % 3}, {"seed": 1}, {"scale": np.array(2.0)})):
        write_sequences(tmp_path / f"{number}.npz", **change)
        prints.add(data.load(Data("features", folder=f"{number}.npz"), tmp_path).fingerprint)
    assert len(prints) == 4
    assert all(len(one) == 64 for one in prints)
