"""The command line, as it prints and as it ends, in a terminal of 80 columns."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import explicit_dropout as xd
from explicit_dropout.cli import main
from explicit_dropout.cli.models import load

ROOT = Path(__file__).parent.parent
ENCODER = (
    "torch:TransformerEncoder(TransformerEncoderLayer(16, 4, 24, batch_first=True), 2, enable_nested_tensor=False)"
)
SMALL = ["--set", "hidden_size=16", "--set", "num_attention_heads=4", "--set", "intermediate_size=24"]
SMALL += ["--set", "num_hidden_layers=2", "--set", "vocab_size=30"]

pytestmark = pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys, *arguments):
    """(exit status, stdout, stderr); no line may be longer than the terminal is wide."""
    try:
        status = main(arguments)
    except SystemExit as left:  # how tyro ends after help and after arguments it does not know
        status = int(left.code or 0)
    out, err = capsys.readouterr()
    if "--json" not in arguments:
        too_long = [line for line in (out + err).splitlines() if len(line.rstrip()) > 80 and " " in line.strip()]
        assert not too_long, too_long
    return status, out, err


# ------------------------------------------------------------------------------------------------ inspect


def test_inspect_lists_every_site_once(capsys):
    status, out, _ = run(capsys, "inspect", ENCODER)
    assert status == 0
    assert "2 layers, 14 sites" in out
    rows = [line.split() for line in out.splitlines()[3:]]
    assert len(rows) == 14
    assert rows[0] == ["0", "query", "0.self_attn", "16", "→", "16", "4", "any"]
    assert rows[-1] == ["feed_forward", "1.linear2", "24", "→", "16", "–", "any"]


def test_inspect_as_a_tree_has_layers_attention_and_components(capsys):
    status, out, _ = run(capsys, "inspect", "torch:TransformerDecoderLayer(16, 4, 24)", "--tree")
    assert status == 0
    assert "layer 0" in out
    assert "self_attn attention, 4 heads" in out
    assert "multihead_attn cross-attention, 4 heads" in out
    assert "feed_forward linear2 24 → 16" in out


def test_inspect_as_json_is_for_programs(capsys):
    arguments = ("hf:llama", *SMALL, "--set", "num_key_value_heads=2", "--json")
    status, out, _ = run(capsys, "inspect", *arguments)
    found = json.loads(out)
    assert status == 0
    assert found["class"] == "LlamaModel"
    assert len(found["sites"]) == 2 * 8
    value = next(site for site in found["sites"] if site["component"] == "value")
    expected = {"in": 16, "out": 8, "heads": 4, "key_heads": 2, "cross": False, "exact": "any", "layer": 0}
    assert {key: value[key] for key in expected} == expected
    assert value["module"] == "layers.0.self_attn"


def test_inspect_says_where_only_some_laws_are_exact_and_why(capsys):
    status, out, _ = run(capsys, "inspect", "hf:llama", *SMALL)
    assert status == 0
    assert "v = 0: rotary embeddings" in out


def test_inspect_names_grouped_heads(capsys):
    _, out, _ = run(capsys, "inspect", "hf:llama", *SMALL, "--set", "num_key_value_heads=2")
    assert "4/2" in out


def test_inspect_finds_cross_attention_of_other_families(capsys):
    small = [
        f"--set={pair}" for pair in ("d_model=16", "d_kv=4", "d_ff=24", "num_layers=1", "num_heads=4", "vocab_size=30")
    ]
    status, out, _ = run(capsys, "inspect", "hf:t5", *small)
    assert status == 0
    assert "(cross)" in out


def test_twins_shows_the_dropout_of_the_model(capsys):
    status, out, _ = run(capsys, "twins", "torch:TransformerDecoderLayer(16, 4, 24)")
    assert status == 0
    assert "TransformerDecoderLayer: dropout at 6 places" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["multihead_attn", "attention_weights", "0.1"] in lines
    assert ["dropout", "linear", "0.1"] in lines
    status, out, _ = run(capsys, "twins", "hf:llama", *SMALL, "--set", "attention_dropout=0.3", "--json")
    found = json.loads(out)["dropout"]
    assert status == 0
    assert [(draw["module"], draw["twin"], draw["p"]) for draw in found] == [
        (f"layers.{layer}.self_attn", "attention_weights", 0.3) for layer in range(2)
    ]
    status, out, _ = run(capsys, "twins", "hf:llama", *SMALL)
    assert status == 0
    assert "Its rates are 0" in out


# ------------------------------------------------------------------------------------------------ verify


def test_verify_agrees_on_torch_nn(capsys):
    status, out, _ = run(capsys, "verify", ENCODER, "--samples", "60", "--noise", "bernoulli")
    assert status == 0
    assert "All 14 sites agree with 60 masks each" in " ".join(out.split())


def test_verify_agrees_on_timm_and_draws_a_plot(capsys, tmp_path):
    plot = tmp_path / "check.png"
    size = [f"--set={pair}" for pair in ("img_size=16", "patch_size=4", "embed_dim=24", "depth=1", "num_heads=3")]
    status, out, _ = run(capsys, "verify", "timm:vit_tiny_patch16_224", *size, "--samples=60", f"--plot={plot}")
    assert status == 0, out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "plot written to" in out


def test_verify_agrees_on_hugging_face_text_and_images(capsys):
    assert run(capsys, "verify", "hf:bert", *SMALL, "--samples=60", "--layers", "1")[0] == 0
    images = [*SMALL[:-2], "--set=image_size=16", "--set=patch_size=8"]
    assert run(capsys, "verify", "hf:vit", *images, "--samples=60", "--components", "value", "key")[0] == 0


def test_verify_leaves_out_what_is_not_exact_and_says_so(capsys):
    status, out, _ = run(capsys, "verify", "hf:llama", *SMALL, "--samples=40")
    assert status == 0
    assert "not exact" in out
    assert "All 10 sites agree" in out
    assert "6 sites not exact under this law" in " ".join(out.split())


def test_verify_under_the_law_of_the_paper_needs_one_mask(capsys):
    status, out, _ = run(capsys, "verify", "hf:llama", *SMALL, "--noise", "paper")
    assert status == 0
    assert "All 16 sites agree within 0.001 of the one mask that paper has" in " ".join(out.split())


def test_verify_is_the_same_twice_and_another_with_another_seed(capsys):
    arguments = ("verify", ENCODER, "--samples=20", "--components", "value")
    first, second = run(capsys, *arguments), run(capsys, *arguments)
    assert first == second
    assert run(capsys, *arguments, "--seed=1")[1] != first[1]


MODEL_FILE = """
import torch
from torch import nn
import explicit_dropout as xd

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.abc, self.d = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (torch.unflatten(p, -1, (2, 4)).transpose(1, 2) for p in self.abc(x).chunk(3, -1))
        return self.d((0.5 * q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

@xd.register_rule(Odd)
def odd(module):
    q, k, v = (xd.Projection(module.abc, slice(8 * i, 8 * i + 8)) for i in range(3))
    return xd.Attention(module, q, k, v, output=module.d, heads=2, scale=SCALE, weights="compute")

def build(batch=2):
    return Odd(), torch.randn(batch, 5, 8)

def without_inputs():
    return Odd()

def nothing():
    return 3
"""


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "odd_model.py"
    path.write_text(MODEL_FILE.replace("SCALE", "0.5"))
    return path


def test_verify_takes_a_function_of_ones_own(capsys, model_file):
    status, out, _ = run(capsys, "verify", f"{model_file}:build", "--set", "batch=3", "--samples=50")
    assert status == 0
    assert "All 5 sites agree" in out


def test_verify_takes_a_module_of_the_current_folder(capsys, model_file, monkeypatch):
    monkeypatch.chdir(model_file.parent)
    monkeypatch.delitem(sys.modules, "odd_model", raising=False)
    assert run(capsys, "verify", "odd_model:build", "--samples=20", "--components=value")[0] == 0


def test_verify_ends_with_1_when_a_rule_is_wrong(capsys, tmp_path):
    path = tmp_path / "wrong_model.py"
    path.write_text(MODEL_FILE.replace("SCALE", "0.6"))
    status, out, _ = run(capsys, "verify", f"{path}:build", "--samples=50")
    assert status == 1
    assert "wrong rule" in out
    assert "1 module described wrongly" in out


COSINES = """
import torch
from torch import nn
from torch.nn import functional as F
import explicit_dropout as xd

class Cosines(nn.Module):
    def __init__(self):
        super().__init__()
        self.abc, self.d, self.weights, self.squares = nn.Linear(8, 24), nn.Linear(8, 8), nn.Identity(), nn.Identity()

    def forward(self, x):
        parts = F.linear(x, self.abc.weight, self.abc.bias).chunk(3, -1)
        q, k, v = (torch.unflatten(p, -1, (2, 4)).transpose(1, 2) for p in parts)
        weights = self.weights((9 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1))
        self.squares(weights.square())
        return self.d((weights @ v).transpose(1, 2).flatten(2))

@xd.register_rule(Cosines)
def cosines(module):
    parts = (slice(8 * i, 8 * i + 8) for i in range(3))
    projections = (xd.Projection(module, rows, "abc.weight", "abc.bias", called=False) for rows in parts)
    return xd.Attention(module, *projections, output=module.d, heads=2, inputs=("x", "x", "x"), obstacle="cosines",
                        weights=WEIGHTS)

def build():
    return Cosines(), torch.randn(3, 5, 8)
"""


def test_verify_goes_by_the_weights_of_the_model_where_scores_are_others(capsys, tmp_path):
    path = tmp_path / "cosines.py"
    path.write_text(COSINES.replace("WEIGHTS", "module.weights"))
    status, out, _ = run(capsys, "verify", f"{path}:build", "--samples=100")
    assert status == 0
    assert "All 2 sites agree" in out


def test_verify_notices_weights_that_are_not_those_of_the_model(capsys, tmp_path):
    path = tmp_path / "squares.py"
    path.write_text(COSINES.replace("WEIGHTS", "module.squares"))
    status, out, _ = run(capsys, "verify", f"{path}:build", "--samples=100")
    assert status == 1
    assert "wrong rule weights failed" in " ".join(out.split())


def test_verify_says_what_cannot_be_measured(capsys, tmp_path):
    path = tmp_path / "hidden.py"
    path.write_text(COSINES.replace("WEIGHTS", "None"))
    status, _, err = run(capsys, "verify", f"{path}:build", "--noise=paper")
    assert status == 2
    assert "nor can its weights be had: no rule says where they are" in " ".join(err.split())


@pytest.mark.parametrize("name", ["swinv2_tiny_window8_256", "beit_base_patch16_224", "vit_srelpos_small_patch16_224"])
def test_verify_agrees_where_scores_are_refused_or_attention_as_a_whole(capsys, name):
    small = {"embed_dim": 24, "img_size": 32, "num_heads": 3, "depth": 1}
    if name.startswith("swin"):
        small = {"embed_dim": 24, "img_size": 32, "num_heads": "(3,)", "depths": "(1,)", "window_size": 4}
    options = [option for key, value in small.items() for option in ("--set", f"{key}={value}")]
    status, out, _ = run(capsys, "verify", f"timm:{name}", *options, "--samples=40")
    assert status == 0
    assert "sites agree" in out


def test_a_checkpoint_folder_gives_its_own_weights(tmp_path):
    from transformers import BertConfig, BertModel

    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertModel(BertConfig(vocab_size=30, **config))
    model.save_pretrained(tmp_path)
    loaded = load(f"hf:{tmp_path}").model
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    fresh = load(f"hf:{tmp_path / 'config.json'}").model
    assert not torch.equal(fresh.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)


# ------------------------------------------------------------------------------------------------ bad input


BAD = {
    ("verify", "nonsense"): "must be one of",
    ("verify", "no.such.module:build"): "there is no module 'no",
    ("verify", "json:nonsense"): "a callable of json: JSONDecoder",
    ("verify", "no_such_file.py:build"): "a Python file that exists",
    ("verify", "timm:vit_tinyy_patch16_224"): "such as vit_tiny_patch16_224",
    ("verify", "hf:berrt"): "such as bert",
    ("verify", "torch:Nonsense(3)"): "a class of torch.nn",
    ("verify", "torch:TransformerEncoderlayer(32, 4)"): "a class of torch.nn, such as TransformerEncoderLayer",
    ("verify", "torch:Transformer(d_model=__import__('os'))"): "a class of torch.nn. Got __import__",
    ("verify", "torch:Transformer(d_model=[].__class__)"): "literals and constructors of torch.nn",
    ("verify", "torch:TransformerEncoderLayer(16, 5)"): "divisible by num_heads",
    ("verify", "torch:Linear(3, 4)"): "is not known",
    ("inspect", "torch:Linear(3, 4)"): "no attention or feed-forward site",
    ("verify", ENCODER, "--layers", "2"): "indices from 0 to 1",
    ("verify", ENCODER, "--rate", "1.5"): "a drop rate in [0, 1)",
    ("verify", ENCODER, "--samples", "19"): "at least 20",
    ("inspect", "hf:bert", "--set", "num_hiden_layers=1"): "such as num_hidden_layers",
    ("verify", ENCODER, "--set", "depth"): "key=value",
    ("verify", ENCODER, "--plot", "no/such/folder/x.png"): "a folder that exists",
    ("verify", ENCODER, "--components", "nonsense"): "nonsense",
    ("nonsense",): "nonsense",
    (): "inspect",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_a_command_that_makes_no_sense_ends_with_2_and_says_why(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert BAD[arguments] in " ".join(err.replace("│", " ").split())


def test_a_callable_without_inputs_is_told_how_to_give_them(capsys, model_file):
    assert run(capsys, "inspect", f"{model_file}:without_inputs")[0] == 0
    status, _, err = run(capsys, "verify", f"{model_file}:without_inputs")
    assert status == 2
    assert "(model, tensor)" in " ".join(err.split())
    status, _, err = run(capsys, "verify", f"{model_file}:nothing")
    assert status == 2
    assert "returns a model, or (model, inputs)" in " ".join(err.split())


FAILING = """
import torch

def build(depth=1):
    raise RuntimeError("out of\\nluck")

def inside(depth=1):
    return torch.zeros(depth) + "text"

def behind():
    try:
        raise RuntimeError("operator torchvision::nms does not exist")
    except RuntimeError as error:
        raise ModuleNotFoundError("Could not import module 'ViTModel'") from error
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("build", "failing.py, line 5: RuntimeError: out of luck"),
        ("build --set width=3", "build does not take what was given"),
        ("inside", "failing.py, line 8: TypeError: unsupported operand"),
        ("behind", "goes back to RuntimeError: operator torchvision::nms does not exist"),
        ("behind", "install it from the same index as torch"),
    ],
)
def test_what_the_code_of_others_raises_is_told_in_a_line_with_its_place(capsys, tmp_path, name, words):
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    status, out, err = run(capsys, "inspect", *f"{path}:{name}".split())
    assert (status, out) == (2, "")
    assert words in " ".join(err.split())


@pytest.mark.parametrize("error", [ImportError, RuntimeError, ModuleNotFoundError])
def test_a_library_that_fails_while_it_is_used_is_told_in_a_line(capsys, monkeypatch, error):
    class Broken:
        def __getattr__(self, name):
            raise error(f"no {name} today")

    monkeypatch.setattr("explicit_dropout.cli.models._imported", lambda *_: Broken())
    status, _, err = run(capsys, "inspect", "hf:bert")
    assert status == 2
    assert f"hf:bert could not be built: {error.__name__}: no " in " ".join(err.split())


# ------------------------------------------------------------------------------------------------ help, packaging


@pytest.mark.parametrize("command", [(), ("inspect",), ("verify",), ("twins",)], ids=" ".join)
def test_help_teaches_by_example(capsys, command):
    status, out, _ = run(capsys, *command, "--help")
    assert status == 0
    assert any(f"explicit-dropout {example}" in out for example in command or ("verify", "inspect"))
    assert "hf:" in out


def test_the_module_runs_and_says_what_is_missing():
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "explicit_dropout",
        "inspect",
        "torch:TransformerEncoderLayer(8, 2)",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "7 sites" in ran.stdout
    missing = (
        "import sys; sys.modules['tyro'] = None; from explicit_dropout.cli import main; sys.exit(main(['--help']))"
    )
    ran = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "pip install 'explicit-dropout[lab]'" in ran.stderr


def test_the_documents_show_what_the_commands_print(capsys):
    """The table of inspect as it is; of verify, the closed forms, for drawn masks differ between machines."""
    blocks = re.findall(
        r"^```\n\$ explicit-dropout (.*?)\n(.*?)^```", (ROOT / "docs" / "cli.md").read_text(), re.M | re.S
    )
    assert len(blocks) == 2
    for command, shown in blocks:
        status, out, _ = run(capsys, *shlex.split(command))
        assert status == 0
        printed = [
            line.split("±")[0].rsplit(maxsplit=1)[0] if "±" in line else line.rstrip() for line in out.splitlines()
        ]
        expected = [line.split("±")[0].rsplit(maxsplit=1)[0] if "±" in line else line for line in shown.splitlines()]
        assert [line for line in printed if "agree" not in line] == [line for line in expected if "agree" not in line]


def test_the_command_is_declared():
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["explicit-dropout"].partition(":")
    assert getattr(__import__(module, fromlist=[name]), name) is main
    assert xd.__name__ == "explicit_dropout"


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"explicit-dropout {xd.__version__}\n"


# ------------------------------------------------------------------------------------------------ twins, own files


BART = [f"--set={side}_{pair}" for side in ("encoder", "decoder") for pair in ("layers=1", "attention_heads=2")]
BART += [f"--set={pair}" for pair in ("d_model=16", "encoder_ffn_dim=24", "decoder_ffn_dim=24", "vocab_size=30")]

RANDOM_BESIDES = """
import random
import torch
from torch import nn

class Noisy(nn.Module):
    def __init__(self, *after):
        super().__init__()
        self.linear, self.drop, self.after = nn.Linear(8, 8), nn.Dropout(0.2), nn.Sequential(*after)

    def forward(self, x):
        return self.after(self.drop(self.linear(x)))

class Jitter(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)

class Coin(nn.Module):
    def forward(self, x):
        return x * random.random()

def several():
    return Noisy(nn.AlphaDropout(0.1), Jitter()), torch.randn(2, 3, 8)

def coin():
    return Noisy(Coin()), torch.randn(2, 3, 8)

def still():
    model = Noisy()
    model.drop.p = 0.0
    return model, torch.randn(2, 3, 8)
"""


@pytest.fixture
def noisy_file(tmp_path):
    path = tmp_path / "noisy_model.py"
    path.write_text(RANDOM_BESIDES)
    return path


def test_twins_ends_with_1_where_convert_dropout_would_refuse_and_names_what_is_random(capsys, noisy_file):
    status, out, _ = run(capsys, "twins", f"{noisy_file}:several")
    assert status == 1
    assert "dropout at 1 place" in out
    told = "also random, without a twin: after.0 (alpha_dropout), after.1 (rand_like); needs others='keep'"
    assert told in " ".join(out.split())
    status, out, _ = run(capsys, "twins", f"{noisy_file}:several", "--json")
    assert status == 1
    assert json.loads(out)["without_twin"] == ["after.0 (alpha_dropout)", "after.1 (rand_like)"]


def test_twins_notices_dice_that_are_not_those_of_torch(capsys, noisy_file):
    status, out, _ = run(capsys, "twins", f"{noisy_file}:coin")
    assert status == 1
    told = " ".join(out.split())
    assert "also random, without a twin: Noisy has drawn random numbers" in told
    assert told.count("others='keep'") == 1


def test_twins_ends_with_0_where_all_that_is_random_has_a_twin(capsys):
    status, out, _ = run(capsys, "twins", "torch:TransformerEncoderLayer(16, 4, 24)")
    assert status == 0
    assert "without a twin" not in out
    status, out, _ = run(capsys, "twins", "torch:TransformerEncoderLayer(16, 4, 24)", "--json")
    assert json.loads(out)["without_twin"] == []


def test_twins_of_bart_are_refused_for_layer_drop_and_its_rows_can_be_told_apart(capsys):
    status, out, _ = run(capsys, "twins", "hf:bart", *BART)
    assert status == 1
    assert "also random, without a twin: encoder (rand), decoder (rand); needs" in " ".join(out.split())
    rows = [line.split(maxsplit=1)[0] + line for line in out.splitlines() if " hidden " in line]
    assert len(rows) == len(set(rows)) == 7
    assert sum("decoder.layers.0 (3)" in row for row in rows) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["timm:vit_tiny_patch16_224", "--set=embed_dim=24", "--set=depth=1", "--set=num_heads=3", "--set=img_size=32"],
        ["torch:TransformerEncoderLayer(16, 4, 24, dropout=0.0)"],
        ["hf:bert", *SMALL, "--set=hidden_dropout_prob=0", "--set=attention_probs_dropout_prob=0"],
        ["hf:llama", *SMALL],
    ],
    ids=lambda command: command[0].split("(")[0],
)
def test_a_model_whose_rates_are_0_is_told_an_argument_that_it_takes(capsys, command):
    status, out, _ = run(capsys, "twins", *command)
    assert status == 0
    (advised,) = re.findall(r"Its rates are 0. To see more: --set (\w+=0.1)", " ".join(out.split()))
    status, out, err = run(capsys, "twins", *command, "--set", advised)
    assert status == 0, err
    assert "Its rates are 0" not in out
    assert " 0.1" in out


def test_rates_that_no_option_reaches_are_told_by_their_place(capsys, noisy_file):
    inside = "torch:TransformerEncoder(TransformerEncoderLayer(16, 4, 24, 0.0), 1, enable_nested_tensor=False)"
    assert "To see more: TransformerEncoderLayer(…, dropout=0.1)" in run(capsys, "twins", inside)[1]
    told = " ".join(run(capsys, "twins", f"{noisy_file}:still")[1].split())
    assert "give rates above 0 where still builds it, or --set an argument of it" in told


def test_a_file_may_import_its_neighbours_at_once_and_later(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "neighbour_at_once.py").write_text("from torch import nn\nLayer = nn.TransformerEncoderLayer\n")
    (folder / "neighbour_later.py").write_text("import torch\ndef inputs():\n    return torch.randn(3, 2, 8)\n")
    (folder / "whole_model.py").write_text(
        "from neighbour_at_once import *\n\ndef build():\n    from neighbour_later import inputs\n\n"
        "    return Layer(8, 2), inputs()\n"
    )
    assert run(capsys, "inspect", f"{folder / 'whole_model.py'}:build")[0] == 0
    for name in ("neighbour_at_once", "neighbour_later", "whole_model"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(folder)])
    monkeypatch.chdir(folder)
    assert run(capsys, "inspect", "whole_model:build")[0] == 0  # and so may a module of the current folder


OFFERS = """
from torch.nn import *

class Own(Module):
    pass

def build():
    return Own()
"""


def test_a_callable_that_is_not_there_is_answered_by_those_of_the_file_functions_first(capsys, tmp_path):
    path = tmp_path / "offers.py"
    path.write_text(OFFERS)
    status, _, err = run(capsys, "inspect", f"{path}:biuld")
    assert status == 2
    assert "build, Own; closest: build. Got biuld." in " ".join(err.split())
    path.write_text(OFFERS + "".join(f"def make_{n}(): pass\n" for n in range(9)))
    told = " ".join(run(capsys, "inspect", f"{path}:nope")[2].split())
    assert "build, make_0, make_1, make_2, make_3, make_4, make_5, make_6, …. Got nope." in told
    assert "Linear" not in told


@pytest.mark.parametrize(
    ("name", "told"),
    [("vit_tiny", "such as vit_tiny_patch16_224"), ("nope", "timm.list_models() has their names. Got 'nope'")],
)
def test_a_name_that_timm_does_not_have_is_answered_by_the_closest_or_where_to_look(capsys, name, told):
    status, _, err = run(capsys, "inspect", f"timm:{name}")
    assert status == 2
    assert told in " ".join(err.split())


@pytest.mark.parametrize("command", ["twins", "data", "sweep"])
def test_help_and_documents_say_alike_what_exit_status_2_means(capsys, command):
    assert "2 the command could not be carried out" in run(capsys, command, "--help")[1]
    assert "2 if it could not be carried out" in (ROOT / "docs" / "cli.md").read_text()
