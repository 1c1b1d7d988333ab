"""The assembly of triton_int4, which the interpreter leaves out, carried out bit by bit."""

import pytest
import torch

from expertile.formats.int4.packing import pack, words
from expertile.ops.weight_only_mm import triton_unpack
from tests.support import int4_emulator


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_nibble_is_a_number_in_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(16 * 64).mul(7).add(torch.arange(16 * 64) // 16).remainder(16).view(16, 64).to(torch.uint8)
    assembly = triton_unpack._BF16 if dtype is torch.bfloat16 else triton_unpack._FP16
    bits = words(pack(values, 32)).long() & 0xFFFFFFFF
    outs = torch.stack(int4_emulator.ptx(assembly.value, 8, [bits]), -1)
    numbers = outs.to(torch.int32).to(torch.int16).view(dtype).float().view(16, 2, 4, 2, 2, 2)
    # [row, 16 values, t, low or high, 8 further, 1 further] -> in the order of K.
    got = numbers.permute(0, 3, 1, 4, 2, 5).reshape(16, 64)
    assert torch.equal(got, values.float() - 8)
