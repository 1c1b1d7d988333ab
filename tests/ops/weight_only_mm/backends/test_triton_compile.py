"""triton_int4 compiles for GPUs that need not be here: it fits, does not spill, and unpacks into registers, which it
leaves alone until they have been multiplied."""

import re
from dataclasses import replace

import pytest
import triton

from expertile.device import Device
from expertile.ops.launch.versions import TRITON
from expertile.ops.weight_only_mm.backends.triton_int4 import BACKEND
from expertile.ops.weight_only_mm.dequantize import dequantize_on_gpu
from tests.ops.weight_only_mm import fp8_cases
from tests.ops.weight_only_mm.cases import BF16, FP16, Case, make, problem_of
from tests.ops.weight_only_mm.fp8_cases import Fp8Case
from tests.support.aot import ptxas_warnings, resources, spills_in_loops
from tests.support.fake_driver import compile_only
from tests.support.wgmma import overwritten_operands

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

DEVICES = {80: "a100", 90: "h200", 100: "b200"}
PLAIN = Case("plain", (32, 32), n=256, k=256)
ZEROS = Case("zeros", (32, 32), n=200, k=256, group=64, zeros=True, bias=True, dtype=FP16)
CHANNEL = Case("per-channel", (32, 32), n=256, k=256, group=None)


MXFP4 = Case("mxfp4", (32, 32), n=256, k=256, group="mxfp4")
MXFP4_ODD = Case("mxfp4-odd", (32, 32), n=250, k=224, group="mxfp4", bias=True, dtype=FP16)


# What triton_int4 offers on sm_80: larger tiles spill from Triton 3.8 on.
LARGEST = (128, 128) if TRITON < (3, 8) else (128, 64)


def found(case: Case, arch: int, tile: tuple[int, int]):
    """Resources of the first config listed of that tile."""
    device = Device.by_name(DEVICES[arch])
    operands = make(case)
    problem = replace(problem_of(case, operands), device_type="cuda", group_sizes=None)
    assert BACKEND.supports(problem, device) is None
    config = next(c for c in BACKEND.configs(problem, device) if (c.block_m, c.block_n) == tile)
    with compile_only(arch) as kernels:
        BACKEND.run(problem, operands, config, None)
    (kernel,) = kernels
    got = resources(kernel, arch)
    assert got.fits, (config, str(got))
    if arch == 80 and tile[0] * tile[1] >= 64 * 128:
        assert spills_in_loops(kernel, "HMMA") == 0, (config, str(got))
    else:
        assert got.spills == 0, (config, str(got))
    assert overwritten_operands(kernel) == [], config
    blocks = config.blocks_per_sm
    assert got.registers * 32 * got.num_warps * blocks <= 65536, f"not {blocks} at once: {config} {got}"
    return got


@pytest.mark.parametrize("case", [PLAIN, ZEROS, MXFP4, MXFP4_ODD], ids=str)
def test_ampere(case):
    got = found(case, 80, (16, 64))
    assert got.opcodes["HMMA"] > 0 and got.opcodes["LDGSTS"] > 0, str(got)
    # Activations come by ldmatrix in the order of unpacked words, which never go through shared memory.
    assert got.opcodes["LDSM"] >= (4 if case.group == "mxfp4" else 8), str(got)


@pytest.mark.parametrize(
    "case, tile", [(PLAIN, LARGEST), (CHANNEL, LARGEST), (ZEROS, (64, 128)), (MXFP4, (64, 128))], ids=str
)
def test_ampere_prefill(case, tile):
    got = found(case, 80, tile)
    # From Triton 3.8 on, a warp loads the same activations with fewer, wider instructions of other kinds beside them.
    few = 4 if case is MXFP4 else 32 if LARGEST == (128, 128) else 8  # steps of 64 of K, not 128
    assert got.opcodes["HMMA"] > 0 and got.opcodes["LDSM"] >= few, str(got)


@pytest.mark.parametrize("case, tile", [(PLAIN, (16, 64)), (PLAIN, (128, 128)), (MXFP4, (16, 64))], ids=str)
def test_blackwell(case, tile):
    assert "tcgen05.mma" in found(case, 100, tile).ptx


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("case", [PLAIN, MXFP4, MXFP4_ODD, Fp8Case("fp8", (5, 9), n=64, k=160)], ids=str)
def test_dequantize(case, arch):
    w = (fp8_cases.make if isinstance(case, Fp8Case) else make)(case).w
    with compile_only(arch) as kernels:
        dequantize_on_gpu(w, BF16)
    (used,) = (resources(kernel, arch) for kernel in kernels)
    assert used.fits and used.spills == 0, str(used)


@pytest.mark.parametrize(
    "case, tile",
    [
        (PLAIN, (16, 64)),
        (ZEROS, (16, 128)),
        (MXFP4, (16, 64)),
        (MXFP4_ODD, (64, 64)),
        (PLAIN, (64, 64)),
        (PLAIN, (32, 128)),
        (CHANNEL, (16, 64)),
        (CHANNEL, (32, 128)),
    ],
    ids=lambda x: str(x),
)
def test_hopper(case, tile):
    got = found(case, 90, tile)
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.\S+\s*\{[^}]*\},\s*(\{)?", got.ptx)
    assert products and all(products), f"weights do not come from registers: {got}"
    assert got.opcodes["LDGSTS"] > 0, str(got)
    assert ptxas_warnings(got) == []
    # Words come by ldmatrix, and their nibbles are where wgmma wants them. (Odd rows of out are stored by halves.)
    assert got.opcodes["LDSM"] >= 2 and (got.opcodes["PRMT"] < 40 or case.n % 8), str(got)
