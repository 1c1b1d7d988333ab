"""The three nouns of a bench: a workload, its rivals, and the operator that says what counts as right.

A family of operators is one file of `lab/operators` that exports

    OPERATORS: tuple[Operator, ...]                                       forward and backward are two operators
    PRESETS: Mapping[str, Callable[[], tuple[Workload, ...]]]           preset name -> its workloads

Two families may hold parts of one preset ("rows"); the parts are joined. Names are unique within a preset.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.roofline import Work

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}

# Largest relative error of one rounding to nearest (unit roundoff): 2^-(significand bits).
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}

Dims = tuple[tuple[str, int | float | bool | str | tuple[int, ...]], ...]
Inputs = tuple[Tensor, ...]
Call = Callable[[], tuple[Tensor, ...]]
Bind = Callable[["Workload", Inputs], Call]
Reference = Callable[["Workload", Inputs], "tuple[Tensor, ...] | Blocks"]
Supports = Callable[["Workload", Device], str | None]


@dataclass(frozen=True)
class Workload:
    """One call of an operator, exact and without tensors.

    `dims` are everything that decides what is computed, in the order of display: (("rows", 8192), ("cols", 8192)).
    `dtype`, "fp32", "bf16", "fp16" or "fp8" (e4m3 operands, results in bfloat16), names the peak by which FLOPs are
    judged. A workload with a reason in `unsupported` is listed and never run. ValueError names field, expected and got.
    """

    name: str
    preset: str
    op: str
    dims: Dims
    dtype: str
    note: str = ""
    unsupported: str = ""

    def __post_init__(self) -> None:
        for key in ("name", "op"):
            if not getattr(self, key):
                raise ValueError(f"workload {self.name!r}: {key}: expected a non-empty string, got ''")
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

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    def shape(self) -> dict[str, Any]:
        """The dims as they stand in a record."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.dims}


def backward_of(forward: Workload) -> Workload:
    """The backward pass of the same dims: "8192x8192-fp32" of "softmax" -> "8192x8192-fp32-backward" of
    "softmax_backward"."""
    return replace(forward, name=f"{forward.name}-backward", op=f"{forward.op}_backward")


def with_backward(forward: Iterable[Workload]) -> tuple[Workload, ...]:
    """All of `forward`, then the backward pass of each."""
    passes = tuple(forward)
    return (*passes, *map(backward_of, passes))


def record_name(workload: Workload) -> str:
    """How records call a workload: "preset/name"."""
    return f"{workload.preset}/{workload.name}" if workload.preset else workload.name


def record_fields(workload: Workload) -> dict[str, Any]:
    """What every record of a workload says of it."""
    return {"op": workload.op, "workload": record_name(workload), "shape": workload.shape(), "dtype": workload.dtype}


@dataclass(frozen=True)
class Verdict:
    """What the gate found. `checked` is the share of elements compared; all are checked for being written."""

    ok: bool
    rel_error: float
    max_error: float
    reason: str = ""
    checked: float = 1.0

    @property
    def status(self) -> str:
        """How a record calls it: "failed" where there was no result to compare."""
        return "ok" if self.ok else "wrong" if self.checked else "failed"


# One block of a result: where it lies, and what it must be.
Part = tuple[tuple[Any, ...], Tensor]


@dataclass(frozen=True)
class Blocks:
    """What one large result must be, block by block: held, or computed anew for each comparison. `split(out)`: the
    elements that a call must write, and those that it must leave alone. `checked`: the share of the elements in the
    blocks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterable[Part]]
    split: Callable[[Tensor], tuple[Tensor, Tensor]]
    checked: float = 1.0


def anywhere(workload: Workload, device: Device) -> str | None:
    """What `Rival.supports` says of a rival that computes every workload on every device."""
    return None


@dataclass(frozen=True)
class Rival:
    """One way to compute an operator.

    - `bind(workload, inputs)`: returns a function of no arguments that computes once on those inputs and returns the
      outputs, fresh ones each time. What a user would not do on every call (compiling, the forward pass of a backward
      workload) happens in `bind`, which runs with gradients enabled; the call that it returns runs without. Timing
      binds once to each of several sets of inputs.
    - `supports(workload, device)`: pure; the reason it can't, or None.
    - `peer`: not our kernel.
    - `graph`: whether that call can be captured in a CUDA graph; if not, it is measured eagerly alone.
    - `peak_nbytes(workload)`: by formula, the bytes that one call allocates on a GPU at its peak, outputs included;
      None where there is no formula. `race/memory.py` sets it beside what was measured.
    - `reference`, `work`, `tolerance`: as the operator's, for a rival that computes something else on the same inputs:
      the same product from operands rounded in another way, or a baseline.
    - `config`: what the record shows. `configs(workload, device)`: the same rival once with each of its configs, the
      default first.
    - `bind_on_host`: `bind` for a CUDA graph, where the call needs the group sizes on the host and is given them; the
      record's config says so.
    - `bind_out(workload, inputs)`: returns a function that computes into a given tensor. The gate fills that tensor
      with NaN.
    - `check(workload, seed)`: judges the rival in a process of its own, before inputs take the memory.
    - `check_again(workload, inputs, seed)`: judges it once it was timed on `inputs`, of which it overwrites the values.
    """

    name: str
    bind: Bind
    supports: Supports = anywhere
    peer: bool = True
    graph: bool = True
    peak_nbytes: Callable[[Workload], float] | None = None
    reference: Reference | None = None
    work: Callable[[Workload], Work] | None = None
    tolerance: Callable[[Workload], tuple[float, float]] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    configs: "Callable[[Workload, Device], Iterable[Rival]] | None" = None
    bind_on_host: Bind | None = None
    bind_out: Callable[[Workload, Inputs], Callable[[Tensor], Any]] | None = None
    check: Callable[[Workload, int], Verdict] | None = None
    check_again: Callable[[Workload, Inputs, int], Verdict] | None = None


@dataclass(frozen=True)
class Operator:
    """What an operator computes, and its rivals.

    - `make_inputs(workload, device, seed)`: fresh random inputs, the same for the same seed and device.
    - `reference(workload, inputs)`: what must come out, in float32 or float64, one tensor for each output.
    - `work(workload)`: useful FLOPs; bytes count each input once and each output once.
    - `tolerance(workload)`: (relative Frobenius error, largest error of an element relative to the reference's
      largest entry) that a right result stays within.
    - `baselines`: speed-of-light rows that no rival has to beat, such as "dense": one product of the same rows.
    - `memory_nbytes(workload)`: what gating needs, where a multiple of `work`'s bytes is far off.
    - `set_nbytes(workload)`: what one set of inputs and outputs occupies, where `work` counts less.
    - `gate_inputs`: as `make_inputs`, with more than a call may read or write, such as rows past the last group.
    - `dtype_key(workload)`: the peak by which FLOPs are judged, a key of `Device.peak_flops`; by default the dtype.
    """

    name: str
    make_inputs: Callable[[Workload, torch.device, int], Inputs]
    reference: Reference
    work: Callable[[Workload], Work]
    rivals: tuple[Rival, ...]
    tolerance: Callable[[Workload], tuple[float, float]]
    baselines: tuple[Rival, ...] = ()
    memory_nbytes: Callable[[Workload], float] | None = None
    set_nbytes: Callable[[Workload], float] | None = None
    gate_inputs: Callable[[Workload, torch.device, int], Inputs] | None = None
    dtype_key: Callable[[Workload], str] | None = None
