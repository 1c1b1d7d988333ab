"""backend="measure": one race for each problem, over candidates that can run."""

from collections import Counter

import pytest
import torch

import expertile as xt
from expertile.device import Device
from expertile.ops import measure
from expertile.ops.grouped_mm.choose import choose, promising
from expertile.ops.grouped_mm.problem import Layout, Problem

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_winners(monkeypatch):
    monkeypatch.setattr(measure, "_winners", {})


class Clock:
    """A timer that says `seconds` of each candidate, and logs which ran on which set and which were sampled."""

    def __init__(self, seconds):
        self.seconds, self.ran, self.sampled = seconds, [], []

    def prepare(self, call, num_sets):
        for i in range(num_sets):
            call(i)
        candidate = self.ran[-1][0]

        def sample(during=None):
            self.sampled.append(candidate)
            return self.seconds[candidate]

        return sample

    def winner(self, key, candidates, run=None):
        def log(candidate, operands):
            self.ran.append((candidate, operands))
            if run is not None:
                run(candidate)

        return measure.winner(key, candidates, lambda: (10, 20), log, self)


def test_the_fastest_wins_after_two_rounds_and_is_kept():
    clock = Clock({"a": 1.1, "b": 1.0, "c": 1.2})
    assert clock.winner("key", lambda: "abc") == "b"
    assert clock.ran == [("a", 10), *((c, x) for c in "abc" for x in (10, 20))]
    first, last = measure._SCREEN, measure._FINAL
    assert Counter(clock.sampled) == {"a": first + last, "b": first + last, "c": first}
    assert clock.sampled[:4] == list("abca") and first < last
    assert clock.winner("key", lambda: pytest.fail("raced again")) == "b"
    assert clock.winner("other", lambda: "ac") == "a"


def test_a_candidate_that_fails_is_left_out_and_the_first_one_s_error_is_the_caller_s():
    def run(c):
        if c == "b":
            raise RuntimeError("out of resources")

    clock = Clock({"a": 2.0, "b": 1.0, "c": 3.0})
    with pytest.warns(UserWarning, match="leaves out b: out of resources"):
        assert clock.winner("key", lambda: "abc", run) == "a"
    with pytest.raises(RuntimeError, match="out of resources"):
        clock.winner("other", lambda: "ba", run)
    assert "other" not in measure._winners


def test_few_winners_are_kept(monkeypatch):
    monkeypatch.setattr(measure, "_MOST", 3)
    for key in range(5):
        Clock({}).winner(key, lambda: "a")
    assert sorted(measure._winners) == [2, 3, 4]


@pytest.mark.parametrize("gpu", ["H200", "A100"])  # measured, and modelled
@pytest.mark.parametrize("rows", [128, 4096, 16500])
def test_candidates_begin_with_the_choice_of_auto_and_can_all_run(gpu, rows):
    device = Device.by_name(gpu)
    problem = Problem(Layout.RAGGED_M, 8, rows, 2048, 1024, BF16, BF16, (1024, 1), (2048 * 1024, 1, 1024))
    first, *others = found = promising(problem, device)
    auto = choose(problem, device, quiet=True)
    assert (first.backend, first.config) == (auto.backend, auto.config)
    assert others and len(found) <= 24 and len(set(found)) == len(found)
    for rival in found:
        assert rival.backend.supports(problem, device) is None
        assert not rival.backend.waits(problem, device)
        assert not getattr(rival.config, "tuned", False)


def test_on_a_cpu_it_is_auto():
    a, b = torch.randn(8, 16), torch.randn(2, 16, 4)
    offs = torch.tensor([3, 8], dtype=torch.int32)
    assert torch.equal(xt.grouped_mm(a, b, offs=offs, backend="measure"), xt.grouped_mm(a, b, offs=offs))
    assert not measure._winners
    with pytest.raises(ValueError, match="batch_invariant"):
        xt.grouped_mm(a, b, offs=offs, backend="measure", batch_invariant=True)
