"""The Triton kernels compile for GPUs that need not be here: they fit, do not spill, load whole vectors, use the tensor
cores; ptxas has nothing to warn of."""

from dataclasses import replace

import pytest
import torch
import triton

from expertile.device import Device
from expertile.ops.gathered_mm import combine, pointwise
from expertile.ops.gathered_mm.backends import triton_gather
from expertile.ops.gathered_mm.backends.triton_gather import Config
from tests.ops.gathered_mm.cases import GATED, MM, WGRAD, Case, make, poisoned_outputs
from tests.support.aot import ptxas_warnings, resources
from tests.support.fake_driver import compile_only

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

DEVICES = {80: "a100", 90: "h200"}
SIZES = (64, 64)
PLAIN = Case("mm", MM, SIZES, n=512, k=512)
HALVES = Case("gated-halves", GATED, SIZES, n=512, k=512)
INTERLEAVED = Case("gated-interleaved-bias", GATED, SIZES, n=512, k=512, interleaved=True, bias=True)
OTHER_ORDER = Case("gated-kn-no-pre", GATED, SIZES, n=512, k=512, storage="kn", save_pre=False, gathered="")
WEIGHTS = Case("wgrad", WGRAD, SIZES, n=512, k=512)


@pytest.mark.parametrize(
    "case, arch, tile",
    [
        (PLAIN, 90, (128, 256, 64, 8, 3)),
        (HALVES, 80, (128, 64, 64, 8, 3)),
        (INTERLEAVED, 90, (128, 128, 64, 8, 3)),
        (OTHER_ORDER, 90, (16, 32, 128, 4, 4)),
        (WEIGHTS, 80, (128, 128, 32, 8, 5)),
        (WEIGHTS, 90, (128, 128, 64, 8, 4)),
    ],
    ids=str,
)
def test_gather_kernels(case: Case, arch: int, tile: tuple[int, ...]) -> None:
    problem, operands = make(case)
    problem = replace(problem, device_type="cuda")
    device = Device.by_name(DEVICES[arch])
    config = Config(*tile)
    offered = triton_gather.BACKEND.configs(problem, device)
    assert config in [replace(c, group_m=8, blocks_per_sm=1) for c in offered]
    with compile_only(arch) as kernels:
        triton_gather.BACKEND.run(problem, operands, config, poisoned_outputs(problem, operands))
    found = resources(kernels[0], arch)
    assert found.fits and found.spills == 0, str(found)
    assert found.opcodes["HGMMA" if arch == 90 and config.block_m >= 64 else "HMMA"] > 0, str(found)
    assert found.opcodes["LDGSTS"] > 0, f"loads are not asynchronous: {found}"
    if arch == 90:
        assert ptxas_warnings(found) == []


def _launched(what: str, cols: int, interleaved: bool = False):
    rows = 64
    offs, index = torch.zeros(4, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    x, pre = torch.empty(rows, cols, dtype=torch.bfloat16), torch.empty(rows, 2 * cols, dtype=torch.bfloat16)
    weights = torch.empty(8, 8)
    if what == "gather_rows":
        pointwise.gather_rows(x, index, offs)
    elif what == "gated_activation":
        pointwise.gated_activation(pre, offs, x, "swiglu", interleaved)
    elif what == "gated_backward":
        pointwise.gated_backward(x, pre, index, weights, offs, pre, x, weights, "geglu", interleaved)
    elif what == "combine":
        combine.forward(x, index.view(8, 8), weights)
    elif what == "combine_many":
        combine.forward(x, torch.zeros(4096, 8, dtype=torch.int32), torch.empty(4096, 8))
    else:
        combine.backward(x[:8], x, index.view(8, 8), weights, True, True)


@pytest.mark.parametrize(
    "what, arch, cols, interleaved",
    [
        ("gather_rows", 80, 4096, False),
        ("gather_rows", 90, 1536, False),
        ("gated_activation", 90, 1024, True),
        ("gated_activation", 80, 256, False),
        ("gated_backward", 90, 1024, False),
        ("gated_backward", 90, 512, True),
        ("combine", 90, 4096, False),
        ("combine", 80, 1536, False),
        ("combine_many", 90, 768, False),
        ("combine_backward", 90, 4096, False),
    ],
)
def test_memory_bound_kernels(what, arch, cols, interleaved, monkeypatch) -> None:
    for module in (pointwise, combine):
        monkeypatch.setattr(module, "on_kernels", lambda x: True, raising=False)
    with compile_only(arch) as kernels:
        _launched(what, cols, interleaved)
    (kernel,) = kernels
    found = resources(kernel, arch)
    assert found.fits and found.spills == 0, str(found)
    moves = [line for line in found.ptx.splitlines() if "ld.global" in line or "st.global" in line]
    for kind in ("ld.global.v4.b32", "st.global.v4.b32"):
        assert any(kind in line for line in moves), "\n".join(moves)
