"""What a record says about where and when it was made."""

import secrets
from importlib.metadata import PackageNotFoundError, version

import torch

from expertile.device import Device
from expertile.lab.measure.clocks import driver_version
from expertile.lab.measure.cpu import quota
from expertile.lab.measure.env import Env
from expertile.version import __version__, commit


def capture_env(device: Device) -> Env:
    """The processor, driver and package versions of this process; clocks are added per record."""
    cpu = device.kind == "cpu"
    return Env(
        gpu=device.name,
        driver=driver_version() if device.kind == "cuda" else None,
        torch=torch.__version__,
        triton=package_version("triton"),
        expertile=__version__,
        commit=commit(),
        cores=device.sm_count if cpu else None,
        threads=torch.get_num_threads() if cpu else None,
        quota=quota() if cpu else None,
    )


def same_machine(first: Env, second: Env) -> bool:
    """Whether two records may belong to one run: the same processor, driver, versions and commit."""
    keys = ("gpu", "driver", "torch", "triton", "expertile", "commit")
    return all(getattr(first, key) == getattr(second, key) for key in keys)


def new_run_id() -> str:
    """Eight hexadecimal digits."""
    return secrets.token_hex(4)


def package_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
