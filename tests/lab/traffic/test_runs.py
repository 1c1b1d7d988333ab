"""Every way of an operator computes the same, so that their traffic may be compared."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from expertile.lab.traffic import formulas
from expertile.lab.traffic.model import OURS, call
from expertile.lab.traffic.runs import prepare, runnable
from tests.lab.traffic.test_formulas import H200, SMALL, subject

GROUPED = call("grouped_mm", (("group_sizes", (5, 0, 11)), ("k", 16), ("n", 24)), "bf16")
SUBJECTS = [
    *(subject(op) for op in SMALL),
    *(subject("attention", kv_heads=2, causal=causal) for causal in (False, True)),
    subject("attention_backward", causal=True),
    *(subject(op, boundary=b) for op in ("laplacian", "laplacian_backward") for b in ("zero", "replicate", "circular")),
    subject("laplacian_backward"),
    subject("add_scalar"),
    GROUPED,
]


@pytest.mark.parametrize("s", SUBJECTS, ids=str)
def test_ways_agree(s):
    ours = [x.double() for x in tree_leaves(prepare(s, OURS, "cpu", seed=3)())]
    assert len(runnable(s.op)) >= 2
    for way in runnable(s.op):
        if way == "torch" and s.op.startswith("attention") and s["heads"] != s["kv_heads"]:
            continue  # SDPA's FlashAttention on a CPU takes no shared key heads
        found = [x.double() for x in tree_leaves(prepare(s, way, "cpu", seed=3)())]
        assert len(found) == len(ours), way
        for a, b in zip(found, ours, strict=True):
            scale = float(b.abs().max())
            torch.testing.assert_close(a, b, rtol=0, atol=scale * (0.03 if s.dtype == "bf16" else 1e-5), msg=way)


@pytest.mark.parametrize("op", formulas())
def test_ours_and_another_way_can_be_run(op):
    ways = runnable(op)
    assert OURS in ways and len(ways) >= 2
    named = {way.name for way in formulas()[op].ways(subject(op), H200)}
    assert set(ways) <= named, "a way is run that no formula counts"


def test_an_unknown_way():
    with pytest.raises(ValueError, match="way: expected one of unfused, torch, expertile for softmax, got 'magic'"):
        prepare(subject("softmax"), "magic", "cpu")
