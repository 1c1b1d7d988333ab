"""gluon_fp8 without a GPU: what it accepts, what it compiles to, its numbers and synchronisation in an emulator."""

import random
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from expertile.device import Device
from expertile.ops.scaled_grouped_mm.backends import _gluon_kernel
from expertile.ops.scaled_grouped_mm.backends.gluon_fp8 import BACKEND, Config, prepared
from expertile.ops.scaled_grouped_mm.problem import Operands
from tests.ops.scaled_grouped_mm import cases
from tests.ops.scaled_grouped_mm.cases import BLOCK, FP16, FP32, ROW, VECTOR, Case, K, M
from tests.support import aot, gluon_emulator
from tests.support.fake_driver import compile_only
from tests.support.mutants import Fault, before, planted

H200 = Device.by_name("h200")

# Small tiles, few stages: many trips around the ring for little work.
SMALL = {
    "three consumers": Config(192, 128, 3, 2),
    "two consumers": Config(128, 64, 3, 2),
    "pairs": Config(128, 128, 2, 2, pairs=True),
    "halves": Config(128, 256, 2, 2),
    "halves, split": Config(128, 256, 2, 2, split_k=2),
    "halves, one consumer": Config(64, 256, 2, 2),
    "one consumer": Config(64, 32, 2, 3),
    "split": Config(128, 64, 3, 2, split_k=3),
    "split, pairs, one consumer": Config(64, 128, 3, 2, split_k=2, pairs=True),
}

# Several tiles for each of several programs, and every edge: empty groups, part tiles, rows past the end.
MANY_TILES = (
    Case("m-tiles", M, BLOCK, (100, 0, 130, 1, 200), n=200, k=400, past=9),
    Case("m-tiles-bias-fp32", M, BLOCK, (37, 5, 160), n=136, k=640, bias=True, span=3, out_dtype=FP32),
    Case("m-tiles-vector", M, VECTOR, (70, 102), n=136, k=512, past=2),
    Case("m-tiles-row", M, ROW, (70, 102), n=136, k=400),
    Case("k-tiles", K, VECTOR, (384, 0, 128, 0), m=136, n=200, past=128),
)

LAST_EMPTY = next(c for c in cases.CASES if c.name == "wgrad-last-empty")


def _emulate(
    case: Case, config: Config, programs: int, seed: int, kernel=_gluon_kernel.scaled_grouped_mm_kernel
) -> None:
    """Run one case in the emulator and check its result; the slices of a split K are added up here."""
    operands = cases.make(case)
    problem = cases.problem_of(case, operands)
    out = cases.poisoned_out(case)
    target = out
    if config.split_k > 1:
        target = torch.full((config.split_k, *out.shape), float("nan"))
    launch, _, *given = prepared(problem, operands, config, target)
    args, options = launch.arguments(*given), dict(launch.options)
    gluon_emulator.run(kernel, programs, args, options, seed)
    if config.split_k > 1:
        out.copy_(target.sum(0))
    cases.check(case, out, operands, limit=2e-6)


def _takes(config: Config, case: Case) -> bool:
    return config.split_k == 1 or (case.layout is M and config.split_k <= -(-case.k // 128))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_right_in_any_order(case: Case, name: str) -> None:
    if not _takes(SMALL[name], case):
        pytest.skip("K is not split here")
    for seed in range(2):
        _emulate(case, SMALL[name], programs=2 + seed, seed=seed)


@pytest.mark.parametrize("case", MANY_TILES[2:4], ids=str)
def test_all_tiles_narrow(case: Case) -> None:
    """Two tiles, each of rows for both consumers, and programs enough for four halves."""
    _emulate(case, SMALL["halves"], programs=7, seed=0)


def _drawn(seed: int) -> tuple[Case, Config, int]:
    """(case, config, programs): tiles 256 wide of groups at the edges of a consumer's rows, columns at those of halves,
    few steps of K, odd and even, and from one program to more than there are units."""
    rng = random.Random(seed)
    split = rng.choice((1, 1, 2, 3))
    out_dtype = rng.choice((torch.bfloat16, FP32))
    config = Config(rng.choice((128, 128, 128, 64)), 256, rng.choice((1, 2, 3)), rng.choice((1, 2, 16)), split)
    n = rng.choice((8, 120, 128, 136, 256, 264, 384, 400))
    if split == 1 and rng.random() < 0.2:
        sizes = tuple(128 * rng.choice((0, 1, 2, 3)) for _ in range(rng.randint(1, 4)))
        case = Case(f"drawn-{seed}", K, VECTOR, sizes, m=rng.choice((1, 64, 65, 130)), n=n, past=128)
    else:
        sizes = tuple(rng.choice((0, 0, 1, 63, 64, 65, 127, 128, 129, 200)) for _ in range(rng.randint(1, 5)))
        k = rng.choice([16, 128, 272, 384, 640][split - 1 :])
        recipe, past = rng.choice((BLOCK, BLOCK, VECTOR, ROW)), rng.choice((0, 3))
        case = Case(f"drawn-{seed}", M, recipe, sizes, n=n, k=k, past=past, span=3, bias=rng.random() < 0.2)
    return replace(case, out_dtype=out_dtype), config, rng.randint(1, 9)


@pytest.mark.parametrize("seed", range(24))
def test_turns_end_for_any_sizes(seed: int) -> None:
    """Neither consumer waits for an arrival or a stage that never comes, whatever rows it has."""
    case, config, programs = _drawn(seed)
    if case.total:
        _emulate(case, config, programs, seed)


def test_many_groups() -> None:
    case = Case("m-many-groups", M, BLOCK, tuple(g % 3 for g in range(130)), n=32, k=128)
    _emulate(case, Config(64, 32, 3), programs=2, seed=0)


def _supported(case: Case) -> bool:
    return BACKEND.supports(cases.problem_of(case, cases.make(case)), H200) is None


@pytest.mark.parametrize("case", [c for c in cases.CASES if _supported(c)], ids=str)
def test_shared_cases(case: Case) -> None:
    problem = cases.problem_of(case, cases.make(case))
    _emulate(case, replace(BACKEND.configs(problem, H200)[0], num_stages=3), programs=2, seed=0)


_ARRIVE = "mbarrier.arrive(_.empty.index(_), ...)"
_FREE = "if LAST: ..."
_ORDER_WAIT, _ORDER_ARRIVE = "ordered_wait(...)", "ordered_arrive(...)"
_MULTIPLY = "_multiply|_multiply_pairs|_multiply_halves"
_BARRIER = 'f"bar.{a_} {b_}, 256; mov.b32 $0, 0;"'
MUTANTS = {
    "a stage is freed before its wgmma is done": Fault("_promote", _FREE, before("warpgroup_mma_wait(...)")),
    "no fence before the TMA store": Fault("store_tile", "fence_async_shared()"),
    "the producer starts on phase 0": Fault("produce", "a_ = 1", "a_ = 0"),
    "a consumer mistakes its phase": Fault(_MULTIPLY, "_ // _.STAGES & 1", "0", nth=...),
    "a skipping consumer keeps the stages": Fault("_skip", _ARRIVE),
    "the ring forgets a tile's steps": Fault("_consumer", "ring += _", "ring += 1"),
    "the scales of the next stage": Fault(
        "_promote", "_scales(p_, i_, ...)", "_scales(p_, (i_ + 1) % p_.STAGES, ...)", nth=...
    ),
    "the scales of another block of k": Fault("_copy_scales", "b_ * p_.sa_k", "0 * p_.sa_k"),
    "b's scales of another block of k": Fault("_copy_scales", "b_ * p_.sb_k", "0 * p_.sb_k"),
    "the scales of another group": Fault("produce", "l_ * p_.sb_g", "0 * p_.sb_g"),
    "the scales of another block of columns": Fault("_copy_scales", "c_ * p_.sb_n", "0 * p_.sb_n"),
    "scales of rows that do not exist": Fault("_copy_scales", "gl.minimum(a_, p_.M - 1)", "a_"),
    "scales of columns that do not exist": Fault("_copy_scales", "gl.minimum(a_, (_.N - 1) // 128)", "a_"),
    "both consumers take the upper one's scales": Fault("_copy_scales", "r_ + _ * _.ROWS", "r_"),
    "both halves take the left one's scales": Fault("_scales", "i_ * p_.HALVES + h_", "i_ * p_.HALVES"),
    "the scales are not waited for": Fault("_copy_scales", "async_copy.mbarrier_arrive(...)"),
    "the right half multiplies the left one's columns": Fault(
        "_multiply_halves", "_products(..., 1)", "_products(..., 0)"
    ),
    "a stage is freed after its left half": Fault("_promote", "if LAST: a_", "a_"),
    "both consumers store the upper one's rows": Fault("_consumer", "_ += _ * _.ROWS"),
    "one row too many is stored": Fault("store_tile", "WRAP - (a_ - b_)", "all_ - 1"),
    "a store's buffer is reused at once": Fault("_store", "tma.store_wait(0)", "tma.store_wait(8)"),
    "a sum is read before it is done": Fault(
        "_promote", "warpgroup_mma_wait(n_, a_)", "warpgroup_mma_wait(n_ + 1, a_)"
    ),
    "expected bytes leave out b": Fault("_expect", "a_ + _.HALVES * _", "a_"),
    "boxes without rows are expected": Fault("_expect", "(_ == c_) & w_", "(c_ == p.BLOCK_M // p.A_BOX) & w_", nth=...),
    "boxes without rows are loaded": Fault("produce", "tma_load(..., _ < _)", "tma_load(..., True)"),
    "a box of rows is left out": Fault("produce", "(a_ + p_.A_BOX - 1) // p_.A_BOX", "a_ // p_.A_BOX"),
    "every box has the first one's rows": Fault("produce", "r_ + _ * _.A_BOX", "r_"),
    "boxes lie on one another": Fault("produce", "p_.a_boxes.index(a_ + _)", "p_.a_boxes.index(a_)"),
    "splits overlap": Fault("span", "_ // p_.SPLIT_K - f_", "steps - f_"),
    "every slice takes the bias along": Fault("_store", "gl.where(_ == 0, n_, 0)", "n_"),
    "slices lie on one another": Fault("_store", "r_ + _ * _.M", "r_"),
    "K runs into the next group": Fault("span", "a_ + b_ - 1", "a_ + 2 * b_ - 1"),
    "two steps' scales are swapped": Fault(
        "_multiply_pairs", "_promote(p_, s_, odd, j, ...)", "_promote(p_, s_, odd, i, ...)"
    ),
    "a pair's first sum is read before it is done": Fault(
        "_multiply_pairs", "_promote(p_, s_, even, i, 1, ...)", "_promote(p_, s_, even, i, 2, ...)"
    ),
    "a narrow tile waits for a whole one's bytes": Fault(
        "_expect", "mbarrier.expect(b_, a_ + n_, ...)", "mbarrier.expect(b_, a_ + 2 * n_, ...)", nth=1
    ),
    "more boxes than the tile has": Fault("produce", "gl.minimum(a_, b_)", "gl.minimum(a_, b_ + 1)"),
    "the other consumer is not let go": Fault("_multiply_halves", _ORDER_ARRIVE, nth=0),
    "the right half is not ordered": [Fault("_multiply_halves", what, nth=1) for what in (_ORDER_WAIT, _ORDER_ARRIVE)],
    "a narrow tile is not ordered": [Fault("_multiply", what) for what in (_ORDER_WAIT, _ORDER_ARRIVE)],
    "a consumer without rows is not ordered": [Fault("_skip", what, nth=...) for what in (_ORDER_WAIT, _ORDER_ARRIVE)],
    "a consumer without rows waits as often as in a narrow tile": Fault("_skip", "if _: ..."),
    "a consumer without rows waits as often as in a wide tile": Fault("_skip", "if _: ...", "if 1: ..."),
    "a consumer without rows does not arrive": Fault("_skip", _ORDER_ARRIVE, nth=0),
    "a consumer without rows goes away": Fault("_consumer", "_skip(...)"),
    "the first arrival is missing": Fault("_consumer", "ordered_begin(...)"),
    "the last wait is missing": Fault("_consumer", "ordered_end(...)"),
    "the first arrival comes with each unit": Fault(
        "_consumer", "_ += _ * p_.ROWS", "all_; ordered_begin(p_, CONSUMER)"
    ),
    "both narrow tiles are the left one": Fault("_consumer|produce", "_ += shift", nth=...),
    "the odd step is left out": Fault("_multiply_pairs", "_ % 2 == 1", "False"),
    "a pair's stages are mistaken": Fault("_multiply_pairs", "advance(p_, j, phase_j)", "advance(p_, i, phase)"),
}


# The same in the ordered barrier and in the units.
PART_MUTANTS = {
    "a consumer arrives at its own barrier": Fault("ordered_arrive", "(w_ + 1) % _.CONSUMERS", "w_"),
    "both wait at the same barrier": Fault("ordered_wait", '_at_barrier("sync", _)', '_at_barrier("sync", 0)'),
    "waits and arrivals are at different barriers": Fault("_at_barrier", "8 + w_", "8 + w_ + 2 * (what != 'sync')"),
    "the barriers are Triton's": Fault("_at_barrier", "8 + w_", "2 + w_"),
    "the barriers do not exist": Fault("_at_barrier", "8 + w_", "15 + w_"),
    "a barrier of more threads than come": Fault("_at_barrier", _BARRIER, _BARRIER.replace("256", "288")),
    "a barrier of two sizes": Fault("_at_barrier", _BARRIER, _BARRIER.replace("256", "{256 if a_ == 'sync' else 384}")),
    "the wrong consumer arrives first": Fault("ordered_begin", "_ == _.CONSUMERS - 1", "CONSUMER == 0"),
    "both consumers arrive first": Fault("ordered_begin", "_ == _.CONSUMERS - 1", "CONSUMER <= 1"),
    "the wrong consumer waits last": Fault("ordered_end", "_ == 0", "CONSUMER == 1"),
    "the last narrow unit is left out": Fault("units", "a_ + _narrow_tiles(_)", "a_"),
    "narrow units are taken in the wrong order": Fault("tile_of", "a_ + b_ // 2", "a_ + b_"),
}


def _caught(kernel, names: tuple[str, ...]) -> bool:
    for seed, programs in enumerate((3, 2, 4, 9)):
        for name in names:
            for case in (*MANY_TILES[:2], LAST_EMPTY):
                if _takes(SMALL[name], case):
                    try:
                        _emulate(case, SMALL[name], programs=programs, seed=seed, kernel=kernel)
                    except (gluon_emulator.EmulationError, AssertionError, TypeError, IndexError):
                        return True
    return False


@pytest.mark.parametrize("name", [*MUTANTS, *PART_MUTANTS])
def test_planted_faults_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant must fail some case, config and seed: the emulator and the cases can see that fault."""
    configs = ("halves",) if name in PART_MUTANTS else ("halves", "pairs", "split", "one consumer", "two consumers")
    fault = (MUTANTS | PART_MUTANTS)[name]
    (kernel,) = planted([_gluon_kernel.scaled_grouped_mm_kernel], fault, tmp_path, monkeypatch)
    assert _caught(kernel, configs), "no case, config or seed did"


# A case's 512 groups of weights take a second to draw, and none of these tests looks at values.
_made = lru_cache(maxsize=1)(cases.make)


def _compiled(case: Case, config: Config) -> tuple[list[Any], list[aot.Resources]]:
    operands = _made(case)
    problem = replace(cases.problem_of(case, operands), device_type="cuda", group_sizes=None)
    with compile_only(90) as kernels:
        BACKEND.run(problem, operands, config, cases.poisoned_out(case))
    return kernels, [aot.resources(kernel, 90) for kernel in kernels]


COMPILED = {
    "block": Case("m", M, BLOCK, (100, 28), n=512, k=1024),
    "block-512-groups-bias": Case("m-512", M, BLOCK, (1,) * 512, n=256, k=1024, bias=True),
    "block-fp32-out": Case("m-fp32", M, BLOCK, (100, 28), n=512, k=1024, out_dtype=FP32),
    "vector-fp16": Case("v", M, VECTOR, (100, 28), n=512, k=1024, out_dtype=FP16),
    "row": Case("r", M, ROW, (100, 28), n=512, k=1024),
    "wgrad": Case("k", K, VECTOR, (128, 256), m=512, n=512, out_dtype=FP32),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_wgmma_and_tma(name: str) -> None:
    case = COMPILED[name]
    problem = cases.problem_of(case, _made(case))
    listed = BACKEND.configs(problem, H200)
    if name == "block":  # every tile meets block scales, the likeliest with and without a split K
        whole = (*listed[:3], Config(128, 256))
        configs = {*listed, *(replace(c, split_k=2, num_stages=min(c.num_stages, 3)) for c in whole)}
        configs.add(Config(192, 128, 4))
        assert {c.block_n == 256 for c in configs if c.split_k > 1} == {True, False}
    else:  # and of the other cases, two halves, which leave the fewest registers, or the pairs that come first
        configs = {next(c for c in listed if c.pairs) if name in ("row", "wgrad") else Config(128, 256, 3)}
    for config in configs:
        (kernel, *_), (used, *more) = _compiled(case, config)
        assert used.fits and used.smem_bytes <= config.smem_bytes(problem), (config, used)
        # Two halves leave no register over: what is kept from tile to tile may wait in memory, never a step's values.
        usual = 24 if config.block_n == 256 else 0
        assert used.spills <= aot.most_spills(usual, 140 if problem.groups > 256 else 32), (config, used)
        assert not used.spills or aot.spills_in_loops(kernel, "QGMMA") == 0, (config, used)
        assert used.opcodes["QGMMA"] and used.opcodes["UTMALDG"] and used.opcodes["UTMASTG"], (config, used)
        assert aot.ptxas_warnings(used) == [], config
        # Triton's own named barriers have the lowest numbers; the ordered barrier has others.
        named = set(map(int, re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\s+(\d+)", used.ptx)))
        assert {b for b in named if b > 3} == (
            {8, 9, 10}
            if config.consumers == 3
            else {8, 9}
            if config.block_n == 256 and config.consumers == 2
            else set()
        )
        assert len(more) == (config.split_k > 1)
        for summing in more:
            assert summing.spills == 0 and summing.fits


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("odd n", M, BLOCK, (8, 8), n=37, k=128), "16 bytes"),
        (Case("odd k", M, BLOCK, (8, 8), n=64, k=131), "16 bytes"),
        (Case("kn", M, BLOCK, (8, 8), n=64, k=128, storage="kn"), "K contiguous"),
        (Case("k row", K, ROW, (128, 128), m=64, n=64), "begin anywhere"),
    ],
    ids=lambda x: str(x) if isinstance(x, Case) else "",
)
def test_refusals_say_why(case: Case, words: str) -> None:
    reason = BACKEND.supports(cases.problem_of(case, cases.make(case)), H200)
    assert reason is not None and words in reason


def test_only_hopper() -> None:
    problem = cases.problem_of(COMPILED["block"], cases.make(COMPILED["block"]))
    for name in ("a100", "rtx 4090", "b200"):
        assert "9.0" in (BACKEND.supports(problem, Device.by_name(name)) or "")


def _of_shape(groups: int, rows: int, n: int, k: int):
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fp8 = torch.float8_e4m3fn
    o = Operands(
        empty(groups * rows, k, dtype=fp8),
        empty(groups, n, k, dtype=fp8).transpose(1, 2),
        empty(groups * rows, -(-k // 128)),
        empty(groups, -(-n // 128), -(-k // 128)),
        empty(groups, dtype=torch.int32),
    )
    from expertile.ops.grouped_mm.problem import described
    from expertile.ops.scaled_grouped_mm.problem import ScaledProblem

    fields = [described(x) for x in (o.a, o.b, o.scale_a, o.scale_b, o.offs)]
    return ScaledProblem.of_descriptions(*fields, None, torch.bfloat16)


def test_few_tiles_are_shared_and_many_are_not() -> None:
    few = BACKEND.configs(_of_shape(1, 64, 2048, 7168), H200)[0]
    assert few.block_m == 64 and few.split_k * -(-2048 // few.block_n) >= 100
    for many in ((8, 512, 7168, 7168), (4, 512, 7168, 7168), (4, 512, 7168, 2048), (8, 512, 4096, 7168)):
        assert BACKEND.configs(_of_shape(*many), H200)[0] == Config(128, 256, 4)
    # One wave of 128 x 128 either way: pairs are faster than narrow tiles.
    assert BACKEND.configs(_of_shape(1, 512, 4096, 7168), H200)[0].pairs
    decode = BACKEND.configs(_of_shape(32, 16, 4096, 7168), H200)[0]
    assert decode.block_m == 64 and decode.split_k == 1


def test_every_config_fits() -> None:
    for case in COMPILED.values():
        problem = cases.problem_of(case, _made(case))
        for config in BACKEND.configs(problem, H200):
            assert config.smem_bytes(problem) <= H200.smem_bytes
