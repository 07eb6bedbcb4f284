"""A real file system that is easily full."""

import subprocess
from pathlib import Path

import pytest


def on_small_disk(path: Path, size: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that sees a file system of this size at the path; the rest of the system does not."""
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    script = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    try:
        subprocess.run([*apart, "sh", "-c", script, path, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting needs user namespaces, which this system does not allow")
    return subprocess.run([*apart, "sh", "-c", script, path, *command], capture_output=True, text=True)
