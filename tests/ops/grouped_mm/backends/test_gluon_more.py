"""gluon_hopper with a second pair of operands, as adapters have: numbers and synchronisation in the emulator, and what
it compiles to. A case's last columns of K are the second pair's."""

import dataclasses

import pytest
import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import _gluon_kernel, _gluon_launch, gluon_hopper
from expertile.ops.grouped_mm.backends.gluon_hopper import Config
from expertile.ops.grouped_mm.problem import Layout, Problem
from tests.ops.grouped_mm import cases
from tests.ops.grouped_mm.backends.test_gluon_hopper import SMALL
from tests.ops.grouped_mm.cases import Case
from tests.support import aot, gluon_emulator
from tests.support.fake_driver import compile_only
from tests.support.mutants import Fault, planted

H200 = Device.by_name("h200")
M = Layout.RAGGED_M
CASES = (
    (Case("nk", M, (100, 0, 130, 64, 1, 300), n=200, k=128 + 16, past=9), 16),
    (Case("kn-bias", M, (37, 5, 260), n=136, k=64 + 16, b_storage="row", bias=True), 16),
    (Case("rank 96", M, (66, 130), n=72, k=64 + 96), 96),
    (Case("fp16", M, (70, 3), n=72, k=128 + 32, b_storage="row", dtype=torch.float16), 32),
)
MODEL = Case("qwen3-down", M, (4,) * 128, n=512, k=256 + 16)


def _split(case: Case, rank: int):
    """Problem, operands and second pair, the full operands beside them."""
    a, b, offs, bias = cases.make(case)
    k = case.k - rank

    def cut(first: int, last: int) -> torch.Tensor:
        part = b[:, first:last]
        return part.contiguous() if case.b_storage == "row" else part.transpose(1, 2).contiguous().transpose(1, 2)

    operands = Operands(a[:, :k].contiguous(), cut(0, k), offs, bias)
    problem = Problem.from_tensors(*dataclasses.astuple(operands))
    return problem, operands, (a[:, k:].contiguous(), cut(k, case.k)), (a, b, offs, bias)


def _emulate(case: Case, rank: int, config: Config, seed: int, kernel=_gluon_kernel.grouped_mm_kernel) -> None:
    problem, operands, more, full = _split(case, rank)
    assert gluon_hopper.takes_more(problem, config)
    out = cases.poisoned_out(case)
    launch, _, *given = _gluon_launch.prepared(problem, operands, config, out, False, more)
    gluon_emulator.run(kernel, 2 + seed % 2, launch.arguments(*given), dict(launch.options), seed)
    cases.check(case, out, cases.expected(case, *full))


@pytest.mark.parametrize("name", [n for n, c in SMALL.items() if c.block_k == 64])
@pytest.mark.parametrize("case, rank", CASES, ids=str)
def test_right_in_any_order(case: Case, rank: int, name: str) -> None:
    _emulate(case, rank, SMALL[name], seed=len(name))


MUTANTS = {
    "the second pair starts late": Fault("produce", "m_ * p_.BLOCK_K", "(m_ + 1) * p_.BLOCK_K", nth=-1),
    "its weights come from the first": Fault("produce", "p_.more_b_desc", "p_.b_desc"),
    "the first pair goes on": Fault("produce", "k_ - p_.MORE * _", "k_"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_caught(name, tmp_path, monkeypatch) -> None:
    (kernel,) = planted([_gluon_kernel.grouped_mm_kernel], MUTANTS[name], tmp_path, monkeypatch)
    with pytest.raises((gluon_emulator.EmulationError, AssertionError)):
        for seed in range(3):
            _emulate(*CASES[0], SMALL["split"], seed, kernel)


def test_what_takes_no_second_pair() -> None:
    problem, *_ = _split(*CASES[0])
    assert not gluon_hopper.takes_more(dataclasses.replace(problem, k=100), Config())
    assert not gluon_hopper.takes_more(dataclasses.replace(problem, a_strides=(1, 600)), Config())


@pytest.mark.compile
@pytest.mark.parametrize("turn, storage", enumerate(["column", "row"]))
def test_compiles(turn: int, storage: str) -> None:
    """Each config meets one storage: the second pair comes by another descriptor, whatever the order of its weights."""
    case = dataclasses.replace(MODEL, b_storage=storage)
    problem, operands, more, _ = _split(case, 16)
    for config in gluon_hopper.configs(problem, H200)[turn:8:2]:
        launch, *given = _gluon_launch.prepared(problem, operands, config, cases.poisoned_out(case), False, more)
        with compile_only(90) as kernels:
            launch.run(*given)
        used = aot.resources(kernels[0], 90)
        # The loading warp has 40 registers, and two more descriptors.
        assert used.fits and used.spills <= 16 and aot.spills_in_loops(kernels[0], "HGMMA") == 0, (config, used)
        assert aot.ptxas_warnings(used) == [], config
