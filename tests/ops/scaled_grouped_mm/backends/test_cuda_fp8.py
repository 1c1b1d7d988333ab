"""cuda_fp8 without a GPU: what it accepts, what it compiles to, and its order of tiles and stores on the host."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from expertile.device import Device
from expertile.ops.backend import Request, select
from expertile.ops.launch import nvrtc
from expertile.ops.scaled_grouped_mm.backends import by_name, cuda_fp8, loop
from expertile.ops.scaled_grouped_mm.backends.cuda_fp8 import BACKEND, Config
from expertile.ops.scaled_grouped_mm.choose import choose
from tests.ops.scaled_grouped_mm import cases
from tests.support import aot

H200 = Device.by_name("h200")
CONFIGS = (Config(), Config(128, 6), Config(64, 8))


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
        nvrtc.compiled("", ())


def test_runs_by_name_alone(with_nvrtc):
    """`auto` passes over it even where it comes first."""
    case = next(c for c in cases.CASES if BACKEND.supports(cases.problem_of(c, cases.make(c)), H200) is None)
    problem = cases.problem_of(case, cases.make(case))
    choice = choose(problem, H200, (BACKEND, loop.BACKEND))
    assert choice.backend is loop.BACKEND
    assert [e.reason is not None and "runs by its name alone" in e.reason for e in choice.estimates] == [True]
    chosen, config = select(problem, H200, Request("cuda_fp8"), by_name, choose)
    assert chosen is BACKEND and config == Config()


@pytest.mark.compile
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_compiles(config):
    """Nothing spills, and the four products of a step are queued without a wait between them."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    code = aot.machine_code(cuda_fp8._binary(config, torch.bfloat16))
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert config.smem_bytes(2048) <= H200.smem_bytes
    products = re.findall(r"QGMMA\.64x(\d+)x32[^\n]*", code)
    assert str(config.block_n) in products
    # ptxas ends every product with gsb0 where it takes them for dependent ("wgmma serialized").
    assert 4 * len(re.findall(r"QGMMA[^\n]*gsb0", code)) == len(products)
    assert "UTMALDG.2D" in code and "UTMALDG.3D" in code


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
  int N = atoi(argv[1]), G = argc - 2, end = 0, rows = 0;
  std::vector<int> row_tiles, row_ends;
  for (int g = 0; g < G; g++) {
    int size = atoi(argv[2 + g]);
    rows += (size + ROWS - 1) / ROWS;
    end += size;
    row_tiles.push_back(rows);
    row_ends.push_back(end);
  }
  int n_full = N / BLOCK_N, rest = N - n_full * BLOCK_N;
  for (int t = 0; t < rows * (n_full + (rest != 0)); t++) {
    Tile x = locate(t, n_full, rest, G, row_tiles.data(), row_ends.data());
    printf("%d %d %d %d %d\n", x.group, x.row, x.row_end, x.col, x.width);
  }
}
"""


def _part(source: str, begin: str, end: str) -> str:
    return source[source.index(begin) : source.index(end, source.index(begin))]


@pytest.mark.parametrize("config", (*CONFIGS, Config(group_m=3, num_stages=3)), ids=str)
@pytest.mark.parametrize("n", [192, 448, 1000, 4096])
def test_tiles_cover_the_result_once(config, n, tmp_path: Path):
    """`locate`, compiled for the host: each row of each group meets each column in one tile, in its own group."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = config.source(torch.bfloat16)
    defined = source[: source.index("typedef")]
    constants = _part(source, "constexpr int CONSUMERS", "static_assert(")
    tiles = _part(source, "struct Tile {", "// ---- barriers") + _part(
        source, "// Tile number ->", "// The producer finds"
    )
    program = tmp_path / "tiles.cpp"
    program.write_text(_HARNESS + defined + "\n" + constants + tiles + _MAIN)
    subprocess.run([compiler, "-std=c++17", "-O1", "-o", tmp_path / "tiles", program], check=True)
    sizes = [100, 0, 1, 300, 65, 0, *[7] * 40, 1000]
    ran = subprocess.run([tmp_path / "tiles", *map(str, [n, *sizes])], check=True, capture_output=True, text=True)
    met = torch.zeros(sum(sizes), n, dtype=torch.int32)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    for line in ran.stdout.splitlines():
        group, row, row_end, col, width = map(int, line.split())
        assert row_end == ends[group]
        assert width % 64 == 0 and width <= config.block_n
        met[row : min(row + 128, row_end), col : col + width] += 1
    assert (met == 1).all()
