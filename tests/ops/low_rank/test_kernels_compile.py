"""The kernels of small rank compile for GPUs that need not be here: they fit and do not spill."""

import pytest
import torch
import triton

from expertile.ops.low_rank import api
from tests.support.aot import resources
from tests.support.fake_driver import compile_only

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

E, T, K, H, I = 128, 64, 8, 2048, 768


# Each pair of values is met.
@pytest.mark.parametrize("arch, rank, interleaved", [(80, 16, False), (80, 64, True), (90, 16, True), (90, 64, False)])
def test_kernels(arch, rank, interleaved, monkeypatch):
    monkeypatch.setattr(api, "on_device", lambda x: True)
    rows, slots = (torch.empty(T * K, dtype=torch.int32) for _ in range(2))
    offs, weights = torch.empty(E, dtype=torch.int32), torch.empty(T, K)
    x, pre, act, u, y = (
        torch.empty(s, dtype=torch.bfloat16) for s in ((T, H), (T * K, 2 * I), (T * K, I), (T * K, rank), (T * K, H))
    )
    factors = ((E, 2 * I, rank), (E, rank, I), (E, H, rank))
    b, a, wide = (torch.empty(s, dtype=torch.bfloat16) for s in factors)
    with compile_only(arch) as kernels:
        api.shrink(x, rows, wide, offs)
        for act_dtype in (None, torch.float32):
            api.activated(pre, u, b, a, offs, ("swiglu", interleaved), dtype=act_dtype)
        api.backward(act, pre, u, b, u, a, slots, rows, weights, offs, ("swiglu", interleaved))
        api.expand(y, u, wide, offs)
        api.outer(u, x, rows, offs, weighted=(slots, weights), last=True)
        api.turn(torch.empty(2 * I, rank, E).permute(2, 0, 1), b)
    names = ("shrink", "activate", "activate", "backward", "expand", "outer", "turn")
    assert [k.metadata.name for k in kernels] == [f"{name}_kernel" for name in names]
    for each in (resources(k, arch) for k in kernels):
        assert each.spills == 0 and each.fits, str(each)
