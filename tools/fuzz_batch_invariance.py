"""Look for a token whose bits depend on its batch, and measure what batch invariance costs.

    python tools/fuzz_batch_invariance.py --cases 10000 --seconds 60 --out FILE.json [--first 0] [--device cuda]
                                          [--only configs,fuzz,cost] [--processes 10]

configs  Every batch-invariant config of every backend on a few problems: all must give the bits of the first.
fuzz     Random layers and products. Each has a pool of tokens, computed once as one batch; a case takes some of them,
         in another order, number or neighbourhood, and compares every bit with the pool's. Numbers of tokens are even
         on a logarithmic scale. Every 16th case with a gradient compares that of x too. A case is told by its number:
         `--first N --cases 1` repeats it.
cost     Layers and products, batch-invariant and not, in turn, by CUDA graph: median of the ratios of the rounds.

On a GPU processes of their own compile the configs first, and fuzz side by side; `--seconds` limits the fuzz, compiling
included. FILE is written after each part. The exit status is 1 if bits differ.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.env import timestamp
from expertile.lab.measure.environment import capture_env
from expertile.lab.measure.stats import median_ci95, turn_order
from expertile.lab.measure.timers import timer_for
from expertile.moe import MoE, moe_mlp
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.problem import Problem
from expertile.ragged import offs_from_sizes

PARTS = ("configs", "fuzz", "cost")
PER_POOL = 100  # cases that share weights and the pool's bits
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
T = torch.Tensor


@dataclass(frozen=True)
class Form:
    """What a layer or product is but for its sizes. `step`: sizes are multiples of it; `experts`: at most."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    experts: int = 32
    step: int = 16
    layer: tuple[tuple[str, Any], ...] = ()  # arguments of MoE; of a product none


def _form(name: str, dtype: torch.dtype = torch.bfloat16, experts: int = 32, step: int = 16, **layer: Any) -> Form:
    return Form(name, dtype, experts, step, tuple(layer.items()))


FORMS = (
    _form("softmax", experts=128),
    _form(
        "sigmoid-groups-shared",
        score="sigmoid",
        num_groups=4,
        top_groups=2,
        scale=2.5,
        shared_intermediate_size=96,
        router_dtype=torch.float32,
    ),
    _form("gpt-oss", bias=True, router_bias=True, interleaved=True, activation="gpt_oss", order="topk_then_softmax"),
    _form("half-geglu", torch.float16, activation="geglu", normalize=False),
    _form("mlp"),
    _form("product"),
    _form("product-bias-float32"),
    _form("product-rows-of-b"),
    _form("float32", torch.float32, experts=16),
    _form("odd-reglu", experts=16, step=1, activation="reglu"),
)


def bits(x: T) -> T:
    return x.contiguous().view(_BITS[x.element_size()])


@dataclass(frozen=True)
class Pool:
    """Tokens and what makes rows of them: `run(x, at)` for rows x that are, or stand in for, tokens `at`."""

    what: dict[str, Any]
    x: T
    run: Callable[[T, T], T]


def pool(number: int, device: torch.device, small: bool) -> Pool:
    """The layer or product of number `number` with its tokens; sizes are drawn."""
    form, draw = FORMS[number % len(FORMS)], random.Random(f"pool {number}")
    torch.manual_seed(number)
    tokens = 48 if small else 8192
    slow = form.dtype is torch.float32 or form.step == 1
    wide = 5 if small else 32 if slow else 128  # sizes reach 16 times that
    unit = 4 if form.step == 1 else 8
    experts = unit * draw.randint(1, 2 if small else form.experts // unit)
    top_k = min(draw.choice((1, 2, 4, 8)), experts // 2)
    hidden, inner = (
        form.step * draw.randint(max(1, wide // 4), wide * 16 // form.step // (1 if form.step > 1 else 2))
        for _ in range(2)
    )
    if form.name == "softmax" and not small and draw.random() < 0.5:
        experts, top_k, hidden, inner = 128, 8, 2048, 768
    x = torch.randn(tokens, hidden, device=device).to(form.dtype)
    what = {"form": form.name, "tokens": tokens, "H": hidden, "I": inner, "E": experts, "k": top_k}

    def weight(*shape: int) -> T:
        return torch.randn(shape, device=device).to(form.dtype) * shape[-1] ** -0.5

    if form.name.startswith("product"):
        b, offs_of = weight(experts, inner, hidden).transpose(1, 2), torch.randint(experts, (tokens,), device=device)
        b = b.contiguous() if form.name == "product-rows-of-b" else b
        extra = form.name == "product-bias-float32"
        bias = weight(experts, inner) if extra else None
        out_dtype = torch.float32 if extra else None

        def product(rows: T, at: T) -> T:
            group, order = offs_of[at].sort(stable=True)
            ends = torch.searchsorted(group, torch.arange(experts, device=device), right=True).to(torch.int32)
            out = grouped_mm(rows[order], b, offs=ends, bias=bias, out_dtype=out_dtype, batch_invariant=True)
            return torch.empty_like(out).index_copy(0, order, out)

        return Pool(what, x, product)
    if form.name == "mlp":
        gate_up, down = weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)
        ids = torch.rand(tokens, experts, device=device).argsort(1)[:, :top_k].to(torch.int32)
        ids = torch.where(torch.rand(ids.shape, device=device) < 0.2, -1, ids)  # dropped slots
        weights = torch.rand(tokens, top_k, device=device)
        return Pool(what, x, lambda rows, at: moe_mlp(rows, gate_up, down, ids[at], weights[at], batch_invariant=True))
    layer = MoE(
        hidden, inner, experts, top_k, device=device, dtype=form.dtype, batch_invariant=True, **dict(form.layer)
    ).requires_grad_(False)
    if layer.correction_bias is not None:
        layer.correction_bias.uniform_(-0.1, 0.1)
    return Pool(what, x, lambda rows, at: layer(rows))


KINDS = ("subset", "prefix", "permutation", "repeated", "neighbours", "strided")


def rows_of(kind: str, x: T, count: int, made: torch.Generator) -> tuple[T, T, T]:
    """(rows, the token of each, which of them count)."""
    tokens, device = x.shape[0], x.device
    at = torch.randperm(tokens, device=device, generator=made)[:count]
    counted = torch.ones(count, dtype=torch.bool, device=device)
    if kind == "prefix":
        at = torch.arange(count, device=device)
    elif kind == "permutation":
        at = torch.randperm(count, device=device, generator=made)
    elif kind == "repeated":
        at = at[torch.randint(max(1, count // 8), (count,), device=device, generator=made)]
    rows = x[at]
    if kind == "neighbours":  # every other row is something else: large, or not a number
        counted = torch.arange(count, device=device) % 2 == 0
        other = torch.randn(rows.shape, device=device, generator=made).to(x.dtype) * 300
        other[1::4] = torch.nan
        rows = torch.where(counted[:, None], rows, other)
    elif kind == "strided":  # a view of wider rows that starts anywhere
        wide = x.new_zeros((count, x.shape[1] + 3))
        wide[:, 1:-2] = rows
        rows = wide[:, 1:-2]
    return rows, at, counted


def with_gradient(pool: Pool, rows: T, at: T, dy: T) -> tuple[T, T]:
    """(out, gradient of rows)."""
    rows = rows.detach().requires_grad_()
    out = pool.run(rows, at)
    (grad,) = torch.autograd.grad(out, rows, dy[at].to(out.dtype))
    return out.detach(), grad


class Fuzz:
    """The cases, pool by pool."""

    def __init__(self, device: torch.device, small: bool) -> None:
        self.device, self.small = device, small
        self.number = -1

    def turn_to(self, number: int) -> None:
        """Make pool `number` and its bits."""
        if number == self.number:
            return
        self.pool = pool(number, self.device, self.small)
        self.number, everyone = number, torch.arange(self.pool.x.shape[0], device=self.device)
        with torch.no_grad():
            self.out = bits(self.pool.run(self.pool.x, everyone))
        torch.manual_seed(number)
        self.dy = torch.randn(self.pool.x.shape[0], self.out.shape[1], device=self.device)
        out, grad = with_gradient(self.pool, self.pool.x, everyone, self.dy)
        self.grad = bits(grad)
        self.trained = (bits(out) != self.out).sum()  # a forward pass with a gradient gives the same bits

    def case(self, number: int) -> tuple[dict[str, Any], T]:
        """(what it was, on the device how many elements differ)."""
        self.turn_to(number // PER_POOL)
        draw = random.Random(f"case {number}")
        tokens = self.pool.x.shape[0]
        kind, count = draw.choice(KINDS), min(tokens, int(2 ** draw.uniform(0, tokens.bit_length())))
        made = torch.Generator(self.device).manual_seed(number)
        rows, at, counted = rows_of(kind, self.pool.x, count, made)
        graded = number % 16 == 0 and kind != "neighbours"  # a gradient of what is not a number is none
        if graded:
            out, grad = with_gradient(self.pool, rows, at, self.dy)
        else:
            with torch.no_grad():
                out = self.pool.run(rows, at)
        wrong = ((bits(out) != self.out[at]) & counted[:, None]).sum()
        if graded:
            wrong = wrong + (bits(grad) != self.grad[at]).sum()
        if number % PER_POOL == 0:
            wrong = wrong + self.trained
        what = {"case": number, "kind": kind, "tokens": count, "gradient": graded, "pool": self.pool.what}
        return what, wrong


def fuzz(device: torch.device, small: bool, first: int, cases: int, seconds: float) -> dict[str, Any]:
    start, run = time.monotonic(), Fuzz(device, small)
    done, graded = 0, 0
    failures: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    waiting: list[tuple[dict[str, Any], T]] = []
    sizes: list[int] = []

    def settle() -> None:
        if waiting:
            counts = torch.stack([wrong for _, wrong in waiting]).tolist()
            failures.extend(what | {"elements": n} for (what, _), n in zip(waiting, counts, strict=True) if n)
            waiting.clear()

    for number in range(first, first + cases):
        if time.monotonic() - start > seconds:
            break
        try:
            waiting.append(run.case(number))
            graded += waiting[-1][0]["gradient"]
            sizes.append(waiting[-1][0]["tokens"])
            done += 1
        except Exception:
            errors.append({"case": number, "error": traceback.format_exc()[-2000:]})
            if len(errors) >= 20:
                break
        if len(waiting) == 100:
            settle()
    settle()
    return {
        "cases": done,
        "asked": cases,
        "first": first,
        "with_gradient": graded,
        "tokens_min": min(sizes, default=0),
        "tokens_max": max(sizes, default=0),
        "pools": len({n // PER_POOL for n in range(first, first + done)}),
        "seconds": time.monotonic() - start,
        "failures": failures[:200],
        "num_failures": len(failures),
        "errors": errors,
    }


def problems(small: bool) -> Iterator[tuple[str, tuple[int, ...], int, int, torch.dtype, torch.dtype, bool, bool]]:
    """(name, rows of the groups, K, N, dtype, dtype of the result, bias, whether b's rows are contiguous)."""
    sizes = (1, 0, 3, 17, 64, 5, 128, 70) if small else (1, 0, 3, 17, 64, 300, 129, 1000)
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    yield "K of 8 and 128 apart", sizes, 200 if small else 1160, 256, bf16, bf16, False, False
    yield "bias, float32 result", sizes, 192 if small else 2048, 136 if small else 1544, bf16, f32, True, False
    yield "float16, rows of b", sizes, 64 if small else 768, 128 if small else 2048, f16, f16, False, True


def configs(device: torch.device, small: bool, part: int = 0, parts: int = 1) -> list[dict[str, Any]]:
    """How many bits each batch-invariant config gives otherwise than its backend's first; every parts-th of them."""
    facts, count = Device.current(device), 0
    found: list[dict[str, Any]] = []
    for name, sizes, k, n, dtype, out_dtype, has_bias, rows_of_b in problems(small):
        made = torch.Generator(device).manual_seed(len(name))

        def normal(*shape: int, made: torch.Generator = made, dtype: torch.dtype = dtype) -> T:
            return torch.randn(shape, device=device, generator=made).to(dtype)

        a, b = normal(sum(sizes), k), normal(len(sizes), n, k).transpose(1, 2)
        b = b.contiguous() if rows_of_b else b
        bias = normal(len(sizes), n) if has_bias else None
        offs = offs_from_sizes(sizes, device)
        problem = Problem.from_tensors(a, b, offs, bias, out_dtype, check=True)
        for backend in BACKENDS:
            if backend.supports(problem, facts) is not None:
                continue
            first: T | None = None
            # Configs are chosen by the number of rows: those of few and of many.
            few = problem.with_sizes(None)
            offered = dict.fromkeys((*backend.invariant(problem, facts), *backend.invariant(few, facts)))
            for config in offered:
                count += 1
                if count % parts != part:
                    continue
                line: dict[str, Any] = {"problem": name, "backend": backend.name, "config": repr(config)}
                try:
                    out = bits(backend.run(problem, Operands(a, b, offs, bias), config, None))
                    first = out if first is None else first
                    line["differing"] = int((out != first).sum())
                except Exception:
                    line["error"] = traceback.format_exc()[-1000:]
                found.append(line)
    return found


LAYERS = (
    ("prefill 8192", 8192, (2048, 768, 128, 8)),
    ("prefill 8192 large", 8192, (4096, 1024, 128, 8)),
    ("decode 1", 1, (2048, 768, 128, 8)),
    ("decode 8", 8, (2048, 768, 128, 8)),
    ("decode 64", 64, (2048, 768, 128, 8)),
)
PRODUCTS = (("product prefill", 65536), ("product decode", 64))


Calls = dict[bool, Callable[[int], T]]


def layers(device: torch.device, sets: int, tokens: int, h: int, i: int, e: int, k: int) -> Calls:
    """A layer's forward pass on input set s, batch-invariant and not, with the same weights."""
    xs = torch.randn(sets, tokens, h, device=device).to(torch.bfloat16)
    usual, invariant = (
        MoE(h, i, e, k, device="meta", dtype=torch.bfloat16, batch_invariant=flag).requires_grad_(False)
        for flag in (False, True)
    )
    usual.to_empty(device=device).reset_parameters()
    invariant.load_state_dict(usual.state_dict(), assign=True)
    return {False: lambda s: usual(xs[s]), True: lambda s: invariant(xs[s])}


def products(device: torch.device, rows: int, k: int, n: int, groups: int) -> Calls:
    """A ragged product of groups of uneven sizes, batch-invariant and not."""
    a, b = torch.randn(rows, k, device=device).bfloat16(), torch.randn(groups, n, k, device=device).bfloat16()
    draw = random.Random(rows)
    ends = [*sorted(draw.randint(0, rows) for _ in range(groups - 1)), rows]
    offs = torch.tensor(ends, dtype=torch.int32, device=device)

    def product(batch_invariant: bool) -> T:
        return grouped_mm(a, b.transpose(1, 2), offs=offs, batch_invariant=batch_invariant)

    return {False: lambda s: product(False), True: lambda s: product(True)}


def cost(device: torch.device, small: bool, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a call, batch-invariant and not."""
    found = []
    for name, tokens, sizes in LAYERS:
        tokens, sizes = (min(tokens, 8), (32, 16, 8, 2)) if small else (tokens, sizes)
        sets = 8 if tokens <= 64 else 2
        line = compare(name, device, rounds, sets, partial(layers, device, sets, tokens, *sizes))
        found.append(line | dict(zip("THIEk", (tokens, *sizes), strict=True)))
    for name, rows in PRODUCTS:
        rows, (k, n, g) = (min(rows, 16), (32, 16, 8)) if small else (rows, (2048, 1536, 128))
        line = compare(name, device, rounds, 1, partial(products, device, rows, k, n, g))
        found.append(line | {"rows": rows, "K": k, "N": n, "G": g})
    return found


def compare(name: str, device: torch.device, rounds: int, sets: int, make: Callable[[], Calls]) -> dict[str, Any]:
    """Both in turn, round by round."""
    try:
        timer = timer_for("graph" if device.type == "cuda" else "eager", device)
        with torch.no_grad():
            samplers = {flag: timer.prepare(call, sets) for flag, call in make().items()}
            for sampler in samplers.values():
                sampler()
            taken: dict[bool, list[float]] = {False: [], True: []}
            for number in range(rounds):
                for place in turn_order(2, number):
                    taken[bool(place)].append(samplers[bool(place)]())
        ratio, interval = median_ci95([b / a for a, b in zip(taken[False], taken[True], strict=True)])
        times = {f"time_s_{key}": median_ci95(taken[flag])[0] for key, flag in (("usual", False), ("invariant", True))}
        return {"name": name, "ratio": ratio, "ratio_ci95": interval, **times, "rounds": rounds}
    except Exception:
        return {"name": name, "error": traceback.format_exc()[-2000:]}


def _compile(part: int, parts: int) -> None:
    """In a process of its own: what compiles the kernels of every parts-th config, whatever comes of it."""
    try:
        configs(torch.device("cuda"), False, part, parts)
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
    torch.cuda.empty_cache()


def compile_first(processes: int, seconds: float) -> float:
    """Fill Triton's cache on disk with the configs; returns the seconds that took."""
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as workers:
        answers = [workers.apply_async(_compile, (part, processes)) for part in range(processes)]
        for answer in answers:
            with suppress(multiprocessing.TimeoutError):
                answer.get(max(0.01, seconds - (time.monotonic() - start)))
    workers.join()  # their memory is free before anything is timed
    return time.monotonic() - start


def fuzz_side_by_side(first: int, cases: int, seconds: float, processes: int) -> dict[str, Any]:
    """`fuzz` on a GPU by several processes, pool by pool, each compiling what its pools need."""
    start, end = time.monotonic(), first + cases
    deadline = time.time() + seconds
    starts = [first, *range((first // PER_POOL + 1) * PER_POOL, end, PER_POOL)]
    with multiprocessing.get_context("spawn").Pool(processes) as workers:
        jobs = [(at, min(end, (at // PER_POOL + 1) * PER_POOL) - at, deadline) for at in starts]
        parts = workers.starmap(_fuzz_until, jobs, chunksize=1)
    found = {name: sum(part[name] for part in parts) for name in ("cases", "with_gradient", "num_failures")}
    found |= {name: [line for part in parts for line in part[name]][:200] for name in ("failures", "errors")}
    ran = [part for part in parts if part["cases"]]
    return found | {
        "asked": cases,
        "first": first,
        "pools": len(ran),
        "processes": processes,
        "tokens_min": min((part["tokens_min"] for part in ran), default=0),
        "tokens_max": max((part["tokens_max"] for part in ran), default=0),
        "seconds": time.monotonic() - start,
    }


def _fuzz_until(first: int, cases: int, deadline: float) -> dict[str, Any]:
    torch.cuda.empty_cache()
    return fuzz(torch.device("cuda"), False, first, cases, deadline - time.time())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of the fuzz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=25, help="of the cost")
    parser.add_argument("--processes", type=int, default=10, help="side by side, on a GPU; 0: none")
    parser.add_argument("--compile-seconds", type=float, default=150.0, help="limit of compiling the configs first")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)
    only = options.only.split(",")
    if not set(only) <= set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {options.only}")
    device = torch.device(options.device)
    small = device.type != "cuda"
    found: dict[str, Any] = {
        "date": timestamp(),
        "env": asdict(capture_env(Device.current(device))),
        "arguments": vars(options) | {"out": str(options.out)},
    }

    def write() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")

    if "configs" in only and not small and options.processes:
        found["compile_s"] = compile_first(options.processes, options.compile_seconds)
        print(f"compiled in {found['compile_s']:.0f} s", flush=True)
    bad = 0
    if "configs" in only:
        found["configs"] = configs(device, small)
        wrong = [line for line in found["configs"] if line.get("differing") or "error" in line]
        bad += len(wrong)
        print(f"configs: {len(found['configs'])} ran, {len(wrong)} differ or failed", flush=True)
        write()
    if "fuzz" in only:
        if small or not options.processes:
            result = fuzz(device, small, options.first, options.cases, options.seconds)
        else:
            result = fuzz_side_by_side(options.first, options.cases, options.seconds, options.processes)
        found["fuzz"] = result
        bad += result["num_failures"] + len(result["errors"])
        print(
            f"fuzz: {result['cases']} cases of {result['pools']} layers and products in {result['seconds']:.0f} s, "
            f"{result['num_failures']} differ, {len(result['errors'])} raised",
            flush=True,
        )
        write()
    if "cost" in only:
        found["cost"] = cost(device, small, options.rounds)
        for line in found["cost"]:
            print(line["name"], f"{line['ratio']:.3f}" if "ratio" in line else line["error"], flush=True)
    write()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
