"""Ways to compute a case, ready to be timed once their results are right. A way's calls have names (pass, kind): kind
"step" is the whole; "compute" and "communication" are its parts, each alone (`replay`), for ours on several ranks.
Every rank makes the same ways in the same order."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from expertile.moe.experts import moe_mlp
from expertile.moe.parallel import ExpertParallel, ParallelConfig
from tools.parallel import rival
from tools.parallel.case import BOTH, FORWARD, Case, Tensors, computed, judge
from tools.parallel.replay import Recorder, Silent, communicate

OURS, ONE_GPU, TORCH, COMPILED = "expertile", "one GPU", "torch", "torch.compile"
STEP, COMPUTE, COMMUNICATION = "step", "compute", "communication"


@dataclass(frozen=True)
class Way:
    """name: one of the four above. Of ours: chunks, combine, and `fixed`: max_tokens is the tokens of a rank, so that
    nothing waits for the host. graph: replayed from a CUDA graph."""

    name: str
    chunks: int = 1
    combine: str = "ordered"
    fixed: bool = False
    graph: bool = False

    @property
    def backend(self) -> str:
        """How records call it."""
        return self.name + (f" {self.combine} {self.chunks}" + " fixed" * self.fixed if self.name == OURS else "")

    def __str__(self) -> str:
        return self.backend + " graph" * self.graph


@dataclass
class Ready:
    """calls: by pass and kind. errors and reason: as `judge` has them. bits: whether out has the bits of `moe_mlp` on
    one GPU. leaving: bytes of rows that leave this rank, by pass; none where nothing leaves."""

    calls: dict[tuple[str, str], Callable[[], object]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    bits: bool = False
    leaving: dict[str, int] = field(default_factory=dict)

    def check(self, results: list[Tensors], expected: Tensors) -> None:
        """Judge each of several results; the worst counts."""
        self.bits = all(torch.equal(got["out"], expected["out"]) for got in results)
        for got in results:
            errors, reason = judge(got, expected)
            self.errors |= {name: max(error, self.errors.get(name, 0.0)) for name, error in errors.items()}
            self.reason = self.reason or reason


def prepare(way: Way, case: Case) -> Ready:
    """Compute the way once and judge it. Exceptions pass through."""
    makers = {OURS: _ours, ONE_GPU: _one_gpu}
    return makers.get(way.name, _plain)(way, case)


def _whole(way: Way, case: Case, step: Callable[[bool], Tensors], expected: Tensors) -> Ready:
    """The whole steps of each pass, judged as they will be timed; step(backward)."""
    runs: dict[str, Callable[[], Tensors]] = {name: partial(step, name == BOTH) for name in case.job.passes}
    results = [run() for run in runs.values()]
    if way.graph:
        runs = {name: _captured(run) for name, run in runs.items()}
        results += [run() for run in runs.values()]
    ready = Ready({(name, STEP): run for name, run in runs.items()})
    ready.check(results, expected)
    return ready


@dataclass(frozen=True)
class _Replay:
    """A captured call; returns what the capture returned, filled anew. `call` is kept for what it holds: a graph has
    the addresses of what lay outside of it (a recorded step's buffers, a count), and keeps none of it alive."""

    graph: torch.cuda.CUDAGraph
    result: Any
    call: Callable[[], Any]

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call`, which has run before, as a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # "thread_local": NCCL's watchdog asks for events all the time, which must not spoil the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    return _Replay(graph, result, call)


def _one_gpu(way: Way, case: Case) -> Ready:
    """`moe_mlp` with all experts, on this rank's tokens, or on all of them where those are divided. Gradients of the
    weights are of these tokens alone, so the expected ones are none of theirs where every rank has its own tokens."""
    weak = case.job.scaling == "weak"
    tokens = case.tokens() if weak else case.all_tokens
    expected = case.expected
    if weak and case.world > 1:
        expected = {name: x for name, x in expected.items() if name not in ("gate_up", "down")}

    def run(backward: bool) -> Tensors:
        whole = computed(moe_mlp, tokens, case.gate_up, case.down, backward)
        return whole if weak else case.own(whole)

    return _whole(way, case, run, expected)


def forward(of: ExpertParallel, *operands: torch.Tensor) -> torch.Tensor:
    """`of.mlp`, after which a recorded forward pass is over."""
    out = of.mlp(*operands)
    if isinstance(of._exchange, Recorder):
        of._exchange.mark()
    return out


def _ours(way: Way, case: Case) -> Ready:
    s, tokens = case.job.size, case.tokens()
    config = ParallelConfig(
        s.experts,
        s.top_k,
        s.hidden,
        chunks=way.chunks,
        combine=way.combine,
        max_tokens=len(tokens["x"]) if way.fixed else None,
    )
    parallel = ExpertParallel(config)
    gate_up, down = parallel.shard(case.gate_up), parallel.shard(case.down)

    def step(of: ExpertParallel, backward: bool) -> Tensors:
        return computed(partial(forward, of), tokens, gate_up, down, backward)

    ready = _whole(way, case, partial(step, parallel), case.expected)
    parallel.check()
    if case.world == 1:
        return ready

    recording, silent = copy.copy(parallel), copy.copy(parallel)
    recording._exchange = recorder = Recorder(parallel._exchange)
    silent._exchange = Silent(recorder)
    step(recording, BOTH in case.job.passes)
    ready.leaving = {name: recorder.leaving_nbytes(name == FORWARD) for name in case.job.passes}
    parts: dict[tuple[str, str], Callable[[], object]] = {}
    for name in case.job.passes:
        parts[name, COMPUTE] = partial(step, silent, name == BOTH)
        parts[name, COMMUNICATION] = partial(communicate, recorder, name == FORWARD)
    for key, call in parts.items():
        got = call()
        if way.graph:
            call = _captured(call)
            got = call()
        if isinstance(got, dict):  # compute alone: on what the recorded step received, so with its results
            reason = judge(got, case.expected)[1]
            ready.reason = ready.reason or (f"compute alone: {reason}" if reason else "")
        ready.calls[key] = call
    return ready


def _plain(way: Way, case: Case) -> Ready:
    s, world, tokens = case.job.size, case.world, case.tokens()
    if s.experts % world:
        raise ValueError(f"experts: expected a multiple of {world} ranks, got {s.experts}")
    mine = case.experts(case.rank)
    gate_up, down = case.gate_up[mine], case.down[mine]
    parts = rival.Parts()
    if way.name == COMPILED:
        parts = parts.compiled(tokens["x"], tokens["ids"], tokens["weights"])

    mlp = partial(rival.mlp, experts=s.experts, parts=parts)
    ready = _whole(way, case, partial(computed, mlp, tokens, gate_up, down), case.expected)
    ids = case.all_tokens["ids"]
    to_here = (ids >= mine.start) & (ids < mine.stop)
    stays = int(to_here[case.rows].sum())
    away, arrives = tokens["ids"].numel() - stays, int(to_here.sum()) - stays
    forward = (away + arrives) * s.hidden * tokens["x"].element_size()
    ready.leaving = {name: forward * (2 if name == BOTH else 1) for name in case.job.passes}
    return ready
