"""What one of two ranks does in test_parts: ways, their parts, and races, over gloo."""

import copy
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from expertile.lab.race.record import Record
from expertile.moe.parallel import ExpertParallel, ParallelConfig
from tests.support.fake_graph import fake_graphs
from tools.parallel import rival, ways
from tools.parallel import run as runs
from tools.parallel.case import BOTH, FORWARD, Case, Job, Size, computed, judge, make
from tools.parallel.replay import Recorder, Silent, communicate
from tools.parallel.run import Options, run
from tools.parallel.team import Team
from tools.parallel.ways import COMMUNICATION, COMPUTE, ONE_GPU, OURS, STEP, TORCH, Way, prepare

SIZE = Size(24, 32, 16, 8, 2)
_CPU = torch.device("cpu")


def every_way_is_right(team: Team) -> None:
    """At every scaling; and the bytes that leave are those of the rows."""
    for scaling in ("weak", "strong"):
        case = make(Job(SIZE, scaling), team.rank, team.world, _CPU)
        assert len(case.tokens()["x"]) == (24 if scaling == "weak" else 12)
        for way in (Way(ONE_GPU), Way(OURS), Way(OURS, 4), Way(OURS, 2, "partial"), Way(OURS, fixed=True), Way(TORCH)):
            ready = prepare(way, case)
            assert not ready.reason, f"{way}: {ready.reason}"
            assert ready.bits or way.name == TORCH or way.combine == "partial", str(way)
            kinds = {STEP} if way.name in (ONE_GPU, TORCH) else {STEP, COMPUTE, COMMUNICATION}
            assert ready.calls.keys() == {(name, kind) for name in (FORWARD, BOTH) for kind in kinds}
        slots = case.all_tokens["ids"] // 4 != torch.arange(2).repeat_interleave(len(case.tokens()["x"]))[:, None]
        mine = slots.chunk(2)
        rows = int(mine[team.rank].sum()) + int(mine[1 - team.rank].sum())
        assert ready.leaving == {FORWARD: rows * 64, BOTH: 2 * rows * 64}


def _recorded(case: Case, **options: object) -> tuple[ExpertParallel, Recorder]:
    config = ParallelConfig(SIZE.experts, SIZE.top_k, SIZE.hidden, **options)  # type: ignore[arg-type]
    parallel = ExpertParallel(config)
    parallel._exchange = recorder = Recorder(parallel._exchange)
    return parallel, recorder


def _step(parallel: ExpertParallel, case: Case) -> dict[str, torch.Tensor]:
    tokens, mine = case.tokens(), case.experts(case.rank)
    return computed(partial(ways.forward, parallel), tokens, case.gate_up[mine], case.down[mine], True)


def graphs_use_nothing_that_was_freed(team: Team) -> None:
    """Every call of a way of which nothing but the calls is left; and the emulated graphs do notice such a use."""
    case = make(Job(SIZE, passes=(FORWARD,), decode=True), team.rank, team.world, _CPU)
    with fake_graphs():
        for way in (Way(ONE_GPU, graph=True), *(Way(OURS, 1, how, True, True) for how in ("ordered", "partial"))):
            ready = prepare(way, case)
            assert not ready.reason and len(ready.calls) == (1 if way.name == ONE_GPU else 3), f"{way}: {ready.reason}"
            for key, call in ready.calls.items():
                call()
                replays = call.graph.replays  # type: ignore[attr-defined]
                assert replays == 2, f"{way}, {key}: {replays} replays, one of them when it was prepared"
        graph, x = torch.cuda.CUDAGraph(), torch.ones(3)
        with torch.cuda.graph(graph):
            kept = x + torch.ones_like(x)
        graph.replay()
        del x
        try:
            graph.replay()
        except RuntimeError as error:
            assert "operands of aten.ones_like" in str(error)
        else:
            raise AssertionError("a replay that reads freed memory")
        assert kept.sum() == 6


def communication_alone_brings_every_row(team: Team) -> None:
    case = make(Job(SIZE), team.rank, team.world, _CPU)
    for options in ({}, {"chunks": 4}, {"combine": "partial", "chunks": 2}, {"max_tokens": 30}):
        parallel, recorder = _recorded(case, **options)
        _step(parallel, case)
        came = [t.buffer.clone() for t in recorder.travelling]
        forward = 3  # labels, dispatch, combine
        assert len(came) == 6 and 0 < recorder.leaving_nbytes(True) < recorder.leaving_nbytes(False)
        for count, only in ((forward, True), (len(came), False)):
            for t in recorder.travelling:
                t.buffer.zero_()
            communicate(recorder, only)
            for index, (t, expected) in enumerate(zip(recorder.travelling, came, strict=True)):
                want = expected if index < count else torch.zeros_like(expected)
                assert torch.equal(t.buffer, want), f"{options}: buffer {index}, {t.what}"


def computation_alone_needs_nobody(team: Team) -> None:
    """Rank 1 takes no part in it, and the results are those of the step."""
    case = make(Job(SIZE), team.rank, team.world, _CPU)
    for options in ({}, {"chunks": 4}, {"combine": "partial"}, {"max_tokens": 24}):
        parallel, recorder = _recorded(case, **options)
        expected = _step(parallel, case)
        if team.rank == 0:
            silent = copy.copy(parallel)
            silent._exchange = Silent(recorder)
            for _ in range(2):
                got = _step(silent, case)
                assert all(torch.equal(got[name], x) for name, x in expected.items()), options
        dist.barrier()


def the_slowest_rank_counts(team: Team) -> None:
    def slow() -> None:
        time.sleep(0.03 if team.rank == 1 else 0.0)

    timings = team.race({("slow",): slow, ("quick",): lambda: None}, 5, 2.0)
    slow_one, quick_one = timings["slow",], timings["quick",]
    assert slow_one.time_s >= 0.03 and quick_one.time_s < 0.03 and len(slow_one.samples) == 5
    assert slow_one.ci95_s[0] <= slow_one.time_s <= slow_one.ci95_s[1]


def nothing_is_timed_without_time(team: Team) -> None:
    late = copy.copy(team)
    late.deadline = time.monotonic() - 1.0
    assert late.race({("call",): lambda: None}, 5, 2.0) == {}
    records: list[Record] = []
    run(late, Options(device="cpu", seconds=60.0), records.append)
    assert len({r.workload for r in records}) == 3
    assert {(r.status, r.reason, r.config["kind"]) for r in records} == {("unsupported", "no time left", STEP)}
    team._said = late._said  # what was said counts on


def what_is_wrong_or_fails_has_no_time(team: Team) -> None:
    """On one rank only: on all ranks it then counts as wrong, and the others are timed."""
    right, mlp = rival.weighted_sum, ways.moe_mlp

    def wrong(rows: torch.Tensor, at: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return right(rows, at, weights) * (1.1 if team.rank == 1 else 1.0)

    def failing(*operands: torch.Tensor) -> torch.Tensor:
        if team.rank == 0:
            raise RuntimeError("out of something")
        return mlp(*operands)

    records: list[Record] = []
    parts, all_jobs = rival.Parts, runs.jobs
    runs.jobs = lambda options: all_jobs(options)[:1]
    rival.Parts = lambda: replace(parts(), weighted_sum=wrong)  # type: ignore[assignment,misc]
    ways.moe_mlp = failing
    try:
        run(team, Options(device="cpu", seconds=60.0, quick=True), records.append)
    finally:
        rival.Parts, ways.moe_mlp, runs.jobs = parts, mlp, all_jobs  # type: ignore[misc]
    steps = [r for r in records if r.config.get("kind") == STEP]
    assert {r.backend.split()[0]: r.status for r in steps} == {"one": "failed", TORCH: "wrong", OURS: "ok"}
    for record in steps:
        assert bool(record.time_s) == bool(record.ci95_s) == (record.backend.split()[0] == OURS)
        if record.backend == ONE_GPU:
            assert "RuntimeError: out of something" in record.reason
        if record.backend == TORCH:
            assert "out: relative error" in record.reason and record.details["errors"]["out"] > 0.05


def a_race_that_fails_leaves_its_records(team: Team) -> None:
    """Made without the GPU, which a failing kernel takes along."""
    records: list[Record] = []
    work, race = Case.work, Team.race

    def failing(
        team: Team, calls: Mapping[tuple[str, ...], Callable[[], object]], rounds: int, seconds: float
    ) -> object:
        Case.work = None  # type: ignore[assignment,method-assign]
        with_one = {name: fail if name == (TORCH, BOTH, STEP) else call for name, call in calls.items()}
        return race(team, with_one, rounds, seconds)

    def fail() -> None:
        raise RuntimeError("device-side assert")

    Team.race = failing  # type: ignore[assignment,method-assign]
    try:
        run(team, Options(device="cpu", seconds=60.0, quick=True), records.append)
    except RuntimeError as error:
        assert "device-side assert" in str(error)
    else:
        raise AssertionError("nobody heard of it")
    finally:
        Case.work, Team.race = work, race  # type: ignore[method-assign]
    assert len(records) == 10 and {(r.config["kind"], r.status) for r in records} == {(STEP, "unsupported")}
    assert all(r.flops and r.value is None for r in records)
    assert all("device-side assert (timing torch|both|step, worker.py:" in r.reason for r in records)


def judged(team: Team) -> None:
    one = torch.ones(3, 4)
    assert judge({"out": one}, {"out": one, "x": one}) == ({"out": 0.0}, "")
    assert "out: expected [3, 4], got [2, 4]" in judge({"out": one[:2]}, {"out": one})[1]
    assert "NaN" in judge({"out": one * torch.nan}, {"out": one})[1]


CHECKS = (
    every_way_is_right,
    graphs_use_nothing_that_was_freed,
    communication_alone_brings_every_row,
    computation_alone_needs_nobody,
    the_slowest_rank_counts,
    nothing_is_timed_without_time,
    what_is_wrong_or_fails_has_no_time,
    a_race_that_fails_leaves_its_records,
    judged,
)


def work(rank: int, world: int, folder: str) -> None:
    """The process of one rank: what went wrong in each check goes to the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    now = time.monotonic()
    team = Team(rank, world, _CPU, store, now, now + 60.0)
    found = {}
    for check in CHECKS:
        try:
            check(team)
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
        torch.save(found, f"{folder}/{rank}.pt")
    os._exit(0)
