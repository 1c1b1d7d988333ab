from expertile.lab.report.verdict import of_candidate
from tests.lab.report import samples


def test_a_candidate_is_judged_against_the_best_of_the_others():
    found = [
        samples.record(name, backend, time * 1e-6)
        for name, *times in (("w/1", 100, 200, 150), ("w/2", 400, 100, 150))
        for backend, time in zip(("mine.py:f", "loop", "quack"), times, strict=True)
    ]
    # 100/150 and 400/100: a geometric mean of 1.63
    assert of_candidate(found, "mine.py:f") == [
        "mine.py:f, CUDA-graph replay: right on 2 of 2 workloads; fastest on 1; "
        "1.63× the time of the best other backend in geometric mean."
    ]


def test_why_it_has_no_time_is_said():
    found = [
        samples.record("w/1", "mine.py:f", status="failed", reason="hangs: no result after 10 s"),
        samples.record("w/1", "loop"),
    ]
    assert of_candidate(found, "mine.py:f") == [
        "mine.py:f is without a result (failed) on 1: hangs: no result after 10 s."
    ]
    assert of_candidate(found, "other.py:f") == ["other.py:f was not measured."]
