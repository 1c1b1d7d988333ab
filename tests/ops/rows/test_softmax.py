"""softmax: values and gradients against float64, odd rows, what torch sees; the kernels through the interpreter."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from expertile.ops.rows.softmax import softmax
from tests.ops.rows.cases import DTYPES, SHAPES, TO_INTERPRET, assert_close, assert_softmax_gradient, fits, leaf, random
from tests.support import interpreter

INF, NAN = float("inf"), float("nan")


def check(shape, dtype, config=None, backward_config=None, scale=1.0):
    x, dy = random(shape, dtype, 0, scale=scale).requires_grad_(), random(shape, dtype, 1)
    y = softmax(x, config=config, backward_config=backward_config)
    y.backward(dy)
    x64 = leaf(x)
    y64 = x64.softmax(-1)
    assert y.dtype is dtype and y.is_contiguous() and x.grad.dtype is dtype
    if x.numel() == 0:
        return
    assert_close(y, y64, "y", 4.0)  # exp of the hardware: 2 units in the last place
    assert_softmax_gradient(x.grad, dy, y)
    if dtype is torch.float32 and shape[-1] > 1 and scale == 1.0:  # a saturated row amplifies the rounding of y
        y64.backward(dy.double())
        assert_close(x.grad, x64.grad, "dx", 8.0)


def odd_rows():
    """Rows with NaN and infinities, and one of very large numbers."""
    x = random((9, 40), torch.float32, 2)
    x[0, 3] = NAN
    x[1, 5] = INF
    x[2, :] = -INF
    x[3, 7:] = -INF
    x[4, 1], x[4, 2] = INF, -INF
    x[5, :] = NAN
    x[6, :] = 3e38
    x[6, 0] = -3e38
    x[7, 2], x[7, 3] = NAN, INF
    return x


def assert_as_torch(config=None):
    x = odd_rows()
    torch.testing.assert_close(softmax(x, config=config), torch.softmax(x, -1), equal_nan=True)


if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_and_gradients(shape, dtype):
        check(shape, dtype)

    def test_infinities_and_nan_as_torch():
        assert_as_torch()

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(0, 5), min_size=0, max_size=3), st.integers(1, 300), st.sampled_from(DTYPES))
    def test_random_shapes(lead, cols, dtype):
        check((*lead, cols), dtype)

    @pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
    def test_other_dimensions(dim):
        x = random((4, 5, 6), torch.float32, 0)
        torch.testing.assert_close(softmax(x, dim), torch.softmax(x, dim))

    def test_empty():
        assert softmax(torch.empty(0, 5)).shape == (0, 5)
        assert softmax(torch.empty(3, 0)).shape == (3, 0)

    def test_second_derivative():
        x = random((3, 5), torch.float32, 0).requires_grad_()
        v, w = random((3, 5), torch.float32, 1), random((3, 5), torch.float32, 2)
        second = []
        for f in (softmax, lambda x: torch.softmax(x, -1)):
            (first,) = torch.autograd.grad(f(x), x, v, create_graph=True)
            second.append(torch.autograd.grad(first, x, w)[0])
        torch.testing.assert_close(*second)

    def test_errors():
        with pytest.raises(ValueError, match="x: expected a torch.Tensor, got list"):
            softmax([1.0])
        with pytest.raises(ValueError, match="x: expected float32, bfloat16, float16 or float64, got torch.int64"):
            softmax(torch.ones(2, dtype=torch.int64))
        with pytest.raises(ValueError, match="x: expected at least one dimension"):
            softmax(torch.tensor(1.0))
        for dim in (None, "a", 1.5):
            with pytest.raises(ValueError, match=f"dim: expected an integer, got {dim!r}"):
                softmax(torch.ones(2, 3), dim)
        with pytest.raises(ValueError, match="^config: expected a RowConfig or None, got 3"):
            softmax(torch.ones(2, 3), config=3)
        with pytest.raises(IndexError):
            softmax(torch.ones(2, 3), dim=2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_opcheck(dtype):
        x = random((3, 20), dtype, 0)
        torch.library.opcheck(torch.ops.expertile.softmax.default, (x,))
        torch.library.opcheck(torch.ops.expertile.softmax.default, (x.clone().requires_grad_(),))
        torch.library.opcheck(torch.ops.expertile.softmax_backward.default, (x, x.softmax(-1)))

    def test_compiles_without_a_break():
        compiled = torch.compile(lambda x: softmax(x * 2.0, 0) + 1.0, fullgraph=True, dynamic=True, backend="aot_eager")
        for shape in ((7, 3), (11, 5), (2, 130)):
            x = random(shape, torch.float32, 0).requires_grad_()
            y = compiled(x)
            y.backward(random(shape, torch.float32, 1))
            expected = x.detach().clone().requires_grad_()
            z = torch.softmax(expected * 2.0, 0) + 1.0
            z.backward(random(shape, torch.float32, 1))
            torch.testing.assert_close(y, z)
            torch.testing.assert_close(x.grad, expected.grad)

    def test_meta_and_fake_tensors():
        assert softmax(torch.empty(4, 5, device="meta")).shape == (4, 5)

else:
    interpreter.repair()

    @pytest.mark.parametrize("config", TO_INTERPRET, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_and_gradients(shape, dtype, config):
        if not fits(config, shape[-1]):
            pytest.skip("too many pieces")
        check(shape, dtype, config, config)

    @pytest.mark.parametrize("config", TO_INTERPRET, ids=str)
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_infinities_and_nan_as_torch(config):
        assert_as_torch(config)

    @settings(max_examples=25, deadline=None)
    @given(
        st.integers(1, 9),
        st.integers(1, 150),
        st.sampled_from(DTYPES),
        st.sampled_from(TO_INTERPRET),
        st.sampled_from([1.0, 30.0]),
    )
    def test_random_shapes(rows, cols, dtype, config, scale):
        check((rows, cols), dtype, config if fits(config, cols) else None, scale=scale)

    def test_strided_rows():
        wide, other = random((6, 80), torch.float32, 0), random((40, 6), torch.float32, 1)
        for x in (wide[:, 8:48], wide[::2, :40], other.t(), wide[:1, :40].expand(3, 40)):
            torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
