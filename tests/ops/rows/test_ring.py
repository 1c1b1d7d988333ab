"""Rows that pass through a ring in shared memory: which rows, emulated values, who writes what, deadlocks, early
releases, and what the compiler makes of it."""

import contextlib
from typing import Any

import pytest
import torch

from expertile.ops.launch import launch as launches
from expertile.ops.launch.device import Machine
from expertile.ops.rows import ring
from expertile.ops.rows import ring_launch as launch
from expertile.ops.rows import softmax as operator
from expertile.ops.rows.ring_launch import RingConfig, choose
from expertile.ops.rows.ring_softmax import softmax_backward_ring_kernel, softmax_ring_kernel
from tests.support import gluon_emulator
from tests.support.aot import resources
from tests.support.fake_driver import compile_only
from tests.support.gluon_machine import EmulationError

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
# rows, columns, chunks of a group and of a box, slots for two-byte elements, programs, consumers
CASES = [
    (5, 2307, 4, 2, 4, 2, 1),
    (4, 5001, 8, 4, 3, 3, 1),
    (7, 4099, 4, 4, 6, 2, 1),
    (3, 2048, 4, 2, 3, 1, 1),
    (1, 3001, 4, 1, 4, 2, 1),
    (7, 2307, 4, 2, 4, 2, 2),
    (5, 2307, 4, 4, 9, 1, 2),
    (2, 3001, 4, 2, 4, 1, 2),
]
LOWEST = torch.finfo(torch.bfloat16).min


def _rows(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance, equal_nan=True)


def _arguments(tensors: list[torch.Tensor], out: torch.Tensor, box: int) -> tuple:
    made = launch.plan(softmax_ring_kernel, len(tensors), RingConfig(box=box), out.dtype, *out.shape, 132)
    return made.arguments(tuple(tensors), (*tensors, out))


def _options(case: tuple, dtype: torch.dtype, tensors: int) -> dict[str, Any]:
    _, _, group, box, slots, _, consumers = case
    chunk = launch.CHUNK_BYTES // dtype.itemsize
    shape = ring.RingShape(tensors, consumers, group, box, chunk, slots * dtype.itemsize // 2)
    return {"SHAPE": shape, "REGISTERS": (0, 0)}


def run(kernel: Any, grid: int, args: tuple, options: dict, out: torch.Tensor, seed: int = 0) -> None:
    """Run a kernel in the emulator; an EmulationError unless each element of `out` is stored once."""
    writes = gluon_emulator.run(kernel, grid, args, options, seed).writes
    if out.data_ptr() not in writes or bool((writes[out.data_ptr()] != 1).any()):
        raise EmulationError("some elements of the result are not written once")


def _forward(case: tuple, x: torch.Tensor, seed: int) -> torch.Tensor:
    y = torch.full_like(x, 7)
    run(softmax_ring_kernel, case[5], _arguments([x], y, case[3]), _options(case, x.dtype, 1), y, seed)
    return y


def _backward(case: tuple, dy: torch.Tensor, y: torch.Tensor, seed: int) -> torch.Tensor:
    dx = torch.full_like(y, 7)
    options = _options(case, y.dtype, 2)
    run(softmax_backward_ring_kernel, case[5], _arguments([dy, y], dx, case[3]), options, dx, seed)
    return dx


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, dtype):
    for seed in range(2):
        x = _rows(*case[:2], dtype, seed)
        if seed:
            x[0, 5] = float("-inf")
            x[-1] = float("-inf")
        _close(_forward(case, x, seed), torch.softmax(x.float(), -1))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case, dtype):
    y = torch.softmax(_rows(*case[:2], dtype, 0).float(), -1).to(dtype)
    dy = _rows(*case[:2], dtype, 9)
    product = dy.float() * y.float()
    for seed in range(2):
        _close(_backward(case, dy, y, seed), product - y.float() * product.sum(-1, keepdim=True))


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_neighbours_do_not_count_and_every_element_does(case):
    x = _rows(*case[:2], torch.bfloat16, 3)
    x[1::2] = float("nan")
    y = _forward(case, x, 0)
    assert y[1::2].isnan().all()
    _close(y[::2], torch.softmax(x[::2].float(), -1))
    for col in (0, 1, 255, 256, case[1] // 2, case[1] - 1):
        x = _rows(*case[:2], torch.bfloat16, 3)
        x[:, col] = 30.0
        _close(_forward(case, x, 0), torch.softmax(x.float(), -1))


def test_masks_of_the_lowest_number():
    """Whole vectors, and a whole row, of what masks are made of: multiplied by log2(e) it would be -inf."""
    case = CASES[0]
    x = _rows(*case[:2], torch.bfloat16, 4)
    x[:, 100:1700] = LOWEST
    x[2] = LOWEST
    x[3, 7], x[4, 8] = float("inf"), float("nan")
    _close(_forward(case, x, 0), torch.softmax(x.float(), -1))


def _not(*_):
    pass


# A part of the kernel -> what it is replaced by, given the original.
MUTANTS = {
    "does not wait in order": ("ordered_wait", lambda f: _not),
    "does not arrive at the next consumer": ("ordered_arrive", lambda f: _not),
    "keeps its slots": ("give_back", lambda f: _not),
    "gives back the slot after": ("give_back", lambda f: lambda p, slot: f(p, (slot + 1) % 4)),
    "leaves the tensor's end": ("complete", lambda f: lambda slot, ptr, at, whole, end, layout: slot.load(layout)),
    "leaves the head and the tail": ("head_and_tail", lambda f: lambda *a: (f(*a)[0], f(*a)[1] & False)),
    "writes whole words of others": ("words", lambda f: lambda p, at, v: (f(p, at, v)[0], f(p, at, v)[1] + v)),
    "leaves the last group": ("place", lambda f: lambda *a: (*f(*a)[:2], f(*a)[2] - 1)),
}


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_mutants_are_noticed(mutant, monkeypatch):
    """Without one of its parts the kernel hangs, or its numbers are wrong, for some order of events."""
    case = (9, 2307, 4, 2, 4, 1, 2)
    if mutant is not None:
        name, change = MUTANTS[mutant]
        monkeypatch.setattr(ring, name, change(getattr(ring, name).fn))
    failures = 0
    for seed in range(40):
        x = _rows(*case[:2], torch.bfloat16, seed)
        try:
            _close(_forward(case, x, seed), torch.softmax(x.float(), -1))
        except (EmulationError, AssertionError):
            failures += 1
            break
    assert bool(failures) == (mutant is not None)


# ------------------------------------------------------------------------------------------------------- which rows


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_choice(itemsize, tensors):
    """A row fits where one is chosen, and so do the registers; rows of whole words have no config."""
    for cols in (*range(8193, 130000, 777), 10001, 20001, 50257, 57343):
        config = choose(cols, itemsize, tensors)
        if cols * itemsize % 16 == 0:
            assert config is None
        elif config is not None:
            assert config.fits(cols, itemsize, tensors) and config.groups(cols, itemsize) >= 2
            start, consumer, loader = config.registers
            warps = config.num_warps * config.consumers + 4
            assert config.programs_per_sm * warps * 32 * start <= 65536
            assert consumer * (warps - 4) + 4 * loader <= start * warps
    assert choose(16385, itemsize, tensors) is choose(1, itemsize, tensors) is None
    assert choose(50257, 2, tensors) is not None and (choose(50257, 4, tensors) is None) == (tensors == 2)


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors that look like those of a GPU of compute capability 9.0 with two SMs, and kernels that are emulated;
    the list grows by the config of each launch."""
    taken: list[RingConfig] = []

    def emulated(inputs: tuple, out: torch.Tensor, programs: int, config: RingConfig) -> None:
        taken.append(config)
        args = _arguments(list(inputs), out, config.box)
        monkeypatch.setattr(torch.Tensor, "is_cuda", False)
        run(launch.KERNELS[len(inputs)], programs, args, launch.options(config, len(inputs), out.itemsize), out)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
    for module in (launch, operator):
        monkeypatch.setattr(module, "machine", lambda index: Machine(2, True))
    monkeypatch.setattr(launch, "run", emulated)
    return taken


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_operator_takes_it(hopper, dtype):
    cols = 32769 if dtype is torch.float32 else 18433
    x, dy = _rows(3, cols, dtype, 0), _rows(3, cols, dtype, 1)
    y = operator.on_rows((x,))
    _close(y, torch.softmax(x.float(), -1))
    assert hopper == [choose(cols, dtype.itemsize, 1)]
    x = x.view(3, 1, cols)
    assert operator.on_rows((x,)).shape == x.shape and len(hopper) == 2
    if dtype is not torch.float32:
        dx = operator.on_rows((dy, y))
        product = dy.float() * y.float()
        _close(dx, product - y.float() * product.sum(-1, keepdim=True))
        assert hopper[2:] == [choose(cols, dtype.itemsize, 2)]


def test_which_tensors(hopper, monkeypatch):
    def taken(x, *others):
        return launch.config_for(torch.empty(x.shape, dtype=x.dtype), x, *others) is not None

    x = torch.empty(4, 20001, dtype=torch.bfloat16)
    assert taken(x) and taken(x, x) and taken(x[1:].clone())
    assert not taken(x[:1])  # fewer rows than SMs
    assert not taken(x[::2]) and not taken(x[:, :20000]) and not taken(x[:, :19999])
    assert not taken(x[1:])  # starts inside a word
    assert not taken(torch.empty(4, 16383)) and not taken(torch.empty(4, 20000))
    assert not taken(torch.empty(4, 90001)) and not taken(torch.empty(4, 50257), torch.empty(4, 50257))
    assert not taken(x, x.to(torch.float16))
    monkeypatch.setattr(launch, "capability", lambda index: (10, 0))
    assert not taken(x)


# ----------------------------------------------------------------------------------------------------- what is compiled


DEFAULTS = [
    (torch.bfloat16, 10001, 1),
    (torch.bfloat16, 20001, 1),
    (torch.float16, 50257, 1),
    (torch.float32, 50257, 1),
    (torch.bfloat16, 20001, 2),
    (torch.bfloat16, 50257, 2),
]
OTHERS = [
    (torch.bfloat16, RingConfig(8, 8, 8, 2), 1),
    (torch.float32, RingConfig(), 1),
    (torch.float32, RingConfig(), 2),
    (torch.bfloat16, RingConfig(8, 8, 8, 1, 2), 2),
]


@pytest.mark.compile
@pytest.mark.parametrize(
    "dtype, config, tensors", [(d, choose(c, d.itemsize, t), t) for d, c, t in DEFAULTS] + OTHERS, ids=str
)
def test_compiled_for_hopper(dtype, config, tensors):
    """Programs fit an SM, do not spill, and write whole words but for head and tail, which one store writes."""
    x = torch.empty(3, 50257, dtype=dtype)
    with compile_only(90) as kernels:
        launch.run((x,) * tensors, x, 132, config)
    found = resources(kernels[0], 90)
    assert found.spills == 0, str(found)
    assert found.smem_bytes <= 233472 // config.programs_per_sm - 1024, str(found)
    assert found.registers * 32 * found.num_warps * config.programs_per_sm <= 65536, str(found)
    assert "UTMALDG" in found.opcodes and "ld.shared.v4.b32" in found.ptx and "st.global.v4.b32" in found.ptx
    alone = [line for line in found.ptx.splitlines() if "st.global" in line and ".v4." not in line]
    assert len(alone) == config.consumers, alone


@pytest.mark.compile
def test_one_kernel_for_all_rows(monkeypatch):
    """Neither rows nor columns are compiled for, and what is prepared ahead of a launch is what Triton would run."""
    config = RingConfig(8, 8, 8, 2)
    monkeypatch.setattr(launches, "prepare", lambda kernel, cluster: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    with compile_only(90) as kernels:
        made = launch.plan(softmax_ring_kernel, 1, config, torch.bfloat16, 300, 50257, 132)
        made._prepare(0)
        for rows, cols in ((1, 50257), (160, 20000), (300, 16385)):
            x = torch.empty(rows, cols, dtype=torch.bfloat16)
            launch.run((x,), x, 132, config)
    assert len(kernels) == 4 and len({kernel.hash for kernel in kernels}) == 1
