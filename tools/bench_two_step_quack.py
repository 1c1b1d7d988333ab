"""`expertile bench` with quack's tuner in two steps, which spares minutes: it takes the same words as bench.

    python tools/bench_two_step_quack.py bench --preset anchors --preset gradients --policy graph --quick

For each new shape quack 0.6.5 times its configurations (22 with ragged M, 44 with ragged K), each for 200 calls after
50 or more of warming up: up to 12 s for each millisecond that the product takes. Here all are timed for some 0.15 s
after 0.1 s, and the six fastest again as quack does by itself; the fastest of these runs. Nothing else of quack is
changed.
"""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

FINALISTS = 6
_WARM_MS, _TIMED_MS = 100.0, 150.0
_LEAST_WARM, _LEAST_TIMED, _MOST_TIMED = 5, 12, 200


def short_bench(
    fn: Callable[..., Any],
    arg_sets: Sequence[Sequence[Any]],
    kwarg_sets: Sequence[dict[str, Any]],
    extra_kwargs: dict[str, Any],
    quantiles: Sequence[float] | None = None,
) -> Any:
    """Milliseconds a call, over rotating inputs in one replay of a CUDA graph, as quack's own `_bench_…_l2_rotate`.

    (The lab's `GraphTimer` warms up for a call only and reads a buffer before each replay; here the first step is to
    rank as the second does.)"""
    count = len(arg_sets)

    def call(times: int) -> None:
        for i in range(times):
            fn(*arg_sets[i % count], **kwarg_sets[i % count], **extra_kwargs)

    def timed(work: Callable[[], None]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    call(3)  # compiles, or says that someone else is still compiling
    once = max(timed(lambda: call(1)), 1e-3)
    call(max(_LEAST_WARM, int(_WARM_MS / once)))
    calls = min(_MOST_TIMED, max(_LEAST_TIMED, int(_TIMED_MS / once)))
    calls = max(1, calls // count) * count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(calls)
    each = timed(graph.replay) / calls
    return [each] * len(quantiles) if quantiles else each


def in_two_steps(tuner: ModuleType, short: Callable[..., Any] = short_bench) -> None:
    """Change `quack.autotuner`: when a shape has to be measured, first all by `short`, then the best as ever."""
    whole, check = tuner._bench_cuda_graph_l2_rotate, tuner.Autotuner.check_disk_cache
    bench = whole

    def check_in_two_steps(self: Any, key: Any, configs: list[Any], bench_all: Callable[[], None]) -> Any:
        def step(by: Callable[..., Any], those: Sequence[Any]) -> Any:
            nonlocal bench
            bench, configs[:] = by, those  # `bench_all` goes through that very list
            bench_all()
            return self.configs_timings

        def both() -> None:
            nonlocal bench
            every = list(configs)
            try:
                times = step(short, every)
                step(whole, sorted(every, key=times.__getitem__)[:FINALISTS])
            finally:
                bench, configs[:] = whole, every

        return check(self, key, configs, both)

    tuner._bench_cuda_graph_l2_rotate = lambda *args, **kwargs: bench(*args, **kwargs)  # type: ignore[attr-defined]
    tuner.Autotuner.check_disk_cache = check_in_two_steps


def main() -> None:
    try:
        from quack import autotuner
    except ImportError:
        sys.exit("bench_two_step_quack: needs quack-kernels (pip install quack-kernels)")
    from expertile.cli import main as expertile

    in_two_steps(autotuner)
    expertile()


if __name__ == "__main__":
    main()
