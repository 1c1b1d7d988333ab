"""Which workloads and rivals one call of bench measures."""

import re

import pytest

from expertile.cli.parts import parts
from expertile.device import Device
from expertile.lab.bench.config import BenchSpec
from expertile.lab.bench.presets import preset
from expertile.lab.operators import operators, presets
from expertile.lab.race.workloads import ragged_m
from expertile.ladder import RUNGS
from expertile.ops.grouped_mm.backends import BACKENDS

CPU = Device.current("cpu")
H200 = Device.by_name("h200")
INLINE = ragged_m("mine", "file", (8, 8), 16, 16, "fp32")


def test_each_preset_has_a_part_and_inline_workloads_one_of_their_own():
    found = parts(BenchSpec(presets=("cpu", "ladder", "softmax-v100"), inline=(INLINE,)), CPU)
    assert [p.name for p in found] == ["cpu", "ladder", "softmax-v100", "custom"]
    cpu, ladder, softmax, custom = found
    assert cpu.backends == custom.backends == BACKENDS and ladder.backends == RUNGS
    assert cpu.operators == () and cpu.op_workloads == ()
    assert softmax.backends == () and softmax.op_workloads == softmax.workloads
    assert {o.name for o in softmax.operators} == {w.op for w in presets()["softmax-v100"]()}
    assert custom.workloads == (INLINE,)


def test_a_cpu_is_spared_rungs_that_would_take_it_minutes():
    (ladder,) = parts(BenchSpec(presets=("ladder",)), CPU)
    spared = {w.name: w.unsupported for w in ladder.workloads}
    assert spared.pop("decode") == ""
    assert spared["moe-ffn-up"] == "needs a GPU: more than 20 GFLOP a call"
    assert all("needs a GPU" in reason for reason in spared.values())
    (whole,) = parts(BenchSpec(presets=("ladder",)), H200)
    assert whole.workloads == preset("ladder")


def test_a_cpu_is_spared_the_large_sizes_unless_it_asks_for_them():
    (spared,) = parts(BenchSpec(presets=("rows",)), CPU)
    assert 0 < len(spared.workloads) < len(presets()["rows"]())
    assert "torch.compile" not in {r.name for o in spared.operators for r in o.rivals}
    assert re.match(r"rows: \d+ of \d+ workloads and torch\.compile are left out, .*--full", spared.note)
    (asked,) = parts(BenchSpec(presets=("rows",), include=("torch.compile",)), CPU)
    assert {r.name for o in asked.operators for r in o.rivals} == {"torch.compile"}
    for spec, device in ((BenchSpec(presets=("rows",), full=True), CPU), (BenchSpec(presets=("rows",)), H200)):
        (full,) = parts(spec, device)
        assert full.workloads == presets()["rows"]() and full.note == ""
        assert "torch.compile" in {r.name for o in full.operators for r in o.rivals}


def test_names_choose_among_backends_and_rivals():
    (squares, softmax) = parts(BenchSpec(presets=("squares", "softmax-v100"), include=("loop", "torch")), H200)
    assert [b.name for b in squares.backends] == ["loop"]
    assert {r.name for o in softmax.operators for r in o.rivals} == {"torch"}
    (softmax,) = parts(BenchSpec(presets=("softmax-v100",), skip=("torch",)), H200)
    left = {r.name for o in softmax.operators for r in o.rivals}
    assert left and left == {r.name for o in softmax.operators for r in operators()[o.name].rivals} - {"torch"}


def test_options_go_to_the_presets_that_take_them():
    spec = BenchSpec(presets=("models", "rows"), inline=(INLINE,), only=("mixtral*", "mine", "*softmax*"), tokens=(64,))
    models, *rest = parts(spec, H200)
    assert {w.preset for w in models.workloads} == {"models"} and rest[-1].workloads == (INLINE,)
    with pytest.raises(ValueError, match="tokens: expected a preset that takes this option"):
        parts(BenchSpec(presets=("rows",), tokens=(64,)), H200)


def test_patterns_choose_among_workloads():
    presets, inline = ("anchors", "squares", "softmax-v100"), (INLINE,)
    (anchors,) = parts(BenchSpec(presets=presets, inline=inline, only=("wgrad-*",)), H200)
    assert anchors.name == "anchors" and len(anchors.workloads) == 6
    assert all(w.name.startswith("wgrad-") for w in anchors.workloads)
    found = parts(BenchSpec(presets=presets, inline=inline, only=("mi?e", "16x512*")), H200)
    assert [(p.name, {w.name for w in p.workloads}) for p in found] == [
        ("anchors", {"16x512"}),
        ("squares", {"16x512", "16x512-ragged"}),
        ("custom", {"mine"}),
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            BenchSpec(presets=("squares", "anchors"), only=("16x*", "17x*")),
            "only: expected a pattern of 4x512, .* and [0-9]+ more, got '17x\\*'",
        ),
        (BenchSpec(presets=("squares",), include=("cutlass",)), "backend: expected one of .*loop.*, got 'cutlass'"),
        (
            BenchSpec(presets=("squares", "softmax-v100"), include=("torch",)),
            "backend: expected some of loop, .* for squares, got torch",
        ),
        (
            BenchSpec(presets=("softmax-v100",), include=("loop",)),
            "backend: expected some of .*expertile.* for softmax-v100, got loop",
        ),
        (
            BenchSpec(presets=("softmax-v100",), candidates=("mine.py:fn",)),
            "candidate: expected a preset of grouped products for it, got softmax-v100",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(spec, message):
    with pytest.raises(ValueError, match=message):
        parts(spec, H200)


def test_candidates_go_where_grouped_products_are():
    found = parts(BenchSpec(presets=("softmax-v100", "squares"), candidates=("mine.py:fn",)), H200)
    assert [p.candidates for p in found] == [(), ("mine.py:fn",)]
