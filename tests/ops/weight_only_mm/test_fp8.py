"""scaled_grouped_mm with weights in 4 bits on the CPU: numbers, the torch operator, and errors."""

from dataclasses import replace

import pytest
import torch

import expertile as xt
from expertile.device import Device
from expertile.ops.weight_only_mm.api import choose
from expertile.ops.weight_only_mm.backends import BACKENDS, by_name
from expertile.ops.weight_only_mm.fp8 import operator
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem
from expertile.ragged import offs_from_sizes
from tests.ops.weight_only_mm import fp8_cases
from tests.ops.weight_only_mm.fp8_cases import CASES, FP32, Fp8Case, check, make, poisoned_out, problem_of
from tests.ops.weight_only_mm.reference import reference

H200 = Device.by_name("h200")
PLAIN = CASES[0]


def call(case: Fp8Case, **changes):
    o = make(case)
    given = {"a": o.a, "b": o.w, "scale_a": o.scale_a, "offs": o.offs, "bias": o.bias}
    given |= {name: v(given[name]) if callable(v) else v for name, v in changes.items()}
    return xt.scaled_grouped_mm(**given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_auto(case):
    o = make(case)
    out = xt.scaled_grouped_mm(
        o.a, o.w, o.scale_a, offs=o.offs, bias=o.bias, out_dtype=case.out_dtype or torch.bfloat16
    )
    out[sum(case.sizes) :] = float("nan")  # left as it comes
    check(case, out, o)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["loop", "dequant"])
def test_backends_of_a_cpu(name, case):
    backend, o = by_name(name), make(case)
    problem, out = problem_of(case, o), poisoned_out(case)
    assert backend.supports(problem, Device.current("cpu")) is None
    assert backend.run(problem, o, backend.configs(problem, H200)[0], out) is out
    check(case, out, o, **({"limit": 2e-6} if name == "loop" and case.out_dtype is FP32 else {}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case):
    o = make(case)
    out = reference(o.a, o.w, o.offs, o.bias, torch.float64, o.scale_a)
    check(case, out, o, 1e-9)


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_one_hot_activations_decode_every_weight(format):
    w = make(Fp8Case("w", (1, 1), n=40, k=256, format=format)).w
    a = torch.eye(256).to(torch.float8_e4m3fn).repeat(2, 1)
    for scale_a in (torch.ones(512), torch.ones(512, 2)):
        for backend in ("loop", "dequant"):
            out = xt.scaled_grouped_mm(a, w, scale_a, offs=offs_from_sizes([256, 256]), backend=backend)
            assert torch.equal(out.view(2, 256, 40).transpose(1, 2), w.dequantize())


def test_activations_as_they_are_quantised():
    """The whole way: bfloat16 activations, quantised, times MXFP4 weights whose scales lie close together."""
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    w = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(1))
    w4, offs = xt.Mxfp4Weight.quantize(w), offs_from_sizes([7, 0, 13])
    a = xt.quantize_activations(x)
    y = xt.scaled_grouped_mm(a.values, xt.Mxfp4Fp8Weight.of(w4), a.scales, offs=offs)
    want = reference(x, w4, offs)
    assert float((y.float() - want).norm() / want.norm()) < 0.04  # e4m3 rounds activations by up to 2^-4


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
@pytest.mark.parametrize("recipe", ["vector", "row"])
def test_operator_passes_opcheck_and_compiles(format, recipe, monkeypatch):
    allclose = torch.allclose

    def allclose_of_bytes(x, y, **options):
        """torch.allclose knows no float8."""
        return torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.itemsize == 1 else allclose(x, y, **options)

    monkeypatch.setattr(torch, "allclose", allclose_of_bytes)
    case = Fp8Case("op", (5, 0, 9), n=40, k=256, format=format, recipe=recipe, bias=True)
    o = make(case)
    fields = (o.w.packed, o.w.scales, o.w.zeros, o.w.format, o.w.group_size, 256)
    call = (o.a, o.scale_a, *fields, o.offs, o.bias, torch.float32, "auto")
    torch.library.opcheck(torch.ops.expertile.fp8_weight_only_mm, call)
    compiled = torch.compile(
        lambda a, s: xt.scaled_grouped_mm(a, o.w, s, offs=o.offs, bias=o.bias) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(o.a, o.scale_a), 2 * operator(*call).bfloat16())
    with pytest.raises(ValueError, match="check: expected None or False under torch.compile"):
        torch.compile(lambda a: xt.scaled_grouped_mm(a, o.w, o.scale_a, offs=o.offs, check=True), backend="eager")(o.a)


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_meta_tensors_have_shapes(format):
    o = make(replace(PLAIN, format=format))
    out = xt.scaled_grouped_mm(o.a.to("meta"), o.w.to("meta"), o.scale_a.to("meta"), offs=o.offs.to("meta"))
    assert out.is_meta and out.shape == (33, 64) and out.dtype is torch.bfloat16


INT4 = Fp8Case("int4", (5, 9), n=40, k=256, format="int4")


def grouped(w, size, symmetric=True):
    return xt.Int4Weight.quantize(w.dequantize(), size, symmetric)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (PLAIN, {"scale_b": torch.ones(2)}, "scale_b: expected None with an Mxfp4Fp8Weight, which has its own"),
        (PLAIN, {"scale_a": None}, "scale_a: expected a torch.Tensor, got NoneType"),
        (PLAIN, {"offs": None}, "offs: expected"),
        (PLAIN, {"b": xt.Mxfp4Weight.quantize(torch.randn(2, 64, 256))}, r"b: expected .* Mxfp4Fp8Weight.of\(w\)"),
        (PLAIN, {"a": lambda a: a.bfloat16()}, "a: expected dtype torch.float8_e4m3fn with scale_a, got"),
        (PLAIN, {"a": lambda a: a[:, :128], "scale_a": lambda s: s[:, :1]}, "b: expected K = 128 .*, got 256"),
        (PLAIN, {"scale_a": lambda s: s.double()}, "scale_a: expected dtype torch.float32, got torch.float64"),
        (PLAIN, {"scale_a": lambda s: s[:, :1]}, r"scale_a: expected \[33, 2\] \(one for each 1×128\) or \[33\]"),
        (PLAIN, {"scale_a": lambda s: s.to("meta")}, "scale_a: expected device cpu as a has, got meta"),
        (PLAIN, {"b": lambda w: w.to("meta")}, "b: expected device cpu as a has, got meta"),
        (PLAIN, {"scale_a": lambda s: s / 0, "check": True}, "scale_a: expected finite scales, got 66"),
        (PLAIN, {"out_dtype": torch.float64}, "out_dtype: expected .*, got torch.float64"),
        (PLAIN, {"backend": "gluon_int4"}, "takes activations of 16 bits"),
        (PLAIN, {"backend": "triton_int4"}, "takes activations of 16 bits"),
        (PLAIN, {"backend": "gluon_w4a8"}, "compute capability 9.0"),
        (INT4, {"b": lambda w: grouped(w, 64)}, "b: expected INT4 in groups of 128 without zero .* groups of 64"),
        (INT4, {"b": lambda w: grouped(w, None)}, "b: expected INT4 in groups of 128 .* groups of 256"),
        (INT4, {"b": lambda w: grouped(w, 128, False)}, "b: expected INT4 .* got groups of 128 with zero points"),
    ],
)
def test_errors_name_the_argument(case, changes, message):
    with pytest.raises(ValueError, match=message):
        call(case, **changes)


@pytest.mark.parametrize("name", ["bias", "scale_a"])
def test_a_gradient_is_refused(name):
    o = make(INT4)
    given = {"bias": torch.zeros(2, 40), "scale_a": o.scale_a.clone()}
    given[name].requires_grad_()
    out = xt.scaled_grouped_mm(o.a, o.w, given["scale_a"], offs=o.offs, bias=given["bias"])
    with pytest.raises(RuntimeError, match="expertile: fp8_weight_only_mm has no gradient"):
        out.sum().backward()


def test_k_that_no_block_divides():
    with pytest.raises(ValueError, match="K: expected a positive multiple of 32"):
        xt.Mxfp4Fp8Weight.of(xt.Mxfp4Weight.quantize(torch.randn(1, 8, 100)))
    with pytest.raises(ValueError, match="128"):
        xt.Int4Weight.quantize(torch.randn(1, 8, 192), 128)


def test_weights_of_the_other_activations_say_where_they_go():
    o, bf16 = make(PLAIN), torch.randn(33, 256).bfloat16()
    with pytest.raises(ValueError, match="expected one of int4, mxfp4 with 16-bit activations, got mxfp4_fp8"):
        xt.grouped_mm(bf16, o.w, offs=o.offs)
    with pytest.raises(ValueError, match="FP8 activations go to scaled_grouped_mm, with their scales"):
        xt.grouped_mm(o.a, make(INT4).w, offs=o.offs)


def test_work_counts_scales_of_both_sides():
    o = make(PLAIN)
    m, n, k = 33, 64, 256
    problem = WeightOnlyProblem.of(o.a, o.w, o.offs, scale_a=o.scale_a)
    assert problem.work().nbytes == m * (k + 4 * 2 + 2 * n) + o.w.nbytes
    assert problem.work().flops == 2 * m * n * k
    by_row = WeightOnlyProblem.of(o.a, o.w, o.offs, scale_a=o.scale_a[:, 0])
    assert by_row.work().nbytes == m * (k + 4 + 2 * n) + o.w.nbytes


@pytest.mark.parametrize("gpu, name", [("h200", "gluon_w4a8"), ("a100", "dequant"), ("b200", "dequant")])
def test_choice_on_a_gpu(gpu, name):
    for case in (PLAIN, INT4):
        problem = replace(problem_of(case, make(case)), device_type="cuda", group_sizes=None)
        assert choose(problem, Device.by_name(gpu)).backend.name == name


def test_only_one_kernel_takes_fp8():
    problem = problem_of(PLAIN, make(PLAIN))
    assert [b.name for b in BACKENDS if b.supports(problem, H200) is None] == ["gluon_w4a8", "dequant", "loop"]
    assert "FP8" in (by_name("gluon_w4a8").supports(replace(problem, dtype=torch.bfloat16), H200) or "")
    assert fp8_cases.LARGE
