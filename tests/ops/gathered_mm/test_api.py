"""The gathered products as a user calls them, on the CPU: values, gradients, operators, choice, errors."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.ops.backend import Request
from expertile.ops.gathered_mm.activation import activate_backward
from expertile.ops.gathered_mm.api import gated_backward_mm, gathered_gated_mm, gathered_mm, gathered_wgrad
from expertile.ops.gathered_mm.backends import BACKENDS, by_name
from expertile.ops.gathered_mm.choose import ORDER, choose
from expertile.ops.gathered_mm.problem import Product
from expertile.ops.gathered_mm.run import select
from expertile.ops.launch import nvrtc
from expertile.roofline import Work
from tests.ops.gathered_mm.cases import BACKWARD, CASES, GATED, MM, WGRAD, Case, check, make

OPS = torch.ops.expertile
T, K, N, SIZES = 7, 12, 10, (4, 0, 9)


def call(case: Case, o, **changes):
    """The public function for a case, on its operands."""
    gated = {"activation": case.activation, "interleaved": case.interleaved, **changes}
    if case.product is MM:
        return (gathered_mm(o.a, o.b, o.rows, o.offs, bias=o.bias, **changes),)
    if case.product is GATED:
        return gathered_gated_mm(o.a, o.b, o.rows, o.offs, bias=o.bias, save_pre=case.save_pre, **gated)
    if case.product is BACKWARD:
        down = o.b.transpose(1, 2)
        return gated_backward_mm(o.a, down, o.rows, o.slots, o.weights, o.pre, o.offs, **gated)
    return (gathered_wgrad(o.a, o.rows, o.b, o.offs, gather_b=case.gathered == "b", **changes),)


@pytest.mark.parametrize("case", [c for c in CASES if not c.past or c.product is WGRAD], ids=str)
def test_values(case):
    _, operands = make(case)
    check(case, operands, call(case, operands))


def test_gpt_oss_has_gradients_at_its_limits_and_none_beyond():
    gate = torch.tensor([7.0, 7.0, 7.03125, 1.0, 1.0])
    up = torch.tensor([7.0, -7.0, 1.0, 7.03125, -7.03125])
    _, dgate, dup = activate_backward(gate, up, torch.ones(5), "gpt_oss")
    assert dgate.ne(0).tolist() == [True, True, False, True, True]
    assert dup.ne(0).tolist() == [True, True, True, False, False]
    # Where kernels are tried, values must lie at the limits as well.
    (case,) = (c for c in CASES if c.product is BACKWARD and c.activation == "gpt_oss")
    pre = make(case)[1].pre
    assert (pre[:, ::2] == 7).any() and (pre[:, 1::2] == 7).any() and (pre[:, 1::2] == -7).any()


def operands(dtype=torch.float32, past=2):
    gen = torch.Generator().manual_seed(0)
    total = sum(SIZES) + past
    x, b = torch.randn(T, K, generator=gen), torch.randn(len(SIZES), N, K, generator=gen).transpose(1, 2)
    rows = torch.randint(0, T, (total,), generator=gen, dtype=torch.int32)
    rows[sum(SIZES) :] = 0
    offs = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    return x.to(dtype), b.to(dtype), rows, offs, torch.randn(len(SIZES), N, generator=gen).to(dtype)


@pytest.mark.parametrize("gathered", [True, False])
def test_gradients_of_gathered_mm(gathered):
    x, b, rows, offs, bias = operands()
    rows_given = rows if gathered else None
    x = x if gathered else x[rows.long()]
    leaves = [t.clone().requires_grad_() for t in (x, b, bias)]
    used = sum(SIZES)
    grad = torch.randn(rows.shape[0], N)
    grad[used:] = float("nan")  # of rows that are nobody's
    gathered_mm(leaves[0], leaves[1], rows_given, offs, bias=leaves[2]).backward(grad)

    wide = [t.double().requires_grad_() for t in (x, b, bias)]
    order = rows[:used].long() if gathered else torch.arange(used)
    group = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    out = torch.einsum("rk,rkn->rn", wide[0][order], wide[1][group]) + wide[2][group]
    out.backward(grad[:used].double())
    for got, want in zip(leaves, wide, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-5)


def test_gradient_of_a_sum_is_expanded():
    x, b, rows, offs, _ = operands(past=0)
    x.requires_grad_()
    gathered_mm(x, b, rows, offs).sum().backward()
    want = torch.zeros(T, K).index_add_(0, rows, b.sum(2).repeat_interleave(torch.tensor(SIZES), 0))
    torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-5)


def test_operators_pass_opcheck():
    x, b, rows, offs, bias = operands(past=0)
    xg, bg, biasg = (t.clone().requires_grad_() for t in (x, b, bias))
    torch.library.opcheck(OPS.gathered_mm, (xg, bg, rows, offs, biasg, "auto"))
    checks = {"test_utils": ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")}
    for save_pre in (True, False):
        args = (x, b, rows, offs, bias, "swiglu", True, save_pre, "auto")
        torch.library.opcheck(OPS.gathered_gated_mm, args, **checks)
    slots, weights = torch.arange(13, dtype=torch.int32), torch.rand(T, 2)
    pre, down = torch.randn(13, 2 * N), b.transpose(1, 2)
    args = (x, down, rows, slots, weights, pre, offs, "geglu", False, "auto")
    torch.library.opcheck(OPS.gated_backward_mm, args, **checks)
    torch.library.opcheck(OPS.gathered_wgrad, (x, rows, pre, offs, False, "auto"), **checks)
    torch.library.opcheck(OPS.sum_rows, (pre, rows, offs, T), **checks)


def test_compiles_without_a_graph_break_for_any_number_of_rows():
    def step(x, b, down, rows, offs, slots, weights):
        act, pre = gathered_gated_mm(x, b, rows, offs, interleaved=False)
        dpre, act_w, dweights = gated_backward_mm(x, down, rows, slots, weights, pre, offs, interleaved=False)
        return act, act_w, dweights, gathered_wgrad(x, rows, dpre, offs), gathered_mm(act, down, None, offs)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 10, 23):
        x, down = torch.randn(tokens, K), torch.randn(2, N, K)
        rows = (torch.arange(2 * tokens) % tokens).int()
        offs = torch.tensor([tokens // 2, 2 * tokens], dtype=torch.int32)
        args = (
            x,
            torch.randn(2, 2 * N, K).transpose(1, 2),
            down,
            rows,
            offs,
            torch.randperm(2 * tokens).int(),
            torch.rand(tokens, 2),
        )
        for got, want in zip(compiled(*args), step(*args), strict=True):
            torch.testing.assert_close(got, want)


def test_dpre_takes_pre_only_where_it_may():
    x, b, rows, offs, _ = operands(past=0)
    slots, weights = torch.arange(13, dtype=torch.int32), torch.rand(T, 2)
    wide = torch.randn(13, 2 * N + 3)

    def step(pre, overwrite_pre=True):
        down = b.transpose(1, 2)
        return gated_backward_mm(
            x, down, rows, slots, weights, pre, offs, interleaved=True, overwrite_pre=overwrite_pre
        )

    for pre, taken in ((wide[:, : 2 * N].contiguous(), True), (wide[:, : 2 * N], False)):
        before = pre.clone()
        want = step(pre, False)
        assert torch.equal(pre, before)
        got = step(pre)
        assert (got[0].data_ptr() == pre.data_ptr()) is taken
        assert all(map(torch.equal, got, want)) and torch.equal(pre, before) is not taken
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    before = pre.clone()
    assert torch.equal(compiled(pre)[0], want[0]) and torch.equal(pre, before)


@pytest.mark.parametrize("gathered", [True, False])
def test_gradients_of_weights_stored_by_columns_are_too(gathered):
    x, b, rows, offs, _ = operands(past=0)
    x, rows = (x, rows) if gathered else (x[rows.long()], None)
    by_rows, by_columns = b.clone().requires_grad_(), b.mT.contiguous().mT.requires_grad_()
    want, got = (torch.autograd.grad(gathered_mm(x, w, rows, offs).square().sum(), w)[0] for w in (by_rows, by_columns))
    torch.testing.assert_close(got, want)
    assert got.stride() == by_columns.stride() and want.stride() == by_rows.stride()


def test_compiled_gradients():
    x, b, rows, offs, _ = operands(past=0)
    x, b = x.requires_grad_(), b.requires_grad_()
    compiled = torch.compile(lambda *xs: gathered_mm(*xs).square(), fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x, b, rows, offs).sum(), (x, b))
    want = torch.autograd.grad(gathered_mm(x, b, rows, offs).square().sum(), (x, b))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_nothing_to_compute():
    x, b, _, offs, bias = operands()
    none, zero = torch.empty(0, dtype=torch.int32), torch.zeros_like(offs)
    assert gathered_mm(x, b, none, zero, bias=bias).shape == (0, N)
    act, pre = gathered_gated_mm(x, b, none, zero, interleaved=True)
    assert act.shape == (0, N // 2) and pre.shape == (0, N)
    out = gathered_wgrad(x, none, torch.empty(0, 3), zero)
    assert torch.equal(out, torch.zeros(3, K, 3))
    pre, weights = torch.empty(0, 2 * N), torch.rand(T, 2)
    back = gated_backward_mm(x, b.transpose(1, 2), none, none, weights, pre, zero, interleaved=False)
    assert [t.shape for t in back] == [(0, 2 * N), (0, N), (T, 2)] and not back[2].any()
    assert gathered_mm(x, b[:0], none, offs[:0]).shape == (0, N)


def test_k_of_zero_is_the_bias():
    _, _, rows, offs, bias = operands(past=0)
    out = gathered_mm(torch.empty(T, 0), torch.empty(3, 0, N), rows, offs, bias=bias)
    assert torch.equal(out, bias.repeat_interleave(torch.tensor(SIZES), 0))


def test_indices_of_any_stride():
    x, b, rows, offs, _ = operands(past=0)
    spread = torch.stack([rows, torch.full_like(rows, 99)], 1)[:, 0]
    ends = torch.stack([offs, torch.full_like(offs, 99)], 1)[:, 0]
    assert torch.equal(gathered_mm(x, b, spread, ends), gathered_mm(x, b, rows, offs))


def good(**changes):
    x, b, rows, offs, bias = operands(past=0)
    named = {"x": x, "b": b, "rows": rows, "offs": offs, "bias": bias}
    return {**named, **{k: v(named[k]) if callable(v) else v for k, v in changes.items()}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": None}, "x: expected a torch.Tensor, got NoneType"),
        ({"rows": [1]}, "rows: expected a torch.Tensor, got list"),
        ({"offs": None}, "offs: expected a torch.Tensor, got NoneType"),
        ({"x": lambda x: x[0]}, r"x: expected 2 dimensions, got shape \[12\]"),
        ({"b": lambda b: b[0]}, r"b: expected 3 dimensions, got shape \[12, 10\]"),
        ({"x": lambda x: x.double()}, "x: expected dtype torch.bfloat16 or .*, got torch.float64"),
        ({"b": lambda b: b.half()}, "b: expected dtype torch.float32 as x has, got torch.float16"),
        ({"rows": lambda r: r.long()}, "rows: expected dtype torch.int32, got torch.int64"),
        ({"rows": lambda r: r[None]}, r"rows: expected 1 dimension, got shape \[1, 13\]"),
        ({"offs": lambda o: o.long()}, "offs: expected dtype torch.int32, got torch.int64"),
        ({"offs": lambda o: o[:2]}, r"offs: expected length 3 \(the experts of b\), got 2"),
        ({"offs": lambda o: o.to("meta")}, "offs: expected device cpu as x has, got meta"),
        ({"b": lambda b: b[:, 1:]}, r"b: expected 12 as its second dimension \(columns of x\), got 11"),
        ({"bias": torch.zeros(3, 7)}, r"bias: expected shape \[3, 10\] \(groups, columns of b\), got \[3, 7\]"),
        ({"bias": torch.zeros(3, 10).long()}, "bias: expected dtype .*, got torch.int64"),
        ({"backend": "abacus"}, "backend: expected one of reference.*, got 'abacus'"),
        ({"backend": "triton_gather"}, "backend: triton_gather cannot take this problem: needs a CUDA GPU"),
        ({"config": object()}, "config: expected None with backend='auto'"),
        ({"backend": "reference", "config": 3}, "config: expected a NoConfig of backend reference, got 3"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        gathered_mm(**good(**changes))


def test_errors_of_the_gated_products():
    x, b, rows, offs, _ = operands(past=0)
    with pytest.raises(ValueError, match="activation: expected one of swiglu, geglu, reglu, gpt_oss, got 'silu'"):
        gathered_gated_mm(x, b, rows, offs, activation="silu", interleaved=True)
    with pytest.raises(ValueError, match=r"b: expected an even last dimension \(gate and up columns\), got 9"):
        gathered_gated_mm(x, b[:, :, 1:], rows, offs, interleaved=True)
    down, slots, weights, pre = b.transpose(1, 2), rows, torch.rand(T, 2), torch.randn(13, 2 * N)

    def back(**changes):
        named = dict(dy=x, down=down, rows=rows, slots=slots, weights=weights, pre=pre, offs=offs, interleaved=True)
        return gated_backward_mm(**{**named, **changes})

    for changes, message in (
        ({"down": down[:, :, 1:]}, r"down: expected 12 as its last dimension \(columns of dy\), got 11"),
        ({"down": down[0]}, r"down: expected 3 dimensions, got shape \[10, 12\]"),
        ({"slots": slots[1:]}, r"slots: expected 13 rows \(as rows has\), got 12"),
        ({"slots": slots.long()}, "slots: expected dtype torch.int32, got torch.int64"),
        ({"weights": weights.half()}, "weights: expected dtype torch.float32, got torch.float16"),
        ({"weights": weights[1:]}, r"weights: expected 7 rows \(as dy has\), got 6"),
        ({"weights": weights.flatten()}, r"weights: expected 2 dimensions, got shape \[14\]"),
        ({"pre": pre[:, 1:]}, r"pre: expected shape \[13, 20\] \(rows, gate and up\), got \[13, 19\]"),
        ({"pre": pre.half()}, "pre: expected dtype torch.float32 as dy has, got torch.float16"),
        ({"pre": None}, "pre: expected a torch.Tensor, got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            back(**changes)
    with pytest.raises(ValueError, match=r"d: expected 13 rows \(as rows has\), got 12"):
        gathered_wgrad(x, rows, pre[1:], offs)
    with pytest.raises(ValueError, match=r"x: expected 13 rows \(as rows has\), got 7"):
        gathered_wgrad(x, rows, pre, offs, gather_b=True)
    with pytest.raises(ValueError, match=r"x: expected 13 rows \(as d has\), got 7"):
        gathered_wgrad(x, None, pre, offs)


def large(product: Product, rows: int, **changes):
    """A problem of that many rows of 128 experts, on a GPU."""
    problem, _ = make(Case("c", product, (1, 2), n=64, k=64))
    sizes = {"k": rows, "m": 1024} if product is WGRAD else {"m": rows, "k": 1024}
    return replace(problem, device_type="cuda", groups=128, tokens=rows // 4, **sizes | changes)


@pytest.mark.parametrize("product", list(Product))
def test_choice(product):
    """The order that the table gives, of those that take the problem."""
    for gpu, fused in (("h200", True), ("a100", False), ("b200", False)):
        for rows in (128, 128 * 1024):
            problem = large(product, rows)
            choice = choose(problem, Device.by_name(gpu))
            order = next(names for most, names in ORDER if problem.mean_group <= most)
            takes = [n for n in order if n in {b.name for b in BACKENDS}]
            takes = [n for n in takes if by_name(n).supports(problem, Device.by_name(gpu)) is None]
            if product is BACKWARD:
                takes = ["cuda_gather"] if rows > 128 and fused and nvrtc.missing() is None else ["composed"]
            assert choice.backend.name == takes[0] and choice.why.startswith(takes[0])
            assert fused or takes[0] in ("composed", "triton_gather")
    cpu = choose(replace(large(product, 128), device_type="cpu"), Device.current("cpu"))
    assert cpu.backend.name == "reference"
    old = choose(large(product, 128), Device.by_name("v100"))
    assert old.backend.name == "reference" and len(old.estimates) == (1 if product is BACKWARD else len(ORDER[0][1]))


@pytest.mark.parametrize(
    ("rows", "inner", "gathered", "composed"),
    [
        (16, 2880, "", True),
        (512, 1024, "", True),
        (256, 2880, "a", True),
        (256, 1024, "a", False),  # the copy would cost more than it saves
        (16, 1024, "a", True),
        (2048, 2880, "", False),
    ],
)
def test_a_gated_backward_with_few_rows_is_composed(rows, inner, gathered, composed, monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    problem = large(Product.BACKWARD, 128 * rows, n=inner, gathered=gathered)
    device = Device.by_name("h200")
    assert (choose(problem, device).backend.name == "composed") is composed
    # Without regard to the number of rows, for each row's bits must not depend on the others.
    assert choose(problem, device, batch_invariant=True).backend.name == "cuda_gather"


def test_select_takes_a_config():
    backend, config = select(large(MM, 128), Device.by_name("h200"), Request("triton_gather"))
    chosen = replace(config, group_m=3)
    assert select(large(MM, 128), Device.by_name("h200"), Request("triton_gather", chosen)) == (backend, chosen)


def test_work():
    """32 tokens of 1024 into 128 rows by 64 columns of 128 experts, in bfloat16."""
    one = 2.0 * 128 * 1024 * 64
    weights, x = 128 * 1024 * 64 * 2, 32 * 1024 * 2
    assert large(MM, 128).work() == Work(one, weights + x + 128 * 64 * 2 + 4 * 128)
    assert large(GATED, 128, n=128).work() == Work(2 * one, 2 * weights + x + 128 * 192 * 2 + 4 * 128)
    assert large(GATED, 128, n=128, save_pre=False).work().nbytes == 2 * weights + x + 128 * 64 * 2 + 4 * 128
    back = large(BACKWARD, 128, weights_shape=(32, 4))
    assert back.work() == Work(one, weights + x + 128 * 5 * 64 * 2 + 2 * 4 * 128 + 2 * 4 * 128)
    assert large(WGRAD, 128).work() == Work(one, weights + x + 128 * 64 * 2 + 4 * 128)
    assert large(MM, 128, gathered="").work([1] * 4 + [0] * 124) == Work(
        2.0 * 4 * 1024 * 64, 4 * (1024 * 64 + 1024 + 64) * 2
    )
