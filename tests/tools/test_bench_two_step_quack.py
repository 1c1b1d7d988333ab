"""tools/bench_two_step_quack.py: everyone is timed shortly, the best at length, and the configurations stay whole."""

import sys
import types

import pytest

from tools import bench_two_step_quack as two_step

TIMES = {name: float(t) for name, t in zip("abcdefghi", (5, 3, 9, 1, 7, 2, 8, 6, 4), strict=True)}


@pytest.fixture
def tuner():
    """A module with what of `quack.autotuner` is changed: a tuner that benches what is not in its cache."""
    module = types.ModuleType("autotuner")
    module.calls = []

    class Autotuner:
        def __init__(self):
            self.configs, self.cache = list(TIMES), {}

        def check_disk_cache(self, key, configs, bench_fn):
            if key not in self.cache:
                bench_fn()

        def __call__(self, key):
            pruned = self.configs

            def benchmark():
                self.configs_timings = {c: module._bench_cuda_graph_l2_rotate(config=c) for c in pruned}
                self.cache[key] = min(self.configs_timings, key=self.configs_timings.get)

            self.check_disk_cache(key, pruned, benchmark)
            return self.cache[key]

    def whole(config):
        module.calls.append(("whole", config))
        return [2.0 if config == "d" else TIMES[config] - 0.5]

    module.Autotuner, module._bench_cuda_graph_l2_rotate = Autotuner, whole
    return module


def short(config, **_):
    return [TIMES[config]]


def test_the_fastest_in_the_short_step_are_measured_at_length(tuner):
    two_step.in_two_steps(tuner, short)
    one = tuner.Autotuner()
    # d is the fastest in the short step, f in the long one.
    assert one("shape") == "f"
    assert tuner.calls == [("whole", c) for c in "dfbiah"] and len(tuner.calls) == two_step.FINALISTS
    assert one.configs == list(TIMES)
    one("shape")
    assert len(tuner.calls) == two_step.FINALISTS


def test_a_failure_leaves_the_tuner_as_it_was(tuner):
    two_step.in_two_steps(tuner, lambda **_: 1 / 0)
    one = tuner.Autotuner()
    with pytest.raises(ZeroDivisionError):
        one("shape")
    assert one.configs == list(TIMES) and tuner._bench_cuda_graph_l2_rotate(config="a") == [4.5]


def test_without_quack_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(SystemExit, match="quack-kernels"):
        two_step.main()
