"""Official files of CIFAR, archives, downloads and pickles: what is read, and what is refused."""

import collections
import functools
import hashlib
import http.server
import io
import os
import pickle
import pickletools
import subprocess
import tarfile
import threading

import numpy as np
import pytest
import torch

from explicit_dropout.errors import DataError, MissingDataError
from explicit_dropout.lab import data
from explicit_dropout.lab.config import Data
from explicit_dropout.lab.data import cifar
from explicit_dropout.lab.data.archives import extract, fetch, md5, members
from explicit_dropout.lab.data.pickles import load_pickle

VARIANTS = {"cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100}


def cifar_files(variant, form, each=20):
    """The official files with few random images: {name: bytes}, the same images in both forms."""
    layout = variant.layouts[form]
    random = np.random.default_rng(5)
    count = len(variant.classes)
    files = {}
    for name in layout.files:
        pixels = random.integers(0, 256, (each, 3072)).astype(np.uint8)
        labels = random.permutation(np.arange(each) % count)
        if isinstance(layout.label, str):
            held = {"batch_label": "x", "data": pixels, layout.label: labels.tolist(), "coarse_labels": [0] * each}
            files[name] = pickle.dumps(held, protocol=2)
        else:
            position, width = layout.label
            before = np.zeros((each, width), dtype=np.uint8)
            before[:, position] = labels
            files[name] = np.concatenate([before, pixels], axis=1).tobytes()
    return layout, files


def packed(path, files, folder=""):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}" if folder else name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def placed(root, variant, form, where):
    """Files in one of the places where people have them."""
    layout, files = cifar_files(variant, form)
    if where.startswith("archive"):
        place = root / variant.name if "own" in where else root
        place.mkdir(parents=True, exist_ok=True)
        packed(place / layout.archive, files, layout.folder)
        return
    folder = {"official": root / layout.folder, "flat": root, "own": root / variant.name}[where]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


# ------------------------------------------------------------------------------------------------ CIFAR


@pytest.mark.parametrize("name", VARIANTS)
def test_both_layouts_in_every_place_give_the_same_dataset(name, tmp_path):
    prints = set()
    for form in (0, 1):
        for where in ("official", "flat", "own", "archive", "archive in own"):
            root = tmp_path / f"{form} {where}"
            placed(root, VARIANTS[name], form, where)
            found = data.load(name, root)
            prints.add(found.fingerprint)
            each = len(found.test)
            assert found.shape == (3, 32, 32)
            assert len(found.train) + len(found.validation) == each * len(VARIANTS[name].layouts[form].train)
            assert not any(os.path.isabs(source) for source in found.sources)
    assert len(prints) == 1


def test_pixels_and_labels_are_where_the_format_has_them(tmp_path):
    for name, header in (("cifar10", b"\x07"), ("cifar100", b"\x03\x07")):
        image = bytes([1] * 1024 + [2] * 1024 + [3] * 1024)
        root = tmp_path / name
        root.mkdir()
        for file in VARIANTS[name].layouts[0].files:
            records = [header[:-1] + bytes([label]) + bytes([label]) * 3072 for label in range(10)]
            (root / file).write_bytes(b"".join([*records, header + image]))
        found = data.load(name, root)
        assert found.test.labels.tolist() == [*range(10), 7]
        assert found.test.pixels[10, :, 5, 5].tolist() == [1, 2, 3]
        assert found.test.pixels[4].unique().tolist() == [4]


def test_python_2_pickles_are_read():
    """As the official archive has them: protocol 2, keys and bytes of Python 2."""
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01K\x02K\x03\x86" + kind + b"\x89U\x06\x00\x01\x02\xfd\xfe\xfftb"
    old = b"\x80\x02}(U\x04data" + array + state + b"U\x06labels](K\x03K\x04eu."
    found = load_pickle(io.BytesIO(old), "old")
    assert found["data"].tolist() == [[0, 1, 2], [253, 254, 255]]
    assert found["labels"] == [3, 4]


def test_test_images_stay_test_images_and_the_rest_is_split_70_30(tmp_path):
    placed(tmp_path, cifar.CIFAR10, 0, "official")
    _, files = cifar_files(cifar.CIFAR10, 0)
    expected = np.frombuffer(files["test_batch.bin"], dtype=np.uint8).reshape(-1, 3073)[:, 1:]
    for seed in (0, 1):
        found = data.load(Data("cifar10", split=seed), tmp_path)
        assert [len(found.train), len(found.validation), len(found.test)] == [70, 30, 20]
        assert np.array_equal(found.test.pixels.reshape(20, -1).numpy(), expected)


def test_equal_training_images_stay_together(tmp_path):
    _, files = cifar_files(cifar.CIFAR10, 0)
    first = files["data_batch_1.bin"]
    files["data_batch_2.bin"] = first
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    doubled = {first[i * 3073 + 1 : (i + 1) * 3073] for i in range(20)}
    for seed in range(3):
        found = data.load(Data("cifar10", split=seed), tmp_path)
        sides = [
            {image.numpy().tobytes() for image in split.pixels} & doubled for split in (found.train, found.validation)
        ]
        assert not sides[0] & sides[1]


def test_content_that_is_not_the_published_one_is_told(tmp_path):
    placed(tmp_path, cifar.CIFAR10, 0, "official")
    found = data.load("cifar10", tmp_path)
    assert found.official is False
    assert "100 training and 20 test images, where the official files have 50,000 and 10,000" in found.notes


@pytest.mark.parametrize("cut", [1, 3072, 3074])
def test_a_truncated_binary_file_is_named_with_its_size(tmp_path, cut):
    placed(tmp_path, cifar.CIFAR10, 0, "official")
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(DataError) as raised:
        data.load("cifar10", tmp_path)
    assert str(file) in str(raised.value)
    assert "multiple of 3073 bytes" in str(raised.value)
    assert f"{20 * 3073 - cut:,} bytes" in str(raised.value)


def test_an_absent_batch_is_named(tmp_path):
    placed(tmp_path, cifar.CIFAR10, 0, "official")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(MissingDataError, match=r"incomplete: data_batch_4\.bin not there"):
        data.load("cifar10", tmp_path)


def test_impossible_labels_are_found(tmp_path):
    placed(tmp_path, cifar.CIFAR10, 0, "flat")
    content = bytearray((tmp_path / "test_batch.bin").read_bytes())
    content[0] = 10
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"test_batch\.bin: labels must be from 0 to 9\. Found 0 to 10"):
        data.load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("held", "complaint"),
    [
        ([1], "must hold a dictionary"),
        ({"data": np.zeros((2, 3072), dtype=np.uint8)}, "with `data` and `labels`"),
        ({"data": np.zeros((2, 3072)), "labels": [0, 1]}, r"must be \(2, 3072\) of uint8"),
        ({"data": np.zeros((3, 3072), dtype=np.uint8), "labels": [0, 1]}, r"Found \(3, 3072\) of uint8"),
        ({"data": "x", "labels": [0, 1]}, "Found str"),
        ({"data": np.zeros((1, 3072), dtype=np.uint8), "labels": ["a"]}, "whole numbers"),
    ],
)
def test_a_pickled_batch_of_another_kind_is_refused(tmp_path, held, complaint):
    placed(tmp_path, cifar.CIFAR10, 1, "flat")
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(held))
    with pytest.raises(DataError, match=complaint) as raised:
        data.load("cifar10", tmp_path)
    assert "data_batch_2" in str(raised.value)


# ------------------------------------------------------------------------------------------------ archives


def test_a_truncated_archive_is_named(tmp_path):
    placed(tmp_path, cifar.CIFAR10, 0, "archive")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    whole = archive.read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 9):
        archive.write_bytes(whole[:length])
        with pytest.raises(
            DataError, match=r"cifar-10-binary\.tar\.gz (is damaged or incomplete|ends early|does not hold)"
        ):
            data.load("cifar10", tmp_path)


def test_an_archive_without_a_batch_says_which(tmp_path):
    layout, files = cifar_files(cifar.CIFAR100, 0)
    del files["test.bin"]
    packed(tmp_path / layout.archive, files, layout.folder)
    with pytest.raises(DataError, match=r"does not hold test\.bin"):
        data.load("cifar100", tmp_path)


def member(name, kind=tarfile.REGTYPE, link=""):
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    "stranger",
    [
        member("../escaped"),
        member("/absolute/escaped"),
        member("fine/../../escaped"),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("hard", tarfile.LNKTYPE, "fine/first"),
        member("pipe", tarfile.FIFOTYPE),
        member("device", tarfile.CHRTYPE),
        member("C:\\escaped"),
    ],
    ids=lambda entry: entry.name,
)
def test_an_archive_with_anything_but_plain_files_inside_is_not_unpacked(tmp_path, stranger):
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(member("fine/first"), io.BytesIO())
        tar.addfile(stranger, io.BytesIO())
    target = tmp_path / "deep" / "target"
    with pytest.raises(DataError, match="was not unpacked"):
        extract(archive, target)
    assert list(target.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "deep"]


def test_a_linked_batch_is_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(member("train.bin", tarfile.SYMTYPE, str(secret)))
    with pytest.raises(DataError, match=r"does not hold train\.bin"):
        members(tmp_path / "a.tar", ["train.bin"])


def test_unpacking_is_all_or_nothing_and_overwrites_nothing(tmp_path):
    packed(tmp_path / "a.tar.gz", {"one": b"1" * 5000, "two": b"2"}, "folder")
    made = extract(tmp_path / "a.tar.gz", tmp_path / "out")
    assert [path.name for path in made] == ["folder"]
    assert (tmp_path / "out" / "folder" / "one").read_bytes() == b"1" * 5000
    with pytest.raises(DataError, match="is there already"):
        extract(tmp_path / "a.tar.gz", tmp_path / "out")
    packed(tmp_path / "b.tar.gz", {f"part{n}": os.urandom(3000) for n in range(9)}, "other")
    cut = (tmp_path / "b.tar.gz").read_bytes()[:-4000]
    (tmp_path / "b.tar.gz").write_bytes(cut)
    with pytest.raises(DataError, match="damaged or incomplete"):
        extract(tmp_path / "b.tar.gz", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["folder"]


# ------------------------------------------------------------------------------------------------ downloads


class Server(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.path.endswith("/broken"):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only so much")
            return
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path):
    """A folder and the address that it is served at."""
    folder = tmp_path / "served"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_download_is_checked_and_appears_when_it_is_whole(tmp_path, served):
    folder, address = served
    content = os.urandom(3_000_000)
    (folder / "file.bin").write_bytes(content)
    told = []
    checksum = hashlib.md5(content).hexdigest()
    target = fetch(f"{address}/file.bin", tmp_path / "new" / "file.bin", checksum, lambda *done: told.append(done))
    assert target.read_bytes() == content
    assert md5(target) == checksum
    assert told[-1] == (3_000_000, 3_000_000)
    assert [path.name for path in target.parent.iterdir()] == ["file.bin"]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("file.bin", "has the MD5 .*; the official one is 0+"),
        ("absent", "File not found"),
        ("broken", "12 of 1,000 bytes|IncompleteRead"),
    ],
)
def test_a_download_that_fails_leaves_nothing(tmp_path, served, path, complaint):
    folder, address = served
    (folder / "file.bin").write_bytes(b"other content")
    with pytest.raises(DataError, match=complaint) as raised:
        fetch(f"{address}/{path}", tmp_path / "new" / "file.bin", "0" * 32)
    assert f"{address}/{path}" in str(raised.value)
    assert list((tmp_path / "new").iterdir()) == []


def test_offline_the_error_says_where_to_put_the_file(tmp_path):
    with pytest.raises(DataError) as raised:
        fetch("http://127.0.0.1:9/file", tmp_path / "file", "0" * 32)
    assert "could not be downloaded" in str(raised.value)
    assert f"copy the file to {tmp_path / 'file'}" in str(raised.value)


def test_an_archive_that_is_there_already_must_be_the_official_one(tmp_path):
    placed(tmp_path, cifar.CIFAR10, 0, "archive")
    with pytest.raises(DataError, match=f"the official one is {cifar.CIFAR10.layouts[0].md5}"):
        cifar.download(cifar.CIFAR10, tmp_path)


# ------------------------------------------------------------------------------------------------ pickles


class Shell:
    """A pickle that runs a command when it is loaded in the ordinary way."""

    def __init__(self, marker, function=os.system):
        self.marker, self.function = marker, function

    def __reduce__(self):
        return self.function, (f"touch {self.marker}",)


@pytest.mark.parametrize("function", [os.system, subprocess.getoutput, eval], ids=["os.system", "subprocess", "eval"])
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path, function):
    marker = tmp_path / "marker"
    placed(tmp_path, cifar.CIFAR10, 1, "flat")
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": Shell(marker, function), "labels": [1]}))
    with pytest.raises(DataError, match="only plain containers and arrays are allowed") as raised:
        data.load("cifar10", tmp_path)
    assert "data_batch_1" in str(raised.value)
    assert not marker.exists()


def opcodes(*parts):
    return b"\x80\x02" + b"".join(parts) + b"."


@pytest.mark.parametrize(
    "program",
    [
        opcodes(b"cnumpy\nndarray\n", b"(K\x01tR"),
        opcodes(b"cnumpy\nload\n", b"(tR"),
        opcodes(b"cnumpy\ndtype\n", b"X\x01\x00\x00\x00O\x85R"),
        opcodes(b"cbuiltins\ngetattr\n", b"(tR"),
        opcodes(b"c__builtin__\neval\n", b"(tR"),
        opcodes(b"cnumpy.core.multiarray\n_reconstruct\n", b"(tR", b"}X\x03\x00\x00\x00rawK\x01sb"),
        opcodes(b"Pname\n"),
        opcodes(b"c_codecs\nencode\n", b"}X\x0c\x00\x00\x00__defaults__)sb"),
        opcodes(b"ccollections\nOrderedDict\n", b"N}X\x04\x00\x00\x00keysNs\x86b"),
        opcodes(b"cnumpy\ndtype\n", b")\x81"),
        opcodes(b"]q\x00h\x00a"),
        opcodes(b"cnumpy\nndarray\n"),
        opcodes(b"ccollections\nOrderedDict\n"),
    ],
)
def test_programs_that_misuse_the_allowed_names_are_refused(program):
    pickletools.dis(program, out=io.StringIO())  # they are well-formed
    with pytest.raises(DataError, match=r"trap\.pickle"):
        load_pickle(io.BytesIO(program), "trap.pickle")


def test_objects_inside_arrays_are_refused():
    with pytest.raises(DataError, match="arrays of type 'O8'"):
        load_pickle(io.BytesIO(pickle.dumps(np.array([{}, None]))), "x")
    with pytest.raises(DataError, match="arrays of"):
        load_pickle(io.BytesIO(pickle.dumps(np.zeros(2, dtype=[("a", "f4")]))), "x")
    with pytest.raises(DataError, match="asks for torch"):
        load_pickle(io.BytesIO(pickle.dumps(torch.zeros(1))), "x")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_containers_and_arrays_come_back_as_they_were(protocol):
    random = np.random.default_rng(0)
    held = collections.OrderedDict(
        a=[1, 2.5, None, True, "é", b"\xff"],
        b=(random.normal(size=(3, 4)).astype(np.float32), np.asfortranarray(random.normal(size=(2, 3)))),
        c={
            "n": np.int64(7),
            "big": np.arange(3, dtype=">i4"),
            "text": np.array(["x", "yz"]),
            "empty": np.zeros((0, 4)),
        },
    )
    found = load_pickle(io.BytesIO(pickle.dumps(held, protocol=protocol)), "x")
    assert found["a"] == held["a"]
    for ours, theirs in zip((*found["b"], *found["c"].values()), (*held["b"], *held["c"].values()), strict=True):
        assert np.array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_what_is_shared_stays_shared():
    held = [1]
    for _ in range(60):
        held = [held, held]  # 2^60 paths to the innermost
    found = load_pickle(io.BytesIO(pickle.dumps(held)), "x")
    assert found[0] is found[1]


def test_a_truncated_pickle_is_named():
    whole = pickle.dumps({"data": np.zeros(1000)}, protocol=4)
    for length in (0, 5, 500, len(whole) - 1):
        with pytest.raises(DataError, match=r"short\.pickle"):
            load_pickle(io.BytesIO(whole[:length]), "short.pickle")
