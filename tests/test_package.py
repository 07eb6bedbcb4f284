"""The package as a stranger meets it: light to import, typed, documented, and its documents tell the truth."""

import inspect
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
import yaml

import explicit_dropout as xd
from explicit_dropout import functional, reference, sampling

ROOT = Path(__file__).parent.parent
FORMS = [name for name in functional.__all__ if inspect.isfunction(getattr(functional, name))]


def printed(code):
    """What a process of its own prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_importing_it_imports_torch_alone():
    """Whatever a bare `import torch` does not load, and is no part of Python or of ours, must not be loaded."""
    code = (
        "import sys, torch, torch.utils.checkpoint; before = set(sys.modules); import explicit_dropout;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(sorted(new))"
    )
    assert printed(code).strip() == "['explicit_dropout']"


def test_testing_is_there_without_an_import_of_its_own():
    code = (
        "import sys, explicit_dropout as xd;"
        "assert 'explicit_dropout.testing' not in sys.modules;"
        "print(xd.testing.check_rule.__name__, hasattr(xd, 'nothing'))"
    )
    assert printed(code).split() == ["check_rule", "False"]


def test_every_public_name_is_there_and_in_the_table_of_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text().split("\n## ", 1)[0]
    listed = set(re.findall(r"`(\w+)`", page))
    errors = {name for name in xd.__all__ if name.endswith("Error")}
    assert set(xd.__all__) - errors == listed - {"ExplicitDropoutError"}
    assert all(hasattr(xd, name) for name in xd.__all__)


def test_it_declares_one_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.11"]
    assert project["requires-python"] == ">=3.11"


def test_it_is_typed():
    assert resources.files(xd).joinpath("py.typed").is_file()


def test_the_citation_carries_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == xd.__version__
    assert citation["preferred-citation"]["title"].startswith("Explicit Dropout")


def test_every_closed_form_has_a_reference_and_a_sampler():
    assert len(FORMS) == 12
    for name in FORMS:
        assert inspect.isfunction(getattr(reference, name))
        assert name in sampling._SITES


@pytest.mark.parametrize("name", FORMS)
def test_reference_takes_the_same_arguments(name):
    def parameters(module):
        found = dict(inspect.signature(getattr(module, name)).parameters)
        found.pop("options", None)
        return list(found)

    closed, literal = parameters(functional), parameters(reference)
    if name == "feed_forward":  # the literal one passes mask, reduction and strength on
        closed = [p for p in closed if p not in ("mask", "reduction", "strength")]
    assert literal == closed


@pytest.mark.parametrize("name", FORMS)
def test_every_closed_form_says_what_it_computes(name):
    assert "½" in getattr(functional, name).__doc__ or "J_" in getattr(functional, name).__doc__


# ------------------------------------------------------------------------------------------------ documents


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks():
    for path in documents():
        text = path.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            yield pytest.param(match[1], id=f"{path.name}:{line}")


@pytest.mark.parametrize("code", list(blocks()))
def test_every_python_block_of_the_documents_runs(code):
    torch.manual_seed(0)
    exec(compile(code, "block", "exec"), {"__name__": "block"})


def table(heading):
    text = (ROOT / "docs" / "equations.md").read_text()
    section = text.split(heading, 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def numbers(cell):
    for part in cell.split(","):
        first, _, last = part.strip().partition("–")
        yield from range(int(first), int(last or first) + 1)


def headings():
    return [line for line in (ROOT / "docs" / "equations.md").read_text().splitlines() if line.startswith("## ")]


def test_every_equation_of_the_paper_stands_in_the_table_once():
    listed = [number for row in table(headings()[0]) for number in numbers(row[0])]
    assert sorted(listed) == list(range(1, 114))


def test_the_equation_table_names_functions_that_exist():
    text = (ROOT / "docs" / "equations.md").read_text()
    named = set(re.findall(r"`(functional|reference)\.(\w+)`", text))
    assert {name for module, name in named if module == "functional"} == set(FORMS)
    for module, name in named:
        assert hasattr(getattr(xd, module), name), f"{module}.{name}"


def test_contributors_are_told_of_every_file_of_the_package():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = {path.name for path in (ROOT / "src" / "explicit_dropout").glob("*.py") if not path.name.startswith("__")}
    assert files == {name for name in files if f"{name}`" in text}


def test_links_between_documents_lead_somewhere():
    pages = ROOT / "docs"
    for path in documents():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
            if path.is_relative_to(pages):  # which are a site of their own
                assert (path.parent / target).resolve().is_relative_to(pages), f"{path.name} links to {target}"


def test_the_numbers_of_the_readme_are_lines_of_a_result_file():
    costs = (ROOT / "README.md").read_text().split("## What it costs")[1].split("\n## ")[0]
    copied = costs.split("<!-- end summary -->")[1]  # what stands before is made by benchmarks/cost_page.py
    rows = [line for line in copied.splitlines() if line.startswith("|")]
    measured = (ROOT / "results" / "benchmarks" / "functional-cpu.md").read_text().splitlines()
    assert len(rows) > 3  # two of them are the head
    for row in rows:
        assert row in measured, row
