"""The interpreter repairs: each fault of the interpreter as shipped, computed rightly."""

import pytest

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import torch
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    interpreter.repair()
    interpreter.repair()  # a second time changes nothing

    @triton.jit
    def _elementwise_kernel(x_ptr, y_ptr, out_ptr, less_ptr, OP: tl.constexpr, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
        if OP == "add":
            result = x + y
        elif OP == "mul":
            result = x * y
        elif OP == "where":
            result = tl.where(x < y, x, y)
        else:
            result = x - y
        tl.store(out_ptr + i, result)
        tl.store(less_ptr + i, (x < y).to(tl.int8))

    @pytest.mark.parametrize("op", ["add", "sub", "mul", "where"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_arithmetic_uses_values(op, dtype):
        torch.manual_seed(0)
        x, y = torch.randn(2, 64).to(dtype)
        out, less = torch.empty_like(x), torch.empty(64, dtype=torch.int8)
        _elementwise_kernel[(1,)](x, y, out, less, OP=op, SIZE=64)
        want = {"add": x + y, "sub": x - y, "mul": x * y, "where": torch.minimum(x, y)}[op]
        assert torch.equal(out, want)
        assert torch.equal(less.bool(), x < y)

    @triton.jit
    def _cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))

    def cast(x, dtype):
        out = torch.empty(x.shape, dtype=dtype)
        _cast_kernel[(1,)](x, out, SIZE=x.numel())
        return out

    @pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
    def test_conversion_rounds_to_nearest_even(target):
        torch.manual_seed(0)
        x = torch.cat([torch.randn(60) * 10, torch.tensor([1.99999, -0.99999, 0.0, 1.00390625])])
        assert torch.equal(cast(x, target).float(), x.to(target).float())

    def test_conversion_carries_into_the_exponent():
        assert cast(torch.tensor([1.99999, 255.9]), torch.bfloat16).tolist() == [2.0, 256.0]

    def test_float8_saturates_as_the_gpu_does():
        x = torch.tensor([1e6, -1e6])
        assert cast(x, torch.float8_e4m3fn).float().tolist() == [448.0, -448.0]
        assert cast(x, torch.float8_e5m2).float().tolist() == [57344.0, -57344.0]

    @pytest.mark.parametrize("source", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
    def test_widening_is_exact(source):
        torch.manual_seed(0)
        x = torch.randn(64).to(source)
        assert torch.equal(cast(x, torch.float32), x.float())

    @triton.jit
    def _matmul_kernel(a_ptr, b_ptr, out_ptr, K, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
        i = tl.arange(0, SIZE)
        ks = tl.arange(0, BLOCK_K)
        acc = tl.zeros((SIZE, SIZE), tl.float32)
        for k in range(0, K, BLOCK_K):  # a run-time bound
            a = tl.load(a_ptr + i[:, None] * K + k + ks[None, :])
            b = tl.load(b_ptr + (k + ks[:, None]) * SIZE + i[None, :])
            acc = tl.dot(a, b, acc)
        tl.store(out_ptr + i[:, None] * SIZE + i[None, :], acc)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
    def test_dot_in_a_loop_with_a_run_time_bound(dtype):
        torch.manual_seed(0)
        a, b = torch.randn(16, 48).to(dtype), torch.randn(48, 16).to(dtype)
        out = torch.empty(16, 16)
        _matmul_kernel[(1,)](a, b, out, 48, SIZE=16, BLOCK_K=16)
        torch.testing.assert_close(out, a.float() @ b.float())

    @triton.jit
    def _window_kernel(desc, out_ptr, start, ROWS: tl.constexpr, COLS: tl.constexpr):
        block = desc.load([0, start])
        tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], block)

    def test_descriptor_does_not_load_from_within_16_bytes():
        x, out = torch.zeros(4, 24, dtype=torch.bfloat16), torch.empty(4, 8, dtype=torch.bfloat16)
        with pytest.raises(Exception, match="16-byte aligned"):
            _window_kernel[(1,)](TensorDescriptor.from_tensor(x, [4, 8]), out, 3, ROWS=4, COLS=8)

    @pytest.mark.parametrize("start", [0, 8, 16, 24, -8])
    def test_descriptor_fills_with_zeros(start):
        x = torch.arange(4 * 24, dtype=torch.float32).view(4, 24).bfloat16() + 1
        out = torch.full((4, 8), -1.0, dtype=torch.bfloat16)
        _window_kernel[(1,)](TensorDescriptor.from_tensor(x, [4, 8]), out, start, ROWS=4, COLS=8)
        padded = torch.zeros(4, 64, dtype=torch.bfloat16)
        padded[:, 16 : 16 + 24] = x
        assert torch.equal(out, padded[:, 16 + start : 24 + start])
