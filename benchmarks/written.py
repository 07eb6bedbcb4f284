"""Results as two files: OUTPUT.json, and OUTPUT.md with what they are and a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write(
    output: Path, result: dict[str, Any], opening: str, header: str, line: Callable[[dict[str, Any]], str]
) -> None:
    """Write `result`, each of its rows as a line of the table below the opening."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    output.with_suffix(".md").write_text(opening + "\n\n" + "\n".join([header, *map(line, result["rows"])]) + "\n")


def about(result: dict[str, Any]) -> str:
    """Where it was measured, in words."""
    return ", ".join(f"{name} {value}" for name, value in result["environment"].items())
