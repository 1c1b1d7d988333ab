"""layer_norm and rms_norm: values and gradients against float64, what torch sees of them; the kernels through the
interpreter."""

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings

from expertile.ops.rows.layer_norm import layer_norm
from expertile.ops.rows.rms_norm import rms_norm
from tests.ops.rows import norm_checks
from tests.ops.rows.cases import SHAPES, TO_INTERPRET, fits, random
from tests.ops.rows.norm_checks import KINDS
from tests.support import interpreter

# Shrinking a failure costs minutes in the interpreter.
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Norm:
    """One of the norms, torch's of the same formula, and what tells them apart."""

    call: Callable
    torchs: Callable
    centered: bool  # subtracts the mean, and can return it
    eps: float


NORMS = {"layer_norm": Norm(layer_norm, F.layer_norm, True, 1e-5), "rms_norm": Norm(rms_norm, F.rms_norm, False, 1e-6)}
of_both = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


def check(norm, shape, kind, config=None, offset=0.0):
    norm_checks.check(norm.call, norm.centered, shape, kind, config, offset)


@of_both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinities_and_nan_as_torch(norm):
    x, weight = random((4, 40), F32, 0), random((40,), F32, 1)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), float("-inf")
    expected = norm.torchs(x, (40,), weight, eps=norm.eps)
    torch.testing.assert_close(norm.call(x, weight), expected, equal_nan=True)


if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

    @of_both
    @pytest.mark.parametrize("kind", KINDS, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_and_gradients(norm, shape, kind):
        check(norm, shape, kind)

    @of_both
    @settings(max_examples=30, deadline=None)
    @given(
        st.lists(st.integers(0, 5), max_size=3),
        st.integers(1, 300),
        st.sampled_from(KINDS),
        st.sampled_from([0.0, 8.0]),
    )
    def test_random_shapes(norm, lead, cols, kind, offset):
        check(norm, (*lead, cols), kind, offset=offset)

    @of_both
    def test_strided_rows(norm):
        norm_checks.check_strides(norm.call)

    @of_both
    def test_only_the_gradients_asked_for(norm):
        norm_checks.check_parts(norm.call)

    @of_both
    def test_what_is_returned(norm):
        x = random((3, 8), F32, 0)
        assert isinstance(norm.call(x), torch.Tensor)
        assert len(norm.call(x, residual=x)) == 2
        assert len(norm.call(x, return_stats=True)) == 2 + norm.centered
        assert len(norm.call(x, residual=x, return_stats=True)) == 3 + norm.centered

    @of_both
    def test_empty(norm):
        weight = torch.ones(5, requires_grad=True)
        y = norm.call(torch.empty(0, 5), weight)
        y.sum().backward()
        assert y.shape == (0, 5) and torch.equal(weight.grad, torch.zeros(5))
        assert norm.call(torch.empty(3, 0)).shape == (3, 0)

    @of_both
    def test_second_derivative(norm):
        x, weight = random((3, 6), F32, 0).requires_grad_(), random((6,), F32, 1).requires_grad_()
        v, w = random((3, 6), F32, 2), random((3, 6), F32, 3)
        second = []
        for f in (lambda: norm.call(x, weight), lambda: norm.torchs(x, (6,), weight, eps=norm.eps)):
            (first,) = torch.autograd.grad(f(), x, v, create_graph=True)
            second.append(torch.autograd.grad(first, (x, weight), w))
        torch.testing.assert_close(*second, rtol=1e-4, atol=1e-5)

    @of_both
    def test_errors(norm):
        x = torch.ones(2, 3)
        cases = {
            "x: expected a torch.Tensor, got list": lambda: norm.call([1.0]),
            "x: expected float32, bfloat16, float16 or float64, got torch.int64": lambda: norm.call(x.long()),
            "x: expected at least one dimension": lambda: norm.call(torch.tensor(1.0)),
            r"weight: expected shape \(3,\) on cpu, got \(4,\)": lambda: norm.call(x, torch.ones(4)),
            r"bias: expected shape \(3,\) on cpu, got \(3, 1\)": lambda: norm.call(x, None, torch.ones(3, 1)),
            "weight: expected float32, bfloat16, float16 or float64, got torch.int64": lambda: norm.call(
                x, torch.ones(3).long()
            ),
            "bias: expected a torch.Tensor, got float": lambda: norm.call(x, None, 1.0),
            r"residual: expected x's shape \(2, 3\)": lambda: norm.call(x, residual=torch.ones(3, 2)),
            "residual: expected x's dtype torch.float32": lambda: norm.call(x, residual=x.half()),
            **{
                f"eps: expected a finite number of at least 0, got {eps!r}": lambda eps=eps: norm.call(x, eps=eps)
                for eps in (-1, float("nan"), float("inf"), None, "a")
            },
            "^config: expected a RowConfig or None, got 3": lambda: norm.call(x, config=3),
            "backward_config: expected a RowConfig or None, got 'a'": lambda: norm.call(x, backward_config="a"),
        }
        for message, call in cases.items():
            with pytest.raises(ValueError, match=message):
                call()

    @of_both
    @pytest.mark.parametrize("kind", KINDS[:6:2], ids=str)
    def test_opcheck(norm, kind):
        x, weight, bias, residual = norm_checks.tensors((3, 20), kind)
        torch.library.opcheck(torch.ops.expertile.row_norm.default, (x, residual, weight, bias, 1e-5, norm.centered))
        plain = [None if t is None else t.detach() for t in (x, weight, bias, residual)]
        x, weight, bias, residual = plain
        h, mean = (x if residual is None else residual), random((3,), F32, 5)
        torch.library.opcheck(
            torch.ops.expertile.row_norm_backward.default,
            (
                x,
                h,
                weight,
                bias,
                mean if norm.centered else None,
                mean.abs(),
                residual,
                weight is not None,
                bias is not None,
            ),
        )

    @of_both
    def test_compiles_without_a_break(norm):
        def layer(x, weight, bias, residual):
            y, total = norm.call(x * 2.0, weight, bias, residual=residual)
            return y + 1.0, total

        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for shape in ((7, 30), (11, 50), (2, 3, 130)):
            ours, theirs = (norm_checks.tensors(shape, (BF16, F32, F32, BF16)) for _ in range(2))
            outputs, expected = compiled(*ours), layer(*theirs)
            torch.testing.assert_close(outputs, expected)
            grads = [random(shape, t.dtype, 9) for t in expected]
            torch.autograd.backward(outputs, grads)
            torch.autograd.backward(expected, grads)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a.grad, b.grad)

    @of_both
    def test_meta_tensors(norm):
        x = torch.empty(4, 5, device="meta")
        y, total = norm.call(x, residual=x)
        assert y.shape == total.shape == (4, 5)

else:
    interpreter.repair()

    @of_both
    @pytest.mark.parametrize("kind", KINDS[2:5], ids=str)
    @pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
    def test_values_and_gradients(norm, shape, kind):
        # The configs take turns: each meets a third of the shapes with each kind.
        fitting = [config for config in TO_INTERPRET if fits(config, shape[-1])]
        turn = SHAPES.index(shape) + KINDS.index(kind)
        for config in fitting[turn % 3 :: 3] or fitting[:1]:
            check(norm, shape, kind, config)

    @of_both
    @settings(max_examples=10, deadline=None, phases=WITHOUT_SHRINKING)
    @given(st.integers(1, 9), st.integers(1, 150), st.sampled_from(KINDS), st.sampled_from(TO_INTERPRET))
    def test_random_shapes(norm, rows, cols, kind, config):
        check(norm, (rows, cols), kind, config if fits(config, cols) else None)

    @of_both
    def test_strided_rows(norm):
        norm_checks.check_strides(norm.call)

    @of_both
    def test_only_the_gradients_asked_for(norm):
        norm_checks.check_parts(norm.call)


@pytest.mark.parametrize("config", TO_INTERPRET if interpreter.active() else (None,), ids=str)
def test_variance_about_a_large_mean(config):
    norm_checks.check_large_mean(layer_norm, config)
