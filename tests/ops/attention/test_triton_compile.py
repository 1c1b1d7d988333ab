"""The Triton kernels compile for GPUs that need not be here: they fit, use the tensor cores, and do not spill."""

import pytest
import triton

from expertile.device import Device
from expertile.ops.attention.backends import triton_portable
from tests.ops.attention.cases import Case, make, on_gpu
from tests.support import aot
from tests.support.fake_driver import compile_only

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

DEVICES = {80: "a100", 86: "rtx 3090", 90: "h200", 100: "b200"}
MATRIX_OPCODE = {80: "HMMA", 86: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
CASES = {
    "D 64": Case("D 64", 64, 64, dim=64, heads=4, causal=True),
    "D 128": Case("D 128", 64, 64, dim=128, heads=4, causal=True),
    "D 256": Case("D 256", 32, 32, dim=256, causal=True),
}
# dK and dV of wide heads fill the registers: those backwards are right, not fast.
SPILLS = {("D 256", 90), ("D 128", 100)}


def _compiled(arch, run):
    with compile_only(arch) as kernels:
        run()
    return [aot.resources(kernel, arch) for kernel in kernels]


# sm_80 and sm_86 differ in shared memory, which is short for wide heads.
TARGETS = [(name, arch) for name in CASES for arch in DEVICES if (name, arch) != ("D 64", 86)]


@pytest.mark.parametrize(("name", "arch"), TARGETS)
def test_compiles(name, arch) -> None:
    made, device = make(CASES[name]), Device.by_name(DEVICES[arch])
    p = on_gpu(made.problem)
    assert triton_portable.supports(p, device) is None
    for config in triton_portable.forward_configs(p, device)[:1]:
        (found,) = _compiled(arch, lambda config=config: triton_portable.forward(p, made.operands, config))
        assert found.fits and found.spills <= aot.most_spills(0, 4), str(found)
        assert found.opcodes[MATRIX_OPCODE[arch]] > 0, str(found)
        assert found.opcodes["LDGSTS"] > 0, f"loads are not asynchronous: {found}"
    if (name, arch) == ("D 256", 100):  # as on sm_90, by the same config
        return
    for config in triton_portable.backward_configs(p, device)[:1]:
        found = _compiled(arch, lambda config=config: triton_portable.backward(p, made.operands, made.saved, config))
        assert [x.name for x in found] == ["statistics_kernel", "dkdv_kernel", "dq_kernel"]
        for x in found:
            assert x.fits, str(x)
            assert x.spills <= aot.most_spills(0, 4) or (name, arch) in SPILLS, str(x)
        # Blocks of less than 64 rows, as wide heads have them, go to the older matrix instruction.
        assert all(x.opcodes[MATRIX_OPCODE[arch]] + x.opcodes["HMMA"] > 0 for x in found[1:])


def test_odd_head_dimensions_and_packed_rows_compile() -> None:
    for case in (Case("D 80", 64, 64, dim=80), Case("packed", (32, 32), (32, 32), dim=36, causal=True)):
        made = make(case)
        p, device = on_gpu(made.problem), Device.by_name("h200")
        config = triton_portable.forward_configs(p, device)[0]
        with compile_only(90) as kernels:
            triton_portable.forward(p, made.operands, config)
        found = aot.resources(kernels[0], 90)
        assert found.fits and found.opcodes["HGMMA"] > 0, str(found)
