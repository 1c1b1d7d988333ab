"""The machine code that tests look at is what cuobjdump shows of the same kernel."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from tests.support import aot
from tests.support.fake_driver import compile_only


@triton.jit
def _mean_kernel(x_ptr, out_ptr, n):
    total = 0.0
    for i in range(n):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, tl.div_rn(total, n.to(tl.float32)))


def _instructions(listing: str) -> list[str]:
    return [re.sub(r"[\s,]", "", found) for found in re.findall(r"^\s+(/\*[0-9a-f]{4,}\*/.*?;)", listing, re.M)]


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code(arch):
    with compile_only(arch) as kernels:
        _mean_kernel[(1,)](torch.empty(8), torch.empty(1), 8)
    (kernel,) = kernels
    shown = aot._read(kernel.asm["cubin"], knobs.nvidia.cuobjdump.path, "--dump-sass")
    # A loop and a call: targets before and behind the instruction, of another function.
    assert re.search(r"BRA 0x", shown) and re.search(r"CALL.* 0x", shown)
    assert _instructions(aot.machine_code(kernel.asm["cubin"])) == _instructions(shown)
