"""What operators require of their tensors, or of what a call knows of them (`grouped_mm.problem.Description`).

All raise ValueError naming the argument, what was expected and what came."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch


def require_tensors(optional: Mapping[str, object], **required: object) -> None:
    """Arguments must be tensors; those of `optional` may be None."""
    for given, may_be_none in ((required, False), (optional, True)):
        for name, x in given.items():
            if not isinstance(x, torch.Tensor) and not (x is None and may_be_none):
                raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def came(x: object) -> str:
    """What came as an argument, for an error: shape, dtype and device of a tensor, or the name of a class."""
    return f"{list(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__


def check_integer(name: str, x: Any, least: int) -> None:
    if not isinstance(x, (int, torch.SymInt, Integral)) or x < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {x!r}")


def check_number(name: str, x: Any, least: float = -math.inf) -> None:
    """A finite number."""
    real = isinstance(x, (int, float, Real))
    if not real or not (x >= least and -math.inf < x < math.inf):
        limit = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{name}: expected a finite number{limit}, got {x!r}")


def check_flags(**flags: object) -> None:
    for name, x in flags.items():
        if not isinstance(x, bool):
            raise ValueError(f"{name}: expected True or False, got {x!r}")


def check_own_memory(name: str, x: torch.Tensor, **inputs: torch.Tensor) -> None:
    """No two elements of x, which is written, may lie in one place, nor x begin where one of `inputs` does."""
    if x.numel() == 0:
        return
    reach = 0
    for stride, size in () if x.is_contiguous() else sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"{name}: expected a place of its own for each element, got shape {list(x.shape)} with strides "
                f"{list(x.stride())}"
            )
        reach += (size - 1) * stride
    for other, y in inputs.items():
        if x.data_ptr() == y.data_ptr():
            raise ValueError(f"{name}: expected memory of its own, got that of {other}")


def check_dims(name: str, x: Any, dims: int) -> None:
    if len(x.shape) != dims:
        raise ValueError(f"{name}: expected {dims} dimension{'s' * (dims > 1)}, got shape {list(x.shape)}")


def check_like(name: str, x: Any, like: Any, like_name: str, *what: str) -> None:
    """`what` of x, "dtype" or "device", must be as `like` has it."""
    for one in what:
        expected, got = getattr(like, one), getattr(x, one)
        if got != expected:
            raise ValueError(f"{name}: expected {one} {expected} as {like_name} has, got {got}")


def check_index(name: str, x: Any, like: Any, like_name: str) -> None:
    """int32 [any length] on the device of `like`."""
    if x.dtype is not torch.int32:
        raise ValueError(f"{name}: expected dtype torch.int32, got {x.dtype}")
    check_dims(name, x, 1)
    check_like(name, x, like, like_name, "device")
