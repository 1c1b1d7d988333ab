"""gluon_w4a8 without a GPU: what it accepts, what it compiles to, its numbers and synchronisation in an emulator."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertile.device import Device
from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
from expertile.ops.hopper.reduce import fitted
from expertile.ops.weight_only_mm.backends import _w4a8_kernel, gluon_w4a8
from expertile.ops.weight_only_mm.backends.gluon_w4a8 import BACKEND, Config
from expertile.ops.weight_only_mm.problem import Operands, WeightOnlyProblem
from tests.ops.weight_only_mm import cases, fp8_cases
from tests.ops.weight_only_mm.fp8_cases import FP8, FP32, Fp8Case
from tests.support import aot, int4_emulator
from tests.support.fake_driver import compile_only
from tests.support.gluon_machine import EmulationError
from tests.support.mutants import Fault, planted
from tests.support.wgmma import overwritten_operands

H200 = Device.by_name("h200")

# Small tiles, few stages: many trips around the ring for little work.
SMALL = {
    "ahead": Config(16, 64, 3, group_m=2),
    "wide": Config(8, 128, 2, store_parts=2),
    "late": Config(16, 128, 3, ahead=False),
    "split": Config(16, 64, 2, split_k=3),
    "split-late": Config(8, 64, 3, split_k=2, ahead=False),
}
HALVES = Config(256, 64, 2, store_parts=4)
# Several tiles for each of several programs, and every edge: empty groups, part tiles, rows past the end.
TILES = Fp8Case("tiles", (19, 0, 6, 1, 9), n=200, k=608, past=3, bias=True)
INT4 = Fp8Case("int4", (19, 0, 6, 1, 9), n=136, k=640, format="int4", recipe="row", past=3)
FEW_STEPS = Fp8Case("few-steps", (5, 17), n=72, k=160, past=2, out_dtype=FP32)


def _emulated(
    o: Operands, problem: WeightOnlyProblem, config: Config, out: torch.Tensor, programs=2, seed=0, kernel=None
):
    target = out
    if config.split_k > 1:
        target = torch.full((config.split_k, *out.shape), float("nan"))
    launch, _, *given = gluon_w4a8.prepared(problem, o, config, target)
    args, options = launch.arguments(*given), dict(launch.options)
    int4_emulator.run(kernel or _w4a8_kernel.w4a8_mm_kernel, programs, args, options, seed)
    if config.split_k > 1:
        out.copy_(target.sum(0))


def _emulate(case: Fp8Case, config: Config, programs: int = 2, seed: int = 0, kernel=None) -> None:
    """Run one case in the emulator and check its result; the slices of a split K are added up here."""
    o = fp8_cases.make(case)
    problem, out = fp8_cases.problem_of(case, o), fp8_cases.poisoned_out(case)
    _emulated(o, problem, config, out, programs, seed, kernel)
    fp8_cases.check(case, out, o, 2e-6 if problem.out_dtype is FP32 else cases.PROMISED / 2)


@pytest.mark.parametrize("name", SMALL)
def test_right_in_any_order(name: str) -> None:
    for seed, case in enumerate((TILES, INT4, FEW_STEPS)):
        _emulate(case, SMALL[name], programs=3 - seed, seed=seed)


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
def test_tiles_of_256_rows_are_multiplied_in_halves(format: str) -> None:
    for recipe in ("vector", "row"):
        case = Fp8Case("halves", (150, 3), n=136, k=256, format=format, recipe=recipe, past=2)
        _emulate(case, HALVES)
        _emulate(case, replace(HALVES, split_k=2, ahead=False))


SHARED = [c for c in fp8_cases.CASES if BACKEND.supports(fp8_cases.problem_of(c, fp8_cases.make(c)), H200) is None]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_shared_cases(case: Fp8Case) -> None:
    names = ("ahead", "wide", "late")
    _emulate(case, SMALL[names[SHARED.index(case) % len(names)]])
    _emulate(case, SMALL["split"])


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
def test_one_hot_activations_decode_every_weight(format: str) -> None:
    """All codes in all places, beside all exponents that a block may have."""
    k, n = 384, 24
    values = torch.arange(n)[:, None].add(torch.arange(k)).remainder(16).to(torch.uint8)[None]
    if format == "mxfp4":
        scales = (130 - torch.arange(n * k // 32) % 12).to(torch.uint8).view(1, n, k // 32)
        w = Mxfp4Fp8Weight.of(Mxfp4Weight.of_codes(values, scales))
    else:
        w = Int4Weight.of_values(values, torch.randn(1, k // 128, n).bfloat16(), None, 128)
    o = Operands(torch.eye(k).to(FP8), w, torch.tensor([k], dtype=torch.int32), None, torch.ones(k, k // 128))
    problem = WeightOnlyProblem.of(o.a, w, o.offs, None, FP32, scale_a=o.scale_a)
    out = torch.full((k, n), float("nan"))
    _emulated(o, problem, Config(64, 64, 2), out, 1)
    assert torch.equal(out, w.dequantize(FP32)[0].T)


MUTANTS = {
    "the producer starts on phase 0": Fault("_producer", "a_ = 1", "a_ = 0"),
    "expected bytes leave out the weights' scales": Fault(
        "_producer", "mbarrier.expect(b_, a_ + _)", "mbarrier.expect(b_, a_)"
    ),
    "the second consumer's columns are the first's": Fault("_producer", "a_ + _ * _.COLS", "a_"),
    "scales of a of the first step": Fault("_producer", "a_ + s_ * _.sx_k", "a_"),
    "scales of w of another expert": Fault("_producer", "_ * _.SCALE_GROUPS + s_", "s_"),
    "the ring forgets a tile's steps": Fault("_consumer", "ring += _", "ring += 1"),
    "both halves of K are the first": Fault("_product", "SLAB * 64", "0"),
    "the second half of K starts anew": Fault("_product", "SLAB > 0", "False"),
    "both halves of a tile are the first": Fault("_product", "a_.slice(FIRST, ...)", "a_.slice(0, ...)"),
    "no scales of a": Fault("_promoted", "a_ + b_ * gl.expand_dims(c_, 0)", "acc + part"),
    "no scales of w": Fault("_promoted", "_ * gl.expand_dims(_, 1)", "part"),
    "the words of the stage before": Fault("_add_stage", "_words(p_, next_i, ...)", "_words(p, i, 0, WHO)"),
    "the next stage is not waited for": Fault("_add_stage", "mbarrier.wait(_, next_phase, ...)"),
    "a stage is never freed": Fault("_add_stage", "mbarrier.arrive(_.empty.index(_), ...)"),
    "an arrival is missing": Fault("_add_stage", "ordered_arrive(...)"),
    "nobody begins the order": Fault("_consumer", "ordered_begin(...)"),
    "nobody ends the order": Fault("_consumer", "ordered_end(...)"),
    "units without steps wait": Fault("_multiply", "steps > 0", "True"),
    "no scales of rows": Fault("_scaled", "a_ * gl.expand_dims(of_w, 1)", "acc"),
    "INT4's sums stay 512 times too small": Fault("_scaled", "a_ * UNIT_OF_INT4", "acc"),
    "rows of a take no scale": Fault("_scaled", "a_ * gl.expand_dims(of_x, 0)", "acc"),
    "every slice takes the bias along": Fault("store_turned", "gl.where(_ == 0, n_, 0)", "p.N"),
    "no fence before the TMA store": Fault("store_turned", "fence_async_shared()"),
    "a store's buffer is reused at once": Fault("store_turned", "tma.store_wait(0)", "tma.store_wait(8)"),
    "one row too many is stored": Fault("store_turned", "WRAP - (a_ - b_)", "WRAP - 1"),
    "slices lie on one another": Fault("store_turned", "r_ + _ * _.M", "row_end"),
    "a block takes the first one's exponent": Fault("unpacked_mxfp4", "2 * SLAB + 1", "2 * SLAB"),
    "both halves are the low nibbles": Fault(
        "_second",
        "unpacked_int4(_, True, ...)",
        "unpacked_int4(words[0], False, gl.DotOperandLayout(0, mma_layout, 4))",
    ),
}
_MXFP4 = Fp8Case("few", (9, 4), n=136, k=320, past=1, bias=True)
_INT4 = Fp8Case("few-int4", (9, 4), n=136, k=384, format="int4", recipe="row", past=1)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant must fail some case, config and seed: the emulator and the cases can see that fault."""
    (kernel,) = planted([_w4a8_kernel.w4a8_mm_kernel], MUTANTS[name], tmp_path, monkeypatch)
    # FEW_STEPS has units without any step, each of a program of its own.
    tried = [(_MXFP4, "ahead", 1), (_INT4, "wide", 1), (FEW_STEPS, "split", 6), (_MXFP4, "split", 1)]
    for seed in range(3):
        for case, config, programs in tried:
            try:
                _emulate(case, SMALL[config], programs, seed, kernel)
            except (EmulationError, AssertionError, TypeError, IndexError):
                return
    try:
        _emulate(Fp8Case("h", (150,), n=72, k=128), HALVES, 1, 0, kernel)
    except (EmulationError, AssertionError):
        return
    pytest.fail("no case, config or seed caught it")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("format", "tile"),
    [(f, t) for f, small in (("mxfp4", (16, 128)), ("int4", (128, 64))) for t in ((256, 64), (128, 128), small)],
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}x{x[1]}",
)
def test_compiles_to_wgmma_and_tma(format: str, tile: tuple[int, int]) -> None:
    case = Fp8Case("c", (3,) * 8, n=256, k=512, format=format)
    o = fp8_cases.make(case)
    problem = replace(fp8_cases.problem_of(case, o), device_type="cuda", group_sizes=None)
    (config,) = (c for c in gluon_w4a8.candidates(format) if (c.block_m, c.cols) == tile)
    with compile_only(90) as kernels:
        BACKEND.run(problem, o, config, fp8_cases.poisoned_out(case))
    (used,) = (aot.resources(kernel, 90) for kernel in kernels)
    assert used.fits and used.smem_bytes <= config.smem_bytes(problem), used
    assert used.spills <= aot.most_spills(4, 40), used
    assert not used.spills or aot.spills_in_loops(kernels[0], "QGMMA") == 0, used
    assert used.opcodes["QGMMA"] and used.opcodes["UTMALDG"] and used.opcodes["UTMASTG"], used
    # Operands come from registers, and nothing brings them to other lanes: shuffles are those of the plan.
    assert ", {" in next(line for line in used.ptx.splitlines() if "wgmma.mma_async" in line)
    assert used.opcodes["SHFL"] < 40
    assert aot.ptxas_warnings(used) == []
    assert overwritten_operands(kernels[0]) == []


@pytest.mark.compile
@pytest.mark.parametrize(("first", "groups"), [(0, 512), (1, 8), (2, 512)])
def test_fits_with_results_of_four_bytes(first: int, groups: int) -> None:
    """The shared memory that Triton takes is at most what `smem_bytes` says, with any number of groups."""
    case = Fp8Case("c", (1,) * groups, n=256, k=256, recipe="row", bias=True, out_dtype=FP32)
    o = fp8_cases.make(case)
    problem = replace(fp8_cases.problem_of(case, o), device_type="cuda", group_sizes=None)
    config = fitted(gluon_w4a8.candidates("mxfp4")[first], problem, H200)
    with compile_only(90) as kernels:
        BACKEND.run(problem, o, config, fp8_cases.poisoned_out(case))
    used = aot.resources(kernels[0], 90)
    assert used.fits and used.smem_bytes <= config.smem_bytes(problem) <= H200.smem_bytes, used


def test_every_config_fits() -> None:
    for format in ("mxfp4", "int4"):
        for groups, rows in ((1, 1), (8, 2048), (512, 64)):
            case = Fp8Case("c", (1,) * groups, n=16, k=256, format=format, out_dtype=FP32)
            problem = replace(fp8_cases.problem_of(case, fp8_cases.make(case)), m=groups * rows, n=4096, k=4096)
            configs = BACKEND.configs(replace(problem, group_sizes=None), H200)
            assert len(configs) == len(gluon_w4a8.candidates(format))
            assert all(c.smem_bytes(problem) <= H200.smem_bytes and c.split_k <= 32 for c in configs)


def test_tiles_follow_the_rows() -> None:
    case = Fp8Case("c", (1,) * 8, n=16, k=256)
    small = fp8_cases.problem_of(case, fp8_cases.make(case))
    by_rows = [
        BACKEND.configs(replace(small, m=8 * rows, n=4096, k=4096, group_sizes=None), H200)[0].block_m
        for rows in (1, 16, 64, 2048)
    ]
    assert by_rows == sorted(by_rows) and by_rows[0] <= 16 and by_rows[-1] == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.bfloat16}, "FP8"),
        ({"n": 37}, "16 bytes"),
        ({"groups": 600}, "600"),
        ({"a_strides": (250, 1)}, "16 bytes apart"),
        ({"a_strides": (1, 99)}, "contiguous K"),
        ({"b_aligned": False}, "16 bytes"),
        ({"m": 2**30}, "rows"),
        ({"scale_a_strides": (2**28, 1)}, "2^31"),
    ],
    ids=str,
)
def test_refusals_say_why(change: dict, words: str) -> None:
    case = Fp8Case("c", (5, 17), n=64, k=256)
    problem = fp8_cases.problem_of(case, fp8_cases.make(case))
    assert BACKEND.supports(problem, H200) is None
    assert words in (BACKEND.supports(replace(problem, **change), H200) or "")


def test_only_hopper() -> None:
    case = Fp8Case("c", (5, 17), n=64, k=256)
    problem = fp8_cases.problem_of(case, fp8_cases.make(case))
    for name in ("a100", "rtx 4090", "b200"):
        assert "9.0" in (BACKEND.supports(problem, Device.by_name(name)) or "")
