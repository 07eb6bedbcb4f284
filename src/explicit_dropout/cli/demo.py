"""`explicit-dropout demo`: the whole laboratory in a minute or two, on data that are built in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.markup import escape

from explicit_dropout.cli import FAILED, FINE
from explicit_dropout.cli.output import console, plural
from explicit_dropout.cli.reporting import show
from explicit_dropout.cli.sweep_display import Display
from explicit_dropout.cli.sweeping import complain_of
from explicit_dropout.lab import estimate
from explicit_dropout.lab import sweep as sweeps
from explicit_dropout.lab.config import Execution
from explicit_dropout.lab.demonstration import experiment
from explicit_dropout.lab.engines import EngineName, Options, choose
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.report import build, write_report
from explicit_dropout.lab.store import Store


def demo(
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("build/demo"),
    engine: Literal["local", "vectorised"] = "local",
    device: str = "cpu",
) -> int:
    """Train a small ViT on handwritten digits with and without dice, and report.

    No dropout, nn.Dropout, DropKey, and explicit dropout on values and
    feed-forward layers under the paper's moments and the exact ones; five seeds,
    λ chosen on validation images. Nothing is downloaded.

    Ends with a table and a report to look at. Run it again: what is finished is
    not trained again.

    Args:
        output: Folder for results and report.
        engine: A process for each core, or many models in one program.
        device: cpu, cuda; the models are so small that a CPU will do.
    """
    return carry_out(experiment(), output, engine, device)


def carry_out(planned: Experiment, output: Path, engine: EngineName, device: str) -> int:
    """An experiment from the first run to the report."""
    out, store, execution = console(), Store(output / "results"), Execution(device=device)
    estimate.device_name(execution)  # a device that is not there is told once, not by every run
    plan = sweeps.plan(planned.runs, store)
    out.print(f"{escape(planned.title)}: {plural(len(planned.rows), 'row')}, {plural(len(planned.runs), 'training')}.")
    display = Display(plan, store, out)
    with display:
        result = sweeps.sweep([planned], store, choose(engine, Options()), execution, on_event=display.on_event)
    if result.failed:
        complain_of(result, out_of=len(plan.todo))
        return FAILED
    made = build(store, [(planned, None)])
    written = write_report(made, output / "report")
    show(made)
    others = ", ".join(path.name for path in written[1:])
    out.print(f"Report: [bold]{escape(str(written[0]))}[/] (and {others})", soft_wrap=True)
    return FINE
