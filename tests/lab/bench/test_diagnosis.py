"""Every number in a sentence follows from the records."""

import pytest

from expertile.device import Device
from expertile.lab.bench.diagnosis import conclude
from expertile.lab.operators.diagnose import ADD, LAUNCH, MATH, OPERATORS, SPLIT, workloads
from expertile.lab.race.operator import record_fields
from expertile.roofline import bound
from tests.lab.records import timed

H200 = Device.by_name("h200")
BY_NAME = {w.name: w for w in workloads()}
KEYS = {operator.name: operator.dtype_key for operator in OPERATORS}


def record(name, form, policy, time_s):
    w = BY_NAME[name]
    work = form.work(w)
    limit = bound(work, H200, KEYS[w.op](w))
    fields = {"flops": work.flops, "nbytes": work.nbytes, "bound": limit.seconds, "limiter": limit.limiter}
    fields |= {"backend": form.name, "config": form.config(w), "policy": policy}
    return timed(time_s, 0.001, **record_fields(w) | fields)


def split(policy, *times):
    return [record("split-1024-fp16", form, policy, t) for form, t in zip(SPLIT, times, strict=True)]


def test_sentences_about_splitting():
    odd = record("math-2896-fp16", MATH[0], "eager", 75e-6)
    found = conclude([*split("eager", 30e-6, 31e-6, 33e-6, 60e-6), odd])
    assert "Equal FLOPs (17.2 GFLOP, fp16, eager): one 2048³ takes 30.0 us, 8 x 1024³ in 8 launches 60.0 us" in found[0]
    assert "one 8192x1024x1024 31.0 us, the same in one torch.bmm 33.0 us" in found[0]
    assert found[0].endswith("Splitting one large product into 8 launches makes it 2.00 times slower.")
    assert "look 1.25 times as fast (eager), but that product does 2.83 times their work" in found[1]
    assert "1.000 times the elements" in found[1]
    assert f"Per FLOP the 8 take {60 / 75 * (2896 / 2048) ** 3:.2f} times as long" in found[1]


def test_a_tie_is_called_one():
    one, _, _, loop = split("graph", 30e-6, 31e-6, 33e-6, 30.01e-6)
    (found,) = conclude([one, loop])
    assert found.endswith("makes no difference that this measurement can see.")


@pytest.mark.parametrize(("rates", "shown"), [((650, 640, 300, 50), True), ((60, 60, 55, 25), False)])
def test_tensor_cores_need_a_rate_that_nothing_else_reaches(rates, shown):
    names = [f"math-4096-{math}" for math in ("fp16", "bf16", "tf32", "fp32")]
    flops = MATH[0].work(BY_NAME[names[0]]).flops
    found = [record(n, MATH[0], "graph", flops / (r * 1e12)) for n, r in zip(names, rates, strict=True)]
    text, limit = "\n".join(conclude(found)), H200.peak("fp32") / 1e12
    if shown:
        assert f"fp16 runs on tensor cores: 650 TFLOP/s at 4096³ is {650 / limit:.1f} times the {limit:.0f} TF" in text
    else:  # 2.4 times float32, and yet no proof
        assert "fp16 is not shown to run on tensor cores: 60 TFLOP/s" in text


def test_launch_cost_is_the_difference_between_eager_and_graph():
    times = {("eager", LAUNCH[0]): 64 * 6e-6, ("graph", LAUNCH[0]): 64 * 2e-6, ("eager", LAUNCH[1]): 12e-6}
    made = [record("launch-256-fp16", form, policy, t) for (policy, form), t in times.items()]
    made += [record("add-1-fp32", ADD[0], policy, 64 * t) for policy, t in (("eager", 4e-6), ("graph", 1e-6))]
    found = conclude(made)
    assert any("64 products of 256³: 6.0 us per call one by one, 2.0 us replayed" in s for s in found)
    assert any("so 4.0 us (67%) of each eager call is launch and not work" in s for s in found)
    assert any("64 additions of one element: 4.0 us per call one by one, 1.0 us" in s for s in found)
    assert any("12.0 us instead of 384.0 us, 32.00 times as fast as 64 launches" in s for s in found)


def test_other_records_and_those_without_a_time_say_nothing():
    (one, *_) = split("graph", 30e-6, 31e-6, 33e-6, 60e-6)
    assert conclude([one, timed()]) == []
