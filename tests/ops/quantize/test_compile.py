"""The quantisers' kernels compile for GPUs that need not be here: no spills, and 16 bytes at a time where rows allow
it."""

import re

import pytest
import torch
import triton

from expertile.ops.quantize import launch as launches
from tests.support.aot import most_spills, resources
from tests.support.fake_driver import compile_only

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

BF16, FP32 = torch.bfloat16, torch.float32
OFFS = torch.zeros(8, dtype=torch.int32)


def compiled(arch, run, most_spilled=0):
    """The last kernel that `run` launches; it spills no more bytes of a thread."""
    with compile_only(arch) as kernels:
        run()
    found = resources(kernels[-1], arch)
    assert found.fits and found.spills <= most_spills(most_spilled, max(most_spilled, 67)), str(found)
    return found


def wide(found):
    """Loads and stores of 16 bytes a thread."""
    lines = [line for line in found.ptx.splitlines() if ".v4.b32" in line or ", 0x10" in line]
    return {kind: sum(word in line for line in lines) for kind, word in (("load", "ld.global"), ("store", "st.global"))}


@pytest.mark.parametrize(
    "arch, source, k, dtype",
    [
        (90, "plain", 7168, BF16),
        (89, "plain", 7168, FP32),
        (100, "swiglu", 2048, BF16),
        (90, "swiglu_interleaved", 2048, BF16),
        (90, "rms_norm", 7168, BF16),
        (90, "rms_norm", 32768, BF16),
    ],
)
def test_rows(arch, source, k, dtype):
    x = torch.empty(4096, 2 * k if source.startswith("swiglu") else k, dtype=dtype)
    weight = torch.empty(k, dtype=BF16) if source == "rms_norm" else None
    found = compiled(arch, lambda: launches.quantize_rows(x, source, weight, 1e-6))
    # Of pairs that are loaded 16 bytes at a time, 8 channels are stored.
    assert wide(found)["load"] and (wide(found)["store"] or source == "swiglu_interleaved"), found.ptx[:2000]
    if source == "plain" and dtype is BF16:
        per_row = compiled(arch, lambda: launches.quantize_per_row(x))
        assert wide(per_row)["load"] and wide(per_row)["store"]
    if source == "plain":  # divided once for each block, and nothing goes through shared memory but sums
        assert found.smem_bytes <= 1024 and found.opcodes["MUFU"] <= 8, str(found)


@pytest.mark.parametrize("source", ["plain", "swiglu"])
def test_tokens(source):
    x = torch.empty(4096, 4096, dtype=BF16)
    found = compiled(90, lambda: launches.quantize_tokens(x, OFFS, source, config=launches.tokens_config(source)))
    assert wide(found)["load"] and wide(found)["store"]
    # Along tokens, two channels a thread: 4-byte loads that hit L1.
    assert found.ptx.count("ld.global") > 8


@pytest.mark.parametrize(
    "arch, source, k, dtype",
    [
        (90, "plain", 7168, BF16),
        (89, "plain", 1000, FP32),
        (90, "swiglu", 2048, BF16),
        (90, "swiglu_interleaved", 2048, BF16),
        (90, "rms_norm", 4096, BF16),
    ],
)
def test_strips(arch, source, k, dtype):
    x = torch.empty(4096, 2 * k if source.startswith("swiglu") else k, dtype=dtype)
    weight = torch.empty(k) if source == "rms_norm" else None
    found = compiled(arch, lambda: launches.quantize_tokens(x, OFFS, source, weight, 1e-6), most_spilled=8)
    assert found.name == "quantize_strips_kernel" and found.registers <= 128
    # Programs that share an SM: as many as registers allow, four of 4 warps or two of 8.
    assert found.smem_bytes <= 228 * 1024 * found.num_warps // 16 - 1024
    staged = launches.strips_config(source).staged
    assert found.opcodes["LDGSTS"] and found.opcodes["BAR"] == (4 if staged else 3), str(found)
    # Strips go out as they are held, 16 bytes of a channel of 4 warps' and 8 of 8; or by way of shared memory, 16.
    words = 4 if staged else 16 // found.num_warps
    assert found.ptx.count(f"st.global.v{words}.b32") >= 4 and "st.shared.b8" not in found.ptx
    assert not re.search(r"st\.global\S*\.b(8|16)", found.ptx)


@pytest.mark.parametrize("k", [2048, 4096, 7168, 14336])
def test_norms(k):
    x, weight = torch.empty(4096, k, dtype=BF16), torch.empty(k, dtype=BF16)
    found = compiled(90, lambda: launches.quantize_rows(x, "rms_norm", weight, 1e-6))
    assert found.name == "quantize_norm_kernel" and found.registers <= 64
    # Values are stored before the barrier of the row's sum.
    assert found.ptx.index("st.global.v4") < found.ptx.index("rsqrt.approx")


def test_rows_that_tiles_cannot_take():
    for x in (torch.empty(4096, 1001, dtype=BF16), torch.empty(4097 * 1024, dtype=BF16)[1 : 4096 * 1024 + 1]):
        with compile_only(90) as kernels:
            launches.quantize_tokens(x if x.dim() == 2 else x.view(4096, 1024), OFFS)
        assert kernels[-1].metadata.name == "quantize_tokens_kernel"


def test_tokens_of_any_width():
    x = torch.empty(4096, 1001, dtype=FP32)
    compiled(90, lambda: launches.quantize_tokens(x, OFFS, "rms_norm", torch.empty(1001), 1e-6), most_spilled=16)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_weights(dtype):
    w = torch.empty(8, 4096, 7168, dtype=dtype)
    for blocks in (1, 8 * 32 * 56):
        config = launches.weights_config(blocks, dtype.itemsize, 132)
        found = compiled(90, lambda c=config: launches.quantize_weights(w, config=c))
        assert wide(found)["store"], found.ptx[:2000]
        if config.num_stages > 1:  # two programs of 16 warps on an SM
            assert found.registers <= 64 and found.smem_bytes <= 100 * 1024
