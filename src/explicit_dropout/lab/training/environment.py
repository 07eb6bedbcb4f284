"""Where a run was made: versions, device and options, but no names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from explicit_dropout import __version__
from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Execution
from explicit_dropout.lab.data import Dataset

LIBRARIES = ("numpy", "scikit-learn", "triton", "ray", "submitit")


def chosen_device(execution: Execution) -> torch.device:
    """The device of a run; an error if it is not there."""
    name = execution.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("device", "auto, cpu, cuda or cuda:N", repr(name)) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "a device that is there; torch sees no GPU on this machine: use cpu", name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError("device", f"one of the {torch.cuda.device_count()} GPUs of this machine", name)
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", "auto, cpu, cuda or cuda:N", repr(name))
    if execution.cuda_graphs and device.type != "cuda":
        raise InputError("execution.cuda_graphs", "off on a CPU: CUDA graphs need a GPU", execution.cuda_graphs)
    return device


def prepare(execution: Execution) -> None:
    """Threads and determinism of this process."""
    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    if execution.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(execution.deterministic)
    torch.backends.cudnn.benchmark = not execution.deterministic


def environment(execution: Execution, device: torch.device, dataset: Dataset, ranks: int = 1) -> dict[str, Any]:
    """What is written beside the results of a run."""
    on_gpu = device.type == "cuda"
    return {
        "explicit_dropout": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "libraries": {name: found for name in LIBRARIES if (found := _version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": ranks,
        "compile": execution.compile,
        "cuda_graphs": execution.cuda_graphs,
        "deterministic": execution.deterministic,
        "dataset": {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "division": dataset.division,
            "official": dataset.official,
            "notes": list(dataset.notes),
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
