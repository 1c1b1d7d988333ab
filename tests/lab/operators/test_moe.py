"""moe and moe_train in the lab: inputs that every way routes alike, the reference, rivals and faults, work, presets."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from expertile.device import Device
from expertile.lab.bench.run import run
from expertile.lab.operators import for_cpu, operators, presets
from expertile.lab.operators import moe as lab
from expertile.lab.operators._moe_rivals import interleaved
from expertile.lab.race.case import Site
from expertile.lab.race.gate import judge
from expertile.lab.race.memory import FORMULA, measure_memory
from expertile.lab.race.record import read
from expertile.lab.race.routing import draw

CPU, H200, A100 = Device.current("cpu"), Device.by_name("h200"), Device.by_name("a100")
SMALL, TRAIN = for_cpu(presets()["moe"]())
SONIC, SONIC_TRAIN = for_cpu(presets()["moe-sonic"]())
(DECODE,) = for_cpu(presets()["moe-decode"]())


def made(w, seed=0):
    return operators()[w.op].make_inputs(w, torch.device("cpu"), seed)


def judged(w, name, inputs=None, tolerance=None):
    operator = operators()[w.op]
    rival = next(r for r in (*operator.rivals, *operator.baselines) if r.name == name)
    assert rival.supports(w, CPU) is None
    right = made(w)
    reference = (rival.reference or operator.reference)(w, right)
    return judge(rival, w, inputs or right, reference, tolerance or operator.tolerance(w))


@pytest.mark.parametrize("w", [SMALL, SONIC, DECODE], ids=lambda w: w.preset)
@pytest.mark.parametrize("seed", [0, 3])
def test_tokens_go_where_the_routing_says_however_logits_are_rounded(w, seed):
    x, router, *_ = made(w, seed)
    t, _, _, e, k = lab.size(w)
    exact = x.double() @ router.double().t()
    best = exact.sort(1, descending=True)
    assert float((best.values[:, k - 1] - best.values[:, k]).min()) > 0.4
    ids = best.indices[:, :k]
    assert torch.equal(F.linear(x, router).topk(k).indices.sort(1).values, ids.sort(1).values)
    sizes = draw(w["routing"], t, e, k, seed=0)[0].group_sizes
    assert tuple(ids.flatten().bincount(minlength=e).tolist()) == sizes
    assert lab.used(w) == sum(size > 0 for size in sizes)
    assert 0.9 < float(x.float().std()) < 1.1


def test_the_reference_is_what_autograd_says_of_every_expert_on_every_token():
    x, router, gate_up, down, dy = (t.double().requires_grad_(i < 4) for i, t in enumerate(made(TRAIN)))
    best = (x @ router.t()).softmax(1).topk(TRAIN["top_k"])
    weights = torch.zeros(len(x), len(router), dtype=torch.float64)
    weights = weights.scatter(1, best.indices, best.values / best.values.sum(1, keepdim=True))
    gate, up = torch.einsum("th,enh->ten", x, gate_up).chunk(2, 2)
    out = torch.einsum("te,tei,ehi->th", weights, F.silu(gate) * up, down)
    want = (out.detach(), *torch.autograd.grad(out, (x, router, gate_up, down), dy))
    got = lab.reference(TRAIN, made(TRAIN))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[0], lab.reference(replace(TRAIN, op="moe"), made(TRAIN)[:4])[0])


@pytest.mark.parametrize("w", [SMALL, TRAIN, SONIC_TRAIN, DECODE], ids=lambda w: f"{w.preset}-{w.op}")
@pytest.mark.parametrize("name", ["expertile", "torch", "torch-index-add", "dense"])
def test_rivals_pass_the_gate(w, name):
    gate = judged(w, name)
    assert gate.ok, gate.reason


@pytest.mark.parametrize("w", [SMALL, TRAIN], ids=lambda w: w.op)
def test_experts_of_transformers_pass_the_gate(w):
    pytest.importorskip("transformers", minversion="5.7")
    gate = judged(w, "transformers")
    assert gate.ok, gate.reason


def _up_and_gate_swapped(inputs):
    return (*inputs[:2], inputs[2].roll(inputs[2].shape[1] // 2, 1), *inputs[3:])


def _one_expert_off(inputs):
    return (*inputs[:3], inputs[3].roll(1, 0), *inputs[4:])


def _one_token_elsewhere(inputs):
    x = inputs[0].clone()
    x[5] -= inputs[1][int((x[5].float() @ inputs[1].float().t()).argmax())] * 3
    return (x, *inputs[1:])


@pytest.mark.parametrize("w", [SMALL, TRAIN], ids=lambda w: w.op)
@pytest.mark.parametrize("fault", [_up_and_gate_swapped, _one_expert_off, _one_token_elsewhere])
def test_faults_are_noticed(w, fault):
    assert not judged(w, "expertile", fault(made(w))).ok


def test_each_gradient_is_looked_at():
    operator = operators()["moe_train"]
    ours = next(r for r in operator.rivals if r.name == "expertile")
    inputs = made(TRAIN)
    reference = operator.reference(TRAIN, inputs)
    for index in range(5):

        def bind(w, given, index=index):
            call = ours.bind(w, given)

            def spoiled():
                outputs = list(call())
                outputs[index] = outputs[index] * 1.03
                return tuple(outputs)

            return spoiled

        gate = judge(replace(ours, bind=bind), TRAIN, inputs, reference, operator.tolerance(TRAIN))
        assert not gate.ok and f"output {index}" in gate.reason


def test_interleaved_weights_alternate_gate_and_up():
    gate_up = torch.arange(2 * 6 * 3).view(2, 6, 3)
    assert torch.equal(interleaved(gate_up)[:, 0::2], gate_up[:, :3])
    assert torch.equal(interleaved(gate_up)[:, 1::2], gate_up[:, 3:])
    sonic = next(r for r in operators()["moe_train"].rivals if r.name == "sonicmoe")
    inputs = made(TRAIN)
    own, plain = sonic.reference(TRAIN, inputs), lab.reference(TRAIN, inputs)
    assert torch.equal(own[3], interleaved(plain[3])) and not torch.equal(own[3], plain[3])
    assert all(torch.equal(own[i], plain[i]) for i in (0, 1, 2, 4))


def test_work():
    by_name = {w.name: w for w in presets()["moe"]()}
    t, h, i, e, k = 32768, 4096, 1024, 128, 8
    shape = "T32768-H4096-I1024-E128-k8"
    work, both = (operators()[w.op].work(w) for w in (by_name[shape], by_name[f"{shape}-train"]))
    assert work.flops == 6 * t * k * h * i and both.flops == 3 * work.flops
    weights = e * h + e * 3 * h * i
    assert work.nbytes == 2 * (2 * t * h + weights) and both.nbytes == 2 * (4 * t * h + 2 * weights)
    decode = {w.name: operators()["moe"].work(w) for w in presets()["moe-decode"]()}
    h, i = 2048, 768
    assert decode["qwen3-30b-a3b-tokens1"].nbytes == 2 * (2 * h + 128 * h + 8 * 3 * h * i)
    h, i = 2880, 2880
    experts = (decode["gpt-oss-120b-tokens8"].nbytes / 2 - 2 * 8 * h - 128 * h) / (3 * h * i)
    assert 4 < experts < 32 and experts == int(experts)


def test_presets():
    def found(name, op):
        return {lab.size(w) for w in presets()[name]() if w.op == op} - {lab.size(w) for w in (SMALL, SONIC, DECODE)}

    full = {(32768, 4096, 1024, 128, 8), (24576, 1536, 256, 128, 8), (32768, 4096, 512, 128, 8)}
    models = {(2048, 768, 128, 8), (7168, 2048, 256, 8), (2880, 2880, 128, 4), (4096, 14336, 8, 2)}
    assert found("moe", "moe") == found("moe", "moe_train") == full | {(8192, *m) for m in models}
    table = {
        (t, h, *row) for t, h in ((40960, 768), (24576, 1536)) for row in ((256, 128, 8), (512, 64, 4), (1024, 32, 2))
    } | {(32768, 4096, i, e, k) for i, e, k in ((256, 256, 16), (512, 128, 8), (1024, 64, 4), (2048, 64, 4))}
    assert found("moe-sonic", "moe") == found("moe-sonic", "moe_train") == table
    assert found("moe-decode", "moe") == {(t, *m) for t in (1, 8, 32, 128) for m in models}
    assert {w.op for w in presets()["moe-decode"]()} == {"moe"}
    with pytest.raises(ValueError, match="hidden >= experts >= top_k >= 1, got 4, 8, 2"):
        lab.workload("w", "p", (1, 4, 4, 8, 2))


def test_what_rivals_refuse():
    rivals = {r.name: r for r in operators()["moe"].rivals}
    assert {"torch.compile", "torch.compile-index-add"} < set(rivals)
    assert "not installed" in rivals["liger"].supports(SMALL, H200) and not rivals["liger"].graph
    assert "not installed" in rivals["sonicmoe"].supports(SMALL, H200)
    assert all(rivals[name].supports(SMALL, A100) is None for name in ("expertile", "torch", "torch.compile"))


def test_peak_memory_is_foretold_for_ours_alone():
    for op, w in (("moe", SMALL), ("moe_train", TRAIN)):
        assert {r.name for r in operators()[op].rivals if r.peak_nbytes} == {"expertile"}
        given, (t, h, i, e, k) = operators()[op].rivals[0].peak_nbytes(w), lab.size(w)
        kept = 2 * t * h + (2 * (4 * t * k * i + 3 * e * h * i) if w is TRAIN else 2 * t * k * i)
        assert given > kept + 2 * t * k * h  # the rows of y, or of dx
    operator = operators()["moe_train"]
    eager = replace(operator, rivals=tuple(r for r in operator.rivals if r.name in ("expertile", "torch")))
    found = {r.backend: r for r in measure_memory([TRAIN], {"moe_train": eager}, Site(CPU, torch.device("cpu")))}
    assert found.keys() == {"expertile", "torch"} and all(
        r.value > 0 and FORMULA not in r.details for r in found.values()
    )


def test_a_run(tmp_path):
    path = tmp_path / "out.jsonl"
    kept = ("expertile", "liger")
    chosen = [
        replace(operators()[op], rivals=tuple(r for r in operators()[op].rivals if r.name in kept))
        for op in ("moe", "moe_train")
    ]
    found = list(run((SMALL, TRAIN), operators=chosen, device="cpu", quick=True, seconds=0.1, seed=1, out_path=path))
    status = {(r.op, r.backend): r.status for r in read(path)}
    assert len(found) == len(status) == 2 * (len(kept) + 2)
    for op in ("moe", "moe_train"):
        assert all(status[op, name] == "ok" for name in ("expertile", "dense", "copy"))
        assert status[op, "liger"] == "unsupported"
    assert {r.shape["experts"] for r in found} == {8}
