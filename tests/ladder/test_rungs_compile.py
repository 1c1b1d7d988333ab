"""Every rung with a kernel compiles for sm_80 and sm_90, fits, does not spill, and moves its data as the page says."""

import pytest
import torch
import triton

from expertile.device import Device
from expertile.ladder import RUNGS
from tests.ops.grouped_mm.backends.test_triton_compile import (
    _M,
    DEVICES,
    assert_sound,
    compiled,
    operands_of,
    problem_of,
)

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

# Each rung meets one dtype on each GPU, the other on the next.
KERNELS = [
    (arch, rung, (torch.bfloat16, torch.float16)[(number + arch // 90) % 2])
    for arch in (80, 90)
    for number, rung in enumerate(RUNGS[2 : 5 if arch == 80 else 7])
]


@pytest.mark.parametrize("arch, rung, dtype", KERNELS, ids=lambda x: str(getattr(x, "name", x)))
def test_rung(arch, rung, dtype):
    operands = operands_of(_M, dtype=dtype)
    problem, device = problem_of(operands), Device.by_name(DEVICES[arch])
    assert rung.supports(problem, device) is None
    for config in rung.configs(problem, device):
        found = compiled(rung, arch, config, problem, operands)
        assert_sound(found)
        assert found.opcodes["HGMMA" if arch == 90 else "HMMA"] > 0, str(found)
        elements = (config.block_m + config.block_n) * config.block_k // (32 * config.num_warps)
        if rung.name == "3_masked_pointer":
            # one load instruction for every element a thread brings, and nothing asynchronous
            assert found.opcodes["LDGSTS"] == 0 and found.opcodes["LDG"] >= elements, str(found)
        elif rung.name in ("4_hints_unmasked", "5_persistent"):
            # eight elements each: the prologue's steps and the loop's
            assert found.opcodes["LDGSTS"] == elements // 8 * config.num_stages, str(found)
            assert found.opcodes["STG"] == config.block_m * config.block_n // (32 * config.num_warps) // 8, str(found)
        else:
            assert found.opcodes["UTMALDG"] > 0 and found.opcodes["UTMASTG"] > 0, str(found)
            assert found.opcodes["LDGSTS"] == 0, str(found)


def test_the_gluon_rung_is_the_backend():
    from expertile.ops.grouped_mm.backends import gluon_hopper

    assert RUNGS[7].run is gluon_hopper.BACKEND.run and RUNGS[7].configs is gluon_hopper.BACKEND.configs
