"""docs/results.md and docs/results/ from results/: every table, what is missing, the command that goes on, and answers.

    python experiments/results.py              # writes these pages, and tables in README.md and docs/findings.md
    python experiments/results.py --check      # only says whether they are current

Tables and statistics are the report's (`explicit_dropout.lab.report`). The command of a table is the one in the first
lines of its experiment file. Nothing is concluded from fewer than five pairs.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pages import choices, classifiers, comparisons, study, summaries
from pages.source import EXPERIMENTS, Source, source, title

from explicit_dropout.lab.report.answers import ENOUGH

STUDIES = {
    "cifar": ("CIFAR-10 and CIFAR-100", ("table1", "table2", "table5", "rates", "noise", "label_noise", "few_cifar")),
    "thumos14": ("THUMOS14", ("table3",)),
    "gtzan": ("GTZAN", ("table4",)),
    "digits": ("Few handwritten digits", ("few_images", "few_images_again")),
    "digits-parts": ("Few handwritten digits: which part helps", ("few_images_why", "few_images_loss")),
    "digits-twins": ("Few handwritten digits: twins", ("few_images_twins", "few_images_twins_long")),
    "digits-size": ("Few handwritten digits: how few", ("few_images_size",)),
    "digits-decay": ("Few handwritten digits: on top of weight decay", ("few_images_decay",)),
}
"""Pages of test scores: title, and the experiments that are on them."""
CHOICES = ("recipe", "strength", "strength_gtzan")
"""Experiments that choose settings, by validation alone."""
MADE = "<!-- Made by `python experiments/results.py` from results/. Do not edit. -->"
INTRODUCTION = """\
The paper's tables beside ours, on real data, as far as they have been run.
[What was seen](findings.md) says in words where explicit dropout helps and where it does not;
here is what that rests on.

Settings are chosen on validation data, ± is a standard deviation over n repetitions, differences are paired,
intervals are Student's at 95 %, p-values are adjusted by Holm's method: in [comparisons](results/comparisons.md)
for those of one question, in a table for all of its rows. So the same difference can have two of them; verdicts rest
on the first. Where a number is missing the cell says so. Numbers of the paper stand in columns that say paper, and
nowhere else. [Reports](report.md) has the details.

A row is what is done to attention + what is done to feed-forward layers: `none+none` has no regulariser,
`none+implicit` is `nn.Dropout` in feed-forward layers, `explicit_v+explicit` has the penalties of values and of
feed-forward layers; [the laboratory](laboratory.md#rows) has all names. Penalties are under the law `paper` unless a
row names another, means over tokens unless it says token sums. All rates are p = 0.2, in penalties and masks, except
where the rate is what is studied, or a row says *p chosen*: on validation data, as λ is."""


def pages(root: Path) -> dict[Path, str]:
    """Every page by its place."""
    studies = {name: [source(file, root) for file in files] for name, (_, files) in STUDIES.items()}
    chosen = [source(file, root) for file in CHOICES]
    found = [one for sources in studies.values() for one in sources]
    every = {part.experiment.name: part.analysis for one in [*chosen, *found] for part in one.parts}
    compared = {part.experiment.name: part.analysis for one in found for part in one.parts}
    questions = comparisons.asked(every.values())
    lines = {
        "results": overview(studies, chosen, questions),
        "results/comparisons": comparisons.page(questions),
        **{f"results/{name}": study.page(STUDIES[name][0], sources) for name, sources in studies.items()},
        "results/settings": choices.page(chosen),
    }
    lines["results/digits"] += classifiers.section(root)
    made = {root / "docs" / f"{name}.md": text([page[0], "", MADE, *page[1:]]) for name, page in lines.items()}
    tables = summaries.tables(compared, {one.file: one.module for one in found})
    for name in summaries.PAGES:
        made[root / name] = summaries.filled((root / name).read_text(encoding="utf-8"), tables)
    return made


def text(lines: Sequence[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


def overview(
    studies: Mapping[str, Sequence[Source]], chosen: Sequence[Source], questions: Sequence[comparisons.Asked]
) -> list[str]:
    """How far every experiment is, and each answer in short."""
    lines = ["# Results", "", INTRODUCTION, "", "## Answers in short", ""]
    lines += ["All comparisons, with intervals: [comparisons](results/comparisons.md).", ""]
    for question in questions:
        lines += [f"**{question.text}**", "", *question.in_short(), ""]
    lines += ["## How far each experiment is", ""]
    lines += ["| experiment | runs finished | rows with n ≥ 5 | to continue |", "| --- | ---: | ---: | --- |"]
    for name, sources in [*studies.items(), ("settings", chosen)]:
        lines += progress(f"results/{name}.md", sources)
    return lines


def progress(page: str, sources: Sequence[Source]) -> list[str]:
    """A line for each experiment of a page: how far it is, and what goes on with it."""
    lines = []
    for found in sources:
        for part in found.parts:
            analysis = part.analysis
            full = sum(row.test.n >= ENOUGH for row in analysis.rows)
            command = "complete" if analysis.complete else f"`{found.continued()}`"
            done = f"{analysis.finished} of {analysis.planned}"
            lines.append(f"| [{title(analysis)}]({page}) | {done} | {full} of {len(analysis.rows)} | {command} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Make the pages of results in docs/, and tables in README.md and docs/findings.md, from results/."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one of them is not current")
    given = parser.parse_args(arguments)
    root = EXPERIMENTS.parent
    made = pages(root)
    stale = [path for path, page in made.items() if not path.exists() or path.read_text(encoding="utf-8") != page]
    for path in made:
        print(f"{path.relative_to(root)} {'is not current' if path in stale else 'is current'}.")
        if path in stale and not given.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
            print("  written anew.")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
