"""Whole MoE layers: every way right before it is timed, reasons for the others, and an end when time runs short."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget
from expertile.lab.operators import moe_sizes
from expertile.lab.race import case
from expertile.lab.race.case import Site
from expertile.lab.race.parts import TimeLimit
from tools.pages.moe import WAYS as TITLES

SITE = Site(replace(Device.current("cpu"), l2_bytes=1), torch.device("cpu"))  # one set of inputs
BUDGET = Budget(0.02, min_rounds=3, max_rounds=3)
SHAPE = (48, 64, 32, 8, 2)
EAGER = ("ours", "eager-gather", "eager-add")


@pytest.fixture(autouse=True)
def without_collecting_garbage(monkeypatch):
    """Which takes longest where large libraries are imported."""
    for module in (moe_sizes, case):
        monkeypatch.setattr(module, "release", lambda device: None)


def measured(limit, ways=EAGER):
    return list(moe_sizes.measure_layer(SHAPE, SITE, limit, BUDGET, ways))


def test_ways_and_sizes_are_those_of_the_page():
    assert moe_sizes.WAYS.keys() == TITLES.keys()
    assert list(moe_sizes.SIZES) == [
        (32768, 4096, 1024, 128, 8),
        (24576, 1536, 256, 128, 8),
        (32768, 4096, 512, 128, 8),
    ]


def test_forward_and_both():
    forward, part = measured(TimeLimit(100))
    assert forward["unfinished"] and "unfinished" not in part
    assert {key: part[key] for key in ("part", "T", "H", "I", "E", "k")} == moe_sizes.layer_part(SHAPE)
    assert part["flops"] == 6 * 48 * 2 * 64 * 32
    for name in ("fwd", "both"):
        assert part[name].keys() == set(EAGER) and all(isinstance(s, float) for s in part[name].values())
        assert part[f"{name}_ci95_s"].keys() == set(EAGER)
    assert part["bound_s"]["both"] > part["bound_s"]["fwd"] > 0
    assert part["err"]["ours"] == 0.0 and 0 < part["err"]["eager-add"] < 0.02
    assert all(len(part["peak_gib"][way]) == 2 and max(part["rel_error"][way]) < 0.02 for way in EAGER)


def test_a_wrong_way_and_one_that_raises_have_reasons_and_no_time(monkeypatch):
    known = moe_sizes.operators()

    def wrong(w, inputs):
        return lambda: (torch.zeros_like(inputs[0]),)

    def raising(w, inputs):
        raise RuntimeError("no such kernel")

    spoiled = {"torch": wrong, "torch-index-add": raising}
    operator = known["moe"]
    rivals = tuple(replace(r, bind=spoiled.get(r.name, r.bind)) for r in operator.rivals)
    monkeypatch.setattr(moe_sizes, "operators", lambda: {**known, "moe": replace(operator, rivals=rivals)})
    _, part = measured(TimeLimit(100))
    assert isinstance(part["fwd"]["ours"], float) and part["err"] == {"ours": 0.0}
    assert part["fwd"]["eager-gather"].startswith("wrong: ") and "no such kernel" in part["fwd"]["eager-add"]
    assert isinstance(part["both"]["eager-gather"], float)


def test_the_end_of_the_time():
    assert measured(TimeLimit(1.0)) == []

    class Ending:
        """Lets two be judged."""

        def __init__(self):
            self.asked = 0

        @property
        def left(self):
            self.asked += 1
            return 100.0 if self.asked <= 2 else 0.5

    (forward,) = measured(Ending())
    assert forward["unfinished"] and isinstance(forward["fwd"]["eager-gather"], float)
    assert forward["fwd"]["eager-add"] == "not reached within the time limit"


def test_an_unusable_device_ends_it(monkeypatch):
    def fatal(self, names, seed):
        yield replace(next(real(self, names, seed)), status="failed", reason="gone", fatal=True)

    real = moe_sizes.Case.candidates
    monkeypatch.setattr(moe_sizes.Case, "candidates", fatal)
    with pytest.raises(RuntimeError, match="expertile: gone"):
        measured(TimeLimit(100))
