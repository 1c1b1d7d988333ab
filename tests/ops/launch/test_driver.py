"""The direct launch hands the driver what Triton's own launch would, and encodes a descriptor once per address."""

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.runtime.driver import driver

from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import _gluon_launch, gluon_hopper
from expertile.ops.grouped_mm.backends._gluon_kernel import grouped_mm_kernel
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.launch import launch as launching
from expertile.ops.launch import versions
from tests.ops.grouped_mm import cases
from tests.ops.grouped_mm.cases import Case
from tests.support import fake_launcher
from tests.support.fake_cuda import BOX
from tests.support.fake_driver import FakeDriver, compile_only
from tests.support.fake_launcher import Launched

CASES = (
    Case("m", Layout.RAGGED_M, (100, 28), n=512, k=256),
    Case("m-kn-bias", Layout.RAGGED_M, (100, 28), n=512, k=256, b_storage="row", bias=True),
    Case("k", Layout.RAGGED_K, (100, 28), m=512, n=512, a_storage="column", b_storage="row"),
    Case("b-fp32-out", Layout.BATCHED, (0, 0), m=256, n=512, k=256, out_dtype=torch.float32),
)
CONFIG = gluon_hopper.Config(64, 64, 64, 3, "pingpong", 2, 1, 1)  # which Triton compiles soonest


@pytest.fixture
def launched() -> list[Launched]:
    """What Triton's C function is called with."""
    return []


@pytest.fixture
def encoded(launched: list[Launched]) -> Iterator[list[tuple[Any, ...]]]:
    """A driver whose descriptors are the arguments they were encoded from; yields those arguments."""
    seen: list[tuple[Any, ...]] = []

    def fill(*args: Any) -> tuple[Any, ...]:
        frozen = tuple(tuple(a) if isinstance(a, list | tuple) else a for a in args)
        seen.append(frozen)
        return frozen

    before = driver._active
    fake = FakeDriver(90)
    fake.utils = fake_launcher.utils(fill, launched)  # type: ignore[attr-defined]
    launching._encode.cache_clear()
    with compile_only(90):
        driver.set_active(fake)
        yield seen
    launching._encode.cache_clear()
    driver._active = before


@pytest.mark.compile
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_launch_as_by_triton(case: Case, encoded: list[tuple[Any, ...]], launched: list[Launched]) -> None:
    a, b, offs, bias = cases.make(case)
    operands = Operands(a, b, offs, bias)
    problem = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
    out = cases.poisoned_out(case)
    launch, _, *given = _gluon_launch.prepared(problem, operands, CONFIG, out)
    args = launch.arguments(*given)
    compiled = grouped_mm_kernel.run(*args, grid=(1,), warmup=True, **dict(launch.options))
    kernel = fake_launcher.loaded(compiled, launched, (12, 1, 1000))
    constants = (None,) * (len(grouped_mm_kernel.arg_names) - len(args))
    kernel.launch_by_triton(132, *args, *constants)

    direct = launching.prepare(kernel)
    assert direct is not None
    device = driver.active.get_current_device()
    used = [(blocks, t) for blocks, t in zip(launch.blocks, given[0], strict=True) if blocks is not None]
    tensors = tuple((direct.tensor(i, blocks), t.data_ptr()) for i, (blocks, t) in enumerate(used))
    rest = (*args[len(used) :], *constants)
    direct(device, 132, tensors, rest)
    by_triton, by_us = launched
    assert by_triton.head == by_us.head and kernel.run.launch_pdl in by_us.head
    for expected, got in zip(by_triton.arguments, by_us.arguments, strict=True):
        assert expected is got or expected == got
    assert len(encoded) == 6 and encoded[:3] == encoded[3:]

    direct(device, 132, tensors, rest)
    assert len(encoded) == 6, "encoded anew for an address that is known"
    moved = (tensors[0][0], tensors[0][1] + 4096)
    direct(device, 132, (moved, *tensors[1:]), rest)
    assert len(encoded) == 7 and encoded[6][0] == moved[1]


def test_caches_are_bounded(encoded: list[tuple[Any, ...]]) -> None:
    tensor = launching.Tensor([64, 64], [64, 1], BOX)
    limit = launching._encode.cache_info().maxsize
    assert limit is not None
    for address in range(0, 16 * (limit + 100), 16):
        launching._encode(tensor, address)
    assert launching._encode.cache_info().currsize == limit
    assert _gluon_launch._launch.cache_info().maxsize is not None
    assert launching._compiled.cache_info().maxsize is not None


def test_scratch_memory_and_versions_not_known_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = types.SimpleNamespace(run=types.SimpleNamespace(global_scratch_size=64, profile_scratch_size=0))
    assert launching.prepare(kernel) is None
    monkeypatch.setattr(versions, "KNOWN", False)
    assert launching.prepare(types.SimpleNamespace()) is None


@pytest.mark.parametrize("triton", ["3.5.1", "3.10.0"])
def test_a_version_not_known_is_warned_of_once(triton: str) -> None:
    code = f"import triton; triton.__version__ = {triton!r}; import expertile.ops.launch.versions; import expertile"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count(f"this is {triton}") == 1


def test_profilers_see_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not launching.hooked()
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    assert launching.hooked()
