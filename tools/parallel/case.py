"""What is computed: sizes, each rank's tokens and weights, and what one GPU makes of all tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from expertile.lab.race.gate import Limits, check_parts
from expertile.moe.experts import moe_mlp
from expertile.roofline import Work

# Unit roundoff of bfloat16 is 2^-8. Two right results differ by their own roundings of pre, act, y and each rank's
# sum, as the lab's "moe" operator allows; single elements by eight times that, as `gate.limits` has it.
LIMITS = Limits(4 * 2.0**-8, 32 * 2.0**-8)
SCALINGS = ("weak", "strong")
FORWARD, BOTH = "forward", "both"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """T tokens (of each rank, or in all: see `Job.scaling`), hidden size, intermediate size, experts, top-k."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"T{self.tokens}-H{self.hidden}-I{self.intermediate}-E{self.experts}-k{self.top_k}"


@dataclass(frozen=True)
class Job:
    """One race. scaling "weak": every rank has `size.tokens`, and one GPU as many; "strong": they are divided among the
    ranks, and one GPU has them all. `passes`: "forward", "both" (forward and backward)."""

    size: Size
    scaling: str = "weak"
    passes: tuple[str, ...] = (FORWARD, BOTH)
    decode: bool = False

    def tokens_of_rank(self, world: int) -> int:
        return self.size.tokens if self.scaling == "weak" else self.size.tokens // world


@dataclass(frozen=True)
class Case:
    """The operands of a rank in bfloat16, ids [T, k] int32 and weights [T, k] float32; weights of all experts, of which
    the rank uses `mine`.

    all_tokens: x, ids, weights and dy of all ranks, in the order of ranks; `rows` are this rank's of them.
    expected: out and gradients (x, weights, gate_up, down) of this rank, by `moe_mlp` on all tokens and experts.
    """

    job: Job
    rank: int
    world: int
    gate_up: torch.Tensor
    down: torch.Tensor
    all_tokens: Tensors
    expected: Tensors

    @property
    def rows(self) -> slice:
        tokens = self.job.tokens_of_rank(self.world)
        return slice(tokens * self.rank, tokens * (self.rank + 1))

    def experts(self, rank: int) -> slice:
        """As `ExpertParallel` places them."""
        most = -(-self.job.size.experts // self.world)
        return slice(most * rank, most * (rank + 1))

    def tokens(self) -> Tensors:
        """This rank's x, ids, weights, dy."""
        return {name: x[self.rows] for name, x in self.all_tokens.items()}

    def own(self, whole: Tensors) -> Tensors:
        """Of the results for all tokens and experts, this rank's."""
        mine = self.experts(self.rank)
        return {name: x[mine if name in ("gate_up", "down") else self.rows] for name, x in whole.items()}

    def work(self, world: int) -> dict[str, Work]:
        """By pass the work of the rank with the most rows, of `world` ranks (the case's, or 1): FLOPs of its products;
        bytes of its tokens and of the experts that have rows once, with their gradients in "both"."""
        s, ids = self.job.size, self.all_tokens["ids"]
        if world == 1:
            groups = [ids[self.rows] if self.job.scaling == "weak" else ids]
        else:
            of_rank = [(ids >= p.start) & (ids < p.stop) for p in map(self.experts, range(world))]
            groups = [ids[here] for here in of_rank]
        busiest = max(groups, key=lambda group: group.numel())
        tokens = self.job.tokens_of_rank(world)
        weights = 3 * s.hidden * s.intermediate * len(busiest.unique())
        flops = 6.0 * busiest.numel() * s.hidden * s.intermediate
        moved = 2.0 * (2 * tokens * s.hidden + weights)
        return {FORWARD: Work(flops, moved), BOTH: Work(3 * flops, 2 * moved)}


def make(job: Job, rank: int, world: int, device: torch.device, seed: int = 0) -> Case:
    """Operands from seeds; the rank that made them sends them to all ranks of the default group, so that all have the
    same bits. Routing is uniform, k distinct experts."""
    s, tokens = job.size, job.tokens_of_rank(world)
    generator = torch.Generator(device).manual_seed(seed + rank)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

    best = torch.rand((tokens, s.experts), generator=generator, device=device).topk(s.top_k, dim=1)
    own = {
        "x": normal(tokens, s.hidden),
        "ids": best.indices.int(),
        "weights": torch.softmax(best.values, 1),
        "dy": normal(tokens, s.hidden),
    }
    gate_up = normal(s.experts, 2 * s.intermediate, s.hidden, scale=s.hidden**-0.5)
    down = normal(s.experts, s.hidden, s.intermediate, scale=s.intermediate**-0.5)
    if world > 1:
        own = {name: _gathered(x, world) for name, x in own.items()}
        for weight in (gate_up, down):
            dist.broadcast(weight, 0)
    case = Case(job, rank, world, gate_up, down, own, {})
    whole = computed(moe_mlp, own, gate_up, down, BOTH in job.passes)
    return replace(case, expected={name: x.clone() for name, x in case.own(whole).items()})  # of this rank alone


def _gathered(x: torch.Tensor, world: int) -> torch.Tensor:
    """All ranks' x, one after the other."""
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


Mlp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def computed(mlp: Mlp, tokens: Tensors, gate_up: torch.Tensor, down: torch.Tensor, backward: bool) -> Tensors:
    """mlp(x, gate_up, down, ids, weights) on tokens; out, and with `backward` the gradients of x, weights, gate_up and
    down for dy."""
    if not backward:
        with torch.no_grad():
            return {"out": mlp(tokens["x"], gate_up, down, tokens["ids"], tokens["weights"])}
    found = {"x": tokens["x"], "weights": tokens["weights"], "gate_up": gate_up, "down": down}
    leaves = {name: x.detach().requires_grad_() for name, x in found.items()}
    out = mlp(leaves["x"], leaves["gate_up"], leaves["down"], tokens["ids"], leaves["weights"])
    gradients = torch.autograd.grad(out, list(leaves.values()), tokens["dy"])
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def judge(got: Tensors, expected: Tensors) -> tuple[dict[str, float], str]:
    """Relative Frobenius error of each result that is expected, and what is wrong with them ("": nothing)."""
    errors, reasons = {}, []
    for name, reference in expected.items():
        if name not in got:
            continue
        if got[name].shape != reference.shape:
            reasons.append(f"{name}: expected {list(reference.shape)}, got {list(got[name].shape)}")
            continue
        step = max(1, reference.shape[0] // 16)
        blocks = (slice(i, i + step) for i in range(0, reference.shape[0], step))
        gate = check_parts(got[name], (((where,), reference[where].float()) for where in blocks), LIMITS)
        errors[name] = gate.rel_error
        if not gate.ok:
            reasons.append(f"{name}: {gate.reason}")
    return errors, "; ".join(reasons)
