"""gluon_hopper without a GPU: what it accepts, what it compiles to, its numbers and synchronisation in an emulator."""

import dataclasses
from pathlib import Path

import pytest
import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import _gluon_kernel, _gluon_launch
from expertile.ops.grouped_mm.backends.gluon_hopper import BACKEND, Config
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.hopper.limits import storable
from tests.ops.grouped_mm import cases
from tests.ops.grouped_mm.cases import Case
from tests.support import aot, gluon_emulator
from tests.support.fake_driver import compile_only
from tests.support.mutants import Fault, before, planted

H200, H100 = Device.by_name("h200"), Device.by_name("h100 sxm")
M, K, B = Layout.RAGGED_M, Layout.RAGGED_K, Layout.BATCHED

# Small tiles, few stages: many trips around the ring for little work.
SMALL = {
    "split": Config(128, 64, 64, 3, "split", 2, 1, 1),
    "split, stored in parts": Config(128, 128, 64, 2, "split", 2, 2, 1),
    "split, two buffers": Config(256, 128, 64, 2, "split", 2, 2, 2),
    "split, short steps": Config(128, 64, 32, 5, "split", 2, 1, 1, lag=2),
    "cooperative": Config(128, 64, 64, 2, "cooperative", 2, 1, 1),
    "cooperative, 64 rows": Config(64, 128, 64, 4, "cooperative", 3, 2, 2),
    "split, buffers in turn": Config(128, 64, 64, 2, "split", 2, 1, 2),
    "pingpong": Config(128, 64, 64, 3, "pingpong", 2, 1, 1),
    "pingpong, buffers in turn": Config(128, 64, 64, 2, "pingpong", 2, 1, 2),
    "pingpong, 64 rows": Config(64, 128, 64, 2, "pingpong", 2, 2, 1),
    "split, dynamic": Config(128, 64, 64, 3, "split", 2, 1, 1, dynamic=True),
    "cooperative, dynamic": Config(64, 128, 64, 4, "cooperative", 3, 2, 2, dynamic=True),
    "pingpong, dynamic": Config(64, 64, 64, 3, "pingpong", 2, 1, 2, dynamic=True),
    "cooperative, small M": Config(64, 128, 64, 3, "cooperative", 3, 1, 1, small_m=True),
    "pingpong, small M": Config(64, 64, 64, 3, "pingpong", 2, 1, 1, small_m=True),
}

# Several tiles for each of several programs, and every edge: empty groups, part tiles, rows past the end.
MANY_TILES = (
    Case("m-tiles", M, (100, 0, 130, 64, 1, 300), n=200, k=264, past=9),
    Case("m-tiles-kn-bias", M, (37, 5, 260), n=136, k=128, b_storage="row", bias=True),
    Case("b-tiles-a-column-fp16", B, (0, 0), m=152, n=128, k=72, a_storage="column", dtype=torch.float16),
    Case("m-many-groups", M, tuple(g % 3 for g in range(130)), n=64, k=64),
    Case("k-tiles", K, (100, 0, 70, 1), m=136, n=200, past=5, a_storage="column", b_storage="row"),
    Case("b-tiles", B, (0, 0), m=150, n=136, k=136, b_storage="row"),
)


def _problem(case: Case) -> tuple[Problem, Operands]:
    operands = Operands(*cases.make(case))
    return Problem.from_tensors(*dataclasses.astuple(operands), out_dtype=case.out_dtype), operands


def _emulate(case: Case, config: Config, programs: int, seed: int, kernel=_gluon_kernel.grouped_mm_kernel) -> None:
    """Run one case in the emulator and check its result."""
    problem, operands = _problem(case)
    out = cases.poisoned_out(case)
    launch, _, *given = _gluon_launch.prepared(problem, operands, config, out)
    args, options = launch.arguments(*given), dict(launch.options)
    gluon_emulator.run(kernel, programs, args, options, seed)
    if config.dynamic and programs == 1:  # of several, emulated, all but one stop early
        assert given[1][-1] == 0
    a, b, offs, bias = dataclasses.astuple(operands)
    cases.check(case, out, cases.expected(case, a, b, offs, bias))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_right_in_any_order(case: Case, name: str) -> None:
    for seed in range(1 if "dynamic" in name else 3):
        _emulate(case, SMALL[name], programs=2 + seed % 2, seed=seed)


@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_a_counter_is_left_at_zero(case: Case) -> None:
    _emulate(case, SMALL["split, dynamic"], programs=1, seed=0)


@pytest.mark.parametrize("name", ["split", "cooperative, 64 rows", "pingpong, buffers in turn"])
def test_adds_to_what_stands_in_out(name: str) -> None:
    """Empty groups add nothing, part tiles nothing past their edge."""
    case = dataclasses.replace(next(c for c in MANY_TILES if c.layout is K), out_dtype=torch.float32)
    problem, operands = _problem(case)
    before = torch.randn(problem.out_shape)
    out = before.clone()
    launch, _, *given = _gluon_launch.prepared(problem, operands, SMALL[name], out, add=True)
    gluon_emulator.run(_gluon_kernel.grouped_mm_kernel, 2, launch.arguments(*given), dict(launch.options))
    cases.check(case, out, before + cases.expected(case, *dataclasses.astuple(operands)))


@pytest.mark.parametrize("case", [c for c in cases.CASES if BACKEND.supports(_problem(c)[0], H200) is None], ids=str)
def test_shared_cases(case: Case) -> None:
    problem, operands = _problem(case)
    out = cases.poisoned_out(case)
    if out.numel() and problem.k:
        _emulate(case, BACKEND.configs(problem, H200)[0], programs=2, seed=0)
    else:
        BACKEND.run(problem, operands, BACKEND.configs(problem, H200)[0], out)
        cases.check(case, out, cases.expected(case, *cases.make(case)))


_ARRIVE = "mbarrier.arrive(_.empty.index(_), ...)"
_WAIT = "warpgroup_mma_wait(0, ...)"
MUTANTS = {
    "a stage is freed before its wgmma is done": Fault("multiply_rest", _ARRIVE, before(_WAIT), nth=-1),
    "no fence before the TMA store": Fault("store_tile", "fence_async_shared()"),
    "the producer starts on phase 0": Fault("produce", "a_ = 1", "a_ = 0"),
    "a consumer mistakes its phase": Fault("_multiply", "_ // _.STAGES & 1", "0"),
    "a skipping consumer keeps the stages": Fault("skip", _ARRIVE),
    "the other consumer's steps are not counted": Fault(
        "_consumer_pingpong", "steps_of(_, _k_length(...))", "0 * all_", nth=...
    ),
    "an empty group has no step": Fault("steps_of", "gl.maximum(k_, 1)", "k_"),
    "a tile is stored where the next one belongs": Fault(
        "_consumer_split", "_store(p_, a_, place, ...)", "_store(p_, a_, next_place, ...)"
    ),
    "the ordered barrier is not arrived at": Fault("multiply_rest", "mbarrier.arrive(_.order.index(_), ...)"),
    "one row too many is stored": Fault("store_tile", "WRAP - (a_ - b_)", "all_ - 1"),
    "a store's buffer is reused at once": Fault("_store", "tma.store_wait(_)", "tma.store_wait(8)"),
    "the buffers are not used in turn": Fault("_store", "(_ * _.STORE_PARTS + s_) % c_", "s_ % c_"),
    "the accumulator is read early": Fault("multiply_rest", _WAIT),
    "expected bytes leave out b": Fault("_fill", "mbarrier.expect(b_, a_ + _)", "mbarrier.expect(b_, a_)"),
    "boxes without rows are loaded": Fault("_fill", "_load(..., _ < _)", "_load(..., True)"),
    "boxes without rows are expected": Fault(
        "_fill", "mbarrier.expect(..., pred=_ == c_)", "mbarrier.expect(..., pred=c_ == BOXES)"
    ),
    "a box of rows is left out": Fault("_fill", "(a_ + p_.A_BOX - 1) // p_.A_BOX", "a_ // p_.A_BOX"),
    "every box has the first one's rows": Fault("_fill", "r_ + _ * _.A_BOX", "r_"),
    "boxes lie on one another": Fault("_fill", "p_.a_boxes.index(a_ + _)", "p_.a_boxes.index(a_)"),
    "tiles are looked up one too far": Fault("locate", "e_.tile_ends <= t_", "e_.tile_ends < t_"),
    "a thin band is cut off": Fault("_raster", "gl.maximum(gl.minimum(h_, _), 1)", "h_"),
    "K runs into the next group": Fault("_load", "WRAP - a_ + b_", "WRAP - a_ - 1 + b_"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant must fail some case, config and seed: the emulator and the cases can see that fault."""
    (kernel,) = planted([_gluon_kernel.grouped_mm_kernel], MUTANTS[name], tmp_path, monkeypatch)
    for seed in range(6):
        for config in SMALL.values():
            for case in (MANY_TILES[0], MANY_TILES[4]):
                try:
                    _emulate(case, config, programs=2, seed=seed, kernel=kernel)
                except (gluon_emulator.EmulationError, AssertionError, ZeroDivisionError):
                    return
    pytest.fail("no case, config or seed caught it")


COMPILED = {
    "m": Case("m", M, (100, 28), n=512, k=256),
    "m-kn": Case("m-kn", M, (100, 28), n=512, k=256, b_storage="row"),
    "m-512-groups-bias": Case("m-512", M, (1,) * 512, n=256, k=64, bias=True),
    "m-fp32-out": Case("m-fp32", M, (100, 28), n=512, k=256, out_dtype=torch.float32),
    "k": Case("k", K, (100, 28), m=512, n=512, a_storage="column", b_storage="row"),
    "b-fp16": Case("b", B, (0, 0), m=256, n=512, k=256, dtype=torch.float16),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_wgmma_and_tma(name: str) -> None:
    problem, operands = _problem(COMPILED[name])
    configs = BACKEND.configs(problem, H200)
    assert configs
    turn = list(COMPILED).index(name)
    configs = configs[turn % 3 :: 3] if turn else configs
    # The order of tiles is one division by a constant: of configs that differ in it alone, one is compiled.
    configs = tuple({dataclasses.replace(c, group_m=1): c for c in configs}.values())
    # The first case meets every config; the others meet every second one of a third, in turn.
    for config in configs[turn % 2 :: 2] if turn else configs:
        with compile_only(90) as kernels:
            launch, *given = _gluon_launch.prepared(problem, operands, config, cases.poisoned_out(COMPILED[name]))
            launch.run(*given)
        (kernel,) = kernels
        used = aot.resources(kernel, 90)
        estimate = config.smem_bytes(problem.dtype.itemsize, problem.out_dtype.itemsize)
        assert used.fits and used.smem_bytes <= estimate, (config, used)
        # The longest plan takes two registers more than a consumer that draws has, outside of the loop over K.
        few = 2 if problem.groups > 256 else 0
        assert used.spills <= (few if config.dynamic else aot.most_spills(0, few)), (config, used)
        assert used.opcodes["HGMMA"] and used.opcodes["UTMALDG"] and used.opcodes["UTMASTG"], (config, used)
        assert aot.ptxas_warnings(used) == [], config


@pytest.mark.compile
def test_adding_is_done_by_tma() -> None:
    problem, operands = _problem(dataclasses.replace(COMPILED["k"], out_dtype=torch.float32))
    config = BACKEND.configs(problem, H200)[0]
    with compile_only(90) as kernels:
        out = torch.zeros(problem.out_shape)
        launch, *given = _gluon_launch.prepared(problem, operands, config, out, add=True)
        launch.run(*given)
    used = aot.resources(kernels[0], 90)
    assert used.fits and used.spills == 0 and used.opcodes["UTMAREDG"] and not used.opcodes["UTMASTG"], config


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("odd n", M, (8, 8), n=37, k=64), "16 bytes"),
        (Case("odd k", M, (8, 8), n=64, k=37), "16 bytes"),
        (Case("shifted", M, (8, 8), n=64, k=64, a_storage="shifted"), "base addresses"),
        (Case("steps", M, (8, 8), n=64, k=64, b_storage="step"), "one contiguous dimension"),
        (Case("expanded", M, (8, 8), n=64, k=64, a_storage="expanded"), "positive"),
        (Case("fp32", M, (8, 8), n=64, k=64, dtype=torch.float32), "not torch.float32"),
        (Case("n", Layout.RAGGED_N, (8, 8), m=64, k=64), "ragged last dimension"),
        (Case("k rows", K, (8, 8), m=64, n=64, a_storage="row", b_storage="row"), "a ragged k"),
    ],
    ids=lambda x: str(x) if isinstance(x, Case) else "",
)
def test_refusals_say_why(case: Case, words: str) -> None:
    reason = BACKEND.supports(_problem(case)[0], H200)
    assert reason is not None and words in reason


def test_only_hopper() -> None:
    problem = _problem(COMPILED["m"])[0]
    for name in ("a100", "rtx 4090", "b200"):
        assert "9.0" in (BACKEND.supports(problem, Device.by_name(name)) or "")


def test_short_loads_are_offered_where_groups_are_short() -> None:
    def offered(case: Case) -> list[Config]:
        problem = _problem(case)[0]
        return [c for c in BACKEND.configs(problem, H200) if c.small_m]

    assert offered(Case("decode", M, (1,) * 128, n=512, k=256))
    assert not offered(Case("prefill", M, (100, 100), n=512, k=256))
    assert not offered(Case("batched", B, (0, 0), m=16, n=512, k=256))
    # Rows of a that lie the other way round, or all have, come in one box of a tile.
    problem, _ = _problem(Case("b", B, (0, 0), m=128, n=512, k=256))
    config = Config(64, 128, 64, 4, "cooperative", small_m=True)
    assert _gluon_launch._launch(problem, config, (65536, 512, 1), None, -1).blocks[0].box == (1, 64, 64)


@pytest.mark.parametrize("wrong", [{"mode": "split"}, {"block_m": 128}, {"block_k": 128}], ids=str)
def test_short_loads_need_their_tile(wrong) -> None:
    with pytest.raises(ValueError, match="small_m: expected block_m 64, block_k 64"):
        Config(**{"block_m": 64, "block_k": 64, "mode": "pingpong", "small_m": True, **wrong})


def test_short_groups_get_short_tiles() -> None:
    cases_of = (Case("decode", M, (1,) * 128, n=512, k=256), Case("prefill", M, (4096, 4096), n=1024, k=256))
    decode, prefill = (BACKEND.configs(_problem(case)[0], H200)[0] for case in cases_of)
    assert decode.block_m == 64 and decode.small_m
    assert prefill.block_m == 128


@pytest.mark.parametrize(
    ("groups", "rows", "k", "n", "mode", "tile"),
    [
        (1, 175, 1536, 7168, "split", (128, 128)),  # 112 tiles of 128x128 for 132 multiprocessors
        (2, 320, 16384, 1024, "cooperative", (64, 128)),  # 48
        (3, 58, 3072, 1024, "cooperative", (64, 128)),  # 24
        (8, 96, 2048, 1536, "split", (128, 128)),  # 96
        (8, 256, 2048, 1536, "cooperative", (128, 256)),  # 192
        (8, 128, 4096, 2048, "cooperative", (128, 256)),  # 128, but reading the weights takes longer
    ],
)
def test_few_tiles_are_small(groups, rows, k, n, mode, tile) -> None:
    config = BACKEND.configs(_problem(Case("few", M, (rows,) * groups, n=n, k=k))[0], H200)[0]
    assert (config.mode, (config.block_m, config.block_n)) == (mode, tile)


def test_weight_gradients_of_small_groups_have_a_dynamic_scheduler() -> None:
    """They are little but stores: in turn from a counter they stay side by side in memory."""
    short, long = (
        Problem(
            K,
            groups=128,
            m=4096,
            n=2048,
            k=128 * rows,
            dtype=torch.bfloat16,
            out_dtype=torch.bfloat16,
            a_strides=(1, 4096),
            b_strides=(2048, 1),
            device_type="cuda",
        )
        for rows in (64, 2048)
    )
    assert BACKEND.configs(short, H200)[0].dynamic and not BACKEND.configs(long, H200)[0].dynamic


def _wgrad(groups: int, rows: int, m: int, n: int, device: Device = H200) -> Config:
    problem = Problem(
        K,
        groups=groups,
        m=m,
        n=n,
        k=groups * rows,
        dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
        a_strides=(1, m),
        b_strides=(n, 1),
        device_type="cuda",
    )
    return BACKEND.configs(problem, device)[0]


def test_weight_gradients_of_small_groups_get_small_tiles() -> None:
    """Too few tiles for a dynamic scheduler: from 128 rows a group down each consumer stores its half of 128x128."""
    expected = ((4, "split", 128), (128, "split", 128), (256, "pingpong", 128), (512, "pingpong", 128))
    for rows, mode, width in expected:
        config = _wgrad(8, rows, 1024, 4096)
        assert (config.mode, config.block_n) == (mode, width)
    wide = _wgrad(8, 512, 4096, 2048)
    assert (wide.mode, wide.block_n) == ("cooperative", 256)


def test_rows_that_begin_anywhere_get_the_tile_with_the_fewest_loads() -> None:
    def default(sizes: tuple[int, ...], k: int, n: int) -> tuple[int, int]:
        config = BACKEND.configs(_problem(Case("unaligned", M, sizes, n=n, k=k))[0], H200)[0]
        return config.block_m, config.block_n

    assert default((800,) * 16, 1000, 1496) == (128, 256)
    assert default((800,) * 16, 1024, 1536) != (128, 256)
    assert default((400,), 1000, 1496) == (64, 128), "84 tiles: all side by side"
    assert default((16,) * 8, 1000, 1496) == (64, 128) and _wgrad(32, 1024, 1496, 1000).block_n == 256


def test_groups_of_a_few_hundred_rows_get_low_tiles() -> None:
    """Half as many rows to spare; but not where 256 columns are too many, stores show, or tiles are few."""

    def default(groups: int, rows: int, k: int, n: int) -> Config:
        problem = Problem(
            M,
            groups=groups,
            m=groups * rows,
            n=n,
            k=k,
            dtype=torch.bfloat16,
            out_dtype=torch.bfloat16,
            a_strides=(k, 1),
            b_strides=(n * k, 1, k),
            device_type="cuda",
        )
        return BACKEND.configs(problem, H200)[0]

    shapes = ((32, 256, 4096, 14336), (128, 600, 1024, 2048), (8, 2048, 4096, 4096), (1, 553, 4096, 7168))
    low = [default(*shape) for shape in shapes]
    assert {(c.block_m, c.block_n, c.mode) for c in low} == {(64, 256, "pingpong")}
    high = [
        default(*shape)
        for shape in ((128, 256, 4096, 1408), (32, 256, 512, 14336), (32, 2048, 1024, 4096), (8, 256, 1024, 4096))
    ]
    assert {c.block_m for c in high} == {128}


def test_small_groups_have_a_dynamic_scheduler_where_there_are_many_waves() -> None:
    many, few = (_problem(Case("", M, (128,) * groups, n=1536, k=64))[0] for groups in (128, 32))
    assert BACKEND.configs(many, H200)[0].dynamic and not BACKEND.configs(few, H200)[0].dynamic


@pytest.mark.parametrize(
    ("groups", "rows", "k", "n", "wide"),
    [
        (128, 2048, 2048, 4096, True),  # 9.2 ms in 128x128 at the power limit, 6.0 to 6.5 in 128x256
        (32, 16, 4096, 2048, False),
        (4, 256, 1024, 1024, False),  # not a wave of wide tiles
    ],
)
def test_an_h100_has_wide_tiles_where_an_h200_has_others(groups, rows, k, n, wide) -> None:
    made = _problem(Case("x", M, (8,) * 2, n=256, k=256))[0]
    problem = dataclasses.replace(made, groups=groups, m=groups * rows, n=n, k=k, group_sizes=None)
    h200, h100 = (BACKEND.configs(problem, device)[0] for device in (H200, H100))
    assert ((h100.block_m, h100.block_n, h100.mode) == (128, 256, "cooperative")) == wide
    assert wide == (h100 != h200)


def test_so_have_its_weight_gradients() -> None:
    assert _wgrad(8, 2048, 4096, 2048).mode == "pingpong"
    assert _wgrad(8, 2048, 4096, 2048, H100).block_n == 256
    assert _wgrad(8, 64, 512, 512, H100) == _wgrad(8, 64, 512, 512)


def test_the_default_comes_first_and_once() -> None:
    for case in cases.CASES:
        problem = _problem(case)[0]
        if BACKEND.supports(problem, H200) is None:
            configs = BACKEND.configs(problem, H200)
            assert len(configs) == len(set(configs))
            sizes = problem.dtype.itemsize, problem.out_dtype.itemsize
            assert all(c.smem_bytes(*sizes) <= H200.smem_bytes for c in configs)


def test_output_that_tma_cannot_write() -> None:
    assert storable(torch.empty(4, 64, dtype=torch.bfloat16))
    assert storable(torch.empty(4, 128, dtype=torch.bfloat16)[:, :64])
    assert not storable(torch.empty(4, 67, dtype=torch.bfloat16)[:, :64])
    assert not storable(torch.empty(64, 4, dtype=torch.bfloat16).t())
