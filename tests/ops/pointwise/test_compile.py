"""The kernels of add_scalar and laplacian compile for GPUs that need not be here: 16-byte loads and stores where rows
allow them, no spills, no trip through shared memory where none is needed."""

import re
from collections import Counter

import pytest
import torch
import triton

from expertile.ops.pointwise import add_scalar, laplacian
from tests.support.aot import resources
from tests.support.fake_driver import compile_only

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Every dtype is compiled for the first and for sm_90. The others have the same loads, stores and arithmetic, and take
# turns at the dtypes.
ARCHES = (80, 86, 89, 90, 100, 120)
TARGETS = [(d, a) for i, a in enumerate(ARCHES) for j, d in enumerate(DTYPES) if a in (80, 90) or i % 3 == j]


def compiled(arch, launch, *args):
    """What `launch(*args)` compiles: its resources, and bytes of each global load and store with their number."""
    with compile_only(arch) as kernels:
        launch(*args)
    assert len(kernels) == 1
    found = resources(kernels[0], arch)
    pattern = r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)"
    accesses = Counter((kind, int(v or 1) * int(bits) // 8) for kind, v, bits in re.findall(pattern, found.ptx))
    return found, accesses


@pytest.mark.parametrize("dtype, arch", TARGETS, ids=str)
def test_add_scalar(dtype, arch):
    x = torch.empty(10**8 + 3, dtype=dtype)
    for numel in (x.numel(), 10**6):
        config = add_scalar.config_for(numel, dtype, 132)
        found, accesses = compiled(arch, add_scalar.launch, x, torch.empty_like(x), 1.0, config)
        assert found.spills == 0 and found.smem_bytes == 0, str(found)
        loads = config.block * dtype.itemsize // (16 * 32 * config.num_warps)
        assert accesses["ld", 16] == accesses["st", 16] == loads, accesses
        # One more for what the last vector leaves: no loop over the last block, which ptxas would unroll.
        assert found.opcodes["LDG"] == found.opcodes["STG"] == loads + 1, found.opcodes


def test_add_scalar_off_by_an_element():
    """An address that is no multiple of 16 must not be read 16 bytes at a time."""
    x = torch.empty(10**6 + 1)
    _, accesses = compiled(90, add_scalar.launch, x[1:], torch.empty(10**6), 1.0, add_scalar.Config(1024, 4))
    assert not accesses["ld", 16] and accesses["ld", 4]


def grid(rows, columns, dtype, boundary):
    u = torch.empty(1, rows, columns, dtype=dtype)
    return u, u.new_empty(1, *laplacian._out_grid(rows, columns, boundary))


@pytest.mark.parametrize(
    "dtype, arch, boundary",
    [
        *((dtype, arch, "zero") for dtype, arch in TARGETS),
        # Boundaries differ in addresses, which dtypes do not change: the widest and the narrowest.
        *((dtype, 90, boundary) for dtype in DTYPES[:2] for boundary in ("replicate", "circular")),
    ],
    ids=str,
)
def test_laplacian(dtype, arch, boundary):
    u, out = grid(4096, 4096, dtype, boundary)
    found, accesses = compiled(arch, laplacian.launch, u, out, boundary, 1.0)
    assert found.spills == 0 and found.smem_bytes == 0, str(found)
    # Ten lines for eight rows, the two elements beside each vector, eight stores: nothing is loaded twice.
    assert accesses == {("ld", 16): 10, ("ld", dtype.itemsize): 16, ("st", 16): 8}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_laplacian_interior(dtype):
    u, out = grid(4096, 4096, dtype, "interior")
    found, accesses = compiled(90, laplacian.launch, u, out, "interior", 1.0)
    assert found.spills == 0 and found.fits and accesses["ld", 16] == 10, (str(found), accesses)
    grad, u_grad = grid(4094, 4094, dtype, "interior_transpose")
    found, accesses = compiled(90, laplacian.launch, grad, u_grad, "interior_transpose", 1.0)
    assert found.spills == 0 and found.smem_bytes == 0 and accesses["st", 16] == 8, (str(found), accesses)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_laplacian_of_any_width(dtype):
    u, out = grid(4096, 4093, dtype, "zero")
    found, accesses = compiled(90, laplacian.launch, u, out, "zero", 1.0)
    assert found.spills == 0 and found.smem_bytes == 0
    assert set(accesses) == {("ld", dtype.itemsize), ("st", dtype.itemsize)}


# Two-byte elements are twice as many in a vector: with the most rows they have the fewest registers to spare.
@pytest.mark.parametrize("dtype, rows", [(torch.float32, 8), (torch.bfloat16, 16)], ids=str)
def test_laplacian_configs(dtype, rows):
    u, out = grid(8192, 8192, dtype, "zero")
    listed = laplacian.configs(1, 8192, 8192 * dtype.itemsize // 16, 132)
    configs = {c.num_warps: c for c in listed if c.block_rows == rows}
    for config in (configs[1], configs[8]):  # the registers of a thread do not depend on how many there are
        found, _ = compiled(90, laplacian.launch, u, out, "zero", 1.0, config)
        assert found.spills == 0 and found.smem_bytes == 0, (config, str(found))
