"""Why a rival can't compute a workload on a device: what several of them have in common."""

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from expertile.device import Device
from expertile.lab.race.operator import Supports, Workload


def on_gpu(w: Workload, device: Device) -> str | None:
    return None if device.kind == "cuda" else "needs a CUDA GPU"


def on_hopper(w: Workload, device: Device) -> str | None:
    return None if device.at_least(9) else "needs compute capability 9.0 or later"


def installed(package: str, then: Supports, named: str = "") -> Supports:
    """`then`, if `package` (`named` so by its installer) can be imported."""

    def supports(w: Workload, device: Device) -> str | None:
        return f"{named or package} is not installed" if find_spec(package) is None else then(w, device)

    return supports


def library(files: tuple[str, ...]) -> Path | None:
    """The first of `files`, compiled torch operators without a Python package, that lies in a folder of sys.path."""
    return next((path for folder in sys.path for file in files if (path := Path(folder, file)).is_file()), None)


def with_library(files: tuple[str, ...], then: Supports) -> Supports:
    """`then`, if one of `files` is found."""

    def supports(w: Workload, device: Device) -> str | None:
        return f"no {files[0]} in a folder of PYTHONPATH" if library(files) is None else then(w, device)

    return supports


@cache
def load(files: tuple[str, ...]) -> None:
    """Make their operators known to `torch.ops`, once."""
    path = library(files)
    if path is not None:
        torch.ops.load_library(path)
