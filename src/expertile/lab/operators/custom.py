"""Workloads of one's own: an operator, a dtype and a value for each dimension that its presets have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expertile.lab.operators import operators, presets
from expertile.lab.race.operator import Workload


def custom(name: str, op: str, dims: Mapping[str, Any], dtype: str) -> Workload:
    """A call of `op` over `dims`, which must be those of the operator's workloads in the presets, of the same types.
    ValueError names what was expected and what came."""
    known = dict.fromkeys(operators())
    if op not in known:
        raise ValueError(f"op: expected one of {', '.join(known)}, got {op!r}")
    example = next(w for build in presets().values() for w in build() if w.op == op)
    for key in dims:
        if key not in dict(example.dims):
            raise ValueError(f"dims.{key}: expected {_described(example)} for {op}, got {key!r}")
    for key, value in example.dims:
        if key not in dims:
            raise ValueError(f"dims.{key}: expected {_described(example)} for {op}, got no {key!r}")
        if type(dims[key]) is not type(value):
            raise ValueError(f"dims.{key}: expected {_kind(value)}, got {dims[key]!r}")
        if isinstance(value, int) and not isinstance(value, bool) and dims[key] < 0:
            raise ValueError(f"dims.{key}: expected 0 or more, got {dims[key]!r}")
    if (dtype == "fp8") != (example.dtype == "fp8"):
        expected = "fp8" if example.dtype == "fp8" else "fp32, bf16 or fp16"
        raise ValueError(f"dtype: expected {expected} for {op}, got {dtype!r}")
    return Workload(name, "file", op, tuple((key, dims[key]) for key, _ in example.dims), dtype)


def _described(example: Workload) -> str:
    return ", ".join(f"{key} ({_kind(value)})" for key, value in example.dims)


def _kind(value: Any) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[type(value)]
