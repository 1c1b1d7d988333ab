"""The plain Triton backends launched past Triton: the kernel that Triton would have compiled, the arguments that it
would have handed over, and one kernel for all numbers of tokens."""

import contextlib
import ctypes
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.backends import _gluon_launch, gluon_hopper, triton_pointer, triton_tma
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.launch import device as launch_device
from expertile.ops.launch import launch as launching
from expertile.ops.launch import nvrtc, pdl
from expertile.ops.launch.launch import Launch
from expertile.ops.launch.versions import FP_FUSION
from tests.ops.grouped_mm import cases
from tests.ops.grouped_mm.cases import Case
from tests.support import fake_launcher
from tests.support.fake_driver import FakeDriver, compile_only
from tests.support.fake_launcher import Launched

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

H200 = Device.by_name("h200")
_M, _K, _N, _B = Layout.RAGGED_M, Layout.RAGGED_K, Layout.RAGGED_N, Layout.BATCHED
CASES = (
    Case("m", _M, (100, 28), n=512, k=256),
    Case("m-one-row-kn-bias", _M, (1, 0), n=512, k=256, b_storage="row", bias=True),
    Case("m-odd-n", _M, (100, 28), n=509, k=256),
    Case("k", _K, (100, 28), m=512, n=512, a_storage="column", b_storage="row"),
    Case("n", _N, (99, 29), m=256, k=128),
    Case("b-fp32-out", _B, (0, 0), m=250, n=512, k=256, out_dtype=torch.float32),
)
POINTER = triton_pointer.Config(32, 64, 32, 4, 2, group_m=4)
TMA = triton_tma.Config(64, 64, 32, 4, 2, group_m=4)
CONFIGS = ((triton_pointer.BACKEND, POINTER), (triton_tma.BACKEND, TMA))


@contextlib.contextmanager
def fake_gpu(seen: list[Launched] | None = None) -> Iterator[list[tuple[Any, ...]]]:
    """An H200 as its tensors, driver and Triton's compiler see it; yields what Triton is called with to launch. What
    its C function is called with is appended to `seen`."""
    calls: list[tuple[Any, ...]] = []
    fake = FakeDriver(90)
    fake.get_current_device = lambda: 90  # type: ignore[method-assign]  # torch has no device number 1090
    fake.utils = fake_launcher.utils(  # type: ignore[attr-defined]
        lambda *args: tuple(tuple(a) if isinstance(a, list) else a for a in args), [] if seen is None else seen
    )
    with compile_only(90), contextlib.ExitStack() as stack:
        driver.set_active(fake)
        compile_for_launch = JITFunction.run

        def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = compile_for_launch(self, *args, grid=grid, warmup=warmup, **options)
            calls.append((kernel, grid, args, warmup))
            return kernel

        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", fake.get_current_device))
        stack.enter_context(mock.patch.object(launch_device, "_sm_count", lambda device: 132))
        stack.enter_context(mock.patch.object(Device, "current", staticmethod(lambda where: H200)))
        stack.enter_context(mock.patch.object(torch.Tensor, "get_device", lambda self: fake.get_current_device()))
        for cache in (launching._encode, launching._compiled, triton_pointer._launch, triton_tma._launch):
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield calls


def _problem(case: Case, operands: Operands) -> Problem:
    problem = Problem.from_tensors(operands.a, operands.b, operands.offs, operands.bias, case.out_dtype)
    return replace(problem, device_type="cuda", group_sizes=None)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend, config", CONFIGS, ids=["pointer", "tma"])
def test_the_same_kernel_and_arguments_as_by_triton(backend: Backend, config: Any, case: Case) -> None:
    operands = Operands(*cases.make(case))
    problem, out = _problem(case, operands), cases.poisoned_out(case)
    assert backend.supports(problem, H200) is None
    seen: list[Launched] = []
    prepare = launching.prepare
    with fake_gpu(seen) as calls:
        with mock.patch.object(launching, "prepare", lambda kernel, cluster: None):
            backend.run(problem, operands, config, out)
        by_triton, grid, args, warmup = calls[-1]
        assert not warmup
        for cache in (launching._compiled, triton_pointer._launch, triton_tma._launch):
            cache.cache_clear()
        loaded = fake_launcher.loaded(by_triton, seen)
        with mock.patch.object(launching, "prepare", lambda kernel, cluster: prepare(loaded)):
            backend.run(problem, operands, config, out)
        ours, _, _, warmup = calls[-1]
        assert warmup, "Triton launched it"
        assert ours is by_triton, "specialised on something else"
        assert not ours.metadata.launch_pdl and "griddepcontrol" not in ours.asm["ptx"]
        constants = (None,) * (len(by_triton.src.fn.arg_names) - len(args))
        loaded.launch_by_triton(*grid, *args, *constants)
    (direct, usual), types_ = seen, by_triton.src.signature.values()
    assert direct.head == usual.head
    flat = [kind for t in types_ for kind in _flat(t)]
    compared = 0
    for kind, got, expected in zip(flat, direct.arguments, usual.arguments, strict=True):
        if kind == "constexpr":
            continue  # known to the compiled kernel
        compared += 1
        assert got == (expected.data_ptr() if isinstance(expected, torch.Tensor) else expected)
    assert compared >= 8


def _flat(kind: Any) -> list[str]:
    """The launcher's arguments for one of the kernel's: a descriptor is a map, its shape and its strides."""
    if not isinstance(kind, str) or not kind.startswith("tensordesc"):
        return [kind]
    return ["map"] + ["number"] * 2 * (kind.count(",") - (1 if "swizzle" in kind else 0) + 1)


@pytest.mark.parametrize("layout", [_M, _K], ids=str)
@pytest.mark.parametrize("backend, config", CONFIGS, ids=["pointer", "tma"])
def test_one_kernel_for_all_numbers_of_tokens_and_groups(backend: Backend, config: Any, layout: Layout) -> None:
    kernels = set()
    with compile_only(90) as compiled:
        for groups, rows, group_m in ((2, 32, 1), (3, 33, 2), (16, 1, 4), (31, 4096, 8)):
            a = torch.empty(rows, 64, dtype=torch.bfloat16)
            if layout is _M:
                b = torch.empty(groups, 64, 64, dtype=torch.bfloat16).transpose(1, 2)
            else:
                a, b = a.t(), torch.empty(rows, 64, dtype=torch.bfloat16)
            operands = Operands(a, b, torch.zeros(groups, dtype=torch.int32))
            problem = replace(Problem.from_tensors(a, b, operands.offs), device_type="cuda", group_sizes=None)
            backend.run(problem, operands, replace(config, group_m=group_m), None)
            kernels.add(id(compiled[-1]))
    assert len(compiled) == 4 and len(kernels) == 1


def test_what_decides_the_code_is_told_apart() -> None:
    """Addresses that are no multiples of 16 must not meet code that loads 16 bytes at a time."""
    case = CASES[1]
    tensors = cases.make(case)
    kernels = []
    with fake_gpu() as calls, mock.patch.object(launching, "prepare", lambda kernel, cluster: None):
        for moved in (None, 0, 1, 2, 3):
            operands = Operands(*(_moved(t) if i == moved else t for i, t in enumerate(tensors)))
            triton_pointer.run(_problem(case, operands), operands, POINTER, None)
            (ours, *_, warmup), (by_triton, *_) = calls[-2:]
            assert warmup and ours is by_triton
            kernels.append(ours)
    assert len(set(map(id, kernels))) == len(kernels)


def _moved(t: torch.Tensor) -> torch.Tensor:
    """A copy of `t` whose address is no multiple of 16."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype)[1:]
    return room.as_strided(t.shape, t.stride(), 1).copy_(t)


@pytest.mark.parametrize("block_n, pdl_wanted", [(256, True), (128, False)])
def test_what_fills_a_multiprocessor_has_pdl(block_n: int, pdl_wanted: bool) -> None:
    case, config = CASES[0], triton_tma.Config(64, block_n, 64, 4, 4)
    operands = Operands(*cases.make(case))
    with fake_gpu() as calls, mock.patch.object(launching, "prepare", lambda kernel, cluster: None):
        triton_tma.BACKEND.run(_problem(case, operands), operands, config, cases.poisoned_out(case))
    kernel = calls[-1][0]
    assert kernel.metadata.launch_pdl == pdl_wanted == ("griddepcontrol.wait" in kernel.asm["ptx"])
    assert (2 * kernel.metadata.shared > H200.smem_bytes) == pdl_wanted


@pytest.mark.parametrize("rows, pdl_wanted", [(9536, True), (9600, False)])
def test_many_flops_start_after_the_kernel_before(rows: int, pdl_wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton, in Gluon and in CUDA C++, which names a cluster only where it has several programs."""
    problem = replace(_problem(CASES[0], Operands(*cases.make(CASES[0]))), m=rows, n=1024, k=1024)
    assert (problem.work().flops <= 2e10) == pdl_wanted
    options = dict(_gluon_launch._launch(problem, gluon_hopper.Config(), (1024, 1), None, -1).options)
    assert options["launch_pdl"] == pdl_wanted
    monkeypatch.setattr(pdl.Device, "current", lambda device: H200)
    assert pdl.pdl_options(0, H200.smem_bytes, problem)["PDL"] == pdl_wanted
    seen = []
    driver = types.SimpleNamespace(cuLaunchKernelEx=lambda config, *rest: seen.append(config._obj) or 0)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    for cluster in (1, 2):
        kernel = nvrtc.Kernel(*[ctypes.c_void_p()] * 2, (), 384, 0, cluster)
        kernel.launch(132, 0, (), launch_device.wants_pdl(problem))()
        (config,) = seen[-1:]
        given = {a.id: list(a.value[:3]) for a in config.attributes[: config.attribute_count]}
        assert given == {nvrtc._PDL: [pdl_wanted, 0, 0]} | ({nvrtc._CLUSTER: [2, 1, 1]} if cluster == 2 else {})


def test_profilers_see_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    operands = Operands(*cases.make(case))
    seen: list[int] = []
    with fake_gpu() as calls:
        compiled = launching.Compiled(lambda programs, *_: seen.append(programs), 0, (), lambda device: 0, lambda: 90)
        with mock.patch.object(launching, "prepare", lambda kernel, cluster: compiled):
            triton_pointer.run(_problem(case, operands), operands, POINTER, None)
            assert len(seen) == 1 and calls[-1][3]
            monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
            triton_pointer.run(_problem(case, operands), operands, POINTER, None)
            assert len(seen) == 1 and not calls[-1][3]


def test_tensors_of_a_cpu_are_left_to_triton() -> None:
    launches: list[tuple[Any, ...]] = []

    class Kernel:
        arg_names = ("a_desc", "offs_ptr", "groups", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launches.append((grid, args, options))

    Launch(Kernel(), (None,), (torch.int8,), (torch.int32,), (7,), (("BLOCK", 64),), 10).run(-1, (None,), ("offs",))
    assert launches == [((10,), (None, "offs", 7), {"BLOCK": 64, **FP_FUSION})]
