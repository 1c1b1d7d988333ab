"""What the lab's quantised grouped products share: rows of each group, the truth group by group, the bf16 rival, dense.

dims: groups, tokens, top_k, n, k, routing (a spec of race/routing.py): rows are tokens · top_k, spread over the groups
as `routing.draw` says with seed 0. The inputs of such a workload end in offs [G] int32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.lab.race.gate import full_precision
from expertile.lab.race.operator import Bind, Call, Dims, Reference, Rival, Workload
from expertile.lab.race.routing import draw
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ragged import offs_from_sizes
from expertile.roofline import Work

# (experts, hidden, FFN, top-k): as report 003 prints them, whatever the models they are named after look like; and
# published configurations (config.json of each on Hugging Face).
REPORT_MODELS = {
    "mixtral": (8, 4096, 14336, 2),
    "deepseek": (64, 4096, 11008, 8),
    "glm5": (128, 5120, 13696, 8),
    "debug": (4, 512, 1024, 2),
}
REAL_MODELS = {
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "deepseek-v3": (256, 7168, 2048, 8),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "gpt-oss-120b": (128, 2880, 2880, 4),
}
PHASES = {"decode": 16, "tokens-256": 256, "prefill": 8192}


def dims(groups: int, tokens: int, top_k: int, n: int, k: int, routing: str = "balanced") -> Dims:
    return (("groups", groups), ("tokens", tokens), ("top_k", top_k), ("n", n), ("k", k), ("routing", routing))


def model_products(
    phases: Mapping[str, int] = PHASES, real: Iterable[str] = ("deepseek-v3", "qwen3-30b-a3b")
) -> Iterator[tuple[str, Dims, str]]:
    """(name, dims, note) of both projections of report 003's models and the `real` ones, of the tokens of each phase.
    The report's are routed as its benchmark does (`skewed`)."""
    for models, routing, note in (
        (REPORT_MODELS, "skewed", "dimensions as report 003 prints them"),
        ({name: REAL_MODELS[name] for name in real}, "uniform", "published configuration"),
    ):
        for model, (experts, hidden, ffn, top_k) in models.items():
            for phase, tokens in phases.items():
                for projection, n, k in (("gate-up", 2 * ffn, hidden), ("down", hidden, ffn)):
                    yield f"{model}-{projection}-{phase}", dims(experts, tokens, top_k, n, k, routing), note


def sizes(w: Workload) -> tuple[int, ...]:
    """Rows of each group."""
    return draw(w["routing"], w["tokens"], w["groups"], w["top_k"], seed=0)[0].group_sizes


def rows(w: Workload) -> int:
    return w["tokens"] * w["top_k"]


def offs(w: Workload, device: torch.device) -> Tensor:
    return offs_from_sizes(sizes(w)).to(device)


def used(w: Workload) -> int:
    """Groups that have rows."""
    return sum(size > 0 for size in sizes(w))


def random(device: torch.device, seed: int) -> Callable[..., Tensor]:
    """Makes normal bfloat16 tensors whose rows differ in magnitude by powers of two, from one generator."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape: int) -> Tensor:
        x = torch.randn(shape, device=device, generator=generator, dtype=torch.float32)
        powers = torch.randn((*shape[:-1], 1), device=device, generator=generator)
        return (x * torch.exp2(powers.mul_(2).round_())).bfloat16()

    return make


def product(w: Workload, left: Callable[[int, int], Tensor], right: Callable[[int], Tensor]) -> tuple[Tensor, ...]:
    """[M, N] float32: left(start, end) [rows, K] times right(group) [N, K] transposed, for each group with rows."""
    parts = []
    with full_precision():
        for group, start, end in spans(w):
            parts.append(left(start, end).float() @ right(group).float().t())
    return (torch.cat(parts),)


def spans(w: Workload) -> Iterator[tuple[int, int, int]]:
    """(group, first row, end row) of each group with rows."""
    end = 0
    for group, size in enumerate(sizes(w)):
        start, end = end, end + size
        if size:
            yield group, start, end


def bf16_call(a: Tensor, weights: Tensor, ends: Tensor) -> Call:
    """Our own product of a [M, K] and weights [G, N, K] in 16 bits."""
    b = weights.transpose(-2, -1)
    return lambda: (grouped_mm(a, b, offs=ends),)


def bf16(bind: Bind, reference: Reference) -> Rival:
    """That product as a rival."""

    def work(w: Workload) -> Work:
        m, n, k = rows(w), w["n"], w["k"]
        return Work(2.0 * m * n * k, 2.0 * (m * k + used(w) * n * k + m * n))

    return Rival("bf16", bind, reference=reference, work=work)


def tolerance(w: Workload) -> tuple[float, float]:
    """One rounding to bfloat16, float32 sums in any order, and the tensor cores' 14 bits within 128 summands of FP8."""
    return 2.0**-8, 2.0**-7


def own(
    ours: Callable[..., Call], backends: Iterable[Any], problem_of: Callable[[Workload, str], Any]
) -> tuple[Rival, ...]:
    """`ours` as "auto" chooses, and with each of our own backends where it takes the workload's problem."""

    def alone(backend: Any) -> Rival:
        def supports(w: Workload, device: Device) -> str | None:
            return backend.supports(problem_of(w, device.kind), device)

        return Rival(f"expertile-{backend.name}", partial(ours, backend=backend.name), supports, peer=False)

    return Rival("expertile", ours, peer=False), *(alone(b) for b in backends if not b.peer and b.name != "loop")
