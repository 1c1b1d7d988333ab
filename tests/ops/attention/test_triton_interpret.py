"""The Triton kernels' numbers, through Triton's interpreter."""

import pytest

from expertile.device import Device
from expertile.ops.attention import reference
from expertile.ops.attention.backend import Saved
from expertile.ops.attention.backends import triton_portable
from expertile.ops.attention.backends.triton_portable import BackwardConfig, Config
from tests.ops.attention.cases import CASES, Case, check_backward, check_forward, make
from tests.support import interpreter

if not interpreter.active():

    def test_interpreted():
        interpreter.run_file_interpreted(__file__)

else:
    interpreter.repair()

    FORWARD = Config(64, 64, 4, 1)
    BACKWARD = BackwardConfig(Config(64, 64, 4, 1), Config(64, 64, 4, 1))
    CPU = Device.current("cpu")
    # Wider heads run the same lines on larger arrays.
    NARROW = [case for case in CASES if case.dim < 128]

    @pytest.mark.parametrize("case", NARROW, ids=str)
    def test_forward(case: Case) -> None:
        made = make(case)
        assert triton_portable.supports(made.problem, CPU) is None
        check_forward(made, *triton_portable.forward(made.problem, made.operands, FORWARD))

    @pytest.mark.parametrize("case", NARROW, ids=str)
    def test_backward(case: Case) -> None:
        made = make(case)
        check_backward(made, triton_portable.backward(made.problem, made.operands, made.saved, BACKWARD))

    def test_gradient_of_lse() -> None:
        made = make(CASES[1])
        dlse = made.lse.clone()
        saved = Saved(made.saved.out, made.lse, made.dout, dlse)
        got = triton_portable.backward(made.problem, made.operands, saved, BACKWARD)
        want = reference.backward(made.problem, made.operands, Saved(made.out, made.lse, made.dout, dlse))
        for g, w in zip(got, want, strict=True):
            assert float((g.float() - w.float()).norm() / w.float().norm()) < 8e-3
