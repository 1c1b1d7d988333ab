"""gluon_gather without a GPU: what it accepts, what it compiles to, its numbers and synchronisation in an emulator."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backends import _gluon_kernel, gluon_gather
from expertile.ops.gathered_mm.backends.gluon_gather import _DECODE, BACKEND, Config
from expertile.ops.gathered_mm.problem import GatherProblem
from tests.ops.gathered_mm import cases
from tests.ops.gathered_mm.cases import BACKWARD, GATED, MM, WGRAD, Case
from tests.support import aot, gluon_emulator
from tests.support.fake_driver import compile_only
from tests.support.mutants import Fault, before, planted

H200 = Device.by_name("h200")

# Small tiles, few stages: many trips around the ring for little work.
SMALL = (
    Config(64, 64, 64, num_stages=3, group_m=2, store_slots=2),
    Config(64, 64, 32, num_stages=2, group_m=8, store_parts=2, store_slots=1),
    Config(64, 128, 64, num_stages=2, group_m=1, store_slots=3, dynamic=True),
    Config(64, 32, 64, num_stages=3, group_m=2, store_slots=2, masked=True),
)
SPLIT = (
    Config(128, 64, 64, num_stages=3, group_m=2, store_slots=1, split=True),
    Config(128, 128, 32, num_stages=2, group_m=1, store_parts=4, store_slots=2, split=True, dynamic=True),
)

# Several tiles for each of several programs, and every edge: empty groups, part tiles, rows past the end.
MANY_TILES = (
    Case("halves", GATED, (100, 0, 70, 1, 64), n=104, k=136, past=9),
    Case("halves-no-pre", GATED, (70, 3, 130), n=72, k=64, save_pre=False, bias=True),
    Case("interleaved", GATED, (66, 0, 130), n=104, k=72, interleaved=True, bias=True, dtype=torch.float16),
    Case("interleaved-kn", GATED, (66, 0, 130), n=72, k=72, interleaved=True, storage="kn"),
    Case("interleaved-no-pre", GATED, (66, 0, 130), n=72, k=72, interleaved=True, bias=True, save_pre=False),
    Case("ordered", GATED, (66, 0, 130), n=104, k=72, interleaved=True, gathered="", past=5, storage="kn"),
    Case("mm", MM, (100, 0, 70, 1), n=136, k=136, past=3, bias=True, storage="kn"),
    Case("many-experts", MM, tuple(g % 3 for g in range(130)), n=64, k=64),
)
TAKEN = [c for c in cases.CASES if BACKEND.supports(cases.make(c)[0], H200) is None]


def _emulate(case: Case, config: Any, programs: int, seed: int, kernel: Any = None) -> None:
    """Run one case in the emulator and check its result."""
    problem, operands = cases.make(case, seed=seed)
    outputs = cases.poisoned_outputs(problem, operands)
    launch, _, tensors, pointers = gluon_gather.prepared(problem, operands, config, outputs)
    kernel = launch.kernel if kernel is None else kernel
    gluon_emulator.run(kernel, programs, launch.arguments(tensors, pointers), dict(launch.options), seed)
    if config.dynamic and programs == 1:  # of several, emulated, all but one stop early
        assert pointers[-1] == 0
    cases.check(case, operands, outputs)


@pytest.mark.parametrize("config", SMALL, ids=str)
@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_right_in_any_order(case: Case, config: Config) -> None:
    seed = SMALL.index(config)
    _emulate(case, config, programs=2 + seed % 2, seed=seed)


@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_a_counter_is_left_at_zero(case: Case) -> None:
    _emulate(case, next(c for c in SMALL if c.dynamic), programs=1, seed=0)


@pytest.mark.parametrize("config", SPLIT, ids=str)
@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_split_tiles_in_any_order(case: Case, config: Config) -> None:
    seed = SPLIT.index(config)
    _emulate(case, config, programs=2 + seed % 2, seed=seed)


@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_shared_cases(case: Case) -> None:
    for seed, config in enumerate((BACKEND.configs(cases.make(case)[0], H200)[0], SMALL[0])):
        _emulate(case, config, programs=2, seed=seed)


MUTANTS = {
    "a stage is freed before its wgmma is done": Fault(
        "multiply_rest", "mbarrier.arrive(_.empty.index(_), ...)", before("warpgroup_mma_wait(0, ...)"), nth=-1
    ),
    "no fence between cp.async and wgmma": Fault("_batch", '_.GATHERED != ""', "False"),
    "no fence before the TMA store": Fault("_store", "fence_async_shared()"),
    "the producers start on phase 0": Fault("produce_gathered", "a_ = 1", "a_ = 0", nth=...),
    "the producers do not wait for the stage": Fault("_fill_gathered", "mbarrier.wait(...)"),
    "copies are not reported": Fault(
        "_fill_gathered", "async_copy.mbarrier_arrive(b_, ...)", "mbarrier.arrive(b_, count=128)", nth=...
    ),
    "the rows of the tile before are loaded": Fault("produce_gathered", "token = next_token"),
    "K does not end": Fault("_fill_gathered", "a_ < b_", "a_ < b_ + 8"),
    "the last row's group is mistaken": Fault("_tokens", "gl.minimum(_, m_.M)", "m_.M + 8"),
    "rows without token are read": Fault("_fill_gathered", "a_ >= 0", "a_ >= -1"),
    "a consumer mistakes its phase": Fault("_multiply", "_ // _.STAGES & 1", "0"),
    "the other consumer's steps are not counted": Fault("_consumer_pingpong", "2 * steps_of(...)", "steps_of(p, p.K)"),
    "the ordered barrier is not arrived at": Fault("multiply_rest", "mbarrier.arrive(_.order.index(_), ...)"),
    "the pieces of a result lie on one another": Fault("_store", "a_ + _ * _", "a_", nth=...),
    "a store's buffer is reused at once": Fault("_buffer", "tma.store_wait(_)", "tma.store_wait(8)"),
    "one row too many is stored": Fault("_store", "[WRAP, a_, b_, HALF, c_]", "[WRAP, a_, b_ - 1, HALF, c_]"),
    "gate and up change places": [
        Fault("store_gated", "_store(..., 1)", "_store(..., 0)"),
        Fault("store_gated", "_store(..., 0)", "_store(..., 1)", nth=0),
    ],
    "the up columns are loaded from the gate": Fault("_load_b", "a_ // 2", "a_"),
    "bias of the wrong half": Fault("_biased_halves", "a_ // b_ * _", "a_ // b_ * b_"),
    "gate and up change places in pairs": Fault("_store_pairs", "unpair(a_, b_)", "unpair(b_, a_)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant must fail some case, config and seed: the emulator and the cases can see that fault."""
    (kernel,) = planted([_gluon_kernel.gathered_mm_kernel], MUTANTS[name], tmp_path, monkeypatch)
    for seed in range(4):
        for case in MANY_TILES[:3]:
            try:
                _emulate(case, SMALL[seed % len(SMALL)], programs=2, seed=seed, kernel=kernel)
            except (gluon_emulator.EmulationError, AssertionError, IndexError):
                return
    pytest.fail("no case, config or seed caught it")


COMPILED = {
    "halves, 128 experts": Case("halves", GATED, (4,) * 128, n=256, k=128),
    "interleaved, gpt-oss": Case(
        "inter", GATED, (512,) * 4, n=256, k=128, interleaved=True, bias=True, activation="gpt_oss"
    ),
    "mm, ordered, 512 experts": Case(
        "mm", MM, (1,) * 512, n=256, k=128, gathered="", storage="kn", dtype=torch.float16
    ),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_wgmma_and_copies(name: str) -> None:
    case = COMPILED[name]
    problem, operands = cases.make(case)
    # The larger tile has the fewer registers to spare; many short groups take the smaller one.
    config = max(BACKEND.configs(problem, H200), key=lambda c: c.block_m * (case.product is not MM))
    outputs = cases.poisoned_outputs(problem, operands)
    launch, _, tensors, pointers = gluon_gather.prepared(problem, operands, config, outputs)
    with compile_only(90) as kernels:
        launch.kernel[(132,)](*launch.arguments(tensors, pointers), **dict(launch.options))
    (kernel,) = kernels
    used = aot.resources(kernel, 90)
    assert used.fits and used.smem_bytes <= config.smem_bytes, used
    allowed = 8 if case.interleaved else 2
    assert used.spills <= aot.most_spills(4 * case.interleaved, allowed), used
    assert not used.spills or aot.spills_in_loops(kernel, "HGMMA") == 0, used
    assert used.opcodes["HGMMA"] and used.opcodes["UTMALDG"] and used.opcodes["UTMASTG"], used
    # 16 bytes a thread: rows of one step over 128 threads, for a tile's first step and the others.
    places = 2 if case.gathered else 0
    copies = places * config.block_m * config.block_k // 8 // 128
    assert used.opcodes["LDGSTS"] == copies, used
    assert aot.ptxas_warnings(used) == []


@pytest.mark.compile
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("height", "dynamic", "spills"), [(128, True, 8), (64, False, 24)])
def test_wide_tiles_fit_the_registers(height: int, dynamic: bool, spills: int, interleaved: bool) -> None:
    """Half a tile of 128x256, or all of 64x256, is 128 registers of every thread: what the epilogue spills is little,
    and the loop over K nothing. gpt-oss's formula with a bias and pairs spills more, and takes 2 to 5 % longer."""
    form = {"interleaved": True, "bias": True, "activation": "gpt_oss"} if interleaved else {}
    problem, operands = cases.make(Case("wide", GATED, (4,) * 128, n=256, k=128, **form))
    wanted = (height, 256, dynamic)
    config = next(c for c in BACKEND.configs(problem, H200) if (c.block_m, c.block_n, c.dynamic) == wanted)
    outputs = cases.poisoned_outputs(problem, operands)
    launch, _, tensors, pointers = gluon_gather.prepared(problem, operands, config, outputs)
    with compile_only(90) as kernels:
        launch.kernel[(132,)](*launch.arguments(tensors, pointers), **dict(launch.options))
    used = aot.resources(kernels[0], 90)
    assert used.fits and used.smem_bytes <= config.smem_bytes, used
    assert used.spills <= spills + 256 * interleaved and aot.spills_in_loops(kernels[0], "HGMMA") == 0, used
    assert aot.ptxas_warnings(used) == []
    # Only tiles for few rows come early, and let others.
    assert not kernels[0].metadata.launch_pdl and "griddepcontrol" not in used.ptx


def test_refusals_say_why() -> None:
    problem, _ = cases.make(Case("x", GATED, (8, 8), n=32, k=64))
    assert BACKEND.supports(problem, H200) is None

    def reason(**changes: Any) -> str:
        return BACKEND.supports(dataclasses.replace(problem, **changes), H200) or ""

    assert "9.0" in (BACKEND.supports(problem, Device.by_name("a100")) or "")
    assert "not torch.float32" in reason(dtype=torch.float32)
    assert "1024 experts" in reason(groups=1025)
    assert "multiple of 8" in reason(k=60)
    assert "base addresses" in reason(a_aligned=False)
    assert "rows of a" in reason(a_strides=(66, 1))
    assert "[E, 2I, K]" in reason(b_strides=(64 * 64, 64, 1))
    assert "stride 1" in reason(b_strides=(64 * 64, 128, 2))
    assert "16-byte multiples" in reason(b_strides=(64 * 64, 1, 66)) or "16 bytes" in reason(b_strides=(64 * 64, 1, 66))
    assert "rows of the result" in reason(n=40)
    wgrad, _ = cases.make(Case("w", WGRAD, (8, 8), n=32, k=64))
    assert "no weight gradients" in (BACKEND.supports(wgrad, H200) or "")
    back, _ = cases.make(Case("b", BACKWARD, (8, 8), n=32, k=64))
    assert "no backward pass" in (BACKEND.supports(back, H200) or "")


def test_short_groups_get_short_tiles() -> None:
    decode, _ = cases.make(Case("decode", GATED, (1,) * 16, n=32, k=64))
    prefill = dataclasses.replace(decode, m=16 * 2048)
    assert BACKEND.configs(decode, H200)[0].block_m == 64
    assert BACKEND.configs(prefill, H200)[0].block_m == 128
    assert all(c.smem_bytes <= H200.smem_bytes for c in BACKEND.configs(prefill, H200))
    # Many wide tiles have a dynamic scheduler; few, or rows in order, do not.
    wide = dataclasses.replace(prefill, n=2048, m=16 * 8192)
    assert BACKEND.configs(wide, H200)[0].dynamic and BACKEND.configs(wide, H200)[0].split
    few = BACKEND.configs(dataclasses.replace(wide, product=MM, groups=2, m=2 * 8192), H200)[0]
    assert few.split and not few.dynamic
    assert not BACKEND.configs(dataclasses.replace(wide, gathered=""), H200)[0].split


@pytest.mark.parametrize(
    "rows, experts, n, k, tile",
    [
        (2048, 128, 2048, 4096, (64, 256)),  # 7.48 ms on an H200, 7.73 with 128x256
        (256, 128, 5760, 2880, (64, 256)),  # 2.42, 2.52, and 3.16 with 64x128
        (1536, 128, 512, 1536, (64, 256)),
        (4096, 32, 5760, 2880, (128, 256)),
        (8192, 32, 5760, 2880, (128, 256)),
        (2048, 128, 128, 2048, (128, 128)),  # half of a wide tile's columns would be empty
        (128, 128, 1536, 2048, (64, 256)),  # 0.24 ms, 0.36 with 128x128
        (32, 128, 1536, 2048, (64, 128)),  # limited by the weights' bytes
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_default_wastes_least(rows, experts, n, k, tile, interleaved) -> None:
    made, _ = cases.make(Case("up", GATED, (1,) * 16, n=32, k=64, interleaved=interleaved))
    sizes = {"groups": experts, "m": experts * rows, "n": n, "k": k, "tokens": experts * rows // 4}
    problem = dataclasses.replace(made, a_strides=(k, 1), b_strides=(n * k, 1, k), **sizes)
    chosen = BACKEND.configs(problem, H200)[0]
    assert (chosen.block_m, chosen.block_n) == tile
    # Where bytes from L2 cost more, the widest tile wins what was close and is not limited by the weights' bytes.
    wider = BACKEND.configs(problem, Device.by_name("h100 sxm"))[0]
    assert (wider.block_m, wider.block_n) == ((128, 256) if tile == (64, 256) and rows > 128 else tile)


@pytest.mark.parametrize(
    "tokens, experts, top_k, inner, hidden, width",
    [
        (1, 128, 8, 768, 2048, 32),
        (128, 128, 8, 768, 2048, 128),
        (1, 256, 8, 2048, 7168, 128),
        (1, 128, 4, 2880, 2880, 64),
    ],
)
def test_decode_tiles_keep_every_multiprocessor_reading(tokens, experts, top_k, inner, hidden, width) -> None:
    strides = (2 * inner * hidden, 1, hidden)
    problem = GatherProblem(
        GATED,
        experts,
        tokens * top_k,
        2 * inner,
        hidden,
        tokens,
        torch.bfloat16,
        (hidden, 1),
        strides,
        activation="swiglu",
    )
    offered = [c for c in BACKEND.configs(problem, H200) if c.masked]
    assert [c.block_n for c in offered] == [width]
    assert not any(c.masked for c in BACKEND.configs(dataclasses.replace(problem, m=experts * 100), H200))


@pytest.mark.compile
@pytest.mark.parametrize("config", _DECODE, ids=str)
def test_decode_tiles_compile(config: Config) -> None:
    problem, operands = cases.make(Case("halves", GATED, (4,) * 128, n=256, k=128, save_pre=False))
    outputs = cases.poisoned_outputs(problem, operands)
    launch, _, tensors, pointers = gluon_gather.prepared(problem, operands, config, outputs)
    with compile_only(90) as kernels:
        launch.kernel[(132,)](*launch.arguments(tensors, pointers), **dict(launch.options))
    used = aot.resources(kernels[0], 90)
    assert used.fits and used.smem_bytes <= config.smem_bytes, used
    assert used.spills == 0 and aot.ptxas_warnings(used) == [], used
    assert kernels[0].metadata.launch_pdl and "griddepcontrol.launch_dependents" in used.ptx
