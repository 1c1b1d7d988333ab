"""gluon_int4 without a GPU: what it accepts, what it compiles to, its numbers and synchronisation in an emulator."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertile.device import Device
from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.ops.weight_only_mm.backends import _gluon_kernel, gluon_int4
from expertile.ops.weight_only_mm.backends._gluon_config import Config
from expertile.ops.weight_only_mm.backends.gluon_int4 import BACKEND
from expertile.ops.weight_only_mm.problem import Operands, WeightOnlyProblem
from tests.ops.weight_only_mm import cases
from tests.ops.weight_only_mm.cases import BF16, FP16, FP32, Case, of_shape
from tests.support import aot, int4_emulator
from tests.support.fake_driver import compile_only
from tests.support.gluon_machine import EmulationError
from tests.support.mutants import Fault, before, planted
from tests.support.wgmma import overwritten_operands

H200 = Device.by_name("h200")

# Small tiles, few stages: many trips around the ring for little work.
SMALL = {
    "sum": Config(8, 64, 2, 128, 3, group_m=2),
    "weight": Config(16, 64, 2, 256, 2, "weight", slab=32, store_parts=2),
    "ordered": Config(8, 64, 2, 128, 3, "fused", group_m=2, ordered=True),
    "ordered-deep": Config(16, 64, 2, 256, 2, "fused", slab=32, store_parts=2, ordered=True),
    "ordered-tails": Config(16, 128, 2, 128, 3, "fused", store_parts=2, tails=True, ordered=True),
    "ordered-split": Config(8, 64, 2, 128, 2, "fused", split_k=2, ordered=True),
    "fused-four": Config(8, 64, 4, 128, 2, "fused"),
    "four": Config(8, 64, 4, 128, 2, slab=32),
    "split": Config(8, 64, 2, 128, 2, split_k=2),
    "deep": Config(16, 128, 2, 256, 2, group_m=1),
    "tails": Config(16, 64, 2, 128, 3, store_parts=2, tails=True),
    "tails-weight": Config(32, 64, 2, 256, 2, "weight", slab=32, store_parts=4, tails=True),
}
MXFP4 = {
    "mxfp4": Config(8, 64, 2, 128, 3, "mxfp4", slab=32, group_m=2, ordered=True),
    "mxfp4-deep": Config(16, 64, 2, 256, 2, "mxfp4", slab=32, store_parts=2),
    "mxfp4-tails": Config(16, 128, 2, 128, 3, "mxfp4", slab=32, store_parts=2, tails=True, ordered=True),
    "mxfp4-pairs": Config(8, 64, 2, 128, 3, "mxfp4", slab=64, group_m=2, ordered=True),
    "mxfp4-deep-pairs": Config(16, 64, 2, 256, 2, "mxfp4", slab=64, store_parts=2, ordered=True),
    "mxfp4-split": Config(8, 64, 2, 128, 2, "mxfp4", slab=32, split_k=2, ordered=True),
}
SMALL |= MXFP4
# Several tiles for each of several programs, and every edge: empty groups, part tiles, rows past the end.
TILES = Case("tiles", (19, 0, 6, 1, 9), n=200, k=640, past=3, bias=True)
TILES_MXFP4 = Case("tiles-mxfp4", (19, 0, 6, 1, 9), n=200, k=608, group="mxfp4", past=3, bias=True)
HALF_MXFP4 = Case("half-mxfp4", (5, 17), n=136, k=320, group="mxfp4", past=2, dtype=FP16)
TILES_64 = Case("tiles-64", (5, 17), n=136, k=320, group=64, past=2)
TILES_32 = Case("tiles-32", (5, 17), n=136, k=320, group=32, past=2)
TILES_ZEROS = Case("tiles-zeros", (5, 17), n=136, k=320, group=64, zeros=True, past=2)


def _emulate(case: Case, config: Config, programs: int = 2, seed: int = 0, kernel=None) -> None:
    """Run one case in the emulator and check its result; the slices of a split K are added up here."""
    operands = cases.make(case)
    problem = cases.problem_of(case, operands)
    out = cases.poisoned_out(case)
    target = out
    if config.split_k > 1:
        target = torch.full((config.split_k, *out.shape), float("nan"))
    launch, _, *given = gluon_int4.prepared(problem, operands, config, target)
    args, options = launch.arguments(*given), dict(launch.options)
    int4_emulator.run(kernel or _gluon_kernel.weight_only_mm_kernel, programs, args, options, seed)
    if config.split_k > 1:
        out.copy_(target.sum(0))
    # Rounded weights are off as much as a rounded result is.
    limit = cases.PROMISED if config.scale != "sum" else 1e-6 if problem.out_dtype is FP32 else cases.PROMISED / 2
    cases.check(case, out, operands, limit)


@pytest.mark.parametrize("name", SMALL)
def test_right_in_any_order(name: str) -> None:
    cases = {"fused": (TILES, TILES_64, TILES_32), "mxfp4": (TILES_MXFP4, HALF_MXFP4, HALF_MXFP4)}.get(
        SMALL[name].scale, (TILES, TILES_ZEROS)
    )
    for seed, case in enumerate(cases):
        _emulate(case, SMALL[name], programs=max(1, 3 - seed), seed=seed)


def _supported(case: Case) -> bool:
    return BACKEND.supports(cases.problem_of(case, cases.make(case)), H200) is None


SHARED = [c for c in cases.CASES if _supported(c)]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_shared_cases(case: Case) -> None:
    if case.group == "mxfp4":
        for name in MXFP4:
            _emulate(case, SMALL[name])
        return
    names = ["sum", "weight", "four", "deep", "tails", "tails-weight"]
    _emulate(case, SMALL[names[SHARED.index(case) % len(names)]])
    if not case.zeros and case.dtype is BF16:
        _emulate(case, SMALL[("ordered", "ordered-deep", "ordered-tails")[SHARED.index(case) % 3]])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("scale", ["sum", "weight", "fused"])
def test_one_hot_activations_decode_every_weight(scale: str, dtype: torch.dtype) -> None:
    k, n = 128, 16
    values = torch.arange(n)[:, None].add(torch.arange(k)).remainder(16)[None]
    scales = torch.randn(1, k // 64, n).to(dtype)
    zeros = torch.arange(16).expand(1, k // 64, n).to(dtype)
    plain, with_zeros = (Int4Weight.of_values(values, scales, z, 64) for z in (None, zeros))
    if scale == "fused" and dtype is FP16:
        pytest.skip("fused scales are bfloat16's")
    for w in (plain,) if scale == "fused" else (plain, with_zeros):
        operands = Operands(torch.eye(k, dtype=dtype), w, torch.tensor([k], dtype=torch.int32))
        out = torch.full((k, n), float("nan"), dtype=dtype)
        problem = WeightOnlyProblem.of(operands.a, w, operands.offs)
        config = Config(64, 64, 2, 128, 2, scale, slab=32)
        launch, _, *given = gluon_int4.prepared(problem, operands, config, out)
        args, options = launch.arguments(*given), dict(launch.options)
        int4_emulator.run(_gluon_kernel.weight_only_mm_kernel, 1, args, options)
        assert torch.equal(out, w.dequantize(dtype)[0].T)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_one_hot_activations_decode_every_mxfp4_weight(dtype: torch.dtype) -> None:
    """All codes in all places, with all scales in which a kernel is exact, and below in float16."""
    k, n, config = 128, 16, Config(64, 64, 2, 128, 2, "mxfp4", slab=32)
    codes = torch.arange(n)[:, None].add(torch.arange(k)).remainder(16).to(torch.uint8)
    low, high = (127 - 93, 127 + 33) if dtype is BF16 else (0, 127 + 1)
    scales = torch.arange(low, high + 1, dtype=torch.uint8)
    for few in scales.split(8):
        some = few[torch.arange(n * k // 32) % len(few)].view(1, n, k // 32)
        w = Mxfp4Weight.of_codes(codes[None], some)
        w.check_numbers(dtype)
        operands = Operands(torch.eye(k, dtype=dtype), w, torch.tensor([k], dtype=torch.int32))
        out = torch.full((k, n), float("nan"), dtype=dtype)
        problem = WeightOnlyProblem.of(operands.a, w, operands.offs)
        launch, _, *given = gluon_int4.prepared(problem, operands, config, out)
        args, options = launch.arguments(*given), dict(launch.options)
        int4_emulator.run(_gluon_kernel.weight_only_mm_kernel, 1, args, options)
        assert torch.equal(out, w.dequantize(dtype)[0].T)


def test_mxfp4_scales_behind_the_end_of_k_are_nobody_elses() -> None:
    """K = 160 fills a stage of 256 partly; the next expert's scales are NaN, and so is padding."""
    case = Case("tail", (9, 0), n=72, k=160, group="mxfp4")
    operands = cases.make(case)
    operands.w.scales[1] = 255
    problem, out = cases.problem_of(case, operands), cases.poisoned_out(case)
    launch, _, *given = gluon_int4.prepared(problem, operands, SMALL["mxfp4-deep"], out)
    args, options = launch.arguments(*given), dict(launch.options)
    int4_emulator.run(_gluon_kernel.weight_only_mm_kernel, 1, args, options)
    cases.check(case, out, operands)


def test_formats_take_their_own_configs() -> None:
    for case, name in ((Case("i", (3,), 64, 128), "mxfp4"), (Case("m", (3,), 64, 128, group="mxfp4"), "sum")):
        operands = cases.make(case)
        problem = cases.problem_of(case, operands)
        with pytest.raises(ValueError, match='config: scale ".*" takes weights of format .*, not .*'):
            gluon_int4.prepared(problem, operands, SMALL[name], cases.poisoned_out(case))
        assert {c.scale == "mxfp4" for c in BACKEND.configs(problem, H200)} == {case.group == "mxfp4"}


def test_ordered_is_of_two_consumers_that_fuse() -> None:
    with pytest.raises(ValueError, match="ordered: expected two consumers"):
        Config(16, 64, 4, scale="fused", ordered=True)
    with pytest.raises(ValueError, match='ordered: expected .* and scale "fused"'):
        Config(16, ordered=True)


@pytest.mark.parametrize("case", [Case("z", (3,), 64, 128, zeros=True), Case("h", (3,), 64, 128, dtype=FP16)], ids=str)
def test_what_cannot_be_fused_is_not(case: Case) -> None:
    operands = cases.make(case)
    problem = cases.problem_of(case, operands)
    with pytest.raises(ValueError, match='scale "fused" takes bfloat16 without zero points'):
        gluon_int4.prepared(problem, operands, SMALL["ordered"], cases.poisoned_out(case))
    assert {c.scale for c in BACKEND.configs(problem, H200)} <= {"sum", "weight"}
    per_channel = of_shape(8, 16, 1536, 2048, 2048)
    assert {c.scale for c in BACKEND.configs(per_channel, H200)} <= {"sum", "weight"}
    assert {(c.scale, c.ordered) for c in BACKEND.configs(of_shape(8, 16, 1536, 2048), H200)} == {("fused", True)}


@pytest.mark.parametrize(
    ("scale", "number"),
    [("sum", 2.0**124), ("weight", 2.0**124), ("fused", 2.0**27 * (1 - 2.0**-8)), ("fused", -(2.0**-94))],
)
def test_scales_of_any_size_within_the_range(scale: str, number: float) -> None:
    """Weights come divided by 64 or 2^32, so that their scales need not be multiplied by it."""
    k, n = 128, 16
    values = torch.arange(n)[:, None].add(torch.arange(k)).remainder(16)[None]
    w = Int4Weight.of_values(values, torch.full((1, k // 64, n), number, dtype=BF16), None, 64)
    operands = Operands(torch.eye(k, dtype=BF16), w, torch.tensor([k], dtype=torch.int32))
    out = torch.full((k, n), float("nan"), dtype=BF16)
    problem = WeightOnlyProblem.of(operands.a, w, operands.offs)
    launch, _, *given = gluon_int4.prepared(problem, operands, Config(64, 64, 2, 128, 2, scale, slab=32), out)
    args, options = launch.arguments(*given), dict(launch.options)
    int4_emulator.run(_gluon_kernel.weight_only_mm_kernel, 1, args, options)
    assert torch.equal(out, w.dequantize(BF16)[0].T)


@pytest.mark.parametrize("name", ["sum", "weight", "ordered"])
def test_scales_behind_the_end_of_k_are_nobody_elses(name: str) -> None:
    """K = 192 fills one and a half stages; the next expert's scales and zeros are NaN."""
    case = Case("tail", (9, 0), n=72, k=192, group=32, zeros=name != "ordered")
    operands = cases.make(case)
    operands.w.scales[1] = float("nan")
    if operands.w.zeros is not None:
        operands.w.zeros[1] = float("nan")
    problem, out = cases.problem_of(case, operands), cases.poisoned_out(case)
    launch, _, *given = gluon_int4.prepared(problem, operands, SMALL[name], out)
    args, options = launch.arguments(*given), dict(launch.options)
    int4_emulator.run(_gluon_kernel.weight_only_mm_kernel, 1, args, options)
    cases.check(case, out, operands)


MUTANTS = {
    "a stage is freed before its products are done": Fault(
        "_add_slabs", "mbarrier.arrive(_.empty.index(_), ...)", before("warpgroup_mma_wait(0, ...)")
    ),
    "a stage is freed before its last group is done": Fault("_add_groups", "j_ == _.GROUPS - 1", "j_ == 0"),
    "a group's product is read early": Fault("_add_groups", "_later_products(_, g_, ...)", "g_"),
    "groups take one another's scale": Fault(
        "_add_groups", "_of_rows(p_, s_, i_, _, ...)", "_of_rows(p_, s_, i_, 0, ...)"
    ),
    "high nibbles take the low ones' scale": Fault(
        "_of_block", "_both(p_, _.s_smem, i_, l_, _, ...)", "_both(p_, p_.s_smem, i_, l_, l_, ...)"
    ),
    "high nibbles take the low ones' zero": Fault(
        "_of_block", "_both(p_, _.z_smem, i_, l_, _, ...)", "_both(p_, p_.z_smem, i_, l_, l_, ...)"
    ),
    "high nibbles meet the wrong activations": Fault("_tokens", "a_ + HIGH * _.HALF", "a_"),
    "every slab is of the first words": Fault("_slabs", "w_.slice(_ * a_ // 4, ...)", "w_.slice(0 * a_ // 4, ...)"),
    "slabs are counted through blocks": Fault("_first_k", "return _", "return slab * width"),
    "a product forgets its first slab": Fault("_add_groups", "_ > _", "False"),
    "no fence before the TMA store": Fault("store_turned", "fence_async_shared()"),
    "a store's buffer is reused at once": Fault("store_turned", "tma.store_wait(0)", "tma.store_wait(8)"),
    "one row too many is stored": Fault("store_turned", "WRAP - (a_ - b_)", "all_ - 1"),
    "the parts of a store lie on one another": Fault("store_turned", "[..., a_ + _ * _, c_]", "[..., a_, c_]"),
    "the producer starts on phase 0": Fault("_producer", "a_ = 1", "a_ = 0"),
    "the ring forgets a tile's steps": Fault("_consumer", "ring += _", "ring += 1"),
    "expected bytes leave out the zeros": Fault("_producer", "mbarrier.expect(b_, a_ + _)", "mbarrier.expect(b_, a_)"),
    "the scales of another group": Fault("_producer", "_ * _ + gl.minimum(a_, b_)", "gl.minimum(a_, b_)"),
    "both consumers take the same scales": Fault("_of_rows", "a_.slice(_ * c_, c_, 0)", "a_.slice(0, c_, 0)"),
    "the second consumer's columns are the first's": Fault("_producer", "a_ + _ * _.COLS", "a_"),
    "splits overlap": Fault("span", "_ * _ // _.SPLIT_K", "0", nth=0),
    "slices lie on one another": Fault("store_turned", "r_ + _ * _.M", "r_"),
    "half a tile is taken for too many rows": Fault("_consumer", "r_ <= b_", "r_ <= b_ + 1"),
    "sums stay 64 times too small": Fault("multiply", "a_ * unit_of(...)", "a_ * 1.0"),
    "fused sums are taken for scaled ones": Fault("multiply", "unit_of(b_, _)", "unit_of(b_, False)"),
    "all blocks take the first one's scales": Fault("_of_block", "b_ * 2 * _.HALF // _.GROUP", "0"),
    "nobody begins the order": Fault("_consumer", "ordered_begin(...)"),
    "nobody ends the order": Fault("_consumer", "ordered_end(...)"),
    "an arrival is missing": Fault("_add_slabs", "ordered_arrive(...)"),
    "a wait for each slab": Fault("_add_slabs", "s_ == 0", "s_ >= 0"),
    "every slice takes the bias along": Fault("store_turned", "gl.where(_ == 0, n_, 0)", "n_"),
    "MXFP4's last half block takes the first one's scale": Fault("factors", "2 * _ + 1", "2 * BLOCK"),
    "all blocks of a word take its first scales": Fault("_of_block", "b_ % 2", "0"),
    "all blocks of a stage take its first words": Fault("_of_block", "w_[b_ // 2]", "words[0]"),
    "the words of another row": Fault("scale_groups", "gl.cdiv(_.K, _.GROUP)", "1"),
    "the second block of a pair takes the first one's": Fault(
        "_add_pairs", "_slabs(p_, (), s_, i_, 2 * a_ + 1, ...)", "_slabs(p_, (), s_, i_, 2 * a_, WHO, mma_layout)"
    ),
    "a stage is freed before its last pair is done": Fault(
        "_add_pairs", "mbarrier.arrive(_.empty.index(_), ...)", before("warpgroup_mma_wait(0, ...)")
    ),
    "MXFP4's sums stay 2^32 times too small": Fault("multiply", "a_ * unit_of_mxfp4(...)", "a_ * 1.0"),
}
_TAIL = Case("tail", (9, 4), n=72, k=192, group=32, zeros=True, past=1)
_MXFP4 = Case("mxfp4", (9, 4), n=72, k=480, group="mxfp4", past=1)
_BIASED = Case("biased", (9, 4), n=72, k=512, past=1, bias=True)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant must fail some case, config and seed: the emulator and the cases can see that fault."""
    (kernel,) = planted([_gluon_kernel.weight_only_mm_kernel], MUTANTS[name], tmp_path, monkeypatch)
    for seed in range(3):
        for config in ("sum", "weight", "split", "four", "tails", "ordered-deep", "mxfp4-deep", "mxfp4-deep-pairs"):
            few = (_MXFP4,) if config.startswith("mxfp4") else (_TAIL, _BIASED)
            for case in few:
                if config in ("split", "ordered-deep") and case is _TAIL:
                    continue
                try:
                    _emulate(case, SMALL[config], 1, seed, kernel)
                except (EmulationError, AssertionError, TypeError, IndexError):
                    return
    pytest.fail("no case, config or seed caught it")


COMPILED = {
    "mxfp4": (
        Case("cmxfp4", (3,) * 8, n=256, k=512, group="mxfp4"),
        Config(16, 128, 2, 128, 9, "mxfp4", 32, ordered=True),
    ),
    "mxfp4-pairs": (
        Case("cmxfp4-pairs", (1,) * 256, n=256, k=512, group="mxfp4", bias=True),
        Config(64, 128, 2, 128, 5, "mxfp4", 64, ordered=True),
    ),
    "mxfp4-tails": (
        Case("cmxfp4-256", (1,) * 256, n=256, k=512, group="mxfp4", bias=True),
        Config(64, 128, 2, 128, 5, "mxfp4", 32, store_parts=2, tails=True, ordered=True),
    ),
    "mxfp4-deep": (
        Case("cmxfp4-300", (1,) * 300, n=256, k=512, group="mxfp4", dtype=FP16),
        Config(16, 128, 2, 256, 4, "mxfp4", 32, ordered=True),
    ),
    "mxfp4-prefill": (
        Case("cmxfp4-prefill", (1,) * 256, n=256, k=512, group="mxfp4", bias=True),
        Config(128, 128, 2, 128, 4, "mxfp4", 32, ordered=True, store_parts=4),
    ),
    "decode": (Case("c", (3,) * 8, n=256, k=512), Config(16, 128, 2, 128, 9)),
    "four": (Case("c32z", (3,) * 8, n=256, k=512, group=32, zeros=True), Config(16, 64, 4, 128, 9)),
    "middle": (Case("cbias", (3,) * 256, n=256, k=512, bias=True), Config(64, 128, 2, 128, 5)),
    "tails": (
        Case("ctails", (3,) * 8, n=256, k=512, zeros=True),
        Config(64, 128, 2, 128, 5, store_parts=2, tails=True),
    ),
    "ordered-deep": (
        Case("cordered32", (1,) * 300, n=256, k=512, group=32),
        Config(16, 128, 2, 256, 4, "fused", ordered=True),
    ),
    "ordered-tails": (
        Case("cordered64", (1,) * 256, n=256, k=512, group=64, bias=True),
        Config(64, 128, 2, 128, 5, "fused", store_parts=2, tails=True, ordered=True),
    ),
    "ordered-prefill": (
        Case("cordered256", (1,) * 256, n=256, k=512, bias=True),
        Config(128, 128, 2, 128, 4, "fused", slab=32, ordered=True, store_parts=4),
    ),
    "tails-four": (Case("ctails4", (3,) * 8, n=256, k=512), Config(32, 64, 4, 128, 8, store_parts=2, tails=True)),
    "many": (Case("c32z512", (1,) * 300, n=256, k=512, group=32, zeros=True), Config(16, 64, 2, 256, 7)),
    "prefill": (
        Case("cfp16", (3,) * 8, n=256, k=512, group=64, zeros=True, dtype=FP16),
        Config(128, 128, 2, 128, 4, "weight", slab=32, store_parts=4),
    ),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_wgmma_and_tma(name: str) -> None:
    case, config = COMPILED[name]
    operands = cases.make(case)
    problem = replace(cases.problem_of(case, operands), device_type="cuda", group_sizes=None)
    with compile_only(90) as kernels:
        BACKEND.run(problem, operands, config, cases.poisoned_out(case))
    (used,) = (aot.resources(kernel, 90) for kernel in kernels)
    assert used.fits and used.smem_bytes <= config.smem_bytes(problem), used
    assert used.spills <= aot.most_spills(0, 5), used
    assert not used.spills or aot.spills_in_loops(kernels[0], "HGMMA") == 0, used
    assert used.opcodes["HGMMA"] and used.opcodes["UTMALDG"] and used.opcodes["UTMASTG"], used
    # Operands come from registers, words by ldmatrix, and nothing rearranges them on the way: permutations are those of
    # zero points, of the plan of many groups and of stores; one for two bytes would be twice as many as allowed.
    assert ", {" in next(line for line in used.ptx.splitlines() if "wgmma.mma_async" in line)
    assert used.opcodes["SHFL"] < 40
    allowed = config.block_n * config.block_k // 1024
    if config.scale == "mxfp4":
        allowed *= 3 if config.tails else 2  # and one for each scale, to take it out of its word
    assert used.opcodes["PRMT"] < allowed, used.opcodes
    assert used.opcodes["LDSM"] >= config.block_n * config.block_k // 2 // 4 // 128 // 4, used.opcodes
    assert aot.ptxas_warnings(used) == []
    assert overwritten_operands(kernels[0]) == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("odd n", (8, 8), n=37, k=128), "16 bytes"),
        (Case("columns", (8, 8), n=64, k=128, storage="columns"), "contiguous K"),
        (Case("part", (8, 8), n=64, k=128, storage="part"), "16 bytes"),
        (Case("groups", (1,) * 600, n=8, k=64, group=64), "600"),
    ],
    ids=lambda x: str(x) if isinstance(x, Case) else "",
)
def test_refusals_say_why(case: Case, words: str) -> None:
    reason = BACKEND.supports(cases.problem_of(case, cases.make(case)), H200)
    assert reason is not None and words in reason


def test_only_hopper() -> None:
    for name in ("a100", "rtx 4090", "b200"):
        assert "9.0" in (BACKEND.supports(of_shape(8, 16, 64, 128), Device.by_name(name)) or "")


def test_tiles_follow_the_rows() -> None:
    few = BACKEND.configs(of_shape(1, 16, 4096, 7168), H200)[0]
    assert few.block_m <= 16 and few.split_k * -(-4096 // few.block_n) >= 60
    decode = BACKEND.configs(of_shape(128, 8, 1536, 2048), H200)[0]
    assert (decode.block_m <= 16 or (decode.block_m == 32 and decode.tails)) and decode.split_k == 1
    many = BACKEND.configs(of_shape(8, 2048, 14336, 4096), H200)[0]
    assert many.block_m >= 128 and many.split_k == 1


@pytest.mark.parametrize("group", [32, 64, 128, 2048])
@pytest.mark.parametrize("groups", [1, 128, 512])
def test_every_config_fits(groups: int, group: int) -> None:
    problem = replace(of_shape(groups, 64, 1536, 2048, group, True), out_dtype=FP32)
    configs = BACKEND.configs(problem, H200)
    assert {c.block_m for c in configs} >= {8, 16, 32, 64, 128}
    for config in configs:
        assert config.smem_bytes(problem) <= H200.smem_bytes


def test_sums_of_many_groups_of_k_leave_no_registers() -> None:
    """Four sums of 16 x 128 and the plan of 300 groups would spill: the weights are scaled instead."""
    problem = of_shape(300, 8, 1536, 2048, 64, True)
    assert Config(16, 128, 2, 256, 5).registers(problem) > 240
    deep = [c for c in BACKEND.configs(problem, H200) if (c.block_m, c.cols, c.block_k) == (16, 128, 256)]
    assert deep and {c.scale for c in deep} == {"weight"}


@pytest.mark.parametrize("fields", [{"store_parts": 1}, {"block_m": 8, "store_parts": 2}], ids=str)
def test_half_tiles_need_parts_to_store(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="store_parts"):
        Config(tails=True, **fields)
