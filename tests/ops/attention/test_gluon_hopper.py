"""gluon_hopper without a GPU: what it accepts, what it compiles to, its numbers and synchronisation in an emulator."""

from pathlib import Path
from typing import Any

import pytest
import torch

from expertile.device import Device
from expertile.ops.attention.backend import new_lse
from expertile.ops.attention.backends import _hopper_backward, _hopper_forward, _statistics, gluon_hopper
from expertile.ops.attention.backends._hopper_configs import ForwardConfig, PassConfig, padded_dim
from expertile.ops.attention.backends._statistics import STAT_PAD, Statistics
from expertile.ops.attention.backends.gluon_hopper import BACKEND
from expertile.ops.attention.problem import row_strides
from tests.ops.attention import hopper_mutants
from tests.ops.attention.cases import CASES, Case, Made, check_backward, check_forward, make, on_gpu
from tests.support import aot, gluon_emulator
from tests.support.fake_driver import compile_only
from tests.support.mutants import planted
from tests.support.wgmma import overwritten_operands

H200 = Device.by_name("h200")

# Small blocks, few stages: many trips around the rings for little work.
FORWARD = {
    "two stages": ForwardConfig(block_n=32, num_stages=2),
    "one buffer of Q": ForwardConfig(block_n=32, num_stages=3, q_slots=1),
    "three consumers": ForwardConfig(block_n=64, consumers=3, num_stages=3),
    "a program for each tile": ForwardConfig(block_n=64, q_slots=1, persistent=False),
}
PASSES = {
    "ahead": PassConfig(block=64, num_stages=2, slots=1, ahead=True),
    "ahead, two buffers": PassConfig(block=32, num_stages=3, slots=2, ahead=True),
    "one by one": PassConfig(block=64, num_stages=2, slots=2, ahead=False),
}


def _emulated(config: Any, kernel: Any) -> Any:
    """A stand-in for `Launch.run`: `kernel`, or the launch's own, in the emulator on few programs."""
    seed, programs = config

    def run(launch: Any, device: int, tensors: Any, pointers: Any) -> None:
        chosen = kernel or launch.kernel
        grid = min(programs, launch.programs)
        gluon_emulator.run(chosen, grid, launch.arguments(tensors, pointers), dict(launch.options), seed)

    return run


def _forward(made: Made, config: ForwardConfig, patch: pytest.MonkeyPatch, seed: int, kernel: Any = None) -> None:
    patch.setattr(gluon_hopper.Launch, "run", _emulated((seed, 2 + seed % 2), kernel))
    patch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    check_forward(made, *gluon_hopper.forward(on_gpu(made.problem), made.operands, config))


def _statistics_of(made: Made) -> Statistics:
    """What `_statistics.compute` makes, in torch."""
    p = made.problem
    lens = [p.q_len] * p.batch
    cu = made.operands.cu_seqlens_q
    if p.packed and cu is not None:
        lens = cu.diff().tolist()
        rows = -(-(p.q_rows + p.batch * STAT_PAD) // STAT_PAD) * STAT_PAD
        starts = [(s + b * STAT_PAD) // STAT_PAD * STAT_PAD for b, s in enumerate(cu.tolist()[:-1])]
        nlse, ndelta = torch.full((2, p.heads, rows), float("nan"))
        stride_b, stride_h = 0, rows
    else:
        rows = -(-p.q_len // STAT_PAD) * STAT_PAD
        nlse, ndelta = torch.full((2, p.batch, p.heads, rows), float("nan"))
        stride_b, stride_h = p.heads * rows, rows
    delta = (made.dout.float() * made.out.to(p.dtype).float()).sum(-1)
    for b, length in enumerate(lens):
        padded = -(-length // STAT_PAD) * STAT_PAD
        if p.packed and cu is not None:
            lse, d = made.lse[:, cu[b] : cu[b + 1]], delta[cu[b] : cu[b + 1]].t()
            to = (slice(None), slice(starts[b], starts[b] + padded))
        else:
            lse, d = made.lse[b], delta[b]
            to = (b,)
        nlse[to] = float("-inf")
        ndelta[to] = 0.0
        nlse[to][:, :length] = torch.where(lse.isinf(), float("-inf"), -lse / p.scale)
        ndelta[to][:, :length] = -d
    return Statistics(nlse.reshape(-1), ndelta.reshape(-1), stride_b, stride_h)


def _pass(made: Made, config: PassConfig, dq: bool, patch: pytest.MonkeyPatch, seed: int, kernel: Any = None) -> None:
    patch.setattr(gluon_hopper.Launch, "run", _emulated((seed, 2 + seed % 2), kernel))
    o = made.operands
    grads = tuple(torch.full_like(x, float("nan")) for x in ((o.q,) if dq else (o.k, o.v)))
    gluon_hopper.run_pass(on_gpu(made.problem), o, made.dout, _statistics_of(made), config, *grads)
    check_backward(made, grads, (0,) if dq else (1, 2))


SUPPORTED = [c for c in CASES if BACKEND.forward.supports(on_gpu(make(c).problem), H200) is None]
BACKWARD = [c for c in CASES if BACKEND.backward.supports(on_gpu(make(c).problem), H200) is None]
MANY_TILES = [c for c in CASES if c.name in ("causal", "grouped heads", "more queries than keys", "packed")]


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_forward_right_in_any_order(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(case)
    for seed in range(2):
        _forward(made, FORWARD[name], monkeypatch, seed)


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_forward_cases(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(case)
    _forward(made, BACKEND.forward.configs(on_gpu(made.problem), H200)[0], monkeypatch, 0)


@pytest.mark.parametrize("dq", (False, True), ids=("dkdv", "dq"))
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_backward_right_in_any_order(case: Case, name: str, dq: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(case)
    for seed in range(2):
        _pass(made, PASSES[name], dq, monkeypatch, seed)


@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_backward_cases(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(case)
    config = BACKEND.backward.configs(on_gpu(made.problem), H200)[0]
    _pass(made, config.dkdv, False, monkeypatch, 0)
    _pass(made, config.dq, True, monkeypatch, 0)


_CAUGHT = (gluon_emulator.EmulationError, AssertionError, ZeroDivisionError, TypeError)


@pytest.mark.parametrize("name", hopper_mutants.FORWARD)
def test_planted_forward_faults_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant must fail some case, config and seed: the emulator and the cases can see that fault."""
    fault = hopper_mutants.FORWARD[name]
    (kernel,) = planted([_hopper_forward.attention_forward_kernel], fault, tmp_path, monkeypatch)
    for seed in range(6):
        for config in FORWARD.values():
            for case in MANY_TILES:
                try:
                    _forward(make(case), config, monkeypatch, seed, kernel)
                except _CAUGHT:
                    return
    pytest.fail("no case, config or seed caught it")


@pytest.mark.parametrize("name", hopper_mutants.BACKWARD)
def test_planted_backward_faults_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = [_hopper_backward.attention_backward_kernel]
    (kernel,) = planted(backward, hopper_mutants.BACKWARD[name], tmp_path, monkeypatch)
    for seed in range(6):
        for config in PASSES.values():
            for case in MANY_TILES:
                for dq in (False, True):
                    try:
                        _pass(make(case), config, dq, monkeypatch, seed, kernel)
                    except _CAUGHT:
                        return
    pytest.fail("no case, config or seed caught it")


COMPILED = {
    "D 64, all keys": Case("D 64", 256, 256, dim=64, heads=4),
    "D 128": Case("D 128", 256, 256, dim=128, heads=4, causal=True),
    "D 256": Case("D 256", 128, 128, dim=256, causal=True),
    "packed": Case("packed, D 96, fp16", (128, 64), (128, 64), dim=96, dtype=torch.float16, causal=True),
}
# Bytes of registers that may go through local memory outside the loops over blocks: what a kernel keeps over its tiles.
# 64 rows of three consumers (never the default) spill 7 accesses of a step with ptxas 13.4, the others none in a loop.
_SPILLED = aot.most_spills(32, 72)


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_wgmma_and_tma(name: str) -> None:
    made = make(COMPILED[name])
    p = on_gpu(made.problem)
    launches: dict[Any, Any] = {}  # by what is compiled: programs do not differ by how many there are
    tried = None if name == "D 128" else 1  # which has the most in registers
    for config in BACKEND.forward.configs(p, H200)[:tried]:
        launch = gluon_hopper._forward_launch(p, config, row_strides(made.operands.q, p.packed), H200)
        spilled = _SPILLED if p.head_dim > 128 else 0 if config.consumers < 3 else aot.most_spills(0, _SPILLED)
        launches[launch.options] = (launch, config.smem_bytes(padded_dim(p.head_dim)), spilled)
    if BACKEND.backward.supports(p, H200) is None:
        strides = [row_strides(x, p.packed) for x in (made.operands.q, made.operands.k)]
        for config in BACKEND.backward.configs(p, H200)[:tried]:
            for dq, one in ((False, config.dkdv), (True, config.dq)):
                of = (strides[0],) * 2 if dq else (strides[1],) * 2
                launch = gluon_hopper._pass_launch(p, one, dq, strides[0], of, (4096, 1024, 256), H200)
                launches[dq, launch.options] = (launch, one.smem_bytes(padded_dim(p.head_dim)), _SPILLED)
    lse = new_lse(p, made.operands.q)
    for launch, smem, spilled in launches.values():
        base = {torch.float32: lse.reshape(-1), p.dtype: made.operands.q}
        tensors = tuple(base[d] for d in launch.block_dtypes)
        pointers = tuple(torch.empty(8, dtype=d) for d in launch.pointers)
        with compile_only(90) as kernels:
            launch.kernel[(1,)](*launch.arguments(tensors, pointers), **dict(launch.options))
        (kernel,) = kernels
        used = aot.resources(kernel, 90)
        assert used.fits and used.smem_bytes <= smem, used
        assert used.stack_bytes <= spilled, used
        assert used.opcodes["HGMMA"] and used.opcodes["UTMALDG"] and used.opcodes["UTMASTG"], used
        assert aot.ptxas_warnings(used) == [], used
        assert overwritten_operands(kernel) == [], used


@pytest.mark.parametrize(
    ("case", "words"),
    [(Case("fp32", 64, 64, dtype=torch.float32), "not torch.float32"), (Case("D 36", 64, 64, dim=36), "16 bytes")],
    ids=str,
)
def test_refusals_say_why(case: Case, words: str) -> None:
    reason = BACKEND.forward.supports(on_gpu(make(case).problem), H200)
    assert reason is not None and words in reason


def test_only_hopper() -> None:
    problem = on_gpu(make(CASES[0]).problem)
    for name in ("a100", "rtx 4090", "b200"):
        assert "9.0" in (BACKEND.forward.supports(problem, Device.by_name(name)) or "")


def test_backward_of_wide_heads_is_left_to_others() -> None:
    problem = on_gpu(make(Case("D 256", 64, 64, dim=256)).problem)
    assert BACKEND.forward.supports(problem, H200) is None
    assert "128" in (BACKEND.backward.supports(problem, H200) or "")


def test_statistics_have_the_layout_that_the_kernels_read() -> None:
    """`_statistics_of` above stands in for a Triton kernel: same strides, same padding."""
    made = make(MANY_TILES[-1])
    stats = _statistics_of(made)
    assert stats.nlse.numel() % _statistics.STAT_PAD == 0
    assert stats.stride_h * made.problem.heads == stats.nlse.numel()
