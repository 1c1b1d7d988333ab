"""The gathered products and combine on a real GPU: every backend over the shared case table, and the public calls."""

from dataclasses import replace

import pytest
import torch

from expertile.ops.gathered_mm.api import gathered_gated_mm, gathered_mm
from expertile.ops.gathered_mm.backends import BACKENDS
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.gathered_mm.sum_rows import sum_rows
from tests.ops.gathered_mm.cases import CASES, LARGE, check, make, poisoned_outputs, run_case
from tests.ops.gathered_mm.test_api import call
from tests.ops.gathered_mm.test_combine import dense_combine, routed

KERNELS = [b for b in BACKENDS if b.name != "reference"]
NAMES = ["auto", *(b.name for b in KERNELS)]


def default(backend, case, device):
    problem, _ = make(case, "cuda")
    reason = backend.supports(problem, device)
    if reason is not None:
        pytest.skip(f"{backend.name} {reason}")
    return backend.configs(problem, device)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small(backend, case, device):
    run_case(backend, case, default(backend, case, device)[0], "cuda")


@pytest.mark.parametrize("backend", KERNELS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(backend, case, device):
    for config in default(backend, case, device)[:3]:
        run_case(backend, case, config, "cuda")


@pytest.mark.parametrize("backend", KERNELS, ids=lambda b: b.name)
@pytest.mark.parametrize("name", ["mm", "gated", "gated-interleaved-bias", "backward", "wgrad"])
def test_every_config(backend, name, device):
    case = next(c for c in CASES if c.name == name)
    for config in default(backend, case, device)[1:]:
        run_case(backend, case, config, "cuda")


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("case", LARGE[:1] + LARGE[2:3] + LARGE[4:7:2], ids=str)
def test_same_bits_no_synchronisation_and_graphs(backend, case):
    _, operands = make(case, "cuda")
    try:
        first = call(case, operands, backend=backend)
    except ValueError as e:
        pytest.skip(str(e))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = call(case, operands, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    used = sum(case.sizes)
    ragged = case.product.value != "wgrad"
    for place, (x, y) in enumerate(zip(first, again, strict=True)):
        assert torch.equal(x[:used], y[:used]) if ragged and place < 2 else torch.equal(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(case, operands, backend=backend)
    # Replayed with the same rows dealt differently to the experts.
    sizes = (used - 3, *(0,) * (len(case.sizes) - 2), 3)
    operands.offs.copy_(torch.tensor(sizes).cumsum(0))
    for place, out in enumerate(outputs):
        if out is not None and place < 2:
            out.fill_(float("nan"))
    graph.replay()
    dealt = replace(case, sizes=sizes)
    if backend == "reference" or not ragged:
        check(dealt, operands, outputs)
    else:
        live = [
            o if o is None or p == 2 else torch.nn.functional.pad(o[:used], (0, 0, 0, case.past), value=float("nan"))
            for p, o in enumerate(outputs)
        ]
        check(dealt, operands, tuple(live))


def test_auto_takes_every_case(device):
    for case in CASES:
        problem, operands = make(case, "cuda")
        outputs = call(case, operands)
        used = sum(case.sizes)
        clean = poisoned_outputs(problem, operands)
        for place, (target, out) in enumerate(zip(clean, outputs, strict=True)):
            if target is not None and out is not None:
                rows = used if case.product.value != "wgrad" and place < 2 else len(out)
                target[:rows] = out[:rows]
        check(case, operands, clean)


def test_gradients_of_gathered_mm():
    case = next(c for c in CASES if c.name == "mm-fp32")
    _, o = make(case, "cuda")
    got = [t.clone().requires_grad_() for t in (o.a, o.b, o.bias)]
    gathered_mm(got[0], got[1], o.rows, o.offs, bias=got[2]).square().sum().backward()
    want = [t.detach().cpu().requires_grad_() for t in got]
    gathered_mm(want[0], want[1], o.rows.cpu(), o.offs.cpu(), bias=want[2]).square().sum().backward()
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.grad.cpu(), w.grad, rtol=1e-4, atol=1e-4)


def test_sum_rows_same_bits():
    d = torch.randn(5000, 1536, device="cuda", dtype=torch.bfloat16)
    rows = torch.randint(0, 700, (5000,), device="cuda", dtype=torch.int32)
    offs = torch.tensor([2000, 4900], device="cuda", dtype=torch.int32)
    got = sum_rows(d, rows, offs, 700)
    want = torch.zeros(700, 1536, device="cuda", dtype=torch.float64).index_add_(0, rows[:4900], d[:4900].double())
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-2)
    assert torch.equal(got, sum_rows(d, rows, offs, 700))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize("cols, top_k", [(4096, 8), (1536, 8), (768, 3), (1000, 2), (37, 4), (256, 32), (64, 40)])
def test_combine(cols, top_k, dtype, tolerance):
    y, positions, weights = routed(33, top_k, cols, dtype, device="cuda")
    out = combine(y, positions, weights)
    torch.testing.assert_close(out.double(), dense_combine(y, positions, weights), rtol=tolerance, atol=tolerance)
    assert torch.equal(out, combine(y, positions, weights))
    y, weights = y.nan_to_num().requires_grad_(), weights.nan_to_num().requires_grad_()
    grad = torch.randn(33, cols, device="cuda").to(dtype)
    got = torch.autograd.grad(combine(y, positions, weights), (y, weights), grad)
    wide = y.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    want = torch.autograd.grad(dense_combine(wide[0], positions, wide[1]), wide, grad.double())
    torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-3, atol=1e-3)


def test_compiled_by_inductor():
    def layer(x, b, down, rows, offs, positions, weights):
        act, _ = gathered_gated_mm(x, b, rows, offs, interleaved=False, save_pre=False)
        return combine(gathered_mm(act, down, None, offs), positions, weights).relu()

    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16).transpose(1, 2) / 16
    down = torch.randn(2, 256, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) / 16
    rows = torch.arange(64, device="cuda", dtype=torch.int32)
    offs = torch.tensor([20, 64], device="cuda", dtype=torch.int32)
    args = (x, b, down, rows, offs, rows[:, None], torch.rand(64, 1, device="cuda"))
    torch.testing.assert_close(compiled(*args), layer(*args))
