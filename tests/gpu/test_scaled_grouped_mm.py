"""scaled_grouped_mm on a real GPU: every backend and config over the shared case table, and the public call."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from expertile.device import Device
from expertile.formats.fp8 import Fp8Blocks
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
from expertile.ops.scaled_grouped_mm.backends import BACKENDS, cuda_fp8, gluon_fp8
from expertile.ops.scaled_grouped_mm.problem import Recipe
from expertile.ragged import offs_from_sizes
from tests.ops.scaled_grouped_mm.cases import CASES, LARGE, Case, check, make, poisoned_out, problem_of
from tests.ops.scaled_grouped_mm.reference import reference

OURS = [b for b in BACKENDS if not b.peer and not b.reads_offs_on_host]
SIZES = [130, 0, 257, 64, 1]
G, K, N = len(SIZES), 640, 384
# Tiles 256 wide: the usual one, with K split, with one consumer.
WIDE = (gluon_fp8.Config(128, 256, 4), gluon_fp8.Config(128, 256, 3, split_k=2), gluon_fp8.Config(64, 256, 4))
CUDA = (*map(cuda_fp8.Config, (192, 256, 128), (4, 3, 5)), cuda_fp8.Config(32, 8, dynamic=False))
HOPPER = ((gluon_fp8.BACKEND, WIDE), (cuda_fp8.BACKEND, CUDA))


def run(backend, case: Case, which) -> int:
    """Run the configs that `which` picks from those of `backend`; how many there were."""
    device = Device.current()
    operands = make(case, "cuda")
    problem = problem_of(case, operands)
    if backend.supports(problem, device) is not None:
        return 0
    configs = which(backend.configs(problem, device))
    for config in configs:
        out = poisoned_out(case, "cuda")
        assert backend.run(problem, operands, config, out) is out
        try:
            check(case, out, operands)
        except AssertionError as e:
            raise AssertionError(f"{backend.name} {config}: {e}") from None
    return len(configs)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small(backend, case):
    if not run(backend, case, lambda configs: configs[:1]):
        pytest.skip(f"{backend.name} does not take this case")


@pytest.mark.parametrize("backend", OURS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("rows-past-the-end", "vector", "wgrad")], ids=str)
def test_every_config(backend, case):
    if not run(backend, case, lambda configs: configs[1:]):
        pytest.skip(f"{backend.name} does not take this case")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(backend, case):
    if not run(backend, case, lambda configs: configs[:1]):
        pytest.skip(f"{backend.name} does not take this case")


def sizes_of(rows_of_tiles: int) -> tuple[int, ...]:
    """Ragged groups, some empty, some of one row, that make up so many rows of tiles 128 high."""
    found, tiles, lengths = [], 0, cycle((1, 0, 128, 65, 129, 0, 64, 127, 300))
    while tiles < rows_of_tiles:
        rows = next(lengths)
        if tiles + -(-rows // 128) <= rows_of_tiles:
            found.append(rows)
            tiles += -(-rows // 128)
    return tuple(found)


@pytest.fixture
def hopper():
    if Device.current().capability != (9, 0):
        pytest.skip("gluon_fp8 and cuda_fp8 are for sm_90a")


@pytest.mark.parametrize("backend, wide", HOPPER, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("k", [16, 384, 656])
@pytest.mark.parametrize("waves", [0.1, 0.5, 0.6, 1.0, 1.05, 1.6, 2.0, 2.3])
def test_waves_of_wide_tiles(waves, k, backend, wide, hopper):
    """Last waves with narrow tiles and without, an odd and an even number of steps of K, columns that end in either
    half of a tile; groups without rows for one consumer or for both."""
    tiles = waves * Device.current().sm_count
    for n, bias in ((640, False), (776, True), (2048, False)):
        sizes = sizes_of(max(1, round(tiles / -(-n // 256))))
        case = Case(f"waves-{waves}-n{n}", Layout.RAGGED_M, Recipe.BLOCK, sizes, n=n, k=k, past=3, span=2)
        case = replace(case, bias=bias and backend is gluon_fp8.BACKEND)
        configs = [c for c in wide if getattr(c, "split_k", 1) <= -(-k // 128)]
        assert run(backend, case, lambda _, configs=configs: configs) == len(configs)


@pytest.mark.parametrize(("sizes", "n"), [((1501,), 3328), ((70, 0, 1400, 0), 3336)])
def test_a_last_wave_of_128_columns(sizes, n, hopper):
    """On 132 multiprocessors: 1.6 waves of 192 columns, the last columns of the last group in tiles of 128."""
    case = Case(f"narrow-n{n}", Layout.RAGGED_M, Recipe.BLOCK, sizes, n=n, k=656, past=3)
    configs = [cuda_fp8.Config(), cuda_fp8.Config(dynamic=False)]
    assert run(cuda_fp8.BACKEND, case, lambda _: configs) == 2


@pytest.mark.parametrize("case", [c for c in LARGE if c.out_dtype is torch.float32 or c.recipe is Recipe.ROW], ids=str)
def test_wide_tiles_of_every_recipe(case, hopper):
    assert run(gluon_fp8.BACKEND, case, lambda _: [gluon_fp8.Config(128, 256, 3)]) == 1


@pytest.mark.parametrize("backend, wide", HOPPER, ids=lambda x: getattr(x, "name", ""))
def test_wide_tiles_without_rows(backend, wide, hopper):
    """No consumer has a turn to take, in a graph that finds rows at its next replay."""
    *call, offs = operands()
    offs.zero_()
    options = {"backend": backend.name, "config": wide[0]}
    scaled_grouped_mm(*call, offs=offs, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_grouped_mm(*call, offs=offs, **options)
    for sizes in ([0] * G, SIZES, [0] * G, [0, 0, 0, 0, 452], [1] * G):
        offs.copy_(offs_from_sizes(sizes, "cuda"))
        graph.replay()
        if sum(sizes):
            close(out, reference(*call, offs))
    torch.cuda.synchronize()


def operands(sizes=SIZES, past=0):
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(sum(sizes) + past, K, device="cuda", generator=gen)
    w = torch.randn(len(sizes), N, K, device="cuda", generator=gen)
    a, b = Fp8Blocks.quantize(x), Fp8Blocks.quantize(w, (128, 128))
    return a.values, b.values.transpose(1, 2), a.scales, b.scales, offs_from_sizes(sizes, "cuda")


def close(out, want):
    used = ~want.isnan()
    error = (out[used].float() - want[used]).norm() / want[used].norm()
    assert error < 4e-3, error


@pytest.fixture
def split():
    """A config with a split K."""
    return gluon_fp8.Config(128, 64, 6, split_k=3)


@pytest.mark.parametrize("backend", ["auto", *(b.name for b in OURS)])
def test_no_host_synchronisation(backend):
    *call, offs = operands()
    try:
        scaled_grouped_mm(*call, offs=offs, backend=backend)  # compiled outside the check
    except ValueError as e:
        pytest.skip(str(e))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaled_grouped_mm(*call, offs=offs, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["auto", *(b.name for b in OURS), "split"])
def test_graph_replays_with_new_offs(backend, split):
    *call, offs = operands()
    options = {"backend": "gluon_fp8", "config": split} if backend == "split" else {"backend": backend}
    try:
        scaled_grouped_mm(*call, offs=offs, **options)
    except ValueError as e:
        pytest.skip(str(e))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_grouped_mm(*call, offs=offs, **options)
    for sizes in (SIZES, [0, 200, 52, 100, 100], [452, 0, 0, 0, 0]):
        offs.copy_(offs_from_sizes(sizes, "cuda"))
        graph.replay()
        close(out, reference(*call, offs))


def test_compiled_with_dynamic_rows():
    compiled = torch.compile(lambda *xs: scaled_grouped_mm(*xs[:4], offs=xs[4]).relu(), fullgraph=True, dynamic=True)
    for sizes in (SIZES, [1, 2, 3, 4, 5], [700, 0, 300, 0, 10]):
        *call, offs = operands(sizes)
        close(compiled(*call, offs), reference(*call, offs).relu())


@pytest.mark.parametrize("config", [None, "split"])
def test_same_bits_every_time(config, split):
    *call, offs = operands([1000, 3000, 0, 2000, 64])
    options = {} if config is None else {"backend": "gluon_fp8", "config": split}
    try:
        first = scaled_grouped_mm(*call, offs=offs, **options)
    except ValueError as e:
        pytest.skip(str(e))
    for _ in range(20):
        assert torch.equal(scaled_grouped_mm(*call, offs=offs, **options), first)


def test_rows_of_two_streams_do_not_mix(split):
    """Partial sums belong to a call, not to the kernel."""
    *call, offs = operands([1000, 0, 600, 64, 1])
    try:
        want = scaled_grouped_mm(*call, offs=offs, backend="gluon_fp8", config=split)
    except ValueError as e:
        pytest.skip(str(e))
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            results.append(scaled_grouped_mm(*call, offs=offs, backend="gluon_fp8", config=split))
    torch.cuda.synchronize()
    assert all(torch.equal(r, want) for r in results)


def test_check_reads_the_scales_on_the_device():
    *call, offs = operands()
    assert scaled_grouped_mm(*call, offs=offs, check=True).isfinite().all()
    call[2][3] = float("nan")
    with pytest.raises(ValueError, match="scale_a: expected finite scales, got 5"):
        scaled_grouped_mm(*call, offs=offs, check=True)


def test_writes_into_an_output_that_tma_cannot():
    case = next(c for c in CASES if c.name == "rows-past-the-end")
    given = make(case, "cuda")
    problem, device = problem_of(case, given), Device.current()
    for backend in OURS:
        if backend.supports(problem, device) is None:
            wide = torch.full((case.total, case.n + 1), float("nan"), device="cuda", dtype=case.out_dtype)
            backend.run(problem, given, backend.configs(problem, device)[0], wide[:, 1:])
            check(case, wide[:, 1:], given)
            assert wide[:, 0].isnan().all()
