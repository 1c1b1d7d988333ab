"""The CUDA C++ kernels of the gathered products on the host's machine: right on every case, and faults are noticed."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backend import new_outputs
from expertile.ops.gathered_mm.backends import cuda_gather, cuda_wgrad
from tests.ops.gathered_mm.cases import (
    BACKWARD,
    CASES,
    GATED,
    WGRAD,
    Case,
    check,
    make,
    over_pre,
    poisoned_outputs,
    run_case,
    second_pair,
)
from tests.support.cuda_emulator import constant, needs_compiler, on_host, shows, without

pytestmark = needs_compiler
H100 = Device.by_name("h100 sxm")
BACKENDS = {"cuda_gather": cuda_gather, "cuda_wgrad": cuda_wgrad}
# Several tiles each way for each program, more steps than stages, groups that end within a tile and in its upper half.
LONGER = (
    Case("longer-gated", GATED, (130, 0, 300), n=264, k=328, past=9),
    Case("short-gated", GATED, (130, 0, 600), n=264, k=40),
    Case("longer-backward", BACKWARD, (130, 0, 300), n=264, k=328, past=9, storage="kn"),
    Case("ordered-backward", BACKWARD, (130, 0, 300), n=264, k=328, past=9, gathered=""),
    Case("short-backward", BACKWARD, (130, 0, 600), n=520, k=40, storage="kn"),
    Case("longer-wgrad", WGRAD, (130, 0, 600), n=264, k=136, past=9),
    Case("longer-wgrad-gather-b", WGRAD, (130, 0, 600), n=136, k=264, past=9, gathered="b"),
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Kernels are cached by config; row sums are added in torch here."""

    def add_row_sums(sums, slots, offs, dweights):
        used = int(offs[-1])
        dweights.view(-1)[slots[:used].long()] = sums.sum(0)[:used]

    monkeypatch.setattr(cuda_gather, "add_row_sums", add_row_sums)
    for module in BACKENDS.values():
        module._kernel.cache_clear()
    yield
    for module in BACKENDS.values():
        module._kernel.cache_clear()


@pytest.mark.parametrize("module", BACKENDS)
@pytest.mark.parametrize("case", CASES + LONGER, ids=str)
def test_right(module, case, cuda_folder, monkeypatch):
    on_host(monkeypatch, cuda_folder, seed=len(case.name))
    backend = BACKENDS[module].BACKEND
    if reason := backend.supports(make(case)[0], H100):
        pytest.skip(reason)
    run_case(backend, case, BACKENDS[module].Config(), "cpu")


@pytest.mark.parametrize("case", [c for c in LONGER if c.product is not WGRAD], ids=str)
def test_right_with_tiles_from_a_counter(case, cuda_folder, monkeypatch):
    on_host(monkeypatch, cuda_folder, seed=len(case.name))
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(cuda_gather, "tile_counter", lambda dynamic, like: counter)
    run_case(cuda_gather.BACKEND, case, cuda_gather.Config(dynamic=True), "cpu")
    assert counter == 0


@pytest.mark.parametrize("case", [c for c in LONGER if c.product is not WGRAD], ids=str)
def test_more_epilogue_warps_give_the_same_bits(case, cuda_folder, monkeypatch):
    on_host(monkeypatch, cuda_folder, seed=len(case.name))
    problem, operands = make(case)
    found = [poisoned_outputs(problem, operands) for _ in range(2)]
    for finishers, outputs in zip((2, 4), found, strict=True):
        cuda_gather.run(problem, operands, cuda_gather.Config(finishers=finishers), outputs)
    check(case, operands, found[1])
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(*found, strict=True) if x is not None)


def test_row_ends_that_decrease_leave_the_counter_at_zero(cuda_folder, monkeypatch):
    """Their results mean nothing, but the next launch must find its counter."""
    on_host(monkeypatch, cuda_folder)
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(cuda_gather, "tile_counter", lambda dynamic, like: counter)
    problem, operands = make(LONGER[0])
    operands = replace(operands, offs=torch.tensor([430, 430, 130], dtype=torch.int32))
    cuda_gather.run(problem, operands, cuda_gather.Config(dynamic=True), new_outputs(problem, operands))
    assert counter == 0


def test_gradients_over_what_they_were_made_of(cuda_folder, monkeypatch):
    on_host(monkeypatch, cuda_folder, programs=1)
    case = next(c for c in LONGER if c.name == "longer-backward")
    problem, operands = make(case)
    outputs = new_outputs(problem, operands)
    cuda_gather.run(problem, operands, cuda_gather.Config(), outputs)
    own, over = over_pre(operands, new_outputs(problem, operands))
    cuda_gather.run(problem, own, cuda_gather.Config(), over)
    used = sum(case.sizes)
    for x, y in zip(outputs, over, strict=True):
        assert torch.equal(x[:used], y[:used])


def test_a_rows_bits_do_not_depend_on_its_place(cuda_folder, monkeypatch):
    """The gradients of the rows behind the first three, without those."""
    on_host(monkeypatch, cuda_folder)
    problem, operands = make(next(c for c in LONGER if c.name == "longer-backward"))
    outputs, slots = new_outputs(problem, operands), operands.slots[3 : int(operands.offs[-1])].long()
    cuda_gather.run(problem, operands, cuda_gather.Config(), outputs)
    later = {name: getattr(operands, name)[3:] for name in ("rows", "slots", "pre")}
    fewer, given = replace(problem, m=problem.m - 3), replace(operands, offs=operands.offs - 3, **later)
    rest = new_outputs(fewer, given)
    cuda_gather.run(fewer, given, cuda_gather.Config(), rest)
    assert all(torch.equal(x[3:][: len(slots)], y[: len(slots)]) for x, y in zip(outputs[:2], rest[:2], strict=True))
    assert torch.equal(outputs[2].view(-1)[slots], rest[2].view(-1)[slots])


MORE = (
    (Case("halves", GATED, (130, 0, 70, 1), n=136, k=328 + 16, past=9), 16),
    (Case("interleaved", GATED, (66, 0, 130), n=136, k=72 + 96, interleaved=True, bias=True), 96),
    (Case("backward", BACKWARD, (130, 0, 70, 1), n=264, k=128 + 16, past=9, storage="kn"), 16),
    (Case("backward-ordered", BACKWARD, (70, 3, 130), n=72, k=40 + 104, gathered="", interleaved=True), 104),
)


@pytest.mark.parametrize("case, rank", MORE, ids=str)
def test_a_second_pair_of_operands(case, rank, cuda_folder, monkeypatch):
    on_host(monkeypatch, cuda_folder, seed=rank)
    problem, operands, more, full = second_pair(case, rank)
    outputs = poisoned_outputs(problem, operands)
    cuda_gather.run(problem, operands, cuda_gather.Config(), outputs, more)
    check(case, full, outputs)


FAULTS = {
    "a stage is read before it is full": ("longer-backward", without("consume", "barrier_wait")),
    "a stage is filled before it is empty": ("longer-backward", without("fill", "barrier_wait")),
    "a stage is given back before its products are done": ("longer-backward", without("consume", "wgmma.wait_group")),
    "products lie where the last tile's are still read": ("longer-backward", without("consume", "barrier_wait", 1)),
    "products are never given back": ("longer-backward", without("finish_tiles", "barrier_arrive")),
    "products are read before they are there": ("longer-gated", without("finish_tiles", "barrier_wait")),
    "pre is read before it is there": ("longer-backward", without("arrived", "copies_wait<DEPTH - 1>")),
    "a queue of two tiles": ("short-gated", constant("SLOTS", 2)),
    "wgrad: a stage is read before it is full": ("longer-wgrad", without("multiply_tile", "barrier_wait")),
    "wgrad: a stage is filled before it is empty": ("longer-wgrad", without("produce", "barrier_wait")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(name, cuda_folder, monkeypatch):
    wanted, fault = FAULTS[name]
    case = next(c for c in LONGER if c.name == wanted)
    module = cuda_wgrad if case.product is WGRAD else cuda_gather

    def prepare(patch, seed):
        on_host(patch, cuda_folder, programs=1, seed=seed, fault=fault)
        module._kernel.cache_clear()

    shows(monkeypatch, prepare, lambda: run_case(module.BACKEND, replace(case, past=0), module.Config(), "cpu"))
