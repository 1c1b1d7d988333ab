"""Three small experiments that tell launch cost, split work and tensor cores apart: preset "diagnose".

- diagnose_split: one large product against many small ones at EQUAL FLOPs: 8 x 1024³ = 1 x 2048³ = 1 x (8192 x 1024 x
  1024).
- diagnose_math: products against the peak of each dtype: a rate above the float32 peak is proof of tensor cores. 2896³
  is among them, with as many elements as the eight above together but 2.83 times their FLOPs.
- diagnose_launch, diagnose_add: the same 64 calls one by one and replayed from a CUDA graph, of products of 256³ and of
  a kernel that does nothing worth mentioning.

dims: side, and of diagnose_math the arithmetic, "math". A record's config says what was computed: `count` products
[m, k] x [k, n] in `launches` calls. `bench/diagnosis.py` turns the records into sentences.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from expertile.device import Device
from expertile.lab.operators._rows import random
from expertile.lab.race.gate import full_precision, limits
from expertile.lab.race.operator import Call, Inputs, Operator, Rival, Supports, Workload, anywhere
from expertile.roofline import Work

LAUNCHES = 64
_SMALL = 256  # on a CPU


@dataclass(frozen=True)
class Form:
    """`count` products of (m, n, k) sides by torch's `how`: "mm", a "loop" of it, or one "bmm"; or as many additions of
    one element ("add")."""

    name: str
    how: str
    count: int = 1
    m: float = 1
    n: float = 1
    k: float = 1

    def sizes(self, w: Workload) -> tuple[int, int, int]:
        """(m, n, k)."""
        m, n, k = (1, 1, 1) if self.how == "add" else (round(x * w["side"]) for x in (self.m, self.n, self.k))
        return m, n, k

    def config(self, w: Workload) -> dict[str, int]:
        launches = self.count if self.how in ("loop", "add") else 1
        return dict(zip("mnk", self.sizes(w), strict=True)) | {"count": self.count, "launches": launches}

    def work(self, w: Workload) -> Work:
        (m, n, k), size = self.sizes(w), w.itemsize
        if self.how == "add":
            return Work(float(self.count), 3.0 * self.count * size)
        return Work(2.0 * self.count * m * n * k, float(self.count * (m * k + k * n + m * n) * size))

    def operands(self, w: Workload, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """a [count, m, k] and b [count, k, n], out of the inputs' elements."""
        (m, n, k), (a, b) = self.sizes(w), inputs
        left, right = a.flatten()[: self.count * m * k], b.flatten()[: self.count * k * n]
        return left.view(self.count, m, k), right.view(self.count, k, n)

    def bind(self, w: Workload, inputs: Inputs) -> Call:
        a, b = self.operands(w, inputs)
        xs, ys = a.unbind(0), b.unbind(0)

        def compute() -> tuple[Tensor, ...]:
            if self.how == "bmm":
                return (torch.bmm(a, b),)
            return tuple(map(torch.add if self.how == "add" else torch.mm, xs, ys))

        if w.dtype != "fp32":
            return compute

        def call() -> tuple[Tensor, ...]:
            with full_precision("high" if dict(w.dims).get("math") == "tf32" else "highest"):
                return compute()

        return call

    def reference(self, w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
        a, b = (x.double() if w.dtype == "fp32" else x.float() for x in self.operands(w, inputs))
        with full_precision():
            made = a + b if self.how == "add" else torch.bmm(a, b)
        return (made,) if self.how == "bmm" else made.unbind(0)

    def tolerance(self, w: Workload) -> tuple[float, float]:
        return limits(_math(w), w.torch_dtype, self.sizes(w)[2])

    def rival(self, supports: Supports = anywhere) -> Rival:
        """With what it computes as its config."""
        own = Rival(self.name, self.bind, supports, reference=self.reference, work=self.work, tolerance=self.tolerance)
        return replace(own, configs=lambda w, device: (replace(own, config=self.config(w)),))


SPLIT = (
    Form("one square", "mm", 1, 2, 2, 2),
    Form("one long", "mm", 1, 8),
    Form("torch.bmm", "bmm", 8),
    Form("torch.mm loop", "loop", 8),
)
MATH = (Form("torch.mm", "mm"),)
LAUNCH = (Form("torch.mm loop", "loop", LAUNCHES), Form("torch.bmm", "bmm", LAUNCHES))
ADD = (Form("torch.add loop", "add", LAUNCHES),)


def _math(w: Workload) -> str:
    """The peak that counts."""
    return str(dict(w.dims).get("math", w.dtype))


def _supports(w: Workload, device: Device) -> str | None:
    known = device.peak(_math(w)) if device.kind == "cuda" else _math(w) in ("bf16", "fp32")
    return None if known else f"{device.name} has no {_math(w)}"


def _inputs(forms: tuple[Form, ...], w: Workload, device: torch.device, seed: int) -> Inputs:
    """Elements for the largest of `forms`; results are of the order of 1."""
    make, sizes = random(w, device, seed), [(form.count, *form.sizes(w)) for form in forms]
    a = make(max(count * m * k for count, m, _, k in sizes))
    return a, make(max(count * k * n for count, _, n, k in sizes)).mul_(w["side"] ** -0.5)


def _operator(name: str, forms: tuple[Form, ...], base: Form, supports: Supports = anywhere) -> Operator:
    """`base` is what the operator's own work and reference are."""
    rivals = tuple(form.rival(supports) for form in forms)
    inputs = partial(_inputs, forms)
    return Operator(name, inputs, base.reference, base.work, rivals, base.tolerance, dtype_key=_math)


def _workload(experiment: str, side: int, dtype: str, math: str = "") -> Workload:
    dims = (("side", side), *((("math", math),) if math else ()))
    return Workload(f"{experiment}-{side}-{math or dtype}", "diagnose", f"diagnose_{experiment}", dims, dtype)


def workloads() -> tuple[Workload, ...]:
    """At sizes of a GPU and of a CPU."""
    found = [_workload("split", 1024, "fp16"), _workload("split", _SMALL, "fp32")]
    for math, dtype in (("fp16", "fp16"), ("bf16", "bf16"), ("tf32", "fp32"), ("fp32", "fp32")):
        found += [_workload("math", side, dtype, math) for side in (512, 1024, 2048, 4096, 8192)]
    found += [_workload("math", larger(1024), "fp16", "fp16"), _workload("math", larger(_SMALL), "fp32", "fp32")]
    found += [_workload("launch", 256, "fp16"), _workload("launch", 64, "fp32")]
    return (*found, _workload("add", 1, "fp32"))


def larger(side: int) -> int:
    """The side of a square with about as many elements as eight of `side`."""
    return 2896 * side // 1024


OPERATORS = (
    _operator("diagnose_split", SPLIT, SPLIT[3]),
    _operator("diagnose_math", MATH, MATH[0], _supports),
    _operator("diagnose_launch", LAUNCH, LAUNCH[0]),
    _operator("diagnose_add", ADD, ADD[0]),
)
PRESETS = {"diagnose": workloads}
