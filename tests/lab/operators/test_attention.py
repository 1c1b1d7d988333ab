"""attention in the lab: the truth, the rivals that run here, what each refuses, the presets, the memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from expertile.device import Device
from expertile.lab.operators import attention
from expertile.lab.operators.attention import OPERATORS, PRESETS, memory_workloads, workload
from expertile.lab.race.case import Site
from expertile.lab.race.gate import judge
from expertile.lab.race.memory import measure_memory
from expertile.lab.race.operator import backward_of

FORWARD, BACKWARD = OPERATORS
CPU, H200, A100 = Device.current("cpu"), Device.by_name("h200"), Device.by_name("a100")


def small(backward=False, causal=True, kv_heads=2, dtype="fp32", head_dim=16, length=40):
    forward = workload("test", 2, 4, length, head_dim, causal, dtype, kv_heads=kv_heads)
    return backward_of(forward) if backward else forward


def rivals(operator):
    return {rival.name: rival for rival in operator.rivals}


@pytest.mark.parametrize("causal", [False, True])
def test_truth(causal):
    w = small(True, causal)
    dout, *qkv = BACKWARD.make_inputs(w, torch.device("cpu"), 3)
    q, k, v = (x.double().requires_grad_() for x in qkv)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), dout.double())
    torch.testing.assert_close(FORWARD.reference(small(False, causal), tuple(qkv))[0], out.detach().float())
    for got, want in zip(BACKWARD.reference(w, (dout, *qkv)), grads, strict=True):
        torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
@pytest.mark.parametrize("name", ["expertile", "expertile-auto", "unfused"])
def test_rivals_pass_the_gate(name, operator, dtype):
    w = small(operator is BACKWARD, dtype=dtype)
    rival = rivals(operator)[name]
    assert rival.supports(w, CPU) is None
    inputs = operator.make_inputs(w, torch.device("cpu"), 0)
    gate = judge(rival, w, inputs, operator.reference(w, inputs), operator.tolerance(w))
    assert gate.ok, gate.reason


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
def test_the_gate_sees_a_mask_one_key_too_wide(operator):
    w = small(operator is BACKWARD, dtype="bf16", length=200)
    inputs = operator.make_inputs(w, torch.device("cpu"), 0)
    wrong = [(k, v + 1 if k == "k_len" else v) for k, v in w.dims]
    longer = tuple(torch.cat([x, x[:, :, :1]], 2) if x.shape[1] == 2 else x for x in inputs)
    truth = operator.reference(type(w)(w.name, w.preset, w.op, tuple(wrong), w.dtype), longer)
    truth = [x[:, :, : w["q_len"]] for x in truth]
    gate = judge(rivals(operator)["expertile"], w, inputs, truth, operator.tolerance(w))
    assert not gate.ok


def test_work_counts_pairs_that_are_seen():
    full, causal = small(causal=False), small(causal=True)
    assert FORWARD.work(full).flops == 4 * 2 * 4 * 40 * 40 * 16
    assert FORWARD.work(causal).flops == 4 * 2 * 4 * (40 * 41 / 2) * 16
    assert BACKWARD.work(small(True)).flops == 2.5 * FORWARD.work(causal).flops
    # q and out of 4 heads, k and v of 2, and LSE.
    assert FORWARD.work(full).nbytes == 2 * 40 * 16 * (2 * 4 + 2 * 2) * 4 + 4 * 2 * 4 * 40


def test_presets():
    v100 = PRESETS["attention-v100"]()
    assert [(w.op, w["batch"], w["heads"], w["head_dim"], w["q_len"], w.dtype) for w in v100[:4]] == [
        ("attention", 4, 8, 64, length, "fp16") for length in (256, 512, 1024, 2048)
    ]
    rows = PRESETS["attention"]()
    shapes = {(w.op, w["head_dim"], w["q_len"], w["causal"]) for w in rows if w["kv_heads"] == 16}
    for op in ("attention", "attention_backward"):
        for dim, length, causal in ((64, 4096, False), (64, 16384, False), (128, 4096, True), (128, 16384, True)):
            assert (op, dim, length, causal) in shapes
    assert any(w["kv_heads"] < w["heads"] for w in rows)
    for build in (*PRESETS.values(), memory_workloads):
        names = [w.name for w in build()]
        assert len(set(names)) == len(names)


def test_what_peers_refuse():
    forward, backward = rivals(FORWARD), rivals(BACKWARD)
    w = small(dtype="bf16", head_dim=64)
    assert forward["sdpa_fa2"].supports(w, H200) is None and forward["sdpa_cudnn"].supports(w, H200) is None
    assert "CUDA" in forward["sdpa_fa2"].supports(w, CPU)
    assert "float32" in backward["sdpa_cudnn"].supports(small(True), A100)
    long = workload("test", 4, 16, 65536, 64, False)
    assert "GB" in forward["unfused"].supports(long, H200)
    assert forward["expertile"].supports(long, H200) is None


@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_the_unfused_grows_with_the_square(backward):
    workloads = [workload("test", 1, 2, length, 16, False, "fp32") for length in (256, 512)]
    workloads = [backward_of(w) if backward else w for w in workloads]
    operators = {
        o.name: replace(o, rivals=tuple(r for r in o.rivals if r.name in ("expertile", "unfused"))) for o in OPERATORS
    }
    site = Site(Device.current("cpu"), torch.device("cpu"))
    peaks = {(r.backend, r.shape["q_len"]): r.value for r in measure_memory(workloads, operators, site)}
    assert peaks["unfused", 512] > 3.5 * peaks["unfused", 256] and peaks["expertile", 512]


def test_formulas_of_memory():
    w = workload("test", 1, 16, 4096, 64, False)
    own, unfused = (rivals(FORWARD)[n].peak_nbytes(w) for n in ("expertile", "unfused"))
    assert own == 16 * 4096 * (64 * 2 + 4)
    assert unfused > 2 * 16 * 4096**2 * 2
    twice = workload("test", 1, 16, 8192, 64, False)
    assert rivals(FORWARD)["expertile"].peak_nbytes(twice) == 2 * own


@pytest.mark.parametrize("causal", [False, True])
def test_fa3_is_handed_sequences_as_its_signature_has_them(causal, monkeypatch):
    """A stand-in with the order of vLLM's `fwd`: q, k, v, then places of cu_seqlens and of the longest sequences."""

    def fwd(q, k, v, *rest):
        given = {place: x for place, x in enumerate(rest[:20]) if x is not None}
        assert set(given) == {4, 5, 9, 10} and rest[20:24] == (0.25, causal, -1, -1) and len(rest) == 34
        starts_q, starts_k, longest_q, longest_k = given.values()
        assert (longest_q, longest_k) == (40, 40) and starts_q.dtype == starts_k.dtype == torch.int32
        out = torch.empty_like(q)
        for at in range(len(starts_q) - 1):
            rows, keys = (slice(s[at], s[at + 1]) for s in (starts_q, starts_k))
            heads = [x[rows if x is q else keys].transpose(0, 1)[None] for x in (q, k, v)]
            done = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)
            out[rows] = done[0].transpose(0, 1)
        return (out,)

    monkeypatch.setattr(attention, "load", lambda paths: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=fwd), raising=False)
    w = small(causal=causal)
    inputs = FORWARD.make_inputs(w, torch.device("cpu"), 0)
    torch.testing.assert_close(rivals(FORWARD)["fa3"].bind(w, inputs)()[0], FORWARD.reference(w, inputs)[0])
