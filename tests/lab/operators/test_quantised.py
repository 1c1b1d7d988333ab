"""quantize_fp8, scaled_grouped_mm and int4_grouped_mm in the lab: rivals pass the gate, faults do not; the work; the
presets; who refuses what."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.bench.run import run
from expertile.lab.operators import operators, presets
from expertile.lab.operators.quantize import _workload as quantize_workload
from expertile.lab.operators.weight_only_mm import weight_of
from expertile.lab.race.gate import judge
from expertile.lab.race.record import read
from expertile.ops.weight_only_mm.api import weight_only_mm

CPU, H200, A100 = Device.current("cpu"), Device.by_name("h200"), Device.by_name("a100")
FP8, INT4 = (
    next(w for w in presets()[preset]() if w.name == name)
    for preset, name in (("fp8-large", "fp8-small"), ("int4-models", "int4-small"))
)
QUANTIZE = [
    quantize_workload("activations", 3, 20, 200, True),
    quantize_workload("swiglu_interleaved", 1, 9, 128),
    quantize_workload("rms_norm", 2, 9, 256, True),
    quantize_workload("weights", 2, 130, 136, dtype="fp32"),
]


def judged(w, name):
    operator = operators()[w.op]
    rival = next(r for r in operator.rivals if r.name == name)
    assert rival.supports(w, CPU) is None
    inputs = operator.make_inputs(w, torch.device("cpu"), 0)
    reference = (rival.reference or operator.reference)(w, inputs)
    return judge(rival, w, inputs, reference, operator.tolerance(w)), operator, inputs


@pytest.mark.parametrize("w", [*QUANTIZE, FP8, INT4, replace(INT4, dims=(*INT4.dims[:-1], ("zeros", False)))], ids=str)
@pytest.mark.parametrize("name", ["expertile", "torch", "bf16", "expertile-dequant"])
def test_rivals_pass_the_gate(w, name):
    if name not in {r.name for r in operators()[w.op].rivals if r.supports(w, CPU) is None}:
        pytest.skip(f"no {name} for {w.op} on a CPU")
    gate, *_ = judged(w, name)
    assert gate.ok, gate.reason


@pytest.mark.parametrize("w, scale", [(FP8, 3), (INT4, 2)], ids=["fp8", "int4"])
def test_a_scale_of_the_next_block_is_noticed(w, scale):
    _, operator, inputs = judged(w, "expertile")
    moved = list(inputs)
    moved[scale] = inputs[scale].roll(1, 2 if w is FP8 else 1)
    gate = judge(operator.rivals[0], w, tuple(moved), operator.reference(w, inputs), operator.tolerance(w))
    assert not gate.ok


@pytest.mark.parametrize("w", [FP8, INT4], ids=["fp8", "int4"])
def test_a_changed_byte_of_the_inputs_is_noticed(w):
    def bind(workload, inputs):
        real = operators()[w.op].rivals[0].bind(workload, inputs)

        def call():
            out = real()
            inputs[2 if w is FP8 else 1].view(torch.uint8).view(-1)[5] += 1
            return out

        return call

    operator = operators()[w.op]
    inputs = operator.make_inputs(w, torch.device("cpu"), 0)
    rival = replace(operator.rivals[0], bind=bind)
    gate = judge(rival, w, inputs, operator.reference(w, inputs), (1.0, 1.0))
    assert not gate.ok and "changes its inputs" in gate.reason


def test_work_counts_what_is_read_and_written():
    by_name = {w.name: w for w in presets()["fp8-sweep"]()}
    w = by_name["fp8-e4-m64-n4096-k7168"]
    m, n, k = 256, 4096, 7168
    scales = 4 * (m * 56 + 4 * 32 * 56)
    work = operators()[w.op].work(w)
    assert (work.flops, work.nbytes) == (2 * m * n * k, m * k + 4 * n * k + 2 * m * n + scales)
    rows = {w.name: w for w in presets()["int4-models"]()}["rows-16"]
    m = 512
    packed = 32 * n * (k // 2 + 2 * k // 128)
    assert operators()[rows.op].work(rows).nbytes == 2 * (m * k + m * n) + packed
    activations = quantize_workload("activations", 1, 256, 512)
    assert operators()["quantize_fp8"].work(activations).nbytes == 256 * 512 * 3 + 256 * 4 * 4


def test_presets():
    sweep = presets()["fp8-sweep"]()
    shapes = {(w["groups"], w["tokens"] // w["groups"], w["n"], w["k"]) for w in sweep}
    assert len(sweep) == len(shapes) == 81
    assert {s[0] for s in shapes} == {1, 4, 8} and {s[1] for s in shapes} == {64, 128, 512}
    assert {s[2] for s in shapes} == {s[3] for s in shapes} == {2048, 4096, 7168}
    large = {(w["groups"], w["tokens"] * w["top_k"], w["n"], w["k"]) for w in presets()["fp8-large"]()}
    assert {(4, 32768, 4096, 7168), (32, 512, 4096, 7168), (1, 8192, 8192, 8192)} <= large
    drawn = presets()["fp8-random"]()
    assert len({w.name for w in drawn}) == 20 and drawn == presets()["fp8-random"]()
    assert {w["routing"] for w in drawn} == {"balanced", "uniform"} and not {w.dims for w in drawn} & {
        w.dims for w in sweep
    }
    assert len({w["groups"] for w in drawn}) > 5 and all(w["n"] % 64 == w["k"] % 128 == 0 for w in drawn)
    both = presets()["int4-models"]()
    models = [w for w in both if w.op == "int4_grouped_mm"]
    # Every model's product in FP8 and in INT4, in one run.
    assert {(w.name, w.dims) for w in both if w.dtype == "fp8"} <= {(w.name, w.dims[:6]) for w in models}
    assert {w["group_size"] for w in models} == {0, 32, 64, 128} and {w["zeros"] for w in models} == {False, True}


def test_what_rivals_refuse():
    fp8 = {r.name: r for r in operators()["scaled_grouped_mm"].rivals}
    (dense,) = operators()["scaled_grouped_mm"].baselines
    w = presets()["fp8-sweep"]()[0]
    assert fp8["torch"].supports(w, H200) is None and "9.0" in fp8["torch"].supports(w, A100)
    assert dense.supports(w, H200) is None and "8.9" in dense.supports(w, CPU)
    assert fp8["expertile-gluon_fp8"].supports(w, H200) is None
    assert "9.0" in fp8["expertile-cuda_fp8"].supports(w, A100)
    assert "9.0" in fp8["expertile-gluon_fp8"].supports(w, A100)
    assert "not installed" in fp8["deepgemm"].supports(w, H200)
    int4 = {r.name: r for r in operators()["int4_grouped_mm"].rivals}
    w = next(w for w in presets()["int4-models"]() if w.op == "int4_grouped_mm")
    assert int4["tinygemm"].supports(w, H200) is None and int4["bf16"].supports(w, H200) is None
    assert int4["expertile-triton_int4"].supports(w, H200) is None
    assert "not installed" in int4["gemlite"].supports(w, H200)


def test_the_result_of_row_wise_scales_is_held_against_its_own_operands():
    rival = next(r for r in operators()["scaled_grouped_mm"].rivals if r.name == "torch")
    operator = operators()["scaled_grouped_mm"]
    inputs = operator.make_inputs(FP8, torch.device("cpu"), 0)
    own, blocks = rival.reference(FP8, inputs)[0], operator.reference(FP8, inputs)[0]
    error = float((own - blocks).norm() / blocks.norm())
    assert 0.005 < error < 0.1  # quantised a second time, along whole rows


def test_suspicions_are_raced_and_scales_multiplied_together_are_wrong():
    small = next(w for w in presets()["fp8-causes"]() if w.name == "small")
    verdicts = {}
    for rival in operators()["fp8_causes"].rivals:
        if rival.supports(small, CPU) is None:
            verdicts[rival.name] = judged(small, rival.name)[0]
    assert verdicts.pop("multiplied").rel_error > 0.1
    assert set(verdicts) >= {"expertile", "expertile-row", "expertile-vector", "expertile-padded"}
    assert all(gate.ok for gate in verdicts.values()), verdicts


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
def test_fp8_beside_four_bits_is_held_against_the_activations_that_it_rounds(form):
    w = next(w for w in presets()["w4a8"]() if w.name == f"small-gate-up-{form}-fp8")
    named = {r.name: r for r in operators()["weight_only_mm_fp8"].rivals}
    for name in (name for name in named if name.startswith("expertile")):
        gate, operator, inputs = judged(w, name)
        assert gate.ok, gate.reason
    rival = operator.rivals[0]
    plain, rounded = operator.reference(w, inputs), rival.reference(w, inputs)
    assert not judge(rival, w, inputs, plain, operator.tolerance(w)).ok
    humming = named["humming"]
    a, weight = inputs[0].float(), weight_of(w, inputs)
    scale = (a.abs().amax(1, keepdim=True) / 448).clamp(min=1e-30)  # as its kernel rounds a row
    a = (a * (1 / scale)).to(torch.float8_e4m3fn).float() * scale
    like = replace(humming, bind=lambda w, inputs: lambda: (weight_only_mm(a.bfloat16(), weight, offs=inputs[-1]),))
    assert judge(like, w, inputs, humming.reference(w, inputs), humming.tolerance(w)).ok
    assert not judge(like, w, inputs, plain, humming.tolerance(w)).ok
    assert not judge(named["expertile-16bits"], w, inputs, rounded, operator.tolerance(w)).ok


def test_fp8_beside_int4_takes_groups_of_128():
    found = {w.name: w for w in presets()["w4a8"]()}
    ours = operators()["weight_only_mm_fp8"].rivals[0]
    assert "128" in ours.supports(found["gpt-oss-120b-gate-up-int4-rows32-fp8"], H200)
    assert ours.supports(found["gpt-oss-120b-gate-up-mxfp4-rows32-fp8"], H200) is None
    assert ours.supports(found["mixtral-gate-up-int4-rows32-fp8"], H200) is None


def test_a_layer_that_rounds_activations_is_held_against_rounded_ones():
    w = next(w for w in presets()["gpt-oss"]() if w.name == "small-mxfp4")
    operator = operators()["moe_mxfp4"]
    ours, rounding = operator.rivals[:2]
    inputs = operator.make_inputs(w, torch.device("cpu"), 0)
    expected, tolerance = rounding.reference(w, inputs), rounding.tolerance(w)
    assert rounding.name == "expertile-w4a8" and judge(rounding, w, inputs, expected, tolerance).ok
    assert not judge(ours, w, inputs, expected, tolerance).ok


def test_a_run_of_all_three(tmp_path):
    path = tmp_path / "out.jsonl"
    known = (operators()[op] for op in ("quantize_fp8", "scaled_grouped_mm", "int4_grouped_mm"))
    chosen = [replace(o, rivals=tuple(r for r in o.rivals if r.name != "torch.compile")) for o in known]
    found = list(run((QUANTIZE[0], FP8, INT4), operators=chosen, device="cpu", seconds=0.1, seed=1, out_path=path))
    status = {(r.op, r.backend): r.status for r in read(path)}
    assert len(found) == len(status)
    for op in ("quantize_fp8", "scaled_grouped_mm", "int4_grouped_mm"):
        assert status[op, "expertile"] == status[op, "copy"] == "ok"
    assert status["scaled_grouped_mm", "dense"] == "unsupported"
    assert {r.dtype for r in found if r.op == "scaled_grouped_mm"} == {"fp8"}
    (bf16,) = (r for r in found if r.op == "scaled_grouped_mm" and r.backend == "bf16")
    (ours,) = (r for r in found if r.op == "scaled_grouped_mm" and r.backend == "expertile")
    assert bf16.flops == ours.flops and bf16.nbytes > 1.5 * ours.nbytes
