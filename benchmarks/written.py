"""A small result as two files: OUTPUT.json, and OUTPUT.md with the command, the environment and a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write(output: Path, result: dict[str, Any], title: str, header: str, line: Callable[[dict[str, Any]], str]) -> None:
    """Write `result`, which has a command, an environment and rows; each row is a line of the table."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    about = ", ".join(f"{name} {value}" for name, value in result["environment"].items())
    text = f"# {title}\n\n`{result['command']}`: {about}.\n\n"
    output.with_suffix(".md").write_text(text + "\n".join([header, *map(line, result["rows"])]) + "\n")
