"""Random problems against the reference: what tests/gpu/test_random_shapes.py spreads over processes.

    python -m tests.gpu.random_shapes --count 10000 --seed 0 --part 3/8 --out part3.json [--device cpu]

A case is drawn from its own seed, "SEED:INDEX", so that any of them can be made again alone. Triton compiles a kernel
anew for each divisibility of sizes and strides, each config, dtype and number of groups (rounded up): ten thousand
free draws would be ten thousand compilations. So a case is drawn within one of `profiles()` (layout, dtypes, storages,
divisibility), and drawn again where it would need another specialisation than the `_VARIANTS` its profile has had.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.race.gate import judge_calls
from expertile.lab.race.reference import limits_of, reference_for
from expertile.ops.backend import Request
from expertile.ops.grouped_mm.api import grouped_mm, select
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.problem import Layout, Problem, tf32_allowed
from tests.ops.grouped_mm.cases import Case, make

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_VARIANTS = 6  # specialisations over all backends that one profile may have
_TRIES = 60
_HOLD_BYTES = 2e9


@dataclass(frozen=True)
class Profile:
    """What stays the same among cases that share compiled kernels. `odd`: sizes that no power of two divides."""

    layout: Layout
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    a_storage: str
    b_storage: str
    bias: bool
    odd: bool
    many: bool  # groups: up to 32, or up to 256
    tf32: bool


def profiles() -> tuple[Profile, ...]:
    """Every layout with every pair of storages in bf16, aligned and odd; and the other dtypes, outputs and biases."""
    m, k, n, b = Layout.RAGGED_M, Layout.RAGGED_K, Layout.RAGGED_N, Layout.BATCHED
    usual = {m: ("row", "column"), k: ("column", "row"), n: ("row", "row"), b: ("row", "column")}
    found = []
    for layout, odd in product((m, k, n, b), (False, True)):
        for a, c in product(("row", "column"), repeat=2):
            found.append(Profile(layout, _BF16, None, a, c, False, odd, False, False))
        for storage in ("padded", "odd", "shifted", "step", "expanded"):
            found.append(Profile(layout, _BF16, None, storage, storage, False, odd, False, False))
        storages = usual[layout]
        found.append(Profile(layout, _BF16, None, *storages, False, odd, True, False))
        found.append(Profile(layout, _FP16, None, *storages, False, odd, False, False))
        found.append(Profile(layout, _FP32, None, *storages, False, odd, False, False))
        found.append(Profile(layout, _FP32, None, "row", "column", False, odd, False, True))
        found.append(Profile(layout, _BF16, _FP32, *storages, False, odd, False, False))
        found.append(Profile(layout, _FP16, _BF16, *storages, False, odd, False, False))
        if layout in (m, b):
            found.append(Profile(layout, _BF16, None, *storages, True, odd, False, False))
            found.append(Profile(layout, _FP16, _FP32, *storages, True, odd, True, False))
    found.append(Profile(m, _BF16, None, "scalar", "column", False, False, False, False))
    found.append(Profile(k, _BF16, None, "column", "scalar", False, False, False, False))
    return tuple(dict.fromkeys(found))


def draw(profile: Profile, rng: random.Random, name: str) -> Case:
    """A case of `profile`: small; lengths fall on and beside the edges of tiles, some groups are empty."""
    layout = profile.layout
    groups = rng.randint(33, 256) if profile.many else rng.choice((1, 2, 3, 5, 8, 16, 27, 32))
    most = 40 if profile.many else rng.choice((16, 130, 400))
    if layout is Layout.BATCHED:
        sizes = (0,) * groups
    else:
        sizes = tuple(_length(rng, most) if rng.random() > 0.2 else 0 for _ in range(groups))
    past = rng.choice((0, 0, rng.randint(1, 70)))
    if not profile.odd:
        # Behind the last group as many as make the whole a multiple of 16: strides of stored columns are then, too.
        past = 0 if layout is Layout.BATCHED else past + -(sum(sizes) + past) % 16
    largest = 256 if layout is Layout.BATCHED and profile.many else 600
    m, n, k = (_extent(rng, largest, profile.odd) for _ in range(3))
    return Case(
        name,
        layout,
        sizes,
        m=0 if layout is Layout.RAGGED_M else m,
        n=0 if layout is Layout.RAGGED_N else n,
        k=0 if layout is Layout.RAGGED_K else k,
        past=0 if layout is Layout.BATCHED else past,
        a_storage=profile.a_storage,
        b_storage=profile.b_storage,
        dtype=profile.dtype,
        out_dtype=profile.out_dtype,
        bias=profile.bias,
    )


def _length(rng: random.Random, most: int) -> int:
    """1 to `most`; half of them at a tile's edge."""
    if rng.random() < 0.5:
        return min(most, max(1, rng.choice((16, 32, 64, 128, 192, 256)) + rng.randint(-1, 1)))
    return rng.randint(1, most)


def _extent(rng: random.Random, most: int, odd: bool) -> int:
    if odd:
        return rng.choice((1, 37, 51, 63, 65, 127, 129, 255, 257, 2 * rng.randint(1, most // 2) + 1))
    return rng.choice((16, 64, 128, 256, 16 * rng.randint(1, most // 16)))


def cases(count: int, seed: int, part: int, parts: int, device: Device, backends: tuple[Backend, ...]) -> Iterator[Any]:
    """(index, profile, case, input seed) of the cases of `part`; a profile belongs to one part, with its kernels."""
    every = profiles()
    variants: dict[Profile, set[Any]] = {}
    last: dict[Profile, Case] = {}
    for index in range(count):
        place = index % len(every)
        if place % parts != part:
            continue
        profile = every[place]
        rng = random.Random(f"{seed}:{index}")
        seen = variants.setdefault(profile, set())
        for _ in range(_TRIES):
            case = draw(profile, rng, f"random-{seed}-{index}")
            new = specialisations(case, profile, device, backends) - seen
            if not seen or not new or len(seen) + len(new) <= _VARIANTS:
                break
        else:
            case = last[profile]  # the same shape with other values: always compiled already
        seen |= new if case is not last.get(profile) else set()
        last[profile] = case
        yield index, profile, case, rng.randrange(2**31)


def specialisations(case: Case, profile: Profile, device: Device, backends: tuple[Backend, ...]) -> set[Any]:
    """What Triton would compile for `case`, or more: by config (the default one, and that of "auto"), how it sees each
    size and stride. Backends that read offs on the host compile nothing."""
    with tf32(profile.tf32):
        p = problem_of(case, device)
    compiling = [b for b in backends if not b.reads_offs_on_host]
    able = [b for b in compiling if b.supports(p, device) is None]
    chosen = [(b.name, b.configs(p, device)[0]) for b in able]
    if able:
        auto, config = select(p, device)
        chosen += [(auto.name, config)] if auto in compiling else []
    sizes = tuple(_class(x) for x in (p.groups, p.m, p.n, p.k, *p.a_strides, *p.b_strides))
    groups = max(32, 1 << (p.groups - 1).bit_length())
    return {(name, c, sizes, groups, p.k % getattr(c, "block_k", 1) == 0) for name, c in chosen}


def problem_of(case: Case, device: Device) -> Problem:
    """The Problem of a case on `device`, group sizes unknown to the host, without making its tensors."""
    a_shape, b_shape, _ = case.shapes
    a_strides, b_strides = (
        _strides(shape, storage, 16 // case.dtype.itemsize)
        for shape, storage in ((a_shape, case.a_storage), (b_shape, case.b_storage))
    )
    return Problem(
        case.layout,
        len(case.sizes),
        a_shape[-2],
        b_shape[-1],
        a_shape[-1],
        case.dtype,
        case.out_torch_dtype,
        a_strides,
        b_strides,
        case.a_storage != "shifted",
        case.b_storage != "shifted",
        case.bias,
        device.kind,
        None,
        case.dtype is _FP32 and tf32_allowed(),
    )


def _strides(shape: tuple[int, ...], storage: str, per_16_bytes: int) -> tuple[int, ...]:
    """Strides in elements of what `tests.ops.grouped_mm.cases.make` stores so."""
    rows, cols = shape[-2:]
    inner = {
        "column": (1, rows),
        "padded": (-(-(cols + 1) // per_16_bytes) * per_16_bytes, 1),
        "odd": (cols + 2 + (cols + 1) % 2, 1),
        "step": (2 * cols, 2),
        "expanded": (0, 1),
        "scalar": (0, 0),
    }.get(storage, (cols, 1))
    lead = {"expanded": cols, "scalar": 0, "column": rows * cols}.get(storage, rows * inner[0])
    return inner if len(shape) == 2 else (lead, *inner)


def _class(value: int) -> int:
    """How Triton specialises an integer argument: 1, a multiple of 16, or any other."""
    return 1 if value == 1 else 16 if value % 16 == 0 else 0


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """float32 products may (or may not) run in TF32 meanwhile; by the switch that the gate uses as well."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class Summary:
    """What was checked. `runs`: "backend layout dtype" -> how many results; `worst`: relative Frobenius error over what
    the gate allows, and whose; `failures`: the reason and a program that makes the case again."""

    seed: int
    count: int
    cases: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    auto_chose: Counter[str] = field(default_factory=Counter)
    repeated: int = 0  # times that auto was run again, for the same bits
    worst: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    specialisations: int = 0
    seconds: float = 0.0

    def add(self, other: dict[str, Any]) -> None:
        """Take in the summary of another part."""
        for name in ("runs", "unsupported", "auto_chose"):
            getattr(self, name).update(other[name])
        for name in ("cases", "repeated", "specialisations"):
            setattr(self, name, getattr(self, name) + other[name])
        self.failures += other["failures"]
        self.seconds = max(self.seconds, other["seconds"])
        for backend, worst in other["worst"].items():
            self.keep_worst(backend, worst)

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def keep_worst(self, backend: str, worst: dict[str, Any]) -> None:
        if worst["of_allowed"] > self.worst.get(backend, {"of_allowed": -1.0})["of_allowed"]:
            self.worst[backend] = worst


def program(case: Case, profile: Profile, backend: str, seed: int, device: str = "cuda") -> str:
    """Python code that makes the case again and raises its failure."""
    dtypes = {f: repr(getattr(case, f)) for f in ("dtype", "out_dtype")}
    fields = ", ".join(
        f"{k}={dtypes.get(k) or repr(v)}" for k, v in asdict(case).items() if k not in ("name", "layout")
    )
    return (
        "import torch\nfrom expertile.ops.grouped_mm.problem import Layout\n"
        "from tests.gpu.random_shapes import reproduce\nfrom tests.ops.grouped_mm.cases import Case\n"
        f"case = Case({case.name!r}, Layout.{case.layout.name}, {fields})\n"
        f"reproduce(case, {backend!r}, seed={seed}, allow_tf32={profile.tf32}, device={device!r})\n"
    )


def reproduce(case: Case, backend: str, seed: int, allow_tf32: bool = False, device: str = "cuda") -> None:
    """Run one case; AssertionError with the reason if it is wrong."""
    with tf32(allow_tf32):
        reason = check(case, backend, seed, torch.device(device))[0]
    assert not reason, f"{backend}: {reason}"


def check(case: Case, backend: str, seed: int, device: torch.device) -> tuple[str, float, str]:
    """(reason or "", relative error over what is allowed, who ran) of one backend on one case, both with a given `out`
    and with its own. "auto" goes through the public call, and must give the same bits when called again."""
    facts = Device.current(device)
    a, b, offs, bias = make(case, device, seed)
    operands = Operands(a, b, offs, bias)
    problem = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
    if device.type == "cuda":
        problem = problem.with_sizes(None)
    chosen, config = select(problem, facts, Request(backend))
    sizes = (problem.m,) * problem.groups if case.layout is Layout.BATCHED else case.sizes

    def run(out: torch.Tensor | None) -> torch.Tensor:
        if out is None and backend == "auto":
            return grouped_mm(a, b, offs=offs, bias=bias, out_dtype=case.out_dtype)
        return chosen.run(problem, operands, config, out)

    try:
        with torch.no_grad():
            reference = reference_for(problem, operands, sizes, _HOLD_BYTES)
            allowed = limits_of(problem, sizes)
            verdict = judge_calls(lambda: (run(None),), reference, allowed, run, device)
            if verdict.ok and backend == "auto" and not _same_bits(run, case):
                return "two calls gave different bits", verdict.rel_error, chosen.name
    except Exception as error:
        return f"{type(error).__name__}: {error}", math.inf, chosen.name
    return ("" if verdict.ok else verdict.reason), verdict.rel_error / allowed.rel_error, chosen.name


def _same_bits(run: Callable[[torch.Tensor | None], torch.Tensor], case: Case) -> bool:
    end = sum(case.sizes)
    pair = [run(None), run(None)]
    if case.layout is Layout.RAGGED_M:
        pair = [x[:end] for x in pair]
    elif case.layout is Layout.RAGGED_N:
        pair = [x[:, :end] for x in pair]
    return torch.equal(*pair)


def run_part(
    count: int,
    seed: int,
    part: int,
    parts: int,
    device: torch.device,
    tell: Callable[[str], None],
    seconds: float = math.inf,
) -> Summary:
    """The cases of one part on `auto` and every own backend: all, or as many as are begun in `seconds`.

    `tell` gets the program of each run before it starts.
    """
    facts = Device.current(device)
    own = tuple(b for b in BACKENDS if not b.peer and (device.type == "cuda" or b.reads_offs_on_host))
    summary, began = Summary(seed, count), time.monotonic()
    compiled: set[Any] = set()
    for _, profile, case, input_seed in cases(count, seed, part, parts, facts, own):
        if time.monotonic() - began > seconds:
            break
        summary.cases += 1
        compiled |= specialisations(case, profile, facts, own)
        with tf32(profile.tf32):
            for name in ("auto", *(b.name for b in own)):
                if not _checked(case, profile, name, input_seed, device, facts, summary, tell):
                    summary.specialisations, summary.seconds = len(compiled), time.monotonic() - began
                    return summary
    summary.specialisations, summary.seconds = len(compiled), time.monotonic() - began
    return summary


def _checked(
    case: Case,
    profile: Profile,
    name: str,
    seed: int,
    device: torch.device,
    facts: Device,
    summary: Summary,
    tell: Callable[[str], None],
) -> bool:
    """Check one backend; False where the device can no longer be used."""
    try:
        chosen, _ = select(problem_of(case, facts), facts, Request(name))
    except ValueError:
        summary.unsupported[name] += 1
        return True
    if chosen.name == "quack":  # measures its own configs, for seconds, on every new shape
        summary.unsupported["auto (chose quack, which tunes itself on every new shape)"] += 1
        return True
    code = program(case, profile, name, seed, device.type)
    tell(code)
    reason, error, who = check(case, name, seed, device)
    summary.runs[f"{name} {case.layout.value} {str(case.dtype).removeprefix('torch.')}"] += 1
    if name == "auto":
        summary.auto_chose[who] += 1
        summary.repeated += 1
    if reason:
        failure = {"case": case.name, "backend": name, "ran": who, "reason": reason[:400], "program": code}
        summary.failures.append(failure)
        return "CUDA error" not in reason and "cudaError" not in reason and len(summary.failures) < 20
    summary.keep_worst(name, {"of_allowed": error, "case": case.name, "dtype": str(case.dtype), "seed": seed})
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="PART/PARTS")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="JSON; the program now running goes to OUT.now")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after that")
    options = parser.parse_args(argv)
    part, parts = map(int, options.part.split("/"))
    now = options.out.with_suffix(".now")
    device = torch.device(options.device)
    # cuBLAS may otherwise add parts of a sum in 16 bits, for `loop` and `padded_bmm`: another product than the gate's.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    summary = run_part(options.count, options.seed, part, parts, device, now.write_text, options.seconds)
    options.out.write_text(json.dumps(summary.as_dict(), indent=1) + "\n")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
