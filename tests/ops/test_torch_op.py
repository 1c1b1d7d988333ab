"""What torch's users rely on beside the forward pass: second derivatives, torch.func, float64."""

import copy
from functools import partial
from typing import ClassVar

import pytest
import torch

import expertile as xt
from expertile.formats.fp8 import Fp8Blocks
from expertile.moe.router import RouterConfig, route
from expertile.ops.gathered_mm.activation import activate, activate_backward
from expertile.ops.gathered_mm.api import gathered_mm
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.gathered_mm.problem import ACTIVATIONS
from expertile.ops.grouped_mm.backends import by_name

OFFS = torch.tensor([4, 4, 9], dtype=torch.int32)  # of 12 rows: the last three belong to no group
ROWS = torch.tensor([5, 0, 2, 2, 1, 4, 3, 3, 5, 0, 0, 0], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 3], [-1, 2], [5, 4], [6, -1]], dtype=torch.int32)
IDS = torch.tensor([[0, 1], [2, 0], [4, 1], [3, -1], [3, 4], [0, 3]])  # 4 and -1: dropped


def random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)


def mlp(activation: str, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, *biases):
    gate_up_bias, down_bias = biases or (None, None)
    return xt.moe_mlp(
        x, gate_up, down, IDS, weights, activation=activation, gate_up_bias=gate_up_bias, down_bias=down_bias
    )


def routed(logits: torch.Tensor, **options: object) -> torch.Tensor:
    routing = route(logits, RouterConfig(5, 2, **options))
    return torch.cat([routing.topk_weights, routing.scores], 1)


MLP = ((6, 4), (4, 6, 4), (4, 4, 3), (6, 2))
CASES = {
    "grouped_mm": (lambda a, b, c: xt.grouped_mm(a, b, offs=OFFS, bias=c)[:9], ((12, 5), (3, 5, 4), (3, 4))),
    "grouped_mm_batched": (lambda a, b, c: xt.grouped_mm(a, b, bias=c), ((3, 2, 5), (3, 5, 4), (3, 4))),
    "grouped_mm_ragged_k": (lambda a, b: xt.grouped_mm(a, b, offs=OFFS), ((3, 12), (12, 4))),
    "gathered_mm": (lambda x, b, c: gathered_mm(x, b, ROWS, OFFS, bias=c)[:9], ((6, 5), (3, 5, 4), (3, 4))),
    "combine": (lambda y, w: combine(y, POSITIONS, w), ((7, 3), (4, 2))),
    "softmax": (xt.softmax, ((3, 5),)),
    "layer_norm": (xt.layer_norm, ((3, 5), (5,), (5,))),
    "rms_norm": (xt.rms_norm, ((3, 5), (5,))),
    "route": (routed, ((6, 5),)),
    "route_sigmoid": (partial(routed, score="sigmoid"), ((6, 5),)),
    "route_topk_first": (partial(routed, order="topk_then_softmax", normalize=False), ((6, 5),)),
    "moe_mlp": (partial(mlp, "swiglu"), MLP),
    "moe_mlp_biased": (partial(mlp, "geglu"), (*MLP, (4, 6), (4, 4))),
}
# Their kernels and formulas take no float64.
WITHOUT_FLOAT64 = {"gathered_mm"}


@pytest.mark.parametrize("name", sorted(set(CASES) - WITHOUT_FLOAT64))
def test_float64_passes_gradcheck(name):
    function, shapes = CASES[name]
    inputs = random(*shapes)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("backend", ["auto", "loop", "padded_bmm"])
def test_float64_is_exact_in_every_backend_that_takes_it(backend):
    a, b, c = random((12, 5), (3, 5, 4), (3, 4))
    out = xt.grouped_mm(a, b, offs=OFFS, bias=c, backend=backend)
    assert out.dtype is torch.float64
    torch.testing.assert_close(out[:4], a[:4] @ b[0] + c[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(out[4:9], a[4:9] @ b[2] + c[2], rtol=0, atol=1e-14)
    assert xt.grouped_mm(a, b, offs=OFFS, out_dtype=torch.float32, backend=backend).dtype is torch.float32


@pytest.mark.parametrize("name", ["torch_grouped", "cublas_grouped", "triton_pointer", "triton_tma", "gluon_hopper"])
def test_kernels_refuse_float64_with_a_reason(name):
    with pytest.raises(ValueError, match=f"backend: {name} cannot take this problem"):
        xt.grouped_mm(*random((12, 5), (3, 5, 4)), offs=OFFS, backend=by_name(name).name)
    with pytest.raises(ValueError, match="out_dtype: expected .* got torch.float64"):
        xt.grouped_mm(*random((12, 5), (3, 5, 4), dtype=torch.float32), offs=OFFS, out_dtype=torch.float64)


def penalty(function, inputs):
    """Gradients of all inputs of a loss with a gradient penalty, whose first incoming gradient is a constant."""
    out = function(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    loss = out.square().sum() + sum(g.square().sum() for g in first)
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("name", sorted(CASES))
def test_second_derivatives_of_a_sum_are_right(name):
    function, shapes = CASES[name]
    inputs = random(*shapes, dtype=torch.float32)
    if name in WITHOUT_FLOAT64:

        def truth(x, b, c):
            rows = ROWS[:9].long()
            return torch.cat([x[rows[:4]] @ b[0] + c[0], x[rows[4:]] @ b[2] + c[2]])

    else:
        truth = function
    expected = penalty(truth, tuple(x.detach().double().requires_grad_() for x in inputs))
    for got, want in zip(penalty(function, inputs), expected, strict=True):
        assert (got.double() - want).norm() <= 2e-6 * want.norm()


def test_second_derivatives_of_a_layer_are_right_where_inputs_depend_on_each_other():
    torch.manual_seed(0)
    wide = xt.MoE(hidden_size=6, intermediate_size=4, num_experts=5, top_k=2, shared_intermediate_size=3).double()
    layer, x = copy.deepcopy(wide).float(), torch.randn(9, 6)

    def gradients(layer, x):
        x = x.clone().requires_grad_()
        scaled = x * layer.gate_up.sum()  # the tokens depend on a weight, and the routing weights on the tokens
        first = torch.autograd.grad(layer(scaled).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), (x, *layer.parameters()))

    for got, want in zip(gradients(layer, x), gradients(wide, x.double()), strict=True):
        assert (got.double() - want).norm() <= 1e-5 * want.norm()


def test_a_second_derivative_that_is_not_there_raises_also_for_a_constant_gradient():
    x, weights = random((5, 128), (5, 2), dtype=torch.float32)
    up, down = (
        Fp8Blocks.quantize(torch.randn(4, 256, 128), (128, 128)),
        Fp8Blocks.quantize(torch.randn(4, 128, 128), (128, 128)),
    )
    ids = torch.randint(0, 4, (5, 2))
    (first,) = torch.autograd.grad(xt.moe_mlp(x, up, down, ids, weights).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="only the first derivative is there"):
        first.square().sum().backward()
    q, k, v = random((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4), dtype=torch.float32)
    (first,) = torch.autograd.grad(xt.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="only the first derivative is there"):
        first.square().sum().backward()


def test_create_graph_through_a_checkpoint():
    """The first derivative is there, as without a checkpoint; its own raises."""
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda q: xt.attention(q, q, q), q, use_reentrant=False)
    (got,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.equal(got, torch.autograd.grad(xt.attention(q, q, q).sum(), q)[0])
    with pytest.raises(RuntimeError, match="only the first derivative"):
        got.sum().backward()


def test_a_second_derivative_across_ranks_raises(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        layer = xt.ExpertParallelMoE(xt.MoE(hidden_size=6, intermediate_size=4, num_experts=5, top_k=2))
        x = torch.randn(3, 6, requires_grad=True)
        (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="only the first derivative is there"):
            first.square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_a_compiled_second_derivative_raises():
    x, gate_up, down, weights = random(*MLP, dtype=torch.float32)
    call = torch.compile(partial(mlp, "swiglu"), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError):
        (first,) = torch.autograd.grad(call(x, gate_up, down, weights).sum(), x, create_graph=True)
        first.square().sum().backward()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autograd_of_an_activation_is_its_gradient_at_the_limits_too(activation):
    values = torch.tensor([-9.0, -7.0, -1.0, 0.0, 2.0, 7.0, 9.0, float("nan")], dtype=torch.float64)
    gate, up = (t.clone().requires_grad_() for t in torch.cartesian_prod(values, values).unbind(1))
    value, *expected = activate_backward(gate, up, torch.ones_like(gate), activation)
    out = activate(gate, up, activation)
    torch.testing.assert_close(out, value, equal_nan=True)
    for got, want in zip(torch.autograd.grad(out.sum(), (gate, up)), expected, strict=True):
        known = gate.isfinite() & up.isfinite()
        torch.testing.assert_close(got[known], want[known])
    assert out[gate.isnan() | (up.isnan() & (gate > 0))].isnan().all()


# ---- torch.func ----


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", sorted(CASES))
def test_functional_gradients_are_those_of_autograd(name):
    function, shapes = CASES[name]
    inputs = random(*shapes, dtype=torch.float32)
    numbers = tuple(range(len(inputs)))

    def loss(*inputs):
        return function(*inputs).square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    plain = tuple(x.detach() for x in inputs)
    for got, want in zip(torch.func.grad(loss, numbers)(*plain), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    out, pull = torch.func.vjp(loss, *plain)
    for got, want in zip(pull(torch.ones_like(out)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    batched = tuple(torch.stack([x, 2 * x, -x]) for x in plain)
    got = torch.func.vmap(torch.func.grad(loss, numbers))(*batched)
    for i in range(3):
        alone = torch.func.grad(loss, numbers)(*(x[i] for x in batched))
        for one, want in zip(got, alone, strict=True):
            torch.testing.assert_close(one[i], want, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functional_gradients_of_a_layer_by_sample():
    layer, x = xt.MoE(hidden_size=6, intermediate_size=4, num_experts=5, top_k=2), torch.randn(7, 6)

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    parameters = dict(layer.named_parameters())
    loss(parameters, x).backward()
    together = torch.func.grad(loss)(parameters, x)
    by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    for name, p in layer.named_parameters():
        torch.testing.assert_close(together[name], p.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(by_sample[name].sum(0), p.grad, rtol=1e-5, atol=1e-5)


def test_functional_second_derivatives_are_right_or_raise():
    a, b = (x.detach() for x in random((12, 5), (3, 5, 4), dtype=torch.float32))

    def twice(product):
        def first(a, b):
            return torch.func.grad(lambda a: product(a, b).pow(3).sum())(a).square().sum()

        return torch.func.grad(first, (0, 1))(a, b)

    def truth(a, b):
        return torch.cat([a[:4] @ b[0], a[4:9] @ b[2]])

    for got, want in zip(twice(lambda a, b: xt.grouped_mm(a, b, offs=OFFS)[:9]), twice(truth), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    layer = xt.MoE(hidden_size=6, intermediate_size=4, num_experts=5, top_k=2)
    with pytest.raises(RuntimeError, match="only the first derivative is there"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: layer(x).sum())(x).square().sum())(torch.randn(3, 6))


# ---- torch's names ----


def test_operands_may_be_given_by_torchs_names():
    a, b = (x.detach() for x in random((12, 5), (3, 5, 4), dtype=torch.float32))
    assert torch.equal(xt.grouped_mm(mat_a=a, mat_b=b, offs=OFFS)[:9], xt.grouped_mm(a, b, offs=OFFS)[:9])
    assert torch.equal(xt.grouped_mm(a, mat_b=b, offs=OFFS)[:9], xt.grouped_mm(a, b, offs=OFFS)[:9])
    with pytest.raises(ValueError, match="a, mat_a: expected one of the two, got both"):
        xt.grouped_mm(a, b, mat_a=a, offs=OFFS)
    with pytest.raises(ValueError, match="b: expected a torch.Tensor, got NoneType"):
        xt.grouped_mm(mat_a=a, offs=OFFS)


def test_rows_without_a_group_to_belong_to_are_refused():
    a, b = (x.detach() for x in random((12, 5), (3, 5, 4), dtype=torch.float32))
    with pytest.raises(ValueError, match="b: expected at least one group for 12 rows of a"):
        xt.grouped_mm(a, b[:0], offs=OFFS[:0])
    assert xt.grouped_mm(a[:0], b[:0], offs=OFFS[:0]).shape == (0, 4)


def test_a_second_derivative_that_is_not_there_raises_on_every_way():
    """`torch.autograd.grad` walks to its inputs alone: a node that hung on nothing let zeros through."""
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        torch.autograd.functional.hessian(lambda x: xt.attention(x, q, q).sum(), q)
    layer = xt.MoE(128, 128, 4, 2, dtype=torch.bfloat16).quantize_experts("mxfp4")
    x = torch.randn(5, 128).bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        torch.autograd.grad(first.float().square().sum(), x)


def test_a_backend_that_is_no_name_is_refused():
    a, b = (x.detach() for x in random((12, 5), (3, 5, 4), dtype=torch.float32))
    with pytest.raises(ValueError, match="backend: expected one of loop, .*got None"):
        xt.grouped_mm(a, b, offs=OFFS, backend=None)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as DTensors are; `seen` has the operators that met one."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, x):
        made = torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)
        made.x = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        bare = torch.utils._pytree.tree_map(lambda t: t.x if isinstance(t, cls) else t, (args, kwargs or {}))
        return func(*bare[0], **bare[1])


@pytest.mark.parametrize("name", ["grouped_mm", "gathered_mm", "rms_norm", "attention", "moe_mlp"])
def test_weights_without_memory_go_to_an_operator(name):
    """A kernel would read what lies at address 0."""
    x, w, ones = torch.randn(4, 8), torch.randn(2, 8, 8), Wrapped(torch.ones(8))
    rows, offs = torch.arange(4, dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32)
    ids, gate_up, q = torch.tensor([[0], [1], [1], [0]]), torch.randn(2, 16, 8), torch.randn(1, 2, 4, 8)
    calls = {
        "grouped_mm": lambda: xt.grouped_mm(x, Wrapped(w), offs=offs),
        "gathered_mm": lambda: gathered_mm(x, Wrapped(w), rows, offs),
        "rms_norm": lambda: xt.rms_norm(x, ones),
        "attention": lambda: xt.attention(q, Wrapped(q), Wrapped(q)),
        "moe_mlp": lambda: xt.moe_mlp(x, Wrapped(gate_up), Wrapped(w), ids, torch.ones(4, 1)),
    }
    Wrapped.seen.clear()
    calls[name]()
    own = {"rms_norm": "row_norm", "attention": "attention_forward"}.get(name, name)
    assert f"expertile.{own}.default" in Wrapped.seen
