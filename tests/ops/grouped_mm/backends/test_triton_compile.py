"""Every Triton kernel and config compiles for GPUs that need not be here: it fits, does not spill, uses the units it is
meant for, and ptxas has nothing to warn of."""

from dataclasses import replace

import pytest
import torch
import triton

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import triton_pointer, triton_tma
from expertile.ops.grouped_mm.problem import Layout, Problem
from tests.support.aot import SMEM_LIMIT, most_spills, ptxas_warnings, resources
from tests.support.fake_driver import compile_only

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

DEVICES = {80: "a100", 86: "rtx 3090", 89: "rtx 4090", 90: "h200", 100: "b200", 120: "rtx 5090"}
# Instructions of the tensor cores that each architecture should be using for large tiles.
MATRIX_OPCODE = {80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
_M, _K, _N, _B = Layout.RAGGED_M, Layout.RAGGED_K, Layout.RAGGED_N, Layout.BATCHED


def operands_of(layout, n=512, k=512, dtype=torch.bfloat16, b_storage="column", bias=False, a_column=False):
    """Unfilled CPU operands: only shapes, strides and alignment matter to the compiler."""
    groups, tokens, m = 8, 1024, 256
    offs = None if layout is _B else torch.zeros(groups, dtype=torch.int32)

    def b_of(*shape):
        if b_storage == "row":
            return torch.empty(shape, dtype=dtype)
        return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).transpose(-1, -2)

    if layout is _M:
        a = torch.empty(k, tokens, dtype=dtype).t() if a_column else torch.empty(tokens, k, dtype=dtype)
        b = b_of(groups, k, n)
    elif layout is _K:
        a, b = torch.empty(tokens, m, dtype=dtype).t(), torch.empty(tokens, n, dtype=dtype)
    elif layout is _N:
        a, b = torch.empty(groups, m, k, dtype=dtype), b_of(k, tokens)
    else:
        a, b = torch.empty(groups, m, k, dtype=dtype), b_of(groups, k, n)
    return Operands(a, b, offs, torch.empty(groups, n, dtype=dtype) if bias else None)


def problem_of(operands, out_dtype=None, allow_tf32=False):
    problem = Problem.from_tensors(operands.a, operands.b, operands.offs, operands.bias, out_dtype)
    return replace(problem, device_type="cuda", group_sizes=None, allow_tf32=allow_tf32)


def compiled(backend, arch, config, problem, operands):
    """What the backend's own `run` compiles for sm_`arch`; one kernel and nothing else."""
    with compile_only(arch) as kernels:
        backend.run(problem, operands, config, None)
    assert len(kernels) == 1
    return resources(kernels[0], arch)


def assert_sound(found):
    assert found.fits, str(found)
    # Those few that ptxas 13.4 spills are none of triton_pointer's choice on sm_90, where triton_tma runs.
    assert found.spills <= most_spills(0, 12 if found.name == "_pointer_kernel" and found.arch >= 90 else 0), str(found)
    if found.arch >= 90:  # the warnings are about wgmma and its successors
        assert ptxas_warnings(found) == [], str(found)


def every_config(backend, arches, variants, first=0):
    """(arch, config, problem, operands): on each arch every config that the backend lists for the first variant, and of
    the others each meets a sixth of theirs, in turn; with first > 0 the first one as well."""
    for arch in arches:
        device = Device.by_name(DEVICES[arch])
        assert device.capability == divmod(arch, 10)
        for turn, (name, (operands, options)) in enumerate(variants.items(), first):
            problem = problem_of(operands, **options)
            assert backend.supports(problem, device) is None, f"{name} on sm_{arch}"
            configs = backend.configs(problem, device)
            for config in configs if turn == 0 else configs[turn % 6 :: 6]:
                tile = f"{config.block_m}x{config.block_n}x{config.block_k}-w{config.num_warps}-s{config.num_stages}"
                extra = f"-f{config.flatten:d}-p{config.subtile}" if hasattr(config, "subtile") else ""
                case_id = f"sm{arch}-{name}-{tile}{extra}-b{config.blocks_per_sm}"
                yield pytest.param(arch, config, problem, operands, id=case_id)


_COMMON = {"m": (operands_of(_M), {})}
_POINTER_HOPPER = {
    "m": (operands_of(_M), {}),
    "m-kn-odd": (operands_of(_M, k=500, n=509, b_storage="row", bias=True), {}),
    "m-odd-n": (operands_of(_M, n=509), {}),
    "m-eights": (operands_of(_M, k=504, n=520), {}),
    "k": (operands_of(_K), {}),
    "n": (operands_of(_N), {}),
    "tf32": (operands_of(_M, dtype=torch.float32), {"allow_tf32": True}),
    "fp32": (operands_of(_M, dtype=torch.float32), {}),
}
_POINTER_OLDER = {name: _POINTER_HOPPER[name] for name in ("m", "m-kn-odd")}
_TMA_HOPPER = {
    "m": (operands_of(_M), {}),
    "m-kn": (operands_of(_M, b_storage="row"), {}),
    "m-bias-fp32-out": (operands_of(_M, bias=True), {"out_dtype": torch.float32}),
    "m-odd-n": (operands_of(_M, n=509), {}),
    "k": (operands_of(_K), {}),
    "n-kn": (operands_of(_N, b_storage="row"), {}),  # first tiles ahead of their groups
    "m-a-column": (operands_of(_M, a_column=True), {}),
    "b": (operands_of(_B), {}),
    "tf32": (operands_of(_M, dtype=torch.float32), {"allow_tf32": True}),
}
_TMA_BLACKWELL = {name: _TMA_HOPPER[name] for name in ("m", "k")}


@pytest.mark.parametrize(
    "arch, config, problem, operands",
    [
        *every_config(triton_pointer.BACKEND, (90,), _POINTER_HOPPER),
        *every_config(triton_pointer.BACKEND, (80,), _POINTER_OLDER),
        *every_config(triton_pointer.BACKEND, (100,), _COMMON),
        # For bfloat16 these have the instructions of sm_80, and all as much shared memory: the largest tile, others.
        *every_config(triton_pointer.BACKEND, (86,), _COMMON, first=3),
        *every_config(triton_pointer.BACKEND, (89,), _COMMON, first=1),
        *every_config(triton_pointer.BACKEND, (120,), _COMMON, first=2),
    ],
)
def test_pointer(arch, config, problem, operands):
    found = compiled(triton_pointer.BACKEND, arch, config, problem, operands)
    assert_sound(found)
    if problem.dtype is torch.float32 and not problem.allow_tf32:
        assert found.opcodes["FFMA"] > 0, str(found)
    elif config.block_m >= 64:
        assert found.opcodes[MATRIX_OPCODE[arch]] > 0, str(found)
    else:
        assert found.opcodes["HMMA"] > 0, str(found)
    if problem.k % 8 == 0:
        assert found.opcodes["LDGSTS"] > 0, f"loads are not asynchronous: {found}"


def test_multiples_of_8_are_loaded_16_bytes_at_a_time():
    """As many asynchronous copies as of multiples of 16, which Triton sees by itself."""

    def copies(k, n):
        operands = operands_of(_M, k=k, n=n)
        config = triton_pointer.Config(128, 128, 64, 8, 3)
        return compiled(triton_pointer.BACKEND, 90, config, problem_of(operands), operands).opcodes["LDGSTS"]

    assert copies(504, 520) == copies(496, 528) > 0


@pytest.mark.parametrize(
    "arch, config, problem, operands",
    [*every_config(triton_tma.BACKEND, (90,), _TMA_HOPPER), *every_config(triton_tma.BACKEND, (100,), _TMA_BLACKWELL)],
)
def test_tma(arch, config, problem, operands):
    found = compiled(triton_tma.BACKEND, arch, config, problem, operands)
    assert_sound(found)
    assert found.opcodes[MATRIX_OPCODE[arch]] > 0, str(found)
    assert found.opcodes["UTMALDG"] > 0, str(found)
    assert found.opcodes["LDGSTS"] == 0, f"operands are loaded through pointers: {found}"
    ahead = problem.layout is _M and problem.a_strides[0] == 1  # of its group, where nothing is to be stored
    stored_by_tma = problem.layout is not _N and not ahead and problem.n * problem.out_dtype.itemsize % 16 == 0
    assert (found.opcodes["UTMASTG"] > 0) == stored_by_tma, str(found)


@pytest.mark.parametrize("arch", sorted(DEVICES))
def test_devices_have_the_shared_memory_assumed(arch):
    assert Device.by_name(DEVICES[arch]).smem_bytes == SMEM_LIMIT[arch]


def test_a_kernel_too_large_is_found():
    """The check itself: five stages of 128 x 256 x 64 do not fit an H200."""
    operands = operands_of(_M)
    config = triton_tma.Config(128, 256, 64, 8, 5)
    found = compiled(triton_tma.BACKEND, 90, config, problem_of(operands), operands)
    assert not found.fits


def test_spills_are_found():
    """The check itself: 256 accumulators per thread do not fit the registers."""
    operands = operands_of(_M)
    config = triton_pointer.Config(128, 256, 64, 4, 2)
    found = compiled(triton_pointer.BACKEND, 80, config, problem_of(operands), operands)
    assert found.spills > 0
