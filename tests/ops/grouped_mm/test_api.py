"""The public call on the CPU: contract, gradients, autocast, compile. The same cases on every backend stand in
tests/ops/grouped_mm/backends and, on a GPU, in tests/gpu."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

import expertile as xt
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm import api
from expertile.ops.grouped_mm.backends import BACKENDS, by_name
from expertile.ops.grouped_mm.tail import zero_tail
from expertile.ragged import offs_from_sizes
from tests.ops.grouped_mm.reference import reference

SIZES = [4, 0, 9, 3]
OFFS = offs_from_sizes(SIZES)
G, M, K, N = len(SIZES), sum(SIZES), 16, 24


def operands(layout, dtype=torch.float64, past=0, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "ragged_m": lambda: (make(M + past, K), make(G, K, N), OFFS),
        "ragged_k": lambda: (make(K, M + past), make(M + past, N), OFFS),
        "ragged_n": lambda: (make(G, K, N), make(N, M + past), OFFS),
        "batched": lambda: (make(G, M, K), make(G, K, N), None),
    }[layout]()


LAYOUTS = ("ragged_m", "ragged_k", "ragged_n", "batched")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_agrees_with_the_reference(layout, dtype):
    a, b, offs = operands(layout, dtype)
    out = xt.grouped_mm(a, b, offs=offs)
    assert out.dtype is dtype
    expected = reference(a, b, offs)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance * 8)


@pytest.mark.parametrize("layout, with_bias", [*((x, False) for x in LAYOUTS), ("ragged_m", True), ("batched", True)])
def test_gradients_follow_the_reference(layout, with_bias):
    a, b, offs = operands(layout, torch.float32)
    bias = torch.randn(G, N, generator=torch.Generator().manual_seed(1)).requires_grad_() if with_bias else None
    leaves = [t for t in (a, b, bias) if t is not None]
    weight = torch.randn_like(xt.grouped_mm(a, b, offs=offs, bias=bias))
    got = torch.autograd.grad((xt.grouped_mm(a, b, offs=offs, bias=bias) * weight).sum(), leaves)
    want = torch.autograd.grad((reference(a, b, offs, bias, torch.float64) * weight.double()).sum(), leaves)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["ragged_m", "batched"])
def test_gradients_of_weights_are_stored_as_the_weights_are(layout, compiled):
    a, b, offs = operands(layout, torch.float32)
    run = torch.compile(xt.grouped_mm, fullgraph=True, backend="aot_eager") if compiled else xt.grouped_mm
    (want,) = torch.autograd.grad(reference(a, b, offs, None, torch.float64).square().sum(), b)
    by_rows, by_columns = b.detach().contiguous(), b.detach().mT.contiguous().mT
    for weights in (by_rows.requires_grad_(), by_columns.requires_grad_()):
        (db,) = torch.autograd.grad(run(a.detach(), weights, offs=offs).square().sum(), weights)
        torch.testing.assert_close(db, want, rtol=1e-4, atol=1e-4)
        assert db.stride() == weights.stride()


@pytest.mark.parametrize("layout", ["ragged_m", "ragged_k", "ragged_n"])
def test_rows_past_the_end_get_zero_gradient(layout):
    a, b, offs = operands(layout, torch.float32, past=3)
    out = xt.grouped_mm(a, b, offs=offs)
    inside = {"ragged_m": out[:M], "ragged_n": out[:, :M]}.get(layout, out)
    inside.sum().backward()
    for grad in {"ragged_m": [a.grad], "ragged_k": [a.grad.mT, b.grad], "ragged_n": [b.grad.mT]}[layout]:
        assert grad.shape[0] == M + 3
        assert (grad[M:] == 0).all() and (grad[:M] != 0).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expanded_gradient(layout):
    a, b, offs = operands(layout, torch.float32)
    xt.grouped_mm(a, b, offs=offs).sum().backward()
    da, db = torch.autograd.grad(reference(a, b, offs).sum(), (a, b))
    torch.testing.assert_close(a.grad, da, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(b.grad, db, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"backend": "loop"}, {"batch_invariant": True}])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_a_batch(layout, options):
    a, b, offs = operands(layout, torch.float32, past=3)
    if options.get("batch_invariant") and b.dim() == 2:
        return
    y = xt.grouped_mm(a, b, offs=offs, **options)
    grads = torch.randn(2, *y.shape)
    for create_graph in (False, True):
        how = dict(retain_graph=True, create_graph=create_graph)
        batch = torch.autograd.grad(y, (a, b), grads, is_grads_batched=True, **how)
        mapped = torch.vmap(lambda grad, how=how: torch.autograd.grad(y, (a, b), grad, **how))(grads)
        for i, grad in enumerate(grads):
            for got, same, want in zip(batch, mapped, torch.autograd.grad(y, (a, b), grad, **how), strict=True):
                torch.testing.assert_close(got[i], want)
                torch.testing.assert_close(same[i], want)


@pytest.mark.parametrize("vmap", [torch.vmap, torch._vmap_internals._vmap])
def test_no_kernel_is_given_a_batch(vmap, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    x = torch.randn(2, M + 3, N)
    with torch.no_grad():
        cut = vmap(lambda x: zero_tail(x, OFFS, 0))(x)
    assert torch.equal(cut[:, :M], x[:, :M]) and not cut[:, M:].any()


def test_second_order_gradient():
    a, b, offs = operands("ragged_m", torch.float32)
    (da,) = torch.autograd.grad(xt.grouped_mm(a, b, offs=offs).pow(2).sum(), a, create_graph=True)
    (dda,) = torch.autograd.grad(da.pow(2).sum(), a)
    (ra,) = torch.autograd.grad(reference(a, b, offs).pow(2).sum(), a, create_graph=True)
    (rra,) = torch.autograd.grad(ra.pow(2).sum(), a)
    torch.testing.assert_close(dda, rra, rtol=1e-3, atol=1e-2)


def test_autocast_casts_like_a_matrix_product():
    a, b, offs = operands("ragged_m", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = xt.grouped_mm(a, b, offs=offs)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert a.grad.dtype is torch.float32 and b.grad.dtype is torch.float32


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_out_dtype(out_dtype):
    a, b, offs = operands("ragged_m", torch.bfloat16)
    out = xt.grouped_mm(a, b, offs=offs, out_dtype=out_dtype)
    assert out.dtype is out_dtype
    torch.testing.assert_close(out.float(), reference(a, b, offs), rtol=0.02, atol=0.1)


def test_operator_passes_opcheck():
    for layout in LAYOUTS:
        a, b, offs = operands(layout, torch.float32)
        torch.library.opcheck(torch.ops.expertile.grouped_mm, (a, b, offs, None, None, "auto", False))


def test_compiles_without_a_graph_break_for_any_number_of_rows():
    compiled = torch.compile(
        lambda a, b, offs: xt.grouped_mm(a, b, offs=offs) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for sizes in ([4, 0, 9, 3], [1, 2, 3, 4], [0, 0, 0, 31]):
        a = torch.randn(sum(sizes), K, requires_grad=True)
        b = torch.randn(G, K, N, requires_grad=True)
        offs = offs_from_sizes(sizes)
        compiled(a, b, offs).sum().backward()
        torch.testing.assert_close(a.grad, torch.autograd.grad((reference(a, b, offs) * 2).sum(), a)[0])


def test_named_backend_that_cannot_gives_its_reason():
    a, b, offs = operands("ragged_m", torch.bfloat16)
    with pytest.raises(ValueError, match="backend: cublas_grouped cannot take this problem: "):
        xt.grouped_mm(a, b, offs=offs, backend="cublas_grouped")


def test_unknown_backend_lists_the_known_ones():
    a, b, offs = operands("ragged_m", torch.bfloat16)
    with pytest.raises(ValueError, match="backend: expected one of .*loop.*, got 'abacus'"):
        xt.grouped_mm(a, b, offs=offs, backend="abacus")


def test_config_needs_a_named_backend():
    a, b, offs = operands("ragged_m", torch.bfloat16)
    with pytest.raises(ValueError, match="config: expected None with backend='auto'"):
        xt.grouped_mm(a, b, offs=offs, config=object())


@pytest.mark.parametrize("check", [False, True])
def test_values_of_offs_on_the_cpu_are_always_checked(check):
    a, b, _ = operands("ragged_m", torch.bfloat16)
    for ends, message in (([4, 3, 5, 6], "ends that never decrease"), ([1, 2, 3, 99], "a last end of at most 16")):
        with pytest.raises(ValueError, match=f"offs: expected {message}"):
            xt.grouped_mm(a, b, offs=torch.tensor(ends, dtype=torch.int32), check=check)


def test_what_is_no_tensor_is_named():
    a, b, offs = operands("ragged_m", torch.float32)
    for bad in ({"a": None}, {"b": [1]}, {"bias": [1]}, {"offs": [4, 4, 13, 16]}, {"offs": offs.numpy()}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected a torch.Tensor, got "):
            xt.grouped_mm(**{"a": a, "b": b, "offs": offs, **bad})


def test_config_must_be_one_of_the_backend():
    a, b, offs = operands("ragged_m", torch.float32)
    with pytest.raises(ValueError, match="config: expected a NoConfig of backend loop, got 3"):
        xt.grouped_mm(a, b, offs=offs, backend="loop", config=3)


def test_explanation_names_bound_choice_and_every_backend():
    a, b, offs = operands("ragged_m", torch.float32)
    explanation = xt.explain(a, b, offs=offs)
    text = str(explanation)
    assert explanation.bound.limiter == "compute" and explanation.choice is not None
    assert explanation.choice.backend.name == "torch_grouped"
    for backend in BACKENDS:
        assert backend.name in text


def test_out_takes_the_result():
    with torch.no_grad():
        for layout in LAYOUTS:
            a, b, offs = operands(layout, torch.bfloat16)
            want = xt.grouped_mm(a, b, offs=offs, out_dtype=torch.float32)
            out = torch.full((*want.shape[:-1], 2 * want.shape[-1]), float("nan"))[..., ::2]
            assert xt.grouped_mm(a, b, offs=offs, out=out) is out
            torch.testing.assert_close(out, want)


@pytest.mark.parametrize("backend", ["auto", *(b.name for b in BACKENDS if not b.peer)])
def test_weight_gradients_are_added_to_a_buffer(backend):
    with torch.no_grad():
        a, b, offs = operands("ragged_k", torch.bfloat16)
        try:
            xt.grouped_mm(a, b, offs=offs, out_dtype=torch.float32, backend=backend)
        except ValueError as refused:
            pytest.skip(str(refused))
        buffer = torch.randn(G, K, N, generator=torch.Generator().manual_seed(1))
        want = buffer + reference(a, b, offs)
        got = xt.grouped_mm(a, b, offs=offs, out=buffer, accumulate=True, backend=backend)
        assert got is buffer
        torch.testing.assert_close(buffer, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("named", [False, True])
def test_adding_goes_to_a_backend_that_adds_as_it_stores(named, monkeypatch):
    """Where `auto` has chosen one that does not; a named backend stays."""
    ran = []

    def backend(name: str, add: Any = None) -> Any:
        return replace(
            by_name("loop"), name=name, run=lambda *given: ran.append(name) or by_name("loop").run(*given), add=add
        )

    plain, adding = backend("plain"), backend("adding", lambda p, o, config, out: ran.append("added") or out)
    monkeypatch.setattr(api, "BACKENDS", (plain, adding))
    monkeypatch.setattr(api, "select", lambda problem, device, request: (plain, NoConfig()))
    api._adding.cache_clear()
    a, b, offs = (torch.randn(M, K).t(), torch.randn(M, N), torch.tensor([3, M], dtype=torch.int32))
    out = torch.zeros(2, K, N)
    xt.grouped_mm(a, b, offs=offs, out=out, accumulate=True, backend="loop" if named else "auto")
    api._adding.cache_clear()
    assert ran == (["plain"] if named else ["added"])


@pytest.mark.parametrize(
    ("layout", "given", "words"),
    [
        ("ragged_k", {"accumulate": True}, "a tensor `out` to add to"),
        ("ragged_m", {"out": torch.zeros(M, N), "accumulate": True}, "weight gradient"),
        ("ragged_k", {"out": torch.zeros(G, N, K)}, r"out: expected \[4, 16, 24\]"),
        ("ragged_k", {"out": torch.zeros(G, K, N), "out_dtype": torch.bfloat16}, "out_dtype: expected that of out"),
        (
            "ragged_k",
            {"out": torch.zeros(G, K, N, dtype=torch.int32)},
            r"out: expected a tensor .*, got torch.int32 \[",
        ),
        ("ragged_k", {"out": [1]}, "out: expected a tensor of one of .*, got list"),
        ("ragged_m", {"out": torch.zeros(1, N).expand(M, N)}, r"out: expected a place of its own .* \[0, 1\]"),
        ("ragged_m", {"out": torch.zeros(M + N).as_strided((M, N), (1, 1))}, "out: expected a place of its own"),
        (
            "ragged_k",
            {"out": torch.zeros(K, N).expand(G, K, N), "accumulate": True},
            "out: expected a place of its own",
        ),
    ],
)
def test_bad_outs_are_refused(layout, given, words):
    a, b, offs = (x.detach() if isinstance(x, torch.Tensor) else x for x in operands(layout, torch.bfloat16))
    with pytest.raises(ValueError, match=words):
        xt.grouped_mm(a, b, offs=offs, **given)


def test_out_is_no_operand():
    square, eye = torch.randn(M, K), torch.eye(K).repeat(G, 1, 1)
    offs = offs_from_sizes([M // G] * G)
    for name, out in (("a", square), ("b", eye.view(-1, K)[:M])):
        with pytest.raises(ValueError, match=f"out: expected memory of its own, got that of {name}"):
            xt.grouped_mm(square, eye, offs=offs, out=out)
    assert xt.grouped_mm(square, eye, offs=offs, out=torch.empty(K, M).t()).shape == (M, K)


def test_out_and_gradients_exclude_each_other():
    a, b, offs = operands("ragged_k", torch.bfloat16)
    with pytest.raises(ValueError, match="out: expected operands without gradients"):
        xt.grouped_mm(a, b, offs=offs, out=torch.zeros(G, K, N))
