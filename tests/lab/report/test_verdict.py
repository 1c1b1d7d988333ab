import pytest

from expertile.lab.report.contest import runs
from expertile.lab.report.verdict import failures, overhead, sentences, standing, verdict
from tests.lab.report import samples


def kinds(records, kind):
    (run,) = runs(records)
    return [sentence.text for sentence in sentences(run) if sentence.kind == kind]


def three(**more):
    """a wins two workloads (2× and 8×: geometric mean 4×), b one (1.5×)."""
    times = [("w/1", 100, 200), ("w/2", 100, 800), ("w/3", 300, 200)]
    return [
        samples.record(name, backend, time * 1e-6, **more)
        for name, *pair in times
        for backend, time in zip(("a", "b"), pair, strict=True)
    ]


def test_nothing_measured():
    assert verdict([]) == ["No records: nothing was measured."]


def test_wins_and_geometric_means():
    assert kinds(three(), "lead") == [
        "CUDA-graph replay: a is fastest on 2 of 3 workloads, by a geometric mean of 4.00× over the next, "
        "b on 1 (by 1.50×)."
    ]


def test_the_lead_names_two_and_counts_the_others():
    won = {"a": 3, "b": 2, "c": 1, "d": 1}
    records, place = [], 0
    for winner, count in won.items():
        for _ in range(count):
            place += 1
            records += [samples.record(f"w/{place}", name, (1 if name == winner else 2) * 1e-4) for name in won]
    (lead,) = kinds(records, "lead")
    assert lead.endswith("b on 2 (by 2.00×), 2 others on 2.") and "a is fastest on 3 of 7 workloads" in lead


def test_the_first_sentence_is_the_scope_and_then_comes_the_lead():
    found = verdict(three(policy="eager"))
    assert found[0] == (
        "Imaginary GPU, 2026-01-02 (run run-a): 3 workloads, 2 backends, eager calls; "
        "6 of 6 records have a right result and a time."
    )
    assert found[1].startswith("Eager calls: a is fastest")


def test_the_scope_counts_what_has_no_time_and_why():
    fates = ["wrong", "wrong", "refused", "failed", "unsupported"]
    others = [samples.record(f"w/{i}", "c", status=status, reason=f"no {i}") for i, status in enumerate(fates)]
    scope, *said = verdict([*three(), *others])
    assert scope.endswith(
        "6 of 11 records have a right result and a time; 2 wrong, 1 failed, 1 refused and 1 unsupported."
    )
    assert any("c gave a wrong result" in sentence for sentence in said)
    known, *said = verdict([*three(), *others], told=["c"])
    assert known == scope and not any("c gave a wrong result" in sentence for sentence in said)


def test_baselines_win_nothing():
    records = [*three(), samples.record("w/1", "dense", 50e-6), samples.record("w/1", "copy", 50e-6)]
    (lead,) = kinds(records, "lead")
    assert "dense" not in lead
    assert "copy" not in lead
    assert kinds(records, "baseline") == [
        "As speed of light, against dense (one weight for all rows) it runs at 0.50× the speed over 1 compute-bound "
        "workload."
    ]


def test_share_of_the_bound_names_the_best_and_the_worst():
    bound = samples.record(time_s=1.0, rows=65536).bound
    records = [samples.record(f"w/{i}", "a", bound / share, rows=65536) for i, share in enumerate((0.9, 0.4))]
    assert kinds(records, "bound") == [
        "The fastest backend of each workload reaches 60 % of the bound in geometric mean: from 40 % on 1 "
        "(limited by compute, 200 TFLOP/s) to 90 % on 0 (limited by compute, 450 TFLOP/s)."
    ]


def test_no_share_without_a_bound():
    (text,) = kinds([samples.record(bounded=False)], "bound")
    assert text == "No bound is known for this machine, so no share of it can be stated."


def test_ties_are_called_ties():
    records = [
        samples.record("w/1", "a", 100e-6),
        samples.record("w/1", "b", 100.5e-6),
        samples.record("w/1", "c", 200e-6),
    ]
    (lead,) = kinds(records, "lead")
    assert "no backend is fastest alone; 1 is a tie; counting ties, a is at the front most often, on 1" in lead
    assert kinds(records, "tie") == ["Ties (95 % intervals overlap, or less than 1 % apart): a and b on 1."]


def test_a_lone_backend_is_not_called_fastest():
    assert kinds([samples.record(backend="loop")], "lead") == [
        "CUDA-graph replay: only loop ran, so there is nothing to be faster than."
    ]


def test_the_best_single_choice_must_run_everything():
    records = [*three(), samples.record("w/1", "c", 99e-6 / 3)]
    (choice,) = kinds(records, "choice")
    assert choice.startswith("If one backend must serve all 3, a loses least")
    assert "at worst 3.03× the best time (1)" in choice


def test_wrong_failed_refused_and_unsupported_with_reasons():
    records = [
        *three(),
        samples.record("w/1", "c", status="unsupported", reason="needs sm_90"),
        samples.record("w/2", "c", status="unsupported", reason="needs sm_90"),
        samples.record("w/1", "d", status="wrong", reason="relative error 0.5"),
        samples.record("w/1", "e", status="refused", reason="faster than the bound"),
        samples.record("w/1", "f", status="failed", reason="RuntimeError: tile out of range"),
    ]
    assert kinds(records, "trouble") == [
        "d gave a wrong result on 1 workload: relative error 0.5.",
        "f failed on 1 workload: RuntimeError: tile out of range.",
        "e was refused a time on 1 workload: faster than the bound.",
        "Not supported on any workload: c (needs sm_90).",
    ]
    able = [*records, samples.record("w/3", "c", 300e-6), samples.record("w/3", "a", 200e-6)]
    assert "c does not support 2 workloads: needs sm_90." in kinds(able, "trouble")
    (run,) = runs(records)
    assert failures(run)[-1] == ("unsupported", "c", "needs sm_90", ("1", "2"))


@pytest.mark.parametrize(("reason", "end"), [("no" * 100, "nonon…"), ("is done.", "is done."), ("is done", "is done.")])
def test_a_reason_ends_once(reason, end):
    records = [*three(), samples.record("w/1", "d", status="failed", reason=reason)]
    (said,) = kinds(records, "trouble")
    assert said.endswith(end) and not said.endswith(("….", ".."))


def test_only_failures():
    records = [samples.record("w/1", "c", status="unsupported", reason="needs sm_90")]
    assert kinds(records, "lead") == ["No backend has both a right result and a time, so nothing can be compared."]


def test_launch_overhead_is_eager_minus_graph():
    records = [
        record
        for policy, extra in (("graph", 0), ("eager", 5e-6))
        for record in (
            samples.record("w/1", "a", 100e-6 + extra, policy=policy),
            samples.record("w/1", "b", 90e-6 + 10 * extra, policy=policy),
        )
    ]
    (run,) = runs(records)
    assert round(overhead(run)["b"][0][1] * 1e6) == 50
    assert kinds(records, "launch") == [
        "Outside a CUDA graph a call takes longer by 5.00 µs (a) to 50.0 µs (b), median over the workloads."
    ]


def test_throttling_is_said():
    (text,) = kinds([samples.record(env={"throttle": "sw_power_cap"}), samples.record(backend="b")], "machine")
    assert "(sw_power_cap) in 1 of 2 measurements" in text


def test_standing():
    (run,) = runs(
        [
            samples.record(backend="a"),
            samples.record(backend="b", time_s=150e-6),
            samples.record(backend="c", status="wrong", reason="no"),
        ]
    )
    (contest,) = run.contests
    assert [standing(contest, row) for row in contest.rows] == ["fastest", "1.50×", "wrong"]


def _of_cpu(**env):
    env = {"cores": 4, "threads": 4, **env}
    return [samples.record("moe-ffn/up", name, policy="eager", env=env) for name in ("loop", "quack")]


def test_a_wide_interval_makes_no_tie():
    noisy = [samples.record("moe-ffn/up", name, policy="eager", spread=0.3) for name in ("loop", "quack")]
    said = " ".join(verdict(noisy))
    assert (
        "1 is inconclusive" in said and "Inconclusive (an interval reaches further than 10 % from its time): up" in said
    )
    assert "is a tie" not in said and "Ties" not in said
    assert "The times are noisy: 2 of 2" in said
    (run,) = runs(noisy)
    assert {standing(run.contests[0], row) for row in run.contests[0].rows} == {"inconclusive"}


def test_a_busy_machine_is_said_to_be_busy():
    assert "The machine was busy: a load of 9.50 on 4.00 cores" in " ".join(verdict(_of_cpu(load=9.5)))
    assert "busy" not in " ".join(verdict(_of_cpu(load=4.0)))
    assert "a load of 4.00 on 2.00 cores" in " ".join(verdict(_of_cpu(load=4.0, quota=2.0)))


def test_a_quota_that_stopped_the_process_is_named():
    said = " ".join(verdict(_of_cpu(throttle="cgroup_quota")))
    assert "The quota of its cgroup stopped this process in 2 of 2 measurements." in said and "GPU held" not in said
