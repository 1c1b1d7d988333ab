"""The three nouns of a bench of any operator: a workload, those who compute it, and what counts as right.

A family of operators is one file of this folder that exports

    OPERATORS: tuple[Operator, ...]                                       forward and backward are two operators
    PRESETS: Mapping[str, Callable[[], tuple[OpWorkload, ...]]]           preset name -> its workloads

Two families may hold parts of one preset ("rows"); the parts are joined. A forward and a backward pass of the same
dims are two workloads, and names are unique within a preset ("8192x8192-fp32", "8192x8192-fp32-backward").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.roofline import Work

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}

# Largest relative error of one rounding to nearest (unit roundoff): 2^-(significand bits).
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}

Dims = tuple[tuple[str, int | float | bool | str], ...]
Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class OpWorkload:
    """One call of an operator, exact and without tensors.

    `dims` are everything that decides what is computed, in the order of display: (("rows", 8192), ("cols", 8192)).
    `dtype` is that of the inputs and results, "fp32", "bf16" or "fp16", or "fp8" for products of e4m3 operands (with
    results in bfloat16); it names the peak by which FLOPs are judged. A workload with a reason in `unsupported` is
    listed and never run. Raises ValueError naming the field, what was expected and what came.
    """

    name: str
    preset: str
    op: str
    dims: Dims
    dtype: str
    note: str = ""
    unsupported: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "op"):
            if not getattr(self, field):
                raise ValueError(f"workload {self.name!r}: {field}: expected a non-empty string, got ''")
        if self.dtype not in TORCH_DTYPES:
            expected = ", ".join(TORCH_DTYPES)
            raise ValueError(f"workload {self.name!r}: dtype: expected one of {expected}, got {self.dtype!r}")
        keys = [key for key, _ in self.dims]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise ValueError(f"workload {self.name!r}: dims: expected each name once, got {key!r} twice")

    def __getitem__(self, key: str) -> Any:
        """The value of dim `key`; KeyError for one that is not there."""
        return dict(self.dims)[key]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    def shape(self) -> dict[str, Any]:
        """The dims as they stand in a record."""
        return dict(self.dims)


@dataclass(frozen=True)
class Rival:
    """One way to compute an operator.

    - `peer`: not our kernel.
    - `supports(workload, device)`: pure; the reason it can't, or None.
    - `bind(workload, inputs)`: returns a function of no arguments that computes once on those inputs and returns the
      outputs, fresh ones each time. What a user would not do on every call (compiling, the forward pass of a backward
      workload) happens in `bind`, which runs with gradients enabled; the call that it returns runs without. Timing
      binds once to each of several sets of inputs.
    - `graph`: whether that call can be captured in a CUDA graph; if not, it is measured eagerly alone.
    - `peak_nbytes(workload)`: by formula, the bytes that one call allocates on a GPU at its peak, outputs included;
      None where nobody worked it out. `race/memory.py` sets it beside what was measured.
    - `reference`, `work`, `tolerance`: as the operator's, for one who computes something else on the same inputs: the
      same product from operands rounded in another way, or a baseline.
    """

    name: str
    peer: bool
    supports: Callable[[OpWorkload, Device], str | None]
    bind: Callable[[OpWorkload, tuple[Tensor, ...]], Call]
    graph: bool = True
    peak_nbytes: Callable[[OpWorkload], float] | None = None
    reference: Callable[[OpWorkload, tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None
    work: Callable[[OpWorkload], Work] | None = None
    tolerance: Callable[[OpWorkload], tuple[float, float]] | None = None


@dataclass(frozen=True)
class Operator:
    """What an operator computes, and everyone who does.

    - `make_inputs(workload, device, seed)`: fresh random inputs, the same for the same seed and device.
    - `reference(workload, inputs)`: what must come out, in float32 or float64, one tensor for each output.
    - `work(workload)`: useful FLOPs; bytes count each input once and each output once.
    - `tolerance(workload)`: (relative Frobenius error, largest error of an element relative to the reference's
      largest entry) that a right result stays within.
    - `baselines`: speed-of-light rows that nobody has to beat, such as "dense": one product of the same rows.
    - `memory_nbytes(workload)`: what gating needs, where a multiple of `work`'s bytes is far off.
    """

    name: str
    make_inputs: Callable[[OpWorkload, torch.device, int], tuple[Tensor, ...]]
    reference: Callable[[OpWorkload, tuple[Tensor, ...]], tuple[Tensor, ...]]
    work: Callable[[OpWorkload], Work]
    rivals: tuple[Rival, ...]
    tolerance: Callable[[OpWorkload], tuple[float, float]]
    baselines: tuple[Rival, ...] = ()
    memory_nbytes: Callable[[OpWorkload], float] | None = None
