"""cuda_fp8 without a GPU: what it accepts, what it compiles to, its order of tiles, and its numbers on the host."""

import re
import shutil
import subprocess
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch

from expertile.device import Device
from expertile.ops.backend import Request, select
from expertile.ops.launch import nvrtc
from expertile.ops.scaled_grouped_mm.api import choose
from expertile.ops.scaled_grouped_mm.backends import by_name, cuda_fp8, loop
from expertile.ops.scaled_grouped_mm.backends.cuda_fp8 import BACKEND, Config
from expertile.ragged import power_of_two
from tests.ops.scaled_grouped_mm import cases
from tests.support import aot
from tests.support.cuda_emulator import divided, needs_compiler, on_host, shows, without

H200 = Device.by_name("h200")
SPLIT = Config(64, 8, dynamic=False, consumers=1, split_k=2)
SPLITS = (SPLIT, Config(128, 5, dynamic=False, split_k=2), Config(64, 6, dynamic=False, split_k=4))
WIDE = (Config(256, 3), Config(256, 3, dynamic=False))
ODD = (Config(144), Config(112, 6, dynamic=False), Config(80, 7, dynamic=False, consumers=1))
NARROW = (Config(32, 8, dynamic=False), Config(48, 6, dynamic=False, consumers=1))
CONFIGS = (Config(), *NARROW, Config(dynamic=False), Config(128, 5), Config(64, 8), *SPLITS, *ODD, *WIDE)


@pytest.fixture
def with_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: None)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_supports(case, with_nvrtc):
    """Ragged rows with scales of blocks, 16-bit results, no bias; a reason for all else."""
    problem = cases.problem_of(case, cases.make(case))
    reason = BACKEND.supports(problem, H200)
    taken = (
        case.layout is cases.M
        and case.recipe is cases.BLOCK
        and not case.bias
        and case.out_dtype is not cases.FP32
        and case.storage != "kn"
        and problem.n % 8 == 0
        and problem.k % 16 == 0
    )
    assert (reason is None) == taken, reason


def test_needs_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: None)
    case = next(c for c in cases.CASES if c.layout is cases.M and c.recipe is cases.BLOCK and not c.bias)
    reason = BACKEND.supports(cases.problem_of(case, cases.make(case)), H200)
    assert reason is not None and "NVRTC" in reason
    with pytest.raises(RuntimeError, match="NVRTC"):
        nvrtc.compiled("")


@pytest.mark.parametrize(
    ("groups", "rows", "n", "k", "expected"),
    [
        (4, 8192, 4096, 7168, Config()),
        (4, 512, 7168, 2048, Config(dynamic=False)),
        (8, 512, 4096, 7168, Config(256, 3, dynamic=False)),
        (1, 832, 4160, 5248, Config(256, 3, dynamic=False)),
        (128, 512, 2048, 1536, Config(256, 3)),
        (4, 128, 7168, 7168, Config(112, 6, dynamic=False)),
        (2, 232, 4480, 3200, Config(144, 5, dynamic=False)),
        (1, 64, 2048, 7168, SPLIT),
        (1, 128, 4096, 7168, Config(64, 8, dynamic=False, consumers=1)),
        (1, 512, 2048, 4096, Config(64, 8, dynamic=False)),
        (1, 512, 4096, 7168, Config(128, 5, dynamic=False)),
        (32, 16, 4096, 7168, "loads 64 rows where a group has 16"),
        (256, 256, 4096, 7168, Config()),
    ],
)
def test_where_auto_takes_it(groups, rows, n, k, expected, with_nvrtc):
    problem = cases.block_problem(groups, groups * rows, n, k)
    choice = choose(problem, H200)
    if isinstance(expected, Config):
        assert choice.backend is BACKEND and choice.config == expected
    else:
        assert choice.backend.name == "gluon_fp8"
        assert [expected in e.reason for e in choice.estimates if e.backend == "cuda_fp8"] == [True]
    # By its name it runs anyhow; and it does where there is no other.
    assert select(problem, H200, Request("cuda_fp8"), by_name, choose)[0] is BACKEND
    assert choose(problem, H200, (BACKEND, loop.BACKEND)).backend is BACKEND


def test_a_problem_without_groups_has_a_choice(with_nvrtc):
    problem = cases.block_problem(0, 0, 1024, 1024)
    assert choose(problem, H200).backend.name == "gluon_fp8" and BACKEND.configs(problem, H200)


@pytest.mark.parametrize("groups", [1, 32, 700])
def test_configs_fit(groups):
    """Into a multiprocessor, and the first is no other of `configs`."""
    for rows, n, k in ((40, 1024, 1024), (128, 4096, 7168), (600, 2048, 8192)):
        found = BACKEND.configs(cases.block_problem(groups, groups * rows, n, k), H200)
        assert len(set(found)) == len(found)
        for config in found:
            assert config.smem_bytes(max(32, power_of_two(groups)), 64) <= H200.smem_bytes


def test_configs_that_no_kernel_has():
    for fields, message in (
        ({"block_n": 176}, "block_n: expected one of 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256, got 176"),
        ({"block_n": 256, "consumers": 1}, "consumers: expected 2 beside block_n=256, got 1"),
        ({"consumers": 3}, "consumers: expected one of 1, 2"),
        ({"split_k": 3, "dynamic": False}, "split_k: expected one of 1, 2, 4, 8"),
        ({"split_k": 2}, "expected dynamic=False"),
        ({"block_n": 64, "num_stages": 5}, "expected an even number"),
        ({"num_stages": 1}, "num_stages: expected one of 2, 3"),
        ({"block_n": 144, "split_k": 4, "dynamic": False}, "parts of a multiple of 8 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**fields)


@pytest.mark.compile
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_compiles(config):
    """Nothing spills, and the four products of a step are queued without a wait between them."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    code = aot.machine_code(nvrtc.compiled(config.source(torch.bfloat16)))
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert config.smem_bytes(1024, 64) <= H200.smem_bytes
    products = re.findall(r"QGMMA\.64x(\d+)x32[^\n]*", code)
    assert str(128 if config.block_n == 256 else config.block_n) in products
    # ptxas ends every product with gsb0 where it takes them for dependent ("wgmma serialized").
    assert 4 * len(re.findall(r"QGMMA[^\n]*gsb0", code)) == len(products)
    assert "UTMALDG.2D" in code and "UTMALDG.3D" in code
    assert "BRA.U.ANY" not in code  # a loop over lanes around an instruction of TMA
    # The parts of a split tile go from registers, what is narrower than a box 16 bytes at a time.
    assert ("UTMASTG.2D" in code) == (config.split_k == 1 and config.block_n >= 64)


_HARNESS = r"""
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
using std::min;
typedef unsigned int u32;
#define __device__
#define __forceinline__ inline
static struct { int x; } threadIdx;
// All lanes of the warp, one after the other: the condition names its lane.
#define __ballot_sync(mask, condition) \
  [&] { u32 bits = 0; for (int lane = 0; lane < 32; lane++) bits |= u32(bool(condition)) << lane; return bits; }()
#define __popc __builtin_popcount
"""

_MAIN = r"""
int main(int argc, char** argv) {
  int N = atoi(argv[1]), programs = atoi(argv[2]), G = argc - 3, end = 0, tiles = 0;
  int n_full = N / BLOCK_N, rest = N - n_full * BLOCK_N, across = n_full + (rest != 0);
  std::vector<int> tile_ends, row_ends;
  for (int g = 0; g < G; g++) {
    int size = atoi(argv[3 + g]);
    tiles += (size + ROWS - 1) / ROWS * across;
    end += size;
    tile_ends.push_back(tiles);
    row_ends.push_back(end);
  }
  Units units = units_of(programs, n_full, rest, G, tile_ends.data(), row_ends.data());
  for (int t = 0; t < units.all; t++) {
    Tile x = locate(t, units, n_full, rest, G, tile_ends.data(), row_ends.data());
    printf("%d %d %d %d", x.group, x.row_end, x.col, x.width);
    for (int i = 0; i < CONSUMERS; i++) printf(" %d", x.row + i * 64 < x.row_end ? first_row(x, i, ROWS) : -1);
    printf("\n");
  }
}
"""


def _part(source: str, begin: str, end: str) -> str:
    return source[source.index(begin) : source.index(end, source.index(begin))]


@pytest.mark.parametrize("config", (*CONFIGS, Config(group_m=3, num_stages=3)), ids=str)
def test_tiles_cover_the_result(config, tmp_path: Path):
    """`locate` and `first_row`, compiled for the host: each row of each group meets each column, in its own group, most
    of them once. Where a group has 64 rows, every consumer has so many, which TMA can store. The last wave's tiles are
    cut where there are programs for their parts."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = config.source(torch.bfloat16)
    defined = source[: source.index("typedef")]
    lanes = _part(source, "constexpr int LANES", "struct alignas")
    tiles = divided(_part(source, "// The group of unit t", "// The scheduling warp finds"))
    program = tmp_path / "tiles.cpp"
    program.write_text(_HARNESS + defined + "\n" + lanes + tiles + _MAIN)
    subprocess.run([compiler, "-std=c++17", "-O1", "-o", tmp_path / "tiles", program], check=True)
    sizes = [100, 0, 1, 300, 65, 0, *[7] * 40, 1000]
    seen = set()
    for n, programs in ((192, 1), (448, 1), (1000, 1), (4096, 1), *((1000, p) for p in range(2, 300, 3))):
        arguments = map(str, [n, programs, *sizes])
        ran = subprocess.run([tmp_path / "tiles", *arguments], check=True, capture_output=True, text=True)
        met = torch.zeros(sum(sizes), n, dtype=torch.int32)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        tiles = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
        for group, row_end, col, width, *firsts in tiles:
            assert row_end == ends[group]
            assert width == config.block_n or (width % 64 == 0 and width < config.block_n)
            for row in (row for row in firsts if row >= 0):
                assert row + 64 <= row_end or sizes[group] < 64
                met[row : min(row + 64, row_end), col : col + width] += 1
        rows_of_tiles = sum(-(-size // config.rows) for size in sizes)
        whole = rows_of_tiles * -(-n // config.block_n)
        left = whole % programs if whole >= programs else 0
        parts = next((p for p in (config.block_n // 64, 2) if left * p <= programs), 1)
        parts = parts if left and config.split_k == 1 and config.block_n in (128, 192, 256) else 1
        if config.block_n == 192 and parts == 1 and any(width == 128 for _g, _e, _c, width, *_ in tiles):
            parts = 0  # tiles of 128 columns in place of the last ones
            first, at_most = whole // programs * programs, (whole // programs + 1) * programs
            assert all(width <= 128 for *_, width, _1, _2 in tiles[first:]) and len(tiles) <= at_most
            assert all(width == 192 or col + width >= n for _g, _e, col, width, *_ in tiles[:programs])
        else:
            assert len(tiles) == whole + left * (parts - 1)
        seen.add(parts)
        assert met.min() == 1
        if parts < 2:
            assert met.max() <= 2
            for size, rows in zip(sizes, met.split(sizes), strict=True):
                again = -size % 64 if size > 64 else 0  # the last consumer's, which the one before has as well
                assert (rows == 2).sum() == again * n
    cut = {128: {1, 2}, 192: {0, 1, 2, 3}, 256: {1, 2, 4}}.get(config.block_n, {1})
    assert seen == (cut if config.split_k == 1 else {1})


@needs_compiler
@pytest.mark.parametrize(
    "config", [Config(), Config(128, 5), Config(64, 8, dynamic=False), *NARROW, *SPLITS, *ODD, *WIDE], ids=str
)
def test_right_on_the_host(config, cuda_folder, monkeypatch):
    """Every case that it takes and one of several tiles each way, on the machine of `cuda_emulator`; results of another
    dtype, for which g++ has another kernel to compile, with the first config alone."""
    on_host(monkeypatch, cuda_folder, programs=8 if config.split_k > 1 else 6)  # 6: the last tiles are cut, both ways
    for kept in ("_launch", "_kernel"):
        monkeypatch.setattr(cuda_fp8, kept, getattr(cuda_fp8, kept).__wrapped__)
    counter = torch.zeros(1, dtype=torch.int32)  # each kernel leaves it at zero for the next
    monkeypatch.setattr(cuda_fp8, "tile_counter", lambda dynamic, like: counter)
    longer = cases.Case("longer", cases.M, cases.BLOCK, (130, 0, 200), n=264, k=1168, past=9)
    alone = cases.Case("alone", cases.M, cases.BLOCK, (150,), n=264, k=640, past=300)  # rows past the only group
    odd = cases.Case("odd", cases.M, cases.BLOCK, (0, 1, 284, 9), n=576, k=128)
    narrow = cases.Case("narrow", cases.M, cases.BLOCK, (250,), n=952, k=256)  # 6 tiles of 192 columns, then 6 of 128
    for case in (*cases.CASES, longer, alone, odd, narrow):
        operands = cases.make(case)
        problem = cases.problem_of(case, operands)
        if BACKEND.supports(problem, H200) is None and (config == Config() or case.out_dtype is longer.out_dtype):
            out = cases.poisoned_out(case)
            BACKEND.run(problem, operands, config, out)
            cases.check(case, out, operands)
            assert counter == 0


def test_a_launch_is_made_once_for_the_same_addresses(monkeypatch):
    """Encoding maps and arguments took 50 us of the host at every call."""
    made, queued = [], []

    class Kernel:
        cluster = 1

        def launch(self, programs, stream, arguments, pdl):
            made.append(arguments)
            return partial(queued.append, len(made))

    case = cases.Case("one", cases.M, cases.BLOCK, (130, 70), n=256, k=256)
    operands = cases.make(case)
    operands = operands._replace(scale_a=operands.scale_a.t().contiguous().t())  # others are copied, to a new address
    problem, results = cases.problem_of(case, operands), [cases.poisoned_out(case) for _ in range(2)]
    for name, stand_in in (("_kernel", lambda *_: Kernel()), ("_launch", lru_cache(cuda_fp8._launch.__wrapped__))):
        monkeypatch.setattr(cuda_fp8, name, stand_in)
    for name, stand_in in (("tensor_map", lambda *_, **__: None), ("current_stream", lambda device: 0)):
        monkeypatch.setattr(nvrtc, name, stand_in)
    monkeypatch.setattr(Device, "current", lambda device: H200)
    for out in (*results, *results):
        BACKEND.run(problem, operands, Config(dynamic=False), out)
    assert len(made) == 2 and queued == [1, 2, 1, 2]
    # Behind seven maps, offs and the scales of b.
    assert [given[9] for given in made] == [out.data_ptr() for out in results]


FAULTS = {
    "a stage is read before it is full": (Config(), without("multiply_step", "barrier_wait")),
    "a tile is never given back": (Config(), without("compute", "barrier_arrive")),
    "a group's last rows go to the tile's": (
        Config(),
        lambda s: s.replace("first_row(tile, group, at_once)", "tile.row + group * 64"),
    ),
    "sums are read before they have come": (SPLIT, without("store_part", "barrier_wait", 1)),
    "no program hears that its sums were read": (SPLIT, without("store_part", "barrier_arrive_at")),
    "the first tile stands by what offs said too early": (Config(), lambda s: s.replace("!= row_end", "< 0")),
    "a tile's parts begin where it does": (Config(), lambda s: s.replace("min(part * columns, found.width - 64)", "0")),
    "the last columns are those of the first box": (
        Config(),
        lambda s: s.replace("tile.col + whole * EDGE", "tile.col"),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_on_the_host(name, cuda_folder, monkeypatch):
    config, fault = FAULTS[name]
    for kept in ("_launch", "_kernel"):
        monkeypatch.setattr(cuda_fp8, kept, getattr(cuda_fp8, kept).__wrapped__)
    case = cases.Case("longer", cases.M, cases.BLOCK, (130, 0, 200), n=264, k=1168)
    operands = cases.make(case)

    def prepare(patch, seed):
        on_host(patch, cuda_folder, programs=config.split_k if config.split_k > 1 else 6, seed=seed, fault=fault)

    def run():
        out = cases.poisoned_out(case)
        BACKEND.run(cases.problem_of(case, operands), operands, config, out)
        cases.check(case, out, operands)

    shows(monkeypatch, prepare, run)
