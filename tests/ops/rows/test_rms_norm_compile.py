"""The kernels of rms norm compile for sm_80, sm_90 and sm_100: they fit, do not spill, and load in whole vectors."""

from functools import partial

import pytest
import torch
import triton

from expertile.ops.rows import choose, norm
from tests.ops.rows.compile_cases import ROWS, assert_sound, cases, compiled

CENTERED = False
FORWARD = partial(choose.forward, vectors=1, inputs=2)
BACKWARD = partial(choose.norm_backward, vectors=1)
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]


@pytest.mark.parametrize("arch, dtype, cols, config", cases(FORWARD, (256, 1023, 5120, 32768)), ids=str)
def test_forward(arch, dtype, cols, config):
    x, weight = torch.empty(ROWS, cols, dtype=dtype), torch.empty(cols, dtype=dtype)
    bias, residual = (weight, None) if CENTERED else (None, x)
    (found,) = compiled(arch, lambda: norm.forward(x, residual, weight, bias, 1e-5, CENTERED, True, config))
    assert_sound(found, cols, config)


@pytest.mark.parametrize("arch, dtype, cols, config", cases(BACKWARD, (256, 5120, 32768)), ids=str)
def test_backward(arch, dtype, cols, config):
    x, weight, rstd = torch.empty(ROWS, cols, dtype=dtype), torch.empty(cols, dtype=dtype), torch.empty(ROWS)
    bias, mean = (weight, rstd) if CENTERED else (None, None)
    wanted = (True, CENTERED)
    kernels = compiled(arch, lambda: norm.backward(x, x, weight, bias, mean, rstd, None, wanted, config))
    assert len(kernels) == (3 if config.streamed else 2)
    assert_sound(kernels[0], cols, config)
    for other in kernels[1:]:
        assert other.fits and other.spills == 0, str(other)
