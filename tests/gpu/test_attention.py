"""attention on a real GPU: every backend over the shared cases, determinism, graphs, torch.compile, NaN, memory."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from expertile.ops.attention import attention, explain_attention
from expertile.ops.attention.backends import BACKENDS, by_name
from tests.ops.attention.cases import CASES, Case, check_backward, check_forward, make

pytestmark = pytest.mark.gpu

LARGE = (
    Case("large", 1030, 1030, dim=64, batch=3, heads=16, kv_heads=8, causal=True),
    Case("large D 128", 2048, 2048, dim=128, batch=2, heads=8, kv_heads=8),
    Case("large, rows first", 1000, 1500, dim=128, heads=8, kv_heads=2, causal=True, rows_first=True),
    Case("large packed", (1000, 1, 300, 0, 900), (1000, 40, 700, 5, 900), dim=128, heads=8, kv_heads=4, causal=True),
)
FUSED = [b.name for b in BACKENDS if b.name != "reference"]


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_forward(name: str, case: Case, device) -> None:
    made = make(case, "cuda")
    direction = by_name(name).forward
    reason = direction.supports(made.problem, device)
    if reason is not None:
        pytest.skip(reason)
    for config in direction.configs(made.problem, device):
        check_forward(made, *direction.run(made.problem, made.operands, config))


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_backward(name: str, case: Case, device) -> None:
    made = make(case, "cuda")
    backend = by_name(name)
    reason = backend.backward.supports(made.problem, device)
    if reason is not None:
        pytest.skip(reason)
    for config in backend.backward.configs(made.problem, device):
        grads = backend.backward.run(made.problem, made.operands, made.saved, config)
        check_backward(made, grads)
        if not backend.peer:
            again = backend.backward.run(made.problem, made.operands, made.saved, config)
            assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), "other bits the second time"


@pytest.mark.parametrize("name", ["auto", *FUSED])
def test_gradients_through_the_public_call(name: str, device) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    try:
        out = attention(q, k, v, causal=True, backend=name)
    except ValueError as error:
        pytest.skip(str(error))
    assert isinstance(out, torch.Tensor)
    want = scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for got, expected in zip(grads, torch.autograd.grad(want, (q, k, v), dout.double()), strict=True):
        assert float((got - expected).norm() / expected.norm()) < 8e-3
    out.sum().backward()  # an expanded gradient


@pytest.mark.parametrize("name", ["auto", *FUSED])
def test_graph_capture_follows_new_values(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call():
        return attention(q, k, v, causal=True, backend=name)

    try:
        call()
    except ValueError as error:
        pytest.skip(str(error))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    q.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call())


@pytest.mark.parametrize("name", ["gluon_hopper", "triton", "sdpa_fa2"])
def test_graph_follows_new_lengths(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)

    def call():
        return attention(
            q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=300, max_seqlen_k=300, backend=name
        )

    try:
        call()
    except ValueError as error:
        pytest.skip(str(error))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    cu.copy_(torch.tensor([0, 17, 300]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call())


@pytest.mark.parametrize("name", ["auto", "gluon_hopper", "triton"])
def test_torch_compile(name: str) -> None:
    def f(q, k, v):
        out, lse = attention(q, k, v, causal=True, return_lse=True, backend=name)
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    for length in (64, 130):
        q, k, v = (
            torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
        )
        try:
            want = torch.autograd.grad(f(q, k, v), (q, k, v))
        except ValueError as error:
            pytest.skip(str(error))
        for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), want, strict=True):
            torch.testing.assert_close(a, b)


def test_opcheck() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    torch.library.opcheck(
        torch.ops.expertile.attention_forward.default, (q, k, v, None, None, None, None, True, 0.125, True, "auto")
    )


@pytest.mark.parametrize("name", ["gluon_hopper", "triton"])
def test_nan_stays_in_its_sequence(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    k[150], v[150], q[151] = math.nan, math.inf, math.nan
    try:
        out = attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=200, max_seqlen_k=200, backend=name)
    except ValueError as error:
        pytest.skip(str(error))
    assert isinstance(out, torch.Tensor)
    assert bool(out[:100].isfinite().all()) and bool(out[100:].isnan().all())


def test_a_query_of_nan_is_a_row_of_nan() -> None:
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[0, 0, 17] = math.nan
    for name in ("gluon_hopper", "triton"):
        try:
            out = attention(q, k, v, backend=name)
        except ValueError:
            continue
        assert isinstance(out, torch.Tensor)
        rows = out.isnan().any(-1)
        assert rows.sum() == 1 and bool(rows[0, 0, 17])


def test_memory_is_linear_in_length() -> None:
    peaks = []
    for length in (2048, 4096):
        q, k, v = (torch.randn(1, 8, length, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
        attention(q, k, v).sum().backward()
        torch.cuda.synchronize()
        q.grad = k.grad = v.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attention(q, k, v).sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.5 * peaks[0]


def test_deterministic_algorithms_keep_peers_away() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.use_deterministic_algorithms(True)
    try:
        assert not explain_attention(q, k, v).backward.backend.peer
    finally:
        torch.use_deterministic_algorithms(False)
