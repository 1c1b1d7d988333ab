"""gluon_gather with a second pair of operands, as adapters have: numbers and synchronisation in the emulator, and what
it compiles to. A case's last columns of K are the second pair's, whose rows stand in order."""

import dataclasses

import pytest

from expertile.device import Device
from expertile.ops.gathered_mm.backends import _gluon_kernel, gluon_gather
from expertile.ops.gathered_mm.backends.gluon_gather import Config
from tests.ops.gathered_mm import cases
from tests.ops.gathered_mm.backends.test_gluon_gather import SMALL, SPLIT
from tests.ops.gathered_mm.cases import GATED, MM, Case
from tests.support import aot, gluon_emulator
from tests.support.fake_driver import compile_only
from tests.support.mutants import Fault, planted

H200 = Device.by_name("h200")
CASES = (
    (Case("halves", GATED, (100, 0, 70, 1, 64), n=104, k=128 + 16, past=9), 16),
    (Case("interleaved", GATED, (66, 0, 130), n=104, k=64 + 96, interleaved=True, bias=True), 96),
    (Case("interleaved-kn", GATED, (66, 0, 130), n=72, k=64 + 32, interleaved=True, storage="kn"), 32),
    (Case("mm", MM, (100, 0, 70, 1), n=136, k=128 + 16, past=3, bias=True, storage="kn"), 16),
    (Case("many-experts", MM, tuple(g % 3 for g in range(130)), n=64, k=64 + 16), 16),
)


def _launch(case: Case, rank: int, config: Config):
    problem, operands, more, full = cases.second_pair(case, rank)
    assert gluon_gather.takes_more(problem, config)
    outputs = cases.poisoned_outputs(problem, operands)
    return gluon_gather.prepared(problem, operands, config, outputs, more), full, outputs


def _emulate(case: Case, rank: int, config: Config, seed: int, kernel=_gluon_kernel.gathered_mm_kernel) -> None:
    programs = 2 + seed % 2
    (launch, _, tensors, pointers), full, outputs = _launch(case, rank, config)
    gluon_emulator.run(kernel, programs, launch.arguments(tensors, pointers), dict(launch.options), seed)
    cases.check(case, full, outputs)


@pytest.mark.parametrize("config", (*SMALL, *SPLIT), ids=str)
@pytest.mark.parametrize("case, rank", CASES, ids=str)
def test_right_in_any_order(case: Case, rank: int, config: Config) -> None:
    _emulate(case, rank, config, seed=config.num_stages)


MUTANTS = {
    "the place of the tile before": Fault("produce_gathered", "place = next_place"),
    "copies are not reported": Fault("produce_gathered", "async_copy.mbarrier_arrive(...)"),
    "the stage is not waited for": Fault("fill_in_order", "mbarrier.wait(...)"),
    "its weights come from the first": Fault("produce_gathered", "p_.more_b_desc", "p_.b_desc"),
    "K is gathered to its end": Fault("produce_gathered", "p_.MORE * _", "0"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_caught(name, tmp_path, monkeypatch) -> None:
    (kernel,) = planted([_gluon_kernel.gathered_mm_kernel], MUTANTS[name], tmp_path, monkeypatch)
    with pytest.raises((gluon_emulator.EmulationError, AssertionError, IndexError)):
        for seed in range(4):
            _emulate(*CASES[0], SMALL[seed % 2], seed, kernel)


def test_what_takes_no_second_pair() -> None:
    problem, *_ = cases.second_pair(*CASES[0])
    assert not gluon_gather.takes_more(dataclasses.replace(problem, k=100), Config())
    assert not gluon_gather.takes_more(dataclasses.replace(problem, gathered=""), Config())


COMPILED = (
    Case("qwen3-up", GATED, (4,) * 128, n=256, k=256 + 16),
    Case("gpt-oss-up", GATED, (512,) * 4, n=256, k=128 + 16, interleaved=True, bias=True, activation="gpt_oss"),
)


@pytest.mark.compile
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiles(case: Case) -> None:
    """Each tile meets one of the two up-projections."""
    problem, *_ = cases.second_pair(case, 16)
    tiles = {(c.block_m, c.block_n): c for c in gluon_gather.configs(problem, H200) if not c.masked}
    for _, config in sorted(tiles.items())[1 - COMPILED.index(case) % 2 :: 2]:
        (launch, _, tensors, pointers), *_ = _launch(case, 16, config)
        with compile_only(90) as kernels:
            launch.kernel[(132,)](*launch.arguments(tensors, pointers), **dict(launch.options))
        used = aot.resources(kernels[0], 90)
        # As much as without a second pair: `test_gluon_gather` has the limits.
        allowed = 280 if case.interleaved else 26
        assert used.fits and used.spills <= allowed and aot.spills_in_loops(kernels[0], "HGMMA") == 0, (config, used)
        assert aot.ptxas_warnings(used) == [], config
