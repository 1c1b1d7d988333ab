"""cuda_gather without a GPU: what it accepts, what it compiles to, and when `auto` takes it. Its numbers: tests/gpu."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backends import cuda_gather
from expertile.ops.gathered_mm.backends.cuda_gather import BACKEND, Config
from expertile.ops.gathered_mm.choose import choose
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.launch import nvrtc
from tests.ops.gathered_mm import cases
from tests.support import aot
from tests.support.cuda_emulator import divided

H100, H200, A100 = Device.by_name("h100 sxm"), Device.by_name("h200"), Device.by_name("a100")


@pytest.fixture
def with_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: None)


def problem(product=Product.BACKWARD, n=1024, k=4096, rows=65536, groups=32, **changes):
    strides = (k * n, n, 1) if product is Product.BACKWARD else (k * n, 1, k)
    made = GatherProblem(product, groups, rows, n, k, rows // 8, torch.bfloat16, (k, 1), strides, activation="swiglu")
    return replace(made, **changes)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_takes_products_beside_a_gated_activation(case, with_nvrtc):
    given = cases.make(case)[0]
    reason = BACKEND.supports(given, H100)
    taken = given.product in (Product.GATED, Product.BACKWARD) and given.dtype.itemsize == 2
    taken = taken and not (given.intermediate % 8 or given.k % 8)
    assert (reason is None) == taken, reason


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"k": 4092}, "multiple of 8"),
        ({"n": 1020, "b_strides": (4096 * 1024, 1024, 1)}, "16 bytes at a time"),
        ({"a_strides": (4100, 1)}, "16-byte aligned"),
        ({"b_strides": (1, 2, 4096)}, "stride 1"),
        ({"b_strides": (4096 * 1024, 1028, 1)}, "strides"),
        ({"a_aligned": False}, "multiples of 16"),
        ({"product": Product.MM}, "gated activation"),
        ({"product": Product.GATED, "n": 2048, "b_strides": (4096 * 2048, 2048, 1)}, "[E, 2I, K]"),
        ({"groups": 4096}, "4096 of them"),
    ],
)
def test_refusals_say_why(changed, word, with_nvrtc):
    assert word in BACKEND.supports(problem(**changed), H100)
    assert "9.0" in BACKEND.supports(problem(), A100)


def test_auto_takes_it_where_it_is_faster(with_nvrtc):
    def name(device=H100, **changes):
        return choose(problem(**changes), device).backend.name

    assert name() == name(device=H200) == "cuda_gather"
    # The fused backward's high tiles: from more rows on the more columns share a copy, and on rows in order.
    assert name(rows=32 * 16) == "composed" and name(rows=32 * 64) == "cuda_gather"
    assert name(rows=32 * 256, n=2880) == "composed" and name(rows=32 * 512, n=2880) == "cuda_gather"
    assert name(rows=32 * 512, gathered="") == "composed" and name(gathered="") == "cuda_gather"
    gated = {"product": Product.GATED, "n": 1536}
    assert name(**gated) == "cuda_gather" and name(device=H200, **gated) == "gluon_gather"
    many = gated | {"n": 4096}
    assert name(device=H200, **many) == "cuda_gather" and name(device=H200, **many, rows=32 * 900) == "gluon_gather"
    # Its products are rounded before they are activated: sums of other numbers of rows would have other bits.
    assert choose(problem(**gated), H100, batch_invariant=True).backend.name == "gluon_gather"
    for rows in (64, 65536):  # of a gated backward it makes all
        assert choose(problem(rows=rows), H100, batch_invariant=True).backend.name == "cuda_gather"


# Problem, bytes of a bias, whether there is a second pair.
PROGRAMS = {
    "gated": (problem(Product.GATED), 0, False),
    "gated-more": (problem(Product.GATED), 0, True),
    "interleaved-bias": (problem(Product.GATED, interleaved=True, activation="gpt_oss", dtype=torch.float16), 2, False),
    "float32-bias": (problem(Product.GATED, save_pre=False, activation="reglu"), 4, False),
    "backward": (problem(), 0, False),
    "backward-more": (problem(), 0, True),
    "backward-interleaved": (problem(interleaved=True, activation="geglu"), 0, False),
}


@pytest.mark.compile
@pytest.mark.parametrize("finishers", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles(name, finishers):
    """Nothing spills, and the four products of a step are queued without a wait between them."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    given, bias, more = PROGRAMS[name]
    source = Config(finishers=finishers).source(cuda_gather._key(given), bias, more)
    code = aot.machine_code(nvrtc.compiled(source, "--ftz=true"))
    assert not re.search(r"\b(LDL|STL)\b", code)
    products = re.findall(rf"HGMMA\.64x{512 // finishers}x16[^\n]*", code)
    assert all(("tnspB" in product) == (given.product is Product.BACKWARD) for product in products)
    # ptxas ends every product with gsb0 where it takes them for dependent ("wgmma serialized").
    assert 2 * finishers * len(re.findall(r"HGMMA[^\n]*gsb0", code)) == len(products) > 0
    assert "UTMALDG.3D" in code and "STSM.16.M88" in code
    # A loop over lanes around an instruction of TMA; a second pair has one around each arrival of copies.
    assert len(re.findall(r"BRA\.U\.ANY", code)) == len(re.findall("ARRIVES.LDGSTSBAR", code)) * more
    # A producer's copies follow each other: addresses stand in registers, no constant is waited for between two.
    copies = [m.start() for m in re.finditer("LDGSTS", code)]
    most = max(range(len(copies) - 15), key=lambda i: -(copies[i + 15] - copies[i]))
    assert "LDC" not in code[copies[most] : copies[most + 15]]


def test_shared_memory_is_what_the_kernel_lays_out():
    """Of the largest problems that are taken."""
    for given, bias, _ in PROGRAMS.values():
        fitting = max(g for g in (128, 256, 512, 1024) if BACKEND.supports(replace(given, groups=g), H100) is None)
        assert fitting == (512 if given.product is Product.BACKWARD else 1024)
        assert Config().smem_bytes(given.product, fitting, bias) <= H100.smem_bytes


def test_epilogues_of_short_sums_have_four_warps():
    """Where a gated backward's rows of pre fit."""
    for given, _, _ in PROGRAMS.values():
        back = given.product is Product.BACKWARD
        for changed, more in ((replace(given, groups=256), back), (replace(given, groups=512), False)):
            assert (BACKEND.configs(replace(changed, k=2048), H100)[0].finishers == 4) == more
            assert BACKEND.configs(replace(changed, k=2056), H100)[0].finishers == 2


_HARNESS = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
typedef unsigned int u32;
#define __device__
#define __forceinline__ inline
static struct { int x; } threadIdx;
constexpr int LANES = 32;
// All lanes of the warp, one after the other: the condition names its lane.
#define __ballot_sync(mask, condition) \
  [&] { u32 bits = 0; for (int lane = 0; lane < 32; lane++) bits |= u32(bool(condition)) << lane; return bits; }()
#define __popc __builtin_popcount
"""
_MAIN = r"""
int main(int argc, char** argv) {
  int across = atoi(argv[1]), G = argc - 2, end = 0, tiles = 0;
  std::vector<int> tile_ends, row_ends;
  for (int g = 0; g < G; g++) {
    int size = atoi(argv[2 + g]);
    tile_ends.push_back(tiles += (size + ROWS - 1) / ROWS * across);
    row_ends.push_back(end += size);
  }
  Groups groups{tile_ends.data(), row_ends.data(), G, across};
  for (int t = 0; t < tiles + 2; t++) {
    Tile x = groups.locate(t);
    printf("%d %d %d %d\n", x.group, x.row, x.row_end, x.col);
  }
}
"""


@pytest.mark.parametrize("band", [2, 8])
@pytest.mark.parametrize("across", [1, 5, 16])
def test_tiles_cover_the_result_once(across, band, tmp_path):
    """`locate`, compiled for the host: each row of each group meets each column in one tile, in its own group."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    places, text = nvrtc.GROUPS.read_text(), cuda_gather._SOURCES[-3].read_text()
    # What only a GPU can do is cut out.
    queue, groups, rest = (text.index(x) for x in ("struct Queue {", "struct Groups {", "// The first warp"))
    text = divided(places[places.index("// The group of unit t") :]) + text[:queue] + text[groups:rest]
    defined = f"#define PRODUCT BACKWARD\n#define BAND {band}\n#define FINISHERS 2\n"
    (tmp_path / "tiles.cpp").write_text(_HARNESS + defined + text + _MAIN)
    subprocess.run([compiler, "-std=c++17", "-O1", "-o", tmp_path / "tiles", tmp_path / "tiles.cpp"], check=True)
    sizes = [100, 0, 1, 300, 65, 0, *[7] * 40, 3000]
    ran = subprocess.run([tmp_path / "tiles", *map(str, [across, *sizes])], check=True, capture_output=True, text=True)
    *tiles, beyond, further = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert beyond[0] == further[0] == -1
    met = torch.zeros(sum(sizes), across, dtype=torch.int32)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    for group, row, row_end, col in tiles:
        assert row_end == ends[group] and row < row_end and col % 256 == 0
        met[row : min(row + 128, row_end), col // 256] += 1
    assert (met == 1).all()
