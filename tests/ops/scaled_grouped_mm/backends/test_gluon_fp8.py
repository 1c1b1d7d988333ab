"""gluon_fp8 without a GPU: what it accepts, what it compiles to, its numbers and synchronisation in an emulator."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from expertile.device import Device
from expertile.ops.hopper import turns, units
from expertile.ops.scaled_grouped_mm.backend import Operands
from expertile.ops.scaled_grouped_mm.backends import _gluon_feed, _gluon_kernel, _gluon_launch
from expertile.ops.scaled_grouped_mm.backends.gluon_fp8 import BACKEND, Config
from tests.ops.scaled_grouped_mm import cases
from tests.ops.scaled_grouped_mm.cases import BLOCK, FP16, FP32, ROW, VECTOR, Case, K, M
from tests.support import aot, gluon_emulator
from tests.support.fake_driver import compile_only
from tests.support.mutants import planted

H200 = Device.by_name("h200")

# Small tiles, few stages: many trips around the ring for little work.
SMALL = {
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


class _Language(gluon_emulator._Language):
    def convert_layout(self, x: torch.Tensor, layout: object) -> torch.Tensor:
        return x


def _flat(x: object) -> object:
    """A tensor of any strides as the memory that a kernel reaches from its first element."""
    if isinstance(x, torch.Tensor) and not x.is_contiguous():
        return x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
    return x


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
    args, options = _gluon_launch.arguments(problem, operands, config, target)
    with mock.patch.object(gluon_emulator, "_Language", _Language):
        gluon_emulator.run(kernel, programs, tuple(map(_flat, args)), options, seed)
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
    """Neither consumer waits for a turn that never comes, nor for a stage, whatever rows it has."""
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


MUTANTS = {
    "a stage is freed before its wgmma is done": (
        "            part = warpgroup_mma_wait(0, (part,))\n            mbarrier.arrive(p.empty.index(i), count=1)\n"
        "            acc += part * ",
        "            mbarrier.arrive(p.empty.index(i), count=1)\n            part = warpgroup_mma_wait(0, (part,))\n"
        "            acc += part * ",
    ),
    "no fence before the TMA store": ("    fence_async_shared()\n    if p.LAYOUT", "    if p.LAYOUT"),
    "the producer starts on phase 0": ("    i = 0\n    phase = 1\n", "    i = 0\n    phase = 0\n"),
    "a consumer mistakes its phase": ("phase = (ring // p.STAGES) & 1\n    scale_a", "phase = 0\n    scale_a"),
    "a skipping consumer keeps the stages": (
        "        mbarrier.arrive(p.empty.index(i), count=1)\n        i, phase = advance(p, i, phase)\n\n\n@gluon.jit\n"
        "def _store",
        "        i, phase = advance(p, i, phase)\n\n\n@gluon.jit\ndef _store",
    ),
    "the ring forgets a tile's steps": ("        ring += steps\n", "        ring += 1\n"),
    "the scales are one step late": ("scale_a = soon_a", "scale_a = scale_a"),
    "b's scales are one step late": ("scale_b = soon_b", "scale_b = scale_b"),
    "the scales of another group": ("at_b += g * p.sb_g", "at_b += 0 * p.sb_g"),
    "the scales of another block of columns": (
        "at_b += gl.minimum(col // 128, (p.N - 1) // 128) * p.sb_n",
        "at_b += 0",
    ),
    "both halves take the left one's scales": ("part, scale_a, scale_c, mma", "part, scale_a, scale_b, mma"),
    "the right half multiplies the left one's columns": ("PART, mma_layout, 1)", "PART, mma_layout, 0)"),
    "a stage is freed after its left half": (
        "        pass_turn(p, PART)\n        part = warpgroup_mma_wait(0, (part,))\n"
        "        mbarrier.arrive(p.empty.index(i), count=1)\n",
        "        pass_turn(p, PART)\n        mbarrier.arrive(p.empty.index(i), count=1)\n"
        "        part = warpgroup_mma_wait(0, (part,))\n",
    ),
    "an empty group's scales lie outside": ("gl.minimum(k0 // 128 + first, (p.K - 1) // 128)", "k0 // 128 + first"),
    "the scales of the tile's upper half": ("        row += WHO * p.ROWS\n", ""),
    "one row too many is stored": ("WRAP - (row_end - row), col]", "WRAP - (row_end - row) - 1, col]"),
    "a store's buffer is reused at once": ("tma.store_wait(0)\n    buf", "tma.store_wait(8)\n    buf"),
    "a sum is read early": ("part = warpgroup_mma_wait(0, (part,))", "part = warpgroup_mma_wait(1, (part,))"),
    "expected bytes leave out b": ("count * A_BYTES + p.HALVES * B_BYTES", "count * A_BYTES"),
    "boxes without rows are expected": ("(boxes == count)", "(count == p.BLOCK_M // p.A_BOX)"),
    "boxes without rows are loaded": ("i * BOXES + s), s < boxes)", "i * BOXES + s), True)"),
    "a box of rows is left out": ("(row_end - row + p.A_BOX - 1) // p.A_BOX", "(row_end - row) // p.A_BOX"),
    "every box has the first one's rows": ("[row + s * p.A_BOX, k]", "[row, k]"),
    "boxes lie on one another": ("p.a_boxes.index(i * BOXES + s)", "p.a_boxes.index(i * BOXES)"),
    "splits overlap": ("    return first, (split + 1) * steps // p.SPLIT_K - first", "    return first, steps - first"),
    "every slice takes the bias along": ("gl.where(split == 0, p.N, 0)", "p.N"),
    "slices lie on one another": ("row_end + split * p.M", "row_end"),
    "K runs into the next group": ("steps = (k_len + 127) // 128", "steps = (k_len + 255) // 128"),
    "two steps' scales are swapped": ("done, odd_a, odd_b", "done, scale_a, scale_b"),
    "a pair's first sum is read early": ("warpgroup_mma_wait(1, (even,))", "warpgroup_mma_wait(2, (even,))"),
    "a pair's second stage is freed early": (
        "        done = warpgroup_mma_wait(0, (odd,))\n        mbarrier.arrive(p.empty.index(j), count=1)\n",
        "        mbarrier.arrive(p.empty.index(j), count=1)\n        done = warpgroup_mma_wait(0, (odd,))\n",
    ),
    "a narrow tile waits for a whole one's bytes": (
        "count * A_BYTES + B_BYTES, pred",
        "count * A_BYTES + 2 * B_BYTES, pred",
    ),
    "more boxes than the tile has": (", BOXES)\n", ", BOXES + 1)\n"),
    "a turn is not passed on": ("        pass_turn(p, PART)\n        next_step", "        next_step"),
    "the right half takes no turn": (
        "        take_turn(p, PART)\n        part = _products(p, i, PART, mma_layout, 1)\n        pass_turn(p, PART)\n",
        "        part = _products(p, i, PART, mma_layout, 1)\n",
    ),
    "a narrow tile takes no turns": (
        "        take_turn(p, PART)\n        part = _products(p, i, PART, mma_layout)\n        pass_turn(p, PART)\n",
        "        part = _products(p, i, PART, mma_layout)\n",
    ),
    "a consumer without rows takes no turns": (
        "        take_turn(p, PART)\n        pass_turn(p, PART)\n        if wide:\n            take_turn(p, PART)\n"
        "            pass_turn(p, PART)\n",
        "",
    ),
    "a consumer without rows takes a narrow tile's turns": (
        "        if wide:\n            take_turn(p, PART)\n            pass_turn(p, PART)\n",
        "",
    ),
    "a consumer without rows takes a wide tile's turns": (
        "        if wide:\n            take",
        "        if 1:\n            take",
    ),
    "a consumer without rows does not pass its turns on": (
        "        take_turn(p, PART)\n        pass_turn(p, PART)\n        if wide",
        "        take_turn(p, PART)\n        if wide",
    ),
    "a consumer without rows goes away": ("            _skip(p, ring, steps, wide, WHO)\n", "            pass\n"),
    "nobody opens the turns": ("    open_turns(p, WHO)\n", ""),
    "nobody closes the turns": ("    close_turns(p, WHO)\n", ""),
    "the turns open anew with each unit": (
        "        row += WHO * p.ROWS\n",
        "        row += WHO * p.ROWS\n        open_turns(p, WHO)\n",
    ),
    "both narrow tiles are the left one": ("        col += shift\n", ""),
    "the odd step is left out": ("if steps % 2 == 1:", "if steps % 2 == 2:"),
    "a pair's stages are mistaken": ("i, phase = advance(p, j, phase_j)", "i, phase = advance(p, i, phase)"),
}


# The same in the modules that the kernel takes its turns and its units from.
PART_MUTANTS = {
    "a consumer passes the turn to itself": (turns, '("arrive", 1 - WHO)', '("arrive", WHO)'),
    "both wait for the same turn": (turns, '("sync", WHO)', '("sync", 0)'),
    "waits and arrivals are at different barriers": (
        turns,
        "{8 + who}, 256",
        "{8 + who if what == 'sync' else 10 + who}, 256",
    ),
    "the barriers are Triton's": (turns, "{8 + who}", "{2 + who}"),
    "the barriers do not exist": (turns, "{8 + who}", "{15 + who}"),
    "a barrier of more threads than come": (turns, ", 256;", ", 288;"),
    "a barrier of two sizes": (turns, ", 256;", ", {256 if what == 'sync' else 384};"),
    "the wrong consumer opens": (turns, "if WHO == 1:", "if WHO == 0:"),
    "both consumers open": (turns, "if WHO == 1:", "if WHO <= 1:"),
    "the wrong consumer closes": (turns, "if WHO == 0:", "if WHO == 1:"),
    "the last narrow unit is left out": (units, "plan.total + _narrow_tiles(plan)", "plan.total"),
    "narrow units are taken in the wrong order": (units, "first + past // 2", "first + past"),
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
    parts = (units, turns, _gluon_feed, _gluon_kernel)
    *part, old, new = MUTANTS[name] if name in MUTANTS else PART_MUTANTS[name]
    configs = ("halves",) if part else ("halves", "pairs", "split", "one consumer", "two consumers")
    kernel = planted(parts, old, new, tmp_path, monkeypatch, part or None)[-1].scaled_grouped_mm_kernel
    assert _caught(kernel, configs), "no case, config or seed did"


# A case's 512 groups of weights take a second to draw, and none of these tests looks at values.
_made = lru_cache(maxsize=1)(cases.make)


def _compiled(case: Case, config: Config) -> tuple[list[Any], list[aot.Resources]]:
    operands = _made(case)
    problem = replace(cases.problem_of(case, operands), device_type="cuda", group_sizes=None)
    with compile_only(90) as kernels:
        _gluon_launch.launch(problem, operands, config, cases.poisoned_out(case))
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
    configs = set(BACKEND.configs(problem, H200))
    if name == "block":  # every tile meets block scales, the likeliest with K split as well
        split = BACKEND.configs(problem, H200)[:3]
        configs |= {replace(c, split_k=2, num_stages=min(c.num_stages, 5)) for c in split}
        configs |= {Config(128, 256, 3, split_k=2), Config(64, 256, 4)}
    else:
        configs = {*BACKEND.configs(problem, H200)[:2], Config(128, 256, 3)}
    for config in configs:
        (kernel, *_), (used, *more) = _compiled(case, config)
        assert used.fits and used.smem_bytes <= config.smem_bytes(problem.out_dtype.itemsize), (config, used)
        # Two halves leave no register over: what is kept from tile to tile may wait in memory, never a step's values.
        usual = 24 if config.block_n == 256 else 0
        assert used.spills <= aot.most_spills(usual, 140 if problem.groups > 256 else 32), (config, used)
        assert not used.spills or aot.spills_in_loops(kernel, "QGMMA") == 0, (config, used)
        assert used.opcodes["QGMMA"] and used.opcodes["UTMALDG"] and used.opcodes["UTMASTG"], (config, used)
        assert aot.ptxas_warnings(used) == [], config
        # Triton's own named barriers have the lowest numbers; those of the turns are no others'.
        named = set(map(int, re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\s+(\d+)", used.ptx)))
        assert {b for b in named if b > 3} == ({8, 9} if config.block_n == 256 and config.consumers == 2 else set())
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
        empty(groups * rows, k, dtype=fp8), empty(groups, n, k, dtype=fp8).transpose(1, 2),
        empty(groups * rows, -(-k // 128)), empty(groups, -(-n // 128), -(-k // 128)),
        empty(groups, dtype=torch.int32),
    )  # fmt: skip
    from expertile.ops.grouped_mm.problem import described
    from expertile.ops.scaled_grouped_mm.problem import ScaledProblem

    fields = [described(x) for x in (o.a, o.b, o.scale_a, o.scale_b, o.offs)]
    return ScaledProblem.of_descriptions(*fields, None, torch.bfloat16)


def test_few_tiles_are_shared_and_many_are_not() -> None:
    few = BACKEND.configs(_of_shape(1, 64, 4096, 7168), H200)[0]
    assert few.block_m == 64 and few.split_k * -(-4096 // few.block_n) >= 100
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
            assert config.smem_bytes(problem.out_dtype.itemsize) <= H200.smem_bytes
