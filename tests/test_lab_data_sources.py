"""GTZAN's audio, THUMOS14's pickles and folders of images, each made here in the layout that it comes in."""

import math
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from explicit_dropout.errors import DataError, InputError, MissingDataError
from explicit_dropout.lab import data
from explicit_dropout.lab.config import Data
from explicit_dropout.lab.data import audio, thumos14

RATE = 16_000


def sine(frequency, seconds=30.0, rate=RATE, loud=0.5):
    return loud * torch.sin(2 * math.pi * frequency * torch.arange(int(seconds * rate)) / rate)


# ------------------------------------------------------------------------------------------------ front end


def test_a_clip_of_30_seconds_becomes_120_tokens_of_mean_and_deviation():
    assert audio.tokens(sine(440), RATE).shape == (120, 128)
    assert audio.tokens(sine(440, rate=22_050), 22_050).shape == (120, 128)
    assert audio.tokens(sine(440, seconds=31), RATE).shape == (120, 128)


@pytest.mark.parametrize("rate", [16_000, 22_050, 44_100])
@pytest.mark.parametrize("frequency", [300, 1000, 4000])
def test_a_tone_is_loudest_in_the_band_of_its_frequency(frequency, rate):
    loudest = audio.tokens(sine(frequency, 3, rate), rate)[2, :64].argmax().item()
    centres = [audio.mel(125) + (band + 1) * (audio.mel(7500) - audio.mel(125)) / 65 for band in range(64)]
    expected = min(range(64), key=lambda band: abs(centres[band] - audio.mel(frequency)))
    assert abs(loudest - expected) <= 1


def test_a_token_sees_one_second_from_a_quarter_second_to_the_next():
    samples = torch.zeros(30 * RATE)
    samples[10 * RATE : 10 * RATE + 100] = 0.9  # a click at 10 s
    heard = (audio.tokens(samples, RATE)[:, :64] > math.log(audio.OFFSET) + 1e-3).any(1)
    assert heard.nonzero().flatten().tolist() == [37, 38, 39, 40]  # windows that begin at 9.25 … 10 s


def test_the_whole_clip_is_used_and_what_is_missing_is_silence():
    silence = audio.tokens(torch.zeros(RATE), RATE)
    torch.testing.assert_close(silence[:, :64], torch.full((120, 64), math.log(audio.OFFSET)))
    late = torch.zeros(30 * RATE)
    late[-RATE // 2 :] = sine(1000, 0.5)
    assert (audio.tokens(late, RATE)[118] > silence[118]).any()
    short = audio.tokens(sine(1000, 20), RATE)
    torch.testing.assert_close(short[85], silence[85])


def test_log_mel_is_the_power_spectrum_through_triangles():
    samples = sine(700, 0.025)[:400]
    spectrum = np.abs(np.fft.rfft(samples.double().numpy() * np.hanning(401)[:400], 512)) ** 2
    expected = np.log(spectrum @ audio.mel_filters(RATE, 512).double().numpy() + 0.01)
    np.testing.assert_allclose(audio.log_mel(samples, RATE)[0].numpy(), expected, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------ GTZAN


@pytest.fixture
def genres(tmp_path):
    """Two genres of ten clips of three seconds; blues 0 and 1 are the same sound."""
    soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
    random = np.random.default_rng(0)
    for genre, frequency in (("blues", 300), ("jazz", 2000)):
        folder = tmp_path / "gtzan" / "genres" / genre
        folder.mkdir(parents=True)
        for number in range(10):
            if (genre, number) != ("blues", 1):
                sound = sine(frequency, 3).numpy() + 0.1 * random.normal(size=3 * RATE)
            suffix = "wav" if number % 2 else "au"
            soundfile.write(folder / f"{genre}.{number:05d}.{suffix}", sound, RATE, subtype="PCM_16")
    return tmp_path


def test_a_folder_of_clips_becomes_sequences_split_72_18_10(genres):
    found = data.load("gtzan", genres)
    assert found.shape == (120, 128)
    assert found.classes == ("blues", "jazz")
    assert [len(found.train), len(found.validation), len(found.test)] == [14, 4, 2]
    assert found.sources == ("gtzan/genres",)
    inputs, _ = found.train.batch(torch.arange(14))
    assert inputs.mean((0, 1)).abs().max() < 1e-3
    varied = inputs.std((0, 1), correction=0)
    assert ((varied - 1).abs() < 1e-2).all()


def test_equal_sound_is_one_group_whatever_the_file(genres):
    data.load("gtzan", genres)
    (cache,) = (genres / "cache").glob("gtzan-*.npz")
    held = np.load(cache)
    groups = dict(zip(held["clips"].tolist(), held["groups"].tolist(), strict=True))
    assert groups["blues.00000.au"] == groups["blues.00001.wav"]
    assert len(set(groups.values())) == 19


def test_features_are_computed_once_and_again_when_a_file_changes(genres):
    first = data.load("gtzan", genres)
    (cache,) = (genres / "cache").iterdir()
    before = cache.stat().st_mtime_ns
    assert data.load("gtzan", genres).fingerprint == first.fingerprint
    assert cache.stat().st_mtime_ns == before
    jazz = genres / "gtzan" / "genres" / "jazz"
    (jazz / "jazz.00003.wav").write_bytes((jazz / "jazz.00005.wav").read_bytes())
    assert data.load("gtzan", genres).fingerprint != first.fingerprint
    assert len(list((genres / "cache").iterdir())) == 2


def test_an_unreadable_clip_is_named_and_can_be_left_out_openly(genres):
    folder = genres / "gtzan" / "genres"
    bad = folder / "jazz" / "jazz.00054.wav"
    bad.write_bytes(b"RIFF\x00\x00\x00\x00not audio")
    with pytest.raises(DataError, match=r"jazz\.00054\.wav is no readable audio") as raised:
        data.load("gtzan", genres)
    assert str(folder / "skip.txt") in str(raised.value)
    (folder / "skip.txt").write_text("jazz.00054.wav  # damaged in my copy\n")
    found = data.load("gtzan", genres)
    assert len(found.train) + len(found.validation) + len(found.test) == 20
    assert found.notes == ("left out, as skip.txt says: jazz.00054.wav",)
    (folder / "skip.txt").write_text("jazz.00099.wav\n")
    with pytest.raises(DataError, match=r"names jazz\.00099\.wav, which is not among the clips"):
        data.load("gtzan", genres)


def test_clips_that_are_too_short_or_too_coarse_are_refused(genres):
    soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
    clip = genres / "gtzan" / "genres" / "blues" / "blues.00001.wav"
    soundfile.write(clip, np.zeros(100), RATE)
    with pytest.raises(DataError, match=r"at least 1 s .* Found 100 samples"):
        data.load("gtzan", genres)
    soundfile.write(clip, np.zeros(16000), 8000)
    with pytest.raises(DataError, match=r"at least 15000 Hz\. Found 8000 Hz"):
        data.load("gtzan", genres)


def test_where_no_cache_can_be_written_the_clips_are_read_all_the_same(genres):
    (genres / "cache").write_text("in the way")
    assert data.load("gtzan", genres).shape == (120, 128)


# ------------------------------------------------------------------------------------------------ THUMOS14


def videos(names, random, width=3):
    """Features and labels; step 2 of each video is ambiguous, step 4 has two actions."""
    features, labels = {}, {}
    for name in names:
        length = int(random.integers(6, 90))
        anno = np.zeros((length, 22))
        anno[np.arange(length), random.integers(0, 21, length)] = 1
        anno[2] = np.eye(22)[21]
        anno[4] = np.eye(22)[3] + np.eye(22)[7]
        step = np.arange(length)[:, None]
        features[name] = {
            "rgb": (step + np.zeros((1, width))).astype(np.float32),
            "flow": (-step + np.zeros((1, width))).astype(np.float32),
        }
        labels[name] = {"anno": anno, "feature_length": length}
    return features, labels


@pytest.fixture
def thumos(tmp_path):
    folder = tmp_path / "thumos14_kinetics"
    folder.mkdir()
    random = np.random.default_rng(1)
    held = {}
    for part, count in (("val", 10), ("test", 4)):
        features, labels = videos([f"video_{part}_{n}" for n in range(count)], random)
        held[part] = features, labels
        (folder / f"thumos_all_feature_{part}_Kinetics.pickle").write_bytes(pickle.dumps(features))
        (folder / f"thumos_{part}_anno.pickle").write_bytes(pickle.dumps(labels, protocol=2))
    return tmp_path, held


def rewrite(root, file, change):
    path = root / "thumos14_kinetics" / file
    held = pickle.loads(path.read_bytes())
    change(held)
    path.write_bytes(pickle.dumps(held))


def test_every_step_that_is_not_ambiguous_is_a_window(thumos):
    root, held = thumos
    found = data.load("thumos14_kinetics", root)
    assert found.shape == (64, 6)
    assert found.classes == ("background", *thumos14.ACTIONS)
    assert len(found.classes) == 21
    lengths = {part: [len(entry["anno"]) for entry in held[part][1].values()] for part in held}
    assert len(found.test) == sum(lengths["test"]) - 4
    assert len(found.train) + len(found.validation) == sum(lengths["val"]) - 10
    assert found.notes == ("14 ambiguous steps are no examples",)
    windows, targets = found.test.batch(torch.arange(len(found.test)))
    assert not (windows[:, -1, 0] == 2).any()
    assert torch.equal(windows[..., :3], -windows[..., 3:])
    assert torch.equal(windows[..., 0], (windows[:, -1:, 0] + torch.arange(-63, 1)).clamp(min=0))
    assert targets[windows[:, -1, 0] == 4].sum(1).tolist() == [2.0] * 4
    expected = np.concatenate([np.delete(held["test"][1][name]["anno"], 2, 0) for name in sorted(held["test"][1])])
    assert np.array_equal(targets.numpy(), expected[:, :21])


def test_videos_are_split_70_30_and_none_is_on_both_sides(tmp_path):
    folder = tmp_path / "thumos14_activitynet"
    folder.mkdir()
    random = np.random.default_rng(1)
    for part, count in (("val", 20), ("test", 2)):
        features, labels = videos([f"v{n}" for n in range(count)], random)
        for number, name in enumerate(sorted(features)):
            features[name]["rgb"][:] = number
        (folder / f"thumos_all_feature_{part}_tsn_v2.pickle").write_bytes(pickle.dumps(features))
        (folder / f"thumos_{part}_anno.pickle").write_bytes(pickle.dumps(labels))
    for seed in range(3):
        found = data.load(Data("thumos14_activitynet", split=seed), tmp_path)
        sides = [
            set(split.inputs(torch.arange(len(split)))[:, -1, 0].tolist()) for split in (found.train, found.validation)
        ]
        assert not sides[0] & sides[1]
        assert [len(side) for side in sides] == [14, 6]


def test_steps_without_labels_and_videos_without_labels_are_told(thumos):
    root, _ = thumos
    rewrite(root, "thumos_val_anno.pickle", lambda held: held["video_val_0"]["anno"].__setitem__(0, 0))
    rewrite(root, "thumos_test_anno.pickle", lambda held: held.pop("video_test_0"))
    notes = data.load("thumos14_kinetics", root).notes
    assert "1 steps without any label count as background" in notes
    assert "1 videos of thumos_all_feature_test_Kinetics.pickle have no labels and are left out" in notes


@pytest.mark.parametrize(
    ("file", "change", "complaint"),
    [
        (
            "thumos_all_feature_val_Kinetics.pickle",
            lambda h: h.pop("video_val_3"),
            "no features of 1 labelled videos: video_val_3",
        ),
        (
            "thumos_all_feature_val_Kinetics.pickle",
            lambda h: h["video_val_3"].pop("flow"),
            "`flow` of video_val_3 must be",
        ),
        (
            "thumos_all_feature_val_Kinetics.pickle",
            lambda h: h["video_val_3"].__setitem__("rgb", h["video_val_3"]["rgb"][:-1]),
            "`rgb` of video_val_3 must be",
        ),
        (
            "thumos_all_feature_val_Kinetics.pickle",
            lambda h: h["video_val_3"]["rgb"].__setitem__((1, 1), np.nan),
            "`rgb` of video_val_3: NaN or infinite values, first at example 1",
        ),
        (
            "thumos_all_feature_val_Kinetics.pickle",
            lambda h: h["video_val_3"].__setitem__("rgb", h["video_val_3"]["rgb"][:, :2]),
            "equally wide",
        ),
        ("thumos_val_anno.pickle", lambda h: h["video_val_3"].__setitem__("feature_length", 1), "but says 1 of itself"),
        (
            "thumos_val_anno.pickle",
            lambda h: h["video_val_3"].__setitem__("anno", h["video_val_3"]["anno"][:, :21]),
            "must be (steps, 22) of 0 and 1",
        ),
        ("thumos_test_anno.pickle", lambda h: h.clear(), "has no videos"),
        ("thumos_test_anno.pickle", lambda h: h.__setitem__(3, 4), "must hold a dictionary by video name"),
    ],
)  # fmt: skip
def test_wrong_features_and_labels_are_named(thumos, file, change, complaint):
    root, _ = thumos
    rewrite(root, file, change)
    with pytest.raises(DataError) as raised:
        data.load("thumos14_kinetics", root)
    assert complaint in str(raised.value)
    assert "thumos14_kinetics" in str(raised.value)


def test_a_malicious_feature_pickle_does_nothing(thumos, tmp_path):
    class Shell:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'marker'}",)

    root, _ = thumos
    (root / "thumos14_kinetics" / "thumos_all_feature_val_Kinetics.pickle").write_bytes(pickle.dumps({"v": Shell()}))
    with pytest.raises(DataError, match="only plain containers and arrays are allowed"):
        data.load("thumos14_kinetics", root)
    assert not (tmp_path / "marker").exists()


def test_two_feature_files_for_one_part_are_too_many(thumos):
    root, _ = thumos
    (root / "thumos14_kinetics" / "thumos_all_feature_val_V3.pickle").write_bytes(b"")
    with pytest.raises(DataError, match=r"must hold one file .*Found .*Kinetics.*V3"):
        data.load("thumos14_kinetics", root)


# ------------------------------------------------------------------------------------------------ images


def picture(path, size=(12, 10), seed=0, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return pixels


def folders(root, **how):
    for label, name in enumerate(("cat", "dog")):
        for number in range(10):
            picture(root / "pets" / name / f"{number}.png", seed=100 * label + number, **how)


def test_a_folder_per_class_is_a_dataset(tmp_path):
    folders(tmp_path)
    found = data.load(Data("images", folder="pets"), tmp_path)
    assert found.classes == ("cat", "dog")
    assert found.shape == (3, 10, 12)
    assert [len(found.train), len(found.validation), len(found.test)] == [11, 5, 4]
    everything = {
        image.numpy().tobytes() for split in (found.train, found.validation, found.test) for image in split.pixels
    }
    original = np.random.default_rng(103).integers(0, 256, (10, 12, 3)).astype(np.uint8)
    assert np.ascontiguousarray(original.transpose(2, 0, 1)).tobytes() in everything
    assert len(everything) == 20


def test_grey_images_have_one_channel(tmp_path):
    folders(tmp_path, mode="L")
    assert data.load(Data("images", folder="pets"), tmp_path).shape == (1, 10, 12)
    picture(tmp_path / "pets" / "cat" / "coloured.png")
    assert data.load(Data("images", folder="pets"), tmp_path).shape == (3, 10, 12)


def test_images_of_many_sizes_need_a_common_one(tmp_path):
    folders(tmp_path)
    picture(tmp_path / "pets" / "cat" / "large.jpg", size=(40, 20))
    with pytest.raises(InputError, match=r"`data\.size` must be given: .* 2 sizes"):
        data.load(Data("images", folder="pets"), tmp_path)
    assert data.load(Data("images", folder="pets", size=8), tmp_path).shape == (3, 8, 8)


def test_folders_named_train_val_and_test_are_kept_as_they_are(tmp_path):
    for part, count in (("train", 6), ("val", 3), ("test", 2)):
        for label, name in enumerate(("a", "b")):
            for number in range(count):
                picture(tmp_path / "set" / part / name / f"{number}.png", seed=100 * count + 10 * label + number)
    found = data.load(Data("images", folder="set"), tmp_path)
    assert [len(found.train), len(found.validation), len(found.test)] == [12, 6, 4]
    (tmp_path / "set" / "val").rename(tmp_path / "elsewhere")
    found = data.load(Data("images", folder="set"), tmp_path)
    assert [len(found.train), len(found.validation), len(found.test)] == [8, 4, 4]
    (tmp_path / "set" / "unexpected").mkdir()
    with pytest.raises(DataError, match="unexpected beside it is neither part nor class"):
        data.load(Data("images", folder="set"), tmp_path)


def test_equal_images_stay_on_one_side(tmp_path):
    for number in range(20):
        for copy in range(2):
            picture(tmp_path / "set" / ("a" if number % 2 else "b") / f"{number}-{copy}.png", seed=number)
    found = data.load(Data("images", folder="set"), tmp_path)
    sides = [
        {image.numpy().tobytes() for image in split.pixels} for split in (found.train, found.validation, found.test)
    ]
    assert sum(map(len, sides)) == len(sides[0] | sides[1] | sides[2]) == 20


def test_what_is_no_image_is_named(tmp_path):
    folders(tmp_path)
    bad = tmp_path / "pets" / "dog" / "broken.png"
    bad.write_bytes((tmp_path / "pets" / "dog" / "1.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"broken\.png is no readable image"):
        data.load(Data("images", folder="pets"), tmp_path)
    bad.unlink()
    Image.fromarray(np.zeros((10, 12), dtype=np.uint16)).save(tmp_path / "pets" / "dog" / "deep.png")
    with pytest.raises(DataError, match=r"deep\.png must have 8 bits per channel"):
        data.load(Data("images", folder="pets"), tmp_path)


def test_a_folder_without_classes_is_refused(tmp_path):
    with pytest.raises(MissingDataError, match="there is no folder"):
        data.load(Data("images", folder="absent"), tmp_path)
    picture(tmp_path / "flat" / "1.png")
    with pytest.raises(DataError, match="Found 0 images in 0 folders"):
        data.load(Data("images", folder="flat"), tmp_path)
