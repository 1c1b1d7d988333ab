"""The shared case table: what every backend of the gathered products must get right.

`CASES` are small enough for the Triton interpreter and the Gluon emulator; `LARGE` need a GPU. A backend is tested on
every case that it does not refuse:

    problem, operands = make(case, device)
    outputs = poisoned_outputs(problem, operands)
    backend.run(problem, operands, config, outputs)
    check(case, operands, outputs)
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs, new_outputs
from expertile.ops.gathered_mm.problem import GatherProblem, Product, describe
from expertile.ops.grouped_mm.problem import described

MM, GATED, BACKWARD, WGRAD = Product.MM, Product.GATED, Product.BACKWARD, Product.WGRAD
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Half an ulp is 2^-9, 2^-12, 2^-25 of a number at worst; a result passes through up to three roundings of its dtype
# (pre, the product before the epilogue, the result). float32 sums of some hundred products add their own.
TOLERANCE = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 3e-6}
MARGIN = 3.0  # the largest error, over the largest entry


@dataclass(frozen=True)
class Case:
    """One product. `sizes`: rows of each expert; `past` rows behind the last one, of dropped slots. `n`: columns of the
    result (MM, WGRAD), or I. `k`: summed columns, or M of WGRAD. `gathered`: "a", "b" (WGRAD) or "". `storage`: of
    b, "nk" (k contiguous) or "kn". `std` of the pre-activation."""

    name: str
    product: Product
    sizes: tuple[int, ...]
    n: int
    k: int
    past: int = 0
    top_k: int = 3
    gathered: str = "a"
    activation: str = "swiglu"
    interleaved: bool = False
    save_pre: bool = True
    bias: bool = False
    storage: str = "nk"
    dtype: torch.dtype = BF16
    std: float = 1.0

    def __str__(self) -> str:
        return self.name

    @property
    def total(self) -> int:
        return sum(self.sizes) + self.past

    @property
    def spans(self) -> list[slice]:
        """The rows of each expert."""
        ends = [sum(self.sizes[: g + 1]) for g in range(len(self.sizes))]
        return [slice(e - s, e) for e, s in zip(ends, self.sizes, strict=True)]


def make(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> tuple[GatherProblem, Operands]:
    """The problem and its operands. What no result may depend on is NaN."""
    gen = torch.Generator(device=device).manual_seed(seed)
    total, used, experts = case.total, sum(case.sizes), len(case.sizes)
    tokens = max(1, -(-total // case.top_k))

    def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=gen, device=device) * std).to(case.dtype)

    def in_order(cols: int, std: float = 1.0) -> torch.Tensor:
        x = randn(total, cols, std=std)
        x[used:] = float("nan")
        return x

    slots = torch.randperm(tokens * case.top_k, generator=gen, device=device)[:total].to(torch.int32)
    slots[used:] = 0
    rows = slots // case.top_k
    offs = torch.tensor(case.sizes).cumsum(0).to(torch.int32).to(device)
    a = randn(tokens, case.k) if case.gathered == "a" else in_order(case.k)
    bias = slots_or_none = weights = pre = None
    if case.product is WGRAD:
        b = randn(tokens, case.n) if case.gathered == "b" else in_order(case.n)
    else:
        n = 2 * case.n if case.product is GATED else case.n
        std = case.std / case.k**0.5
        b = randn(experts, n, case.k, std=std).transpose(1, 2)
        b = b.contiguous() if case.storage == "kn" else b
        if case.bias:
            bias = randn(experts, n)
    if case.product is BACKWARD:
        slots_or_none, pre = slots, in_order(2 * case.n, std=case.std)
        weights = torch.rand(tokens, case.top_k, generator=gen, device=device) + 0.1
    operands = Operands(a, b, offs, rows if case.gathered else None, bias, slots_or_none, weights, pre)
    return problem_of(case, operands), operands


def problem_of(case: Case, o: Operands) -> GatherProblem:
    fields = tuple(map(described, (o.a, o.b, o.offs, o.rows, o.bias, o.slots, o.weights, o.pre)))
    gated = case.product in (GATED, BACKWARD)
    return describe(
        case.product,
        *fields,
        activation=case.activation if gated else "",
        interleaved=case.interleaved,
        save_pre=case.save_pre,
        gather_b=case.gathered == "b",
    )


def second_pair(case: Case, rank: int) -> tuple[GatherProblem, Operands, tuple[torch.Tensor, torch.Tensor], Operands]:
    """(problem, operands, second pair, all operands) with the last `rank` columns of K as a second pair, whose rows
    stand in order, as adapters have it."""
    _, full = make(case)
    k = case.k - rank

    def cut(first: int, last: int) -> torch.Tensor:
        part = full.b[:, first:last]
        return part.contiguous() if case.storage == "kn" else part.transpose(1, 2).contiguous().transpose(1, 2)

    operands = replace(full, a=full.a[:, :k].contiguous(), b=cut(0, k))
    u = full.a[:, k:] if full.rows is None else full.a[full.rows.long(), k:]
    u = u.contiguous()
    u[sum(case.sizes) :] = float("nan")
    return problem_of(case, operands), operands, (u, cut(k, case.k)), full


def poisoned_outputs(problem: GatherProblem, operands: Operands) -> Outputs:
    """Outputs full of NaN, but for the routing weights' gradient, which comes as zeros."""
    outputs = new_outputs(problem, operands)
    for place, out in enumerate(outputs):
        if out is not None and place < 2:
            out.fill_(float("nan"))
    return outputs


def clamped(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """x between low and high, with a gradient of 1 at and within them; torch.clamp's at a bound depends on torch's
    version.
    """
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def _activate(pre: torch.Tensor, case: Case) -> torch.Tensor:
    gate, up = (pre[:, ::2], pre[:, 1::2]) if case.interleaved else pre.chunk(2, -1)
    if case.activation == "swiglu":
        return F.silu(gate) * up
    if case.activation == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    if case.activation == "reglu":
        return F.relu(gate) * up
    gate, up = clamped(gate, -math.inf, 7.0), clamped(up, -7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def expected(case: Case, o: Operands) -> tuple[torch.Tensor | None, ...]:
    """The outputs in float64, NaN where they must be left alone; gradients by autograd."""
    a, b = o.a.double(), o.b.double()
    left = a[o.rows.long()] if case.gathered == "a" else a
    if case.product is WGRAD:
        right = b[o.rows.long()] if case.gathered == "b" else b
        return (torch.stack([left[s].T @ right[s] for s in case.spans]),)

    def by_expert(x: torch.Tensor) -> torch.Tensor:
        out = x.new_full((case.total, b.shape[2]), float("nan"))
        for g, s in enumerate(case.spans):
            out[s] = x[s] @ b[g] + (0.0 if o.bias is None else o.bias[g].double())
        return out

    out = by_expert(left)
    if case.product is MM:
        return (out,)
    if case.product is GATED:
        return _activate(out, case), out if case.save_pre else None
    used = sum(case.sizes)
    pre = o.pre.double()[:used].requires_grad_()
    weights = o.weights.double().requires_grad_()
    weighted = _activate(pre, case) * weights.flatten()[o.slots[:used].long(), None]
    dpre, dweights = torch.autograd.grad((weighted * out[:used]).sum(), (pre, weights))
    nobodys = case.total - used
    dpre, act_w = (F.pad(x, (0, 0, 0, nobodys), value=float("nan")) for x in (dpre, weighted.detach()))
    return dpre, act_w, dweights


def check(case: Case, operands: Operands, outputs: Outputs) -> None:
    """Fail unless every output is NaN exactly where it must be left alone and close to float64 elsewhere."""
    wanted = expected(case, operands)
    assert len(outputs) == len(wanted)
    for place, (out, want) in enumerate(zip(outputs, wanted, strict=True)):
        if want is None or out is None:
            assert want is None and out is None
            continue
        name = f"{case} output {place}"
        assert out.shape == want.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(want.shape)}"
        assert out.dtype == (FP32 if place == 2 else case.dtype), f"{name}: {out.dtype}"
        live, written = ~want.isnan(), ~out.isnan()
        assert not (written & ~live).any(), f"{name}: rows past the end were written"
        assert not (live & ~written).any(), f"{name}: elements are NaN or were not written"
        got, ref = out[live].double(), want[live]
        if not got.numel() or not ref.norm():
            assert not got.any(), f"{name}: expected zeros"
            continue
        limit = TOLERANCE[case.dtype]
        error = (got - ref).norm() / ref.norm()
        assert error <= limit, f"{name}: relative Frobenius error {error:.3g} > {limit:.3g}"
        largest = (got - ref).abs().max() / ref.abs().max()
        assert largest <= MARGIN * limit, f"{name}: largest error {largest:.3g} > {MARGIN * limit:.3g}"


def over_pre(operands: Operands, outputs: Outputs) -> tuple[Operands, Outputs]:
    """BACKWARD with dpre in a copy of pre."""
    assert operands.pre is not None
    spare = operands.pre.clone()
    spare[operands.offs[-1] :] = float("nan")
    return replace(operands, pre=spare), (spare, *outputs[1:])


def run_case(backend: Backend, case: Case, config: object, device: str = "cpu", overwrite_pre: bool = False) -> None:
    """Run and check a case that the backend takes."""
    problem, operands = make(case, device)
    outputs = poisoned_outputs(problem, operands)
    given = operands
    if overwrite_pre:
        given, outputs = over_pre(operands, outputs)
    backend.run(problem, given, config, outputs)
    check(case, operands, outputs)


CASES: tuple[Case, ...] = (
    Case("mm", MM, (20, 13), n=48, k=64),
    Case("mm-empty-past-bias", MM, (0, 33, 0, 21), n=40, k=48, past=7, bias=True),
    Case("mm-ordered-kn", MM, (17, 1, 9), n=48, k=32, past=3, gathered="", storage="kn"),
    Case("mm-odd", MM, (5, 11), n=37, k=51, dtype=FP16),
    Case("mm-fp32", MM, (12, 20), n=24, k=40, dtype=FP32, bias=True),
    Case("mm-all-empty", MM, (0, 0), n=16, k=16, past=4),
    Case("gated", GATED, (20, 0, 13), n=32, k=64, past=2),
    Case("gated-interleaved-bias", GATED, (20, 13), n=48, k=40, interleaved=True, bias=True),
    Case("gated-geglu-no-pre", GATED, (9, 24), n=40, k=32, activation="geglu", save_pre=False),
    Case("gated-reglu-ordered", GATED, (9, 24), n=32, k=32, activation="reglu", gathered="", past=5),
    Case("gated-gpt-oss", GATED, (30, 3), n=24, k=56, activation="gpt_oss", interleaved=True, bias=True, std=6.0),
    Case("gated-odd-kn", GATED, (7, 8), n=19, k=33, storage="kn", dtype=FP32),
    Case("gated-odd-interleaved-kn", GATED, (7, 8), n=19, k=33, storage="kn", interleaved=True, dtype=FP16),
    Case("backward", BACKWARD, (20, 0, 13), n=32, k=64, past=3, storage="kn"),
    Case("backward-interleaved-geglu", BACKWARD, (20, 13), n=48, k=40, interleaved=True, activation="geglu"),
    Case("backward-reglu-ordered", BACKWARD, (9, 24), n=40, k=32, activation="reglu", gathered="", past=5),
    Case("backward-gpt-oss", BACKWARD, (30, 3), n=64, k=56, activation="gpt_oss", interleaved=True, std=6.0),
    Case("backward-odd-one-choice", BACKWARD, (7, 8), n=19, k=33, top_k=1, dtype=FP32),
    Case("wgrad", WGRAD, (20, 0, 45), n=48, k=40, past=6),
    Case("wgrad-gather-b", WGRAD, (0, 20, 45), n=24, k=32, past=6, gathered="b"),
    Case("wgrad-ordered-odd", WGRAD, (3, 20), n=19, k=37, past=6, gathered="", dtype=FP32),
)

LARGE: tuple[Case, ...] = (
    Case("large-mm", MM, (700, 0, 1300, 64, 1, 2031), n=1536, k=2048, past=100, top_k=8),
    Case("large-gated", GATED, (700, 0, 1300, 64, 1, 2031), n=768, k=2048, past=100, top_k=8),
    Case(
        "large-gated-interleaved",
        GATED,
        (513, 255, 256, 257),
        n=520,
        k=1040,
        top_k=4,
        interleaved=True,
        bias=True,
        activation="gpt_oss",
        std=4.0,
    ),
    Case("large-gated-many-experts", GATED, tuple(g % 5 for g in range(512)), n=256, k=1024, top_k=8, save_pre=False),
    Case("large-backward", BACKWARD, (700, 0, 1300, 64, 1, 2031), n=768, k=2048, past=100, top_k=8, storage="kn"),
    Case(
        "large-backward-interleaved",
        BACKWARD,
        (513, 255, 256, 257),
        n=1032,
        k=1040,
        top_k=4,
        interleaved=True,
        activation="geglu",
        storage="kn",
    ),
    Case("large-wgrad", WGRAD, (700, 0, 1300, 64, 1, 2031), n=1536, k=1024, past=100, top_k=8),
    Case("large-wgrad-gather-b", WGRAD, (513, 255, 256, 257), n=1032, k=776, top_k=4, gathered="b"),
)
