"""add_scalar on the CPU: values, strides, gradients, the operator's contract, errors."""

import pytest
import torch

from expertile.ops.pointwise import add_scalar as elementwise
from expertile.ops.pointwise.add_scalar import add_scalar, config_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def summed(x, value):
    """The sum in float32 (float64 for float64), rounded once."""
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide + value).to(x.dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4)])
def test_values(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    for value in (1, 0.1, -3.7, float("inf"), float("nan")):
        torch.testing.assert_close(add_scalar(x, value), summed(x, value), rtol=0, atol=0, equal_nan=True)


def strided():
    base = torch.randn(6, 8, 4)
    yield "transposed", base.transpose(0, 2)
    yield "sliced", base[:, ::2]
    yield "expanded", base[:, :1].expand(6, 5, 4)
    yield "offset", base.flatten()[3:]
    yield "channels-last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield "sliced-transposed", base.transpose(0, 1)[::2]


@pytest.mark.parametrize("x", [pytest.param(x, id=name) for name, x in strided()])
def test_strides(x):
    out = add_scalar(x, 2.5)
    torch.testing.assert_close(out, x + 2.5, rtol=0, atol=0)
    assert out.stride() == torch.empty_like(x).stride()
    torch.library.opcheck(torch.ops.expertile.add_scalar, (x, 2.5))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (0, 3), ()])
def test_opcheck(shape, requires_grad):
    x = torch.randn(shape, requires_grad=requires_grad)
    torch.library.opcheck(torch.ops.expertile.add_scalar, (x, 2.5))


def test_gradients():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: add_scalar(x, 2.5), (x,))
    torch.autograd.gradgradcheck(lambda x: add_scalar(x, 2.5) ** 2, (x,))


def test_compiles_whole_with_changing_shapes():
    def run(x, v):
        return add_scalar(x * 2, v).relu()

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((4, 9), (6, 2), (5,)):
        x = torch.randn(shape, requires_grad=True)
        out = compiled(x, 1.5)
        torch.testing.assert_close(out, (x * 2 + 1.5).relu())
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], 2.0 * (out > 0))


def test_meta_tensors_have_a_shape():
    assert add_scalar(torch.empty(3, 4, device="meta"), 1).shape == (3, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 32_000, 10**6, 10**8])
def test_blocks_are_powers_of_two(numel, dtype):
    config = config_for(numel, dtype, 132)
    assert config.block & (config.block - 1) == 0
    # At least one 16-byte load for every thread.
    assert config.block * dtype.itemsize >= 16 * 32 * config.num_warps


def test_small_tensors_spread_over_the_sms():
    small, large = config_for(10**6, torch.float32, 132), config_for(10**8, torch.float32, 132)
    assert small.block < large.block
    assert 10**6 // small.block > 132


@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_of_large_tensors_come_in_many_waves(dtype):
    """2048 threads stay on an SM: with two waves the last one could be nearly empty and cost as much as the first."""
    config = config_for(10**7, dtype, 132)
    assert 10**7 / config.block > 4 * 132 * 2048 / (32 * config.num_warps)


@pytest.mark.parametrize(
    "args, error, message",
    [
        (([1.0], 1), TypeError, "x: expected a torch.Tensor, got list"),
        ((torch.ones(2, dtype=torch.int32), 1), ValueError, "x: expected float32, bfloat16 or float16.*int32"),
        ((torch.ones(2), torch.ones(2)), TypeError, "value: expected a number, got Tensor"),
        ((torch.ones(2), "1"), TypeError, "value: expected a number, got str"),
    ],
)
def test_errors(args, error, message):
    with pytest.raises(error, match=message):
        add_scalar(*args)


def test_float64_is_for_the_cpu():
    with pytest.raises(ValueError, match="on a CPU also float64"):
        add_scalar(torch.empty(2, dtype=torch.float64, device="meta"), 1)


def test_backward_runs_no_kernel(monkeypatch):
    x = torch.randn(5, requires_grad=True)
    out = add_scalar(x, 1.0)
    monkeypatch.setattr(elementwise, "_forward", lambda *_: pytest.fail("a kernel ran backward"))
    (grad,) = torch.autograd.grad(out, x, torch.ones(5))
    assert torch.equal(grad, torch.ones(5))
