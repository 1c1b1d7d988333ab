"""Every number in a sentence follows from the records."""

from dataclasses import replace

from expertile.device import Device
from expertile.lab.bench.diagnose import Case, experiments
from expertile.lab.bench.diagnosis import conclude
from expertile.lab.measure.env import Env
from expertile.lab.race.record import Record
from expertile.roofline import bound

H200 = Device.by_name("h200")


def record(case, policy, time_s, status="ok", reason=""):
    work, limit = case.work, bound(case.work, H200, case.dtype)
    ok = status == "ok"
    shape = {"count": case.count, "m": case.m, "n": case.n, "k": case.k, "launches": case.launches}
    return Record(
        op=case.op,
        workload=case.workload,
        shape=shape,
        dtype=case.dtype,
        backend=case.backend,
        policy=policy,
        value=time_s if ok else None,
        ci95=(time_s * 0.999, time_s * 1.001) if ok else None,
        flops=work.flops,
        nbytes=work.nbytes,
        bound=limit.seconds,
        limiter=limit.limiter,
        rel_error=1e-3,
        max_error=1e-3,
        status=status,
        reason=reason,
        env=Env("NVIDIA H200", driver="580"),
        run="r",
        date="2026-01-01",
    )


def test_sentences_about_splitting():
    one, tall, bmm, loop, odd = experiments(H200)[0]
    times = {one: 30e-6, tall: 31e-6, bmm: 33e-6, loop: 60e-6, odd: 75e-6}
    found = conclude([record(c, "eager", t) for c, t in times.items()])
    assert "Equal FLOPs (17.2 GFLOP, fp16, eager): one 2048³ takes 30.0 us, 8 x 1024³ in 8 launches 60.0 us" in found[0]
    assert "one 8192x1024x1024 31.0 us, the same in one torch.bmm 33.0 us" in found[0]
    assert found[0].endswith("Splitting one large product into 8 launches makes it 2.00 times slower.")
    assert "look 1.25 times as fast (eager), but that product does 2.83 times their work" in found[1]
    assert "1.000 times the elements" in found[1]
    assert f"Per FLOP the 8 take {60 / 75 * (2896 / 2048) ** 3:.2f} times as long" in found[1]


def test_a_tie_is_called_one():
    one, _, _, loop, _ = experiments(H200)[0]
    found = conclude([record(one, "graph", 30e-6), record(loop, "graph", 30.1e-6)])
    assert found[0].endswith("makes no difference that this measurement can see.")


def test_tensor_cores_need_a_rate_that_nothing_else_reaches():
    group = experiments(H200)[2]
    fast = [record(c, "graph", c.work.flops / (t * 1e12)) for c, t in zip(group, (650, 640, 300, 50), strict=True)]
    text = "\n".join(conclude(fast))
    limit = H200.peak("fp32") / 1e12
    assert f"fp16 runs on tensor cores: 650 TFLOP/s at 4096³ is {650 / limit:.1f} times the {limit:.0f} TFLOP/s" in text
    slow = [record(c, "graph", c.work.flops / (t * 1e12)) for c, t in zip(group, (60, 60, 55, 25), strict=True)]
    text = "\n".join(conclude(slow))  # 2.4 times float32, and yet no proof
    assert "fp16 is not shown to run on tensor cores: 60 TFLOP/s" in text


def test_launch_cost_is_the_difference_between_eager_and_graph():
    loop, bmm, add = experiments(H200)[-1]
    found = conclude(
        [
            record(loop, "eager", 64 * 6e-6),
            record(loop, "graph", 64 * 2e-6),
            record(bmm, "eager", 12e-6),
            record(add, "eager", 64 * 4e-6),
            record(add, "graph", 64 * 1e-6),
        ]
    )
    assert any("64 products of 256³: 6.0 us per call one by one, 2.0 us replayed" in s for s in found)
    assert any("so 4.0 us (67%) of each eager call is launch and not work" in s for s in found)
    assert any("64 additions of one element: 4.0 us per call one by one, 1.0 us" in s for s in found)
    assert any("12.0 us instead of 384.0 us, 32.00 times as fast as 64 launches" in s for s in found)


def test_cases_without_a_time_are_named():
    case = Case("mm", 1, 8, 8, 8, "fp16")
    found = conclude([record(case, "graph", 1.0, "unsupported", "out of memory")])
    assert found == ["Without a time: diagnose/1x8x8x8 fp16 torch.mm (graph): out of memory."]
    other = replace(record(case, "graph", 1.0), workload="squares/8x8")
    assert conclude([other]) == []
