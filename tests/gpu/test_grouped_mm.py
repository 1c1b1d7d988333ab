"""The public call on a real GPU: no host synchronisation, graph capture with new offs, compile, gradients."""

import pytest
import torch

import expertile as xt
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ragged import offs_from_sizes
from tests.ops.grouped_mm.reference import reference

SIZES = [130, 0, 257, 64, 1]
G, K, N = len(SIZES), 256, 384
OURS = [b.name for b in BACKENDS if not b.reads_offs_on_host and not b.peer]


def operands(sizes=SIZES, dtype=torch.bfloat16, past=0):
    gen = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(sum(sizes) + past, K, device="cuda", generator=gen).to(dtype)
    w = (torch.randn(len(sizes), N, K, device="cuda", generator=gen) * K**-0.5).to(dtype)
    return a, w.transpose(1, 2), offs_from_sizes(sizes, "cuda")


def close(out, want):
    torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02)


@pytest.fixture
def no_sync():
    """Any synchronising call raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["auto", *OURS])
def test_no_host_synchronisation(backend, no_sync):
    torch.cuda.set_sync_debug_mode("default")
    a, b, offs = operands()
    a.requires_grad_()
    try:
        xt.grouped_mm(a, b, offs=offs, backend=backend)  # compile outside the check
    except ValueError as e:
        pytest.skip(str(e))
    grad = torch.ones(a.shape[0], N, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    xt.grouped_mm(a, b, offs=offs, backend=backend)
    if backend == "auto":
        xt.grouped_mm(a, b, offs=offs).backward(grad)


@pytest.mark.parametrize("backend", ["auto", *OURS])
def test_graph_replays_with_new_offs(backend):
    a, b, offs = operands()
    try:
        xt.grouped_mm(a, b, offs=offs, backend=backend)
    except ValueError as e:
        pytest.skip(str(e))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = xt.grouped_mm(a, b, offs=offs, backend=backend)
    for sizes in (SIZES, [0, 200, 52, 100, 100], [452, 0, 0, 0, 0]):
        offs.copy_(offs_from_sizes(sizes, "cuda"))
        graph.replay()
        close(out, reference(a, b, offs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients(dtype):
    a, b, offs = operands(dtype=dtype, past=5)
    w = b.transpose(1, 2).detach().requires_grad_()
    a.requires_grad_()
    out = xt.grouped_mm(a, w.transpose(1, 2), offs=offs)
    grad = torch.randn_like(out)
    da, dw = torch.autograd.grad(out, (a, w), grad)
    rows = sum(SIZES)
    want = reference(a, w.transpose(1, 2), offs)
    ra, rw = torch.autograd.grad(want[:rows], (a, w), grad[:rows].float())
    assert (da[rows:] == 0).all()
    for got, ref in ((da, ra), (dw, rw)):
        error = (got.double() - ref.double()).norm() / ref.double().norm()
        assert error < (6e-3 if dtype is torch.bfloat16 else 1e-3)


def test_compiled_with_dynamic_rows():
    compiled = torch.compile(lambda a, b, o: xt.grouped_mm(a, b, offs=o).relu(), fullgraph=True, dynamic=True)
    for sizes in (SIZES, [1, 2, 3, 4, 5], [700, 0, 300, 0, 10]):
        a, b, offs = operands(sizes)
        close(compiled(a, b, offs), reference(a, b, offs).relu())


def test_tf32_follows_torch():
    a, b, offs = operands(dtype=torch.float32)
    want = reference(a, b, offs, dtype=torch.float64)

    def error():
        return ((xt.grouped_mm(a, b, offs=offs).double() - want).norm() / want.norm()).item()

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        assert error() < 2e-6
        torch.backends.cuda.matmul.allow_tf32 = True
        assert error() < 1e-3
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_same_bits_every_time():
    a, b, offs = operands([1000, 3000, 0, 2000, 64])
    first = xt.grouped_mm(a, b, offs=offs)
    for _ in range(20):
        assert torch.equal(xt.grouped_mm(a, b, offs=offs), first)


def test_memory_stays_flat_over_changing_shapes():
    def calls(count):
        for i in range(count):
            a, b, offs = operands([i % 97 + 1, 3, i % 13, 0, 5])
            xt.grouped_mm(a, b, offs=offs)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    assert calls(300) <= calls(50) + 2**21


@pytest.mark.parametrize("backend", ["auto", *OURS])
@pytest.mark.parametrize("sizes", [SIZES, [4096, 0, 2048]], ids=["small", "large"])
def test_weight_gradients_are_added_to_a_buffer(backend, sizes):
    """Three times over, as three micro-batches would."""
    a, _, offs = operands(sizes)
    b = torch.randn(a.shape[0], N, device="cuda", dtype=torch.bfloat16)
    buffer = torch.randn(len(sizes), K, N, device="cuda")
    want = buffer + 3 * reference(a.t(), b, offs)
    try:
        for _ in range(3):
            assert xt.grouped_mm(a.t(), b, offs=offs, out=buffer, accumulate=True, backend=backend) is buffer
    except ValueError as e:
        pytest.skip(str(e))
    assert (buffer - want).norm() / want.norm() < 1e-4


def test_measured_once_forward_and_backward(monkeypatch):
    from expertile.ops import measure

    monkeypatch.setattr(measure, "_winners", {})
    a, b, offs = operands()
    a.requires_grad_()
    out = xt.grouped_mm(a, b, offs=offs, backend="measure")
    close(out[: sum(SIZES)], reference(a.detach(), b, offs)[: sum(SIZES)])
    (measured,) = measure._winners
    out.sum().backward()
    assert len(measure._winners) == 2, "the gradient of a is another problem"
    first, (_, problem, device) = measure._winners[measured], measured
    assert first.config in first.backend.configs(problem, device)
    again = xt.grouped_mm(a, b, offs=offs, backend="measure")
    assert torch.equal(again[: sum(SIZES)], out[: sum(SIZES)]) and len(measure._winners) == 2
