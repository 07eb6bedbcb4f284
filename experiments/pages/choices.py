"""How settings were chosen: experiments whose validation scores decided, and whose test scores are not shown."""

from collections.abc import Callable, Iterator, Sequence

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.report import markdown
from explicit_dropout.lab.report.reading import Part
from explicit_dropout.lab.report.tables import MISSING, Column, Table, measured, percent
from explicit_dropout.lab.statistics import Analysis, Configuration, Estimate, differences
from pages.source import Source, commands, heading, not_run


def page(sources: Sequence[Source]) -> list[str]:
    lines = ["# How settings were chosen", "", "By validation scores alone; test scores are not shown here.", ""]
    for found in sources:
        for part in found.parts:
            lines += section(found, part)
    return lines


def section(found: Source, part: Part) -> list[str]:
    """Validation scores of everything that was tried."""
    analysis = part.analysis
    if not analysis.finished:
        return [*heading(analysis), *not_run(found, analysis)]
    tables = [settings_table(analysis)] if len(analysis.rows) == 1 else list(strength_tables(analysis))
    return [*heading(analysis), *(markdown(table) for table in tables), *commands(found, analysis)]


def settings_table(analysis: Analysis) -> Table:
    """One row of the paper under several settings."""
    (row,) = analysis.rows
    labels = differences([c.run for c in row.configurations])
    return Table(
        analysis.experiment.name,
        analysis.experiment.title,
        f"Validation accuracy of {row.name} in %; n of the planned repetitions.",
        (Column("settings", "settings", number=False), Column("validation", "validation"), Column("n", "n")),
        tuple(
            {
                "settings": label,
                "validation": measured(c.validation) if c.validation.n else absent(c),
                "n": f"{c.validation.n} of {c.planned}",
            }
            for c, label in zip(row.configurations, labels, strict=True)
        ),
    )


def absent(configuration: Configuration) -> str:
    """Why there is no number."""
    return "diverged" if configuration.results else "not run"


def tokens(run: Run) -> int:
    """How many tokens an example of a study has."""
    return {"cifar10": 65, "gtzan_yamnet": 120}[run.data.name]


def per_token(run: Run) -> float:
    """λ of the mean over tokens that is the same penalty."""
    treatment = run.treatment
    return float(f"{treatment.strength * (tokens(run) if treatment.reduction == 'sample' else 1):.6g}")


def strength_tables(analysis: Analysis) -> Iterator[Table]:
    """λ across, rows down: validation, and how much of the loss the penalty is at the end."""
    cells = {(row.name, per_token(c.run)): c for row in analysis.rows for c in row.configurations}
    across = sorted({strength for _, strength in cells})
    columns = (
        Column("row", "row", number=False),
        *(Column(f"{s:g}", f"{s:g}" if s else "no λ") for s in across),
    )

    def filled(text: Callable[[Configuration], str]) -> tuple[dict[str, str], ...]:
        return tuple(
            {
                "row": row.name,
                **{
                    f"{s:g}": (text(c) if c.validation.n else absent(c)) if (c := cells.get((row.name, s))) else ""
                    for s in across
                },
            }
            for row in analysis.rows
        )

    name, shown = analysis.experiment.name, analysis.experiment.title
    yield Table(
        name,
        shown,
        "Validation accuracy in % (n). Columns: λ for a mean over tokens. Rows of token sums had this value divided by "
        "the number of tokens.",
        columns,
        filled(lambda c: f"{measured(c.validation)} ({c.validation.n})"),
    )
    yield Table(
        f"{name}_share",
        shown,
        "λ Σ J of the last epoch in % of the task loss beside it (n).",
        columns,
        filled(lambda c: f"{percent(share(c).mean)} ({share(c).n})" if c.run.treatment.has_penalty else MISSING),
    )


def share(configuration: Configuration) -> Estimate:
    last = [result.metrics[-1] for result in configuration.results if result.metrics]
    return Estimate(tuple(m["penalty"] / m["train_loss"] for m in last if m["train_loss"] and m["penalty"] is not None))
