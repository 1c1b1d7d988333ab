"""Definitions race as operators do: the reference is the gate, and expertile computes what it says."""

import pytest
import torch

from expertile.lab.bench.run import run
from expertile.lab.flashinfer import load, operator, workload
from tests.lab.flashinfer import datasets


def race(root, name):
    definitions, tasks = load(root)
    op = operator(definitions[name], tasks[name])
    return list(run(list(map(workload, tasks[name])), operators=[op], rounds=3, seed=3))


def statuses(records):
    return {(r.backend, r.status) for r in records if r.backend != "copy"}


RIGHT = {("reference", "ok"), ("expertile", "ok")}
ALL = RIGHT | {("expertile-arranged", "ok")}


@pytest.mark.parametrize("data", [datasets.gemm(), datasets.gemm(dtype="float32"), datasets.gemm(dtype="bfloat16")])
def test_a_gemm(tmp_path, data):
    name = datasets.add(tmp_path, data, ({"M": 5}, {}))
    records = race(tmp_path, name)
    assert statuses(records) == RIGHT
    ours = next(r for r in records if r.backend == "expertile")
    itemsize = 4 if ours.dtype == "fp32" else 2
    assert ours.flops == 2 * 5 * 24 * 64 and ours.nbytes == itemsize * (5 * 64 + 24 * 64 + 5 * 24)
    assert ours.workload.startswith("gemm_n24_k64/M5-") and ours.shape.items() >= {"M": 5, "N": 24, "K": 64}.items()
    assert ours.rel_error < 2.0**-8  # of a reference that was computed in float32


def test_a_batched_product(tmp_path):
    name = datasets.add(tmp_path, datasets.batched(), ({"G": 3, "M": 5}, {}))
    assert statuses(race(tmp_path, name)) == RIGHT


@pytest.mark.parametrize("offset", [0, 8])
def test_an_fp8_layer_of_one_rank(tmp_path, offset):
    scalars = {"local_expert_offset": offset, "routed_scaling_factor": 2.5}
    data = datasets.moe("moe_fp8_block_scale_ds_routing", 32, 8, (4, 2))
    name = datasets.add(tmp_path, data, ({"T": 21}, scalars))
    records = race(tmp_path, name)
    assert statuses(records) == ALL
    (task,) = load(tmp_path)[1][name]
    made = task.make(("routing_logits", "routing_bias"), torch.device("cpu"), 0)
    space = dict(made, torch=torch, **scalars)
    exec("\n".join(line.strip() for line in datasets.SIGMOID.format(ng=4, kg=2, k=4).splitlines()), space)
    here = (space["ids"] >= offset) & (space["ids"] < offset + 8)
    ours = next(r for r in records if r.backend == "expertile")
    assert ours.flops == 6 * int(here.sum()) * 256 * 128 and ours.dtype == "fp8"
    used, tokens = space["ids"][here].unique().numel(), int(here.any(1).sum())
    weights = 3 * 256 * 128 + 4 * (2 * 2 + 2)
    routing = 21 * 32 * 4 + 32 * 2
    assert ours.nbytes == used * weights + tokens * (256 + 4 * 2) + routing + 21 * 256 * 2


def test_an_fp8_layer_with_renormalised_weights(tmp_path):
    name = datasets.add(tmp_path, datasets.moe("moe_fp8_block_scale_renorm", 8), ({"T": 1}, {}), ({"T": 17}, {}))
    assert statuses(race(tmp_path, name)) == ALL


def test_logits_of_16_bits_have_one_right_choice(tmp_path):
    """Of 64 experts in bfloat16, drawn as they come, the 8th and 9th are equal for some of 200 tokens."""
    name = datasets.add(tmp_path, datasets.moe("moe_renorm", 64, k=8), ({"T": 200}, {}))
    definitions, tasks = load(tmp_path)
    op, w = operator(definitions[name], tasks[name]), workload(tasks[name][0])
    drawn = tasks[name][0].make(("routing_logits",), torch.device("cpu"), 0)["routing_logits"].sort(1).values
    assert (drawn[:, -8] == drawn[:, -9]).any()
    logits = op.make_inputs(w, torch.device("cpu"), 1)[definitions[name].tensors.index("routing_logits")]
    assert all(row.unique().numel() == 64 for row in logits) and logits.dtype is torch.bfloat16


def test_experts_that_are_not_those_of_the_reference_are_wrong(tmp_path):
    name = datasets.add(tmp_path, datasets.moe("moe_renorm", 8, k=4, said_k=3), ({"T": 17}, {}))
    assert statuses(race(tmp_path, name)) == {(b, "ok" if b == "reference" else "wrong") for b, _ in ALL}


def test_a_layer_of_tokens_that_were_routed_before(tmp_path):
    reference = """import torch

def run(hidden_states, gating_output, w1, w2, topk_weights, topk_ids):
    x, out = hidden_states.float(), torch.zeros(hidden_states.shape)
    for t, j in ((t, j) for t in range(len(x)) for j in range(topk_ids.shape[1])):
        up, gate = (w1[topk_ids[t, j]].float() @ x[t]).chunk(2)
        out[t] += topk_weights[t, j] * (w2[topk_ids[t, j]].float() @ (gate * torch.sigmoid(gate) * up))
    return {"output": out.to(torch.bfloat16)}
"""
    tensors = {
        "hidden_states": ("T H", "bfloat16"),
        "gating_output": ("T E", "float32"),
        "w1": ("E U H", "bfloat16"),
        "w2": ("E H I", "bfloat16"),
        "topk_weights": ("T k", "float32"),
        "topk_ids": ("T k", "int32"),
    }
    axes = dict(T=None, E=6, H=64, I=32, U=64, k=3)
    data = datasets.definition("moe_bf16", "moe", axes, tensors, {"output": ("T H", "bfloat16")}, reference)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(9)]).int()
    name = datasets.add(tmp_path, data, ({"T": 9}, {"topk_ids": ids}))
    assert statuses(race(tmp_path, name)) == ALL


def test_a_reference_that_insists_on_its_dtype_gets_it(tmp_path):
    reference = datasets.GEMM.replace("    return", "    assert A.dtype is torch.bfloat16\n    return")
    name = datasets.add(tmp_path, datasets.gemm(dtype="bfloat16", reference=reference), ({"M": 5}, {}))
    assert statuses(race(tmp_path, name)) == RIGHT


def test_a_reference_that_fails_leaves_reasons(tmp_path):
    data = datasets.gemm(reference="def run(A, B):\n    raise RuntimeError('not today')\n")
    records = race(tmp_path, datasets.add(tmp_path, data, ({"M": 5}, {})))
    assert statuses(records) == {("reference", "failed"), ("expertile", "failed")}
    assert all("not today" in r.reason for r in records if r.backend != "copy")


@pytest.mark.parametrize(
    "data, message",
    [
        (datasets.gemm(op_type="rope"), "expertile serves gemm, grouped_gemm, moe, not rope"),
        (datasets.gemm(op_type="moe"), "expertile has no moe of A, B"),
        (
            datasets.moe("moe", 8) | {"name": "moe_renorm"},
            "expected an axis top_k, or a name with topk, got moe_renorm",
        ),
    ],
)
def test_what_is_not_served_is_one_sentence(tmp_path, data, message):
    name = datasets.add(tmp_path, data, ({"M": 5, "T": 5}, {}))
    definitions, tasks = load(tmp_path)
    with pytest.raises(ValueError, match=message):
        operator(definitions[name], tasks[name])
