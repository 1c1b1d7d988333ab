"""The host's side of a call, with the launch faked: what is worked out once, and that nothing piles up. The GPU tier
measures the same with real launches (tests/gpu/test_launch.py)."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import expertile as xt
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm import api as running
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.problem import Problem
from expertile.ragged import offs_from_sizes
from tests.support.fake_cuda import CACHES, OWN, fake_cuda

needs_the_compiler = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter launches nothing")
NAMES = ("auto", *(b.name for b in OWN))
G, K, N = 4, 64, 64


def weights(groups: int = G) -> torch.Tensor:
    return torch.zeros(groups, N, K, dtype=torch.bfloat16).transpose(1, 2)


@needs_the_compiler
@pytest.mark.parametrize("backend", NAMES)
def test_shapes_seen_before_are_not_worked_out_again(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, offs = torch.zeros(32, K, dtype=torch.bfloat16), weights(), offs_from_sizes([8] * G)
    with fake_cuda() as launches:
        xt.grouped_mm(a, b, offs=offs, backend=backend)

        def again(*args: Any) -> Any:
            raise AssertionError("worked out again")

        for name in ("from_tensors", "from_descriptions"):
            monkeypatch.setattr(Problem, name, staticmethod(again))
        monkeypatch.setattr(running.backends, "select", again)
        before = len(launches)
        for other in (a, torch.ones_like(a), a[:32]):
            xt.grouped_mm(other, b, offs=offs.clone(), backend=backend)
        assert len(launches) - before == (0 if backend == "auto" and before == 0 else 3)
        with pytest.raises(AssertionError, match="worked out again"):
            xt.grouped_mm(a[:31], b, offs=offs, backend=backend)


@needs_the_compiler
@pytest.mark.parametrize("change", ["rows", "strides", "address", "out_dtype", "tf32", "bias", "groups", "offs"])
def test_whatever_decides_a_problem_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Problem] = []

    def run(problem: Problem, operands: Operands, config: Any, out: torch.Tensor | None) -> torch.Tensor:
        seen.append(problem)
        return operands.a

    noted = Backend("noted", "", run)
    monkeypatch.setattr(running.backends, "select", lambda *arguments: (noted, NoConfig()))
    dtype = torch.float32 if change == "tf32" else torch.bfloat16
    a, b, offs = torch.zeros(32, K, dtype=dtype), weights().to(dtype), offs_from_sizes([8] * G)
    room = torch.zeros(32 * (K + 8), dtype=dtype)
    first: dict[str, Any] = {"a": a, "b": b, "offs": offs}
    other = {
        "rows": {"a": a[:16]},
        "strides": {"a": room.view(32, K + 8)[:, :K]},
        "address": {"a": room[1 : 1 + a.numel()].view(a.shape)},
        "out_dtype": {"out_dtype": torch.float32},
        "tf32": {},
        "bias": {"bias": torch.zeros(G, N, dtype=dtype)},
        "groups": {"b": b[:3], "offs": offs[:3]},
        "offs": {"offs": offs.long()},
    }[change]
    with fake_cuda():
        xt.grouped_mm(**first)
        if change == "tf32":
            monkeypatch.setattr(running, "tf32_allowed", lambda: True)
        if change == "offs":
            with pytest.raises(ValueError, match=r"offs: expected dtype torch.int32, got torch.int64"):
                xt.grouped_mm(**{**first, **other})
            return
        xt.grouped_mm(**{**first, **other})
        xt.grouped_mm(**{**first, **other})
    assert seen[0] != seen[1] and seen[1] is seen[2]


def test_a_problem_is_made_once_with_check(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = Problem.from_descriptions

    def counted(*args: Any) -> Problem:
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(Problem, "from_descriptions", staticmethod(counted))
    a = torch.zeros(32, K, dtype=torch.bfloat16)
    xt.grouped_mm(a, weights(), offs=offs_from_sizes([8] * G), check=True)
    assert len(made) == 1


def test_backends_get_offs_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read offs as a plain array; a slice with a step is copied first."""
    given: list[torch.Tensor] = []

    def run(problem: Problem, operands: Operands, config: Any, out: torch.Tensor | None) -> torch.Tensor:
        assert operands.offs is not None
        given.append(operands.offs)
        return operands.a

    noted = Backend("noted", "", run)
    monkeypatch.setattr(running.backends, "select", lambda *arguments: (noted, NoConfig()))
    wide = torch.tensor([8, -1, 16, -1, 24, -1, 32, -1], dtype=torch.int32)
    xt.grouped_mm(torch.zeros(32, K, dtype=torch.bfloat16), weights(), offs=wide[::2])
    assert given[0].is_contiguous() and given[0].tolist() == [8, 16, 24, 32]


def test_every_cache_is_bounded() -> None:
    for cache in CACHES:
        assert cache.cache_info().maxsize is not None, cache


def changing_shapes(backend: str, first: int, count: int) -> None:
    """Calls of which hardly two have the same shape: rows, groups, N and the output's dtype change."""
    most = 65536
    a = torch.empty(most, K, dtype=torch.bfloat16)
    b = {(g, n): torch.empty(g, n, K, dtype=torch.bfloat16).transpose(1, 2) for g in (4, 33) for n in (64, 72)}
    offs = {g: offs_from_sizes([1] * g) for g in (4, 33)}
    shapes = list(b)
    for i in range(first, first + count):
        rows = 4096 + i * 7919 % (most - 4096)  # 7919 is prime: 61440 calls before a number of rows comes again
        g, n = shapes[i % len(shapes)]
        xt.grouped_mm(a[:rows], b[g, n], offs=offs[g], backend=backend)


@needs_the_compiler
@pytest.mark.parametrize("backend", NAMES)
def test_nothing_piles_up_beside_the_caches(backend: str) -> None:
    """Not even once they are full; those of the backends that auto takes for few of these shapes fill slowly."""
    largest = max(cache.cache_info().maxsize for cache in CACHES)
    with fake_cuda():
        changing_shapes(backend, 0, largest + 500)
        before = objects_beside_the_caches()
        changing_shapes(backend, largest + 500, largest + 500)
        grown = objects_beside_the_caches() - before
    assert grown < 500, f"{largest + 500} calls leave {grown} objects behind"


def objects_beside_the_caches() -> int:
    for cache in CACHES:
        cache.cache_clear()
    gc.collect()
    return len(gc.get_objects())


@needs_the_compiler
@pytest.mark.slow
def test_memory_stays_flat_over_4e4_calls() -> None:
    with fake_cuda():
        changing_shapes("auto", 0, 20_000)
        gc.collect()
        before = resident_bytes()
        changing_shapes("auto", 20_000, 40_000)
        gc.collect()
        grown = resident_bytes() - before
    assert grown <= 40_000 * 168, f"host memory grew by {grown / 2**20:.1f} MiB over 4e4 calls"


def resident_bytes() -> int:
    """Without what the allocator has been given back and keeps, which comes and goes by 20 MiB."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
