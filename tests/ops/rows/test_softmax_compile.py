"""The softmax kernels compile for sm_80, sm_90 and sm_100: they fit, do not spill, and load in whole vectors."""

import pytest
import torch
import triton

from expertile.ops.rows import choose
from expertile.ops.rows.softmax import on_rows
from tests.ops.rows.compile_cases import ROWS, assert_sound, cases, compiled

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]


@pytest.mark.parametrize("arch, dtype, cols, config", cases(choose.forward), ids=str)
def test_forward(arch, dtype, cols, config):
    x = torch.empty(ROWS, cols, dtype=dtype)
    (found,) = compiled(arch, lambda: on_rows((x,), config))
    assert_sound(found, cols, config)


@pytest.mark.parametrize("arch, dtype, cols, config", cases(choose.softmax_backward), ids=str)
def test_backward(arch, dtype, cols, config):
    x = torch.empty(ROWS, cols, dtype=dtype)
    (found,) = compiled(arch, lambda: on_rows((x, x), config))
    assert_sound(found, cols, config)
