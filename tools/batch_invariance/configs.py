"""Every batch-invariant config of every backend on a few problems: all must give the bits of the first."""

import multiprocessing
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.problem import Problem
from expertile.ragged import offs_from_sizes
from tools.batch_invariance.fuzz import T, bits


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
