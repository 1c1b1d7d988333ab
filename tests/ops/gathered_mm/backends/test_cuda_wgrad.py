"""cuda_wgrad without a GPU: what it accepts, what it compiles to, and when `auto` takes it. Its numbers: tests/gpu."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backends import cuda_wgrad
from expertile.ops.gathered_mm.backends.cuda_wgrad import BACKEND, Config
from expertile.ops.gathered_mm.choose import choose
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.launch import nvrtc
from tests.ops.gathered_mm import cases
from tests.support import aot

H100, H200, A100 = Device.by_name("h100 sxm"), Device.by_name("h200"), Device.by_name("a100")


@pytest.fixture
def with_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: None)


def problem(m=1024, n=4096, gathered="b", rows=65536, groups=32):
    return GatherProblem(
        Product.WGRAD, groups, m, n, rows, 8192, torch.bfloat16, (m, 1), (n, 1), gathered, weights_shape=()
    )


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_takes_weight_gradients_that_gather(case, with_nvrtc):
    given = cases.make(case)[0]
    reason = BACKEND.supports(given, H100)
    taken = given.product is Product.WGRAD and given.gathered and given.dtype.itemsize == 2
    taken = taken and not (given.m % 8 or given.n % 8)
    assert (reason is None) == bool(taken), reason


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"m": 1020, "a_strides": (1020, 1)}, "whole 16 bytes"),
        ({"b_strides": (1, 8192)}, "strides"),
        ({"a_aligned": False}, "multiples of 16"),
        ({"gathered": ""}, "gather one"),
        ({"product": Product.MM}, "weight gradients"),
    ],
)
def test_refusals_say_why(changed, word, with_nvrtc):
    assert word in BACKEND.supports(replace(problem(), **changed), H100)
    assert "9.0" in BACKEND.supports(problem(), A100)


def test_auto_takes_it_where_tiles_are_full(with_nvrtc):
    assert choose(problem(), H100).backend.name == "cuda_wgrad"
    assert choose(problem(gathered="a"), H100).backend.name == "cuda_wgrad"
    for other in (problem(m=8), problem(rows=32 * 256), problem(n=8, gathered="a"), problem(gathered="")):
        assert choose(other, H100).backend.name != "cuda_wgrad"


@pytest.mark.parametrize(("device", "gathered", "least"), [(H200, "a", 2560), (H200, "b", 1536), (H100, "b", 5120)])
def test_rows_that_serve_many_columns_are_copied(device, gathered, least, with_nvrtc):
    side = "n" if gathered == "a" else "m"
    assert choose(problem(**{side: least}, gathered=gathered), device).backend.name == "composed"
    assert choose(problem(**{side: least - 8}, gathered=gathered), device).backend.name == "cuda_wgrad"


@pytest.mark.compile
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiles(turned, dtype):
    """Nothing spills, and the four products of a step are queued without a wait between them."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    code = aot.machine_code(nvrtc.compiled(Config().source(dtype, turned)))
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert Config().smem_bytes <= H100.smem_bytes
    products = re.findall(r"HGMMA\.64x256x16[^\n]*", code)
    assert all("tnspA.tnspB" in product for product in products)
    # ptxas ends every product with gsb0 where it takes them for dependent ("wgmma serialized").
    assert 4 * len(re.findall(r"HGMMA[^\n]*gsb0", code)) == len(products) > 0
    assert "UTMALDG.4D" in code and "UTMASTG.3D" in code and "LDGSTS" in code
    assert code.count("BRA.U.ANY") == 1  # a loop over lanes, around the arrival of copies; none around TMA
    assert ("STSM.16.MT88" in code) == turned


_HARNESS = """
#include <cstdio>
#include <cstdlib>
#define __device__
#define __forceinline__ inline
"""
_MAIN = """
int main(int argc, char** argv) {
  int tiles_x = atoi(argv[1]), tiles_d = atoi(argv[2]), offs[] = {5, 5, 12};
  for (int t = 0; t < 3 * tiles_x * tiles_d; t++) {
    Tile x = locate(t, tiles_x, tiles_d, offs);
    printf("%d %d %d %d %d\\n", x.group, x.x, x.d, x.row, x.rows);
  }
}
"""


@pytest.mark.parametrize("tiles", [(1, 1), (7, 3), (32, 8), (40, 1)], ids=str)
def test_tiles_cover_the_result_once(tiles, tmp_path):
    """`locate`, compiled for the host."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = Path(cuda_wgrad._SOURCES[-1]).read_text()
    tile = text[text.index("struct Tile") : text.index("struct Shared")]
    constants = "constexpr int TILE_X = 128, TILE_D = 256;\n#define BAND 16\n"
    (tmp_path / "tiles.cpp").write_text(_HARNESS + constants + tile + _MAIN)
    subprocess.run([compiler, "-std=c++17", "-o", tmp_path / "tiles", tmp_path / "tiles.cpp"], check=True)
    run = subprocess.run([tmp_path / "tiles", *map(str, tiles)], check=True, capture_output=True, text=True)
    found = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    groups = ((0, 0, 5), (1, 5, 0), (2, 5, 7))
    wanted = [
        (g, 128 * x, 256 * d, row, rows) for g, row, rows in groups for x in range(tiles[0]) for d in range(tiles[1])
    ]
    assert sorted(found) == sorted(wanted)
