"""The public call on the CPU: contract, gradients, errors, compile."""

from dataclasses import replace

import pytest
import torch

import expertile as xt
from expertile.device import Device
from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.ops.weight_only_mm.api import DEQUANT_FROM_ROWS, choose, int4_grouped_mm, ranges, weight_only_mm
from expertile.ops.weight_only_mm.backends import BACKENDS
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem
from expertile.ragged import offs_from_sizes
from tests.ops.weight_only_mm.cases import CASES, check, make, problem_of
from tests.ops.weight_only_mm.reference import reference

SIZES = [5, 0, 9, 3]
OFFS = offs_from_sizes(SIZES)
G, T, K, N = len(SIZES), sum(SIZES), 256, 40


def operands(symmetric=False, rows=T):
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(G, N, K, generator=gen).bfloat16()
    return torch.randn(rows, K, generator=gen).bfloat16(), Int4Weight.quantize(w, 64, symmetric)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_auto(case):
    o = make(case)
    out = int4_grouped_mm(o.a, o.w, offs=o.offs, bias=o.bias, out_dtype=case.out_dtype)
    out[sum(case.sizes) :] = float("nan")  # left as it comes
    check(case, out, o)


def test_one_hot_activations_decode_every_weight():
    w = operands()[1]
    a, offs = torch.eye(K).bfloat16().repeat(G, 1), offs_from_sizes([K] * G)
    for backend in ("loop", "dequant"):
        out = int4_grouped_mm(a, w, offs=offs, backend=backend)
        assert torch.equal(out.view(G, K, N).transpose(1, 2), w.dequantize())


def test_one_operator_for_all_formats():
    a, w = operands(rows=T)
    mxfp4 = Mxfp4Weight.quantize(w.dequantize())
    for b in (w, mxfp4):
        want = reference(a, b, OFFS)
        for call in (weight_only_mm, int4_grouped_mm, xt.weight_only_mm, xt.int4_grouped_mm, xt.grouped_mm):
            torch.testing.assert_close(call(a, b, offs=OFFS).float(), want, rtol=0.02, atol=0.05)
    with pytest.raises(ValueError, match="batch_invariant: expected False with an Mxfp4Weight"):
        xt.grouped_mm(a, mxfp4, offs=OFFS, batch_invariant=True)
    with torch.autocast("cpu", torch.float16):
        assert weight_only_mm(a.float(), mxfp4, offs=OFFS).dtype is torch.float16


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("format", ["int4", "mxfp4"])
@pytest.mark.parametrize("range_bytes", [2, 2**28])
def test_gradients(compiled, format, range_bytes, monkeypatch):
    """Where a range of K has few bytes, the weights are dequantised 128 columns at a time."""
    monkeypatch.setattr("expertile.ops.weight_only_mm.api._RANGE_BYTES", range_bytes)
    assert len(ranges(G * N, K, 2)) == (2 if range_bytes == 2 else 1)
    a, w = operands(rows=T + 2)
    w = Mxfp4Weight.quantize(w.dequantize()) if format == "mxfp4" else w
    bias = torch.randn(G, N).bfloat16().requires_grad_()
    a.requires_grad_()

    def call(a, bias):
        return int4_grouped_mm(a, w, offs=OFFS, bias=bias)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    grad = torch.randn(T, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    da, dbias = torch.autograd.grad(run(a, bias)[:T], (a, bias), grad)
    dense = w.dequantize(torch.float32)
    want = torch.cat([g.float() @ dense[e] for e, g in enumerate(grad.split(SIZES))])
    torch.testing.assert_close(da[:T].float(), want, rtol=0.02, atol=0.05)
    assert (da[T:] == 0).all() and da.dtype == torch.bfloat16
    want_bias = torch.stack([g.float().sum(0) for g in grad.split(SIZES)])
    torch.testing.assert_close(dbias.float(), want_bias, rtol=0.02, atol=0.02)


def test_gradient_of_the_bias_alone():
    a, w = operands()
    bias = torch.zeros(G, N, dtype=torch.bfloat16, requires_grad=True)
    int4_grouped_mm(a, w, offs=OFFS, bias=bias).sum().backward()
    assert bias.grad[:, 0].tolist() == SIZES


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "mxfp4"])
def test_operator_passes_opcheck(kind):
    a, w = operands(kind == "symmetric")
    w = Mxfp4Weight.quantize(w.dequantize()) if kind == "mxfp4" else w
    a.requires_grad_()
    bias = torch.randn(G, N, requires_grad=True)
    call = (a, *w.parts, OFFS, bias, torch.float32, "auto")
    torch.library.opcheck(torch.ops.expertile.weight_only_mm, call)


def test_compiles_without_a_graph_break_for_any_number_of_rows():
    int4 = operands()[1]
    for w in (int4, Mxfp4Weight.quantize(int4.dequantize())):
        compiled = torch.compile(
            lambda a, offs, w=w: weight_only_mm(a, w, offs=offs) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
        )
        for sizes in (SIZES, [1, 2, 3, 4], [0, 0, 0, 31]):
            a, offs = torch.randn(sum(sizes), K).bfloat16(), offs_from_sizes(sizes)
            torch.testing.assert_close(compiled(a, offs).float(), reference(a, w, offs) * 2, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_meta_tensors_have_shapes(kind):
    a, w = operands()
    w = Mxfp4Weight.quantize(w.dequantize()) if kind == "mxfp4" else w
    out = weight_only_mm(a.to("meta"), w.to("meta"), offs=OFFS.to("meta"), out_dtype=torch.float32)
    assert out.is_meta and out.shape == (T, N) and out.dtype is torch.float32


def test_autocast_and_offs_of_any_stride():
    a, w = operands()
    want = int4_grouped_mm(a, w, offs=OFFS)
    offs = torch.stack([OFFS, torch.full_like(OFFS, 99)], 1)[:, 0]
    assert torch.equal(int4_grouped_mm(a, w, offs=offs), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(int4_grouped_mm(a.float(), w, offs=OFFS), want)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"a": None}, "a: expected a torch.Tensor, got NoneType"),
        ({"a": lambda a: a[0]}, r"a: expected \[M, K\], .* got \[256\]"),
        ({"a": lambda a: a.float()}, "a: expected dtype torch.bfloat16 or torch.float16, got torch.float32"),
        (
            {"a": lambda a: a.half()},
            r"b \(w of weight_only_mm\): expected scales of dtype torch.float16 as a has .*, got torch.bfloat16",
        ),
        (
            {"a": lambda a: a[:, :-1]},
            r"b \(w of weight_only_mm\): expected K = 255 .*, got 256 in shape \[4, 40, 256\]",
        ),
        ({"w": lambda w: w.packed}, "w: expected an Int4Weight or Mxfp4Weight, got Tensor"),
        ({"w": lambda w: w.to("meta")}, r"b \(w of weight_only_mm\): expected device cpu as a has, got meta"),
        (
            {"w": lambda w: replace(w, scales=w.scales.clone().requires_grad_())},
            r"b \(w of weight_only_mm\): expected weights that need no grad",
        ),
        ({"offs": None}, "offs: expected an int32 tensor with the end of each group"),
        ({"offs": [1]}, "offs: expected a torch.Tensor, got list"),
        ({"offs": OFFS.long()}, "offs: expected dtype torch.int32, got torch.int64"),
        ({"offs": OFFS[None]}, r"offs: expected 1 dimension, got shape"),
        ({"offs": OFFS[:2]}, r"offs: expected length 4 \(the groups of b\), got 2"),
        ({"offs": OFFS + 5}, "offs: expected a last end of at most 17"),
        ({"bias": torch.zeros(4, 7)}, r"bias: expected shape \[4, 40\]"),
        ({"out_dtype": torch.int8}, "out_dtype: expected torch.bfloat16 or .*, got torch.int8"),
        ({"backend": "abacus"}, "backend: expected one of .*loop.*, got 'abacus'"),
        ({"backend": "triton_int4"}, "backend: triton_int4 cannot take this problem: needs a CUDA GPU"),
        ({"config": object()}, "config: expected None with backend='auto'"),
        ({"backend": "loop", "config": 3}, "config: expected a NoConfig of backend loop, got 3"),
        (
            {"w": lambda w: replace(w, scales=w.scales / 0), "check": True},
            "scales: expected finite numbers, got 640 that are",
        ),
        (
            {"w": lambda w: replace(w, zeros=w.zeros * float("nan")), "check": True},
            "zeros: expected finite numbers, got 640",
        ),
        (
            {"w": lambda w: replace(w, scales=torch.full_like(w.scales, -(2.0**27))), "check": True},
            r"scales: expected magnitudes below 2\^27, got 640",
        ),
    ],
)
def test_errors_name_the_argument(changes, message):
    a, w = operands()
    named = {"a": a, "w": w, "offs": OFFS}
    call = {**named, **{k: v(named[k]) if callable(v) else v for k, v in changes.items()}}
    with pytest.raises(ValueError, match=message):
        int4_grouped_mm(**call)


def test_scales_are_not_looked_at_unasked():
    a, w = operands()
    assert int4_grouped_mm(a, replace(w, scales=w.scales / 0), offs=OFFS).isfinite().sum() == 0
    assert int4_grouped_mm(a, w, offs=OFFS, check=True).isfinite().all()


def test_work_counts_packed_bytes_of_groups_in_use():
    a, w = operands()
    work = WeightOnlyProblem.of(a, w, OFFS).work()
    assert work.flops == 2 * T * N * K
    assert work.nbytes == 2 * T * (K + N) + w.nbytes * 3 / 4
    assert WeightOnlyProblem.of(a, w, OFFS).work([1] * G).nbytes == 2 * G * (K + N) + w.nbytes


def test_scales_that_kernels_cannot_take_are_found_when_asked():
    a = torch.randn(T, 64).bfloat16()
    scales = torch.full((G, N, 2), 161, dtype=torch.uint8)
    w = Mxfp4Weight.of_codes(torch.zeros(G, N, 64, dtype=torch.uint8), scales)
    assert weight_only_mm(a, w, offs=OFFS).shape == (T, N)
    with pytest.raises(ValueError, match=r"scales: expected at most 2\^33 with torch.bfloat16, got 320 larger"):
        weight_only_mm(a, w, offs=OFFS, check=True)


def test_choice_says_why():
    problem = problem_of(CASES[0], make(CASES[0]))
    choice = choose(problem, Device.current("cpu"))
    assert choice.backend.name == "loop" and choice.why == "loop: the first that takes it"


@pytest.mark.parametrize(
    "gpu, rows, names",
    [
        ("h200", 16, ("gluon_int4", "triton_int4")),
        ("a100", 16, ("triton_int4",)),
        ("a100", 4096, ("dequant",)),
        ("h200", 4096, ("gluon_int4",)),
        ("v100", 16, ("dequant",)),
    ],
)
def test_choice_on_a_gpu(gpu, rows, names):
    problem = problem_of(CASES[0], make(CASES[0]))
    problem = replace(problem, device_type="cuda", group_sizes=None, groups=8, m=8 * rows, n=4096, k=4096)
    choice = choose(problem, Device.by_name(gpu))
    assert choice.backend.name in names
    if gpu == "a100" and rows > 16:
        assert choice.why == "dequant: 4096 rows per group pay for dequantised weights"
        assert any("rows: from" in e.reason for e in choice.estimates)


def test_thresholds_are_of_backends():
    assert DEQUANT_FROM_ROWS.keys() <= {b.name for b in BACKENDS}
