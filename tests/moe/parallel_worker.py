"""What one rank does in test_parallel: every case of a world size in one process, compared with a single process."""

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.weight_only import quantize
from expertile.moe import _members
from expertile.moe.experts import moe_mlp
from expertile.moe.layer import MoE
from expertile.moe.parallel import ExpertParallel, ParallelConfig
from expertile.moe.parallel_layer import ExpertParallelMoE
from tests.moe.operators import counted

TIMEOUT_S = 8.0
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One layer and its tokens: `tokens` of each rank (its last entry for all further ranks)."""

    name: str
    experts: int
    top_k: int
    tokens: tuple[int, ...]
    hidden: int = 16
    intermediate: int = 8
    dtype: torch.dtype = torch.float32
    chunks: int = 1
    combine: str = "ordered"
    max_tokens: int | None = None
    capacity: int | None = None
    activation: str = "swiglu"
    interleaved: bool = False
    bias: bool = False
    routing: str = "random"  # "random" | "one" (all to expert 0) | "last" (to the last rank's) | "dropped" (a third)

    def config(self) -> ParallelConfig:
        return ParallelConfig(
            self.experts, self.top_k, self.hidden, self.dtype, self.chunks, self.combine, self.max_tokens, self.capacity
        )

    def tokens_of(self, world: int) -> list[int]:
        return [self.tokens[min(r, len(self.tokens) - 1)] for r in range(world)]


CASES = (
    Case("even", experts=8, top_k=2, tokens=(6,)),
    Case("uneven-tokens-and-experts", experts=9, top_k=3, tokens=(7, 0, 3, 12), chunks=2),
    Case("four-chunks-bf16", experts=16, top_k=4, tokens=(33, 17), chunks=4, dtype=torch.bfloat16),
    Case(
        "bias-interleaved",
        experts=8,
        top_k=2,
        tokens=(9, 4),
        activation="gpt_oss",
        interleaved=True,
        bias=True,
        chunks=2,
    ),
    Case("bias-bf16", experts=8, top_k=3, tokens=(21, 14), activation="geglu", bias=True, dtype=torch.bfloat16),
    Case("all-to-one-expert", experts=8, top_k=1, tokens=(5, 2), routing="one", chunks=2),
    Case("all-to-the-last-rank", experts=8, top_k=2, tokens=(5, 2), routing="last"),
    Case("dropped", experts=8, top_k=2, tokens=(11, 6), routing="dropped", chunks=2),
    Case("nothing-anywhere", experts=4, top_k=2, tokens=(0,)),
    Case("one-token", experts=4, top_k=2, tokens=(0, 1, 0), chunks=1),
    Case("partial", experts=9, top_k=3, tokens=(7, 0, 3), combine="partial", chunks=2, bias=True),
    Case("partial-bf16", experts=8, top_k=4, tokens=(25, 16), combine="partial", dtype=torch.bfloat16),
    Case("fixed", experts=9, top_k=3, tokens=(7, 0, 3, 5), max_tokens=8),
    Case("fixed-partial", experts=8, top_k=2, tokens=(8, 3), max_tokens=8, combine="partial", bias=True),
    Case("fixed-tight", experts=8, top_k=2, tokens=(4, 3), max_tokens=8, capacity=7, routing="dropped"),
)


@dataclass(frozen=True)
class Layer:
    """Everything of all ranks, alike in every process; leaves that require gradients."""

    x: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    ids: torch.Tensor
    dy: torch.Tensor

    @staticmethod
    def of(case: Case, world: int) -> "Layer":
        made = torch.Generator().manual_seed(sum(map(ord, case.name)))
        tokens, e, k, h, i = sum(case.tokens_of(world)), case.experts, case.top_k, case.hidden, case.intermediate

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made).to(case.dtype).requires_grad_()

        ids = torch.rand(tokens, e, generator=made).argsort(1)[:, :k]
        if case.routing == "one":
            ids = torch.zeros_like(ids)
        elif case.routing == "last":
            ids = e - 1 - torch.rand(tokens, e // world, generator=made).argsort(1)[:, :k]
        elif case.routing == "dropped":
            ids = torch.where(torch.rand(ids.shape, generator=made) < 1 / 3, e, ids)
        weights = torch.rand(tokens, k, generator=made).requires_grad_()
        bias = (normal(e, 2 * i), normal(e, h)) if case.bias else (None, None)
        return Layer(
            normal(tokens, h),
            weights,
            normal(e, 2 * i, h),
            normal(e, h, i),
            *bias,
            ids.int(),
            normal(tokens, h).detach(),
        )

    def to(self, device: torch.device) -> "Layer":
        tensors = ((f.name, getattr(self, f.name)) for f in fields(self))
        return Layer(**{name: None if x is None else x.detach().to(device) for name, x in tensors})

    def leaves(self) -> dict[str, torch.Tensor]:
        names = ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def single(case: Case, layer: Layer) -> torch.Tensor:
    """What one process that holds all experts computes."""
    with torch.no_grad():
        return moe_mlp(
            layer.x,
            layer.gate_up,
            layer.down,
            layer.ids,
            layer.weights,
            activation=case.activation,
            interleaved=case.interleaved,
            gate_up_bias=layer.gate_up_bias,
            down_bias=layer.down_bias,
        )


def gradients(case: Case, layer: Layer) -> dict[str, torch.Tensor]:
    """Gradients of the layer in float64, written as a sum over experts."""
    from expertile.ops.gathered_mm.activation import activate, split

    wide = {name: x.detach().double().requires_grad_() for name, x in layer.leaves().items()}
    out = torch.zeros_like(wide["x"])
    for e in range(case.experts):
        weight = (wide["weights"] * (layer.ids == e)).sum(1, keepdim=True)
        pre = wide["x"] @ wide["gate_up"][e].t()
        pre = pre + wide["gate_up_bias"][e] if case.bias else pre
        y = activate(*split(pre, case.interleaved), case.activation) @ wide["down"][e].t()
        y = y + wide["down_bias"][e] if case.bias else y
        out = out + weight * y
    out.backward(layer.dy.double())
    return {name: x.grad for name, x in wide.items()}


def compare(
    case: Case, rank: int, world: int, group: DeviceMesh | None = None, device: torch.device = _CPU, bits: bool = True
) -> None:
    """Forward and gradients of `world` ranks, of which this is number `rank`, with those of one process."""
    layer = Layer.of(case, world).to(device)
    counts = case.tokens_of(world)
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    parallel = ExpertParallel(case.config(), group)
    local = {
        name: x.detach()[mine] if name in ("x", "weights") else parallel.shard(x.detach())
        for name, x in layer.leaves().items()
    }
    local = {name: x.clone().requires_grad_() for name, x in local.items()}
    out = parallel.mlp(
        local["x"],
        local["gate_up"],
        local["down"],
        layer.ids[mine],
        local["weights"],
        activation=case.activation,
        interleaved=case.interleaved,
        gate_up_bias=local.get("gate_up_bias"),
        down_bias=local.get("down_bias"),
        check=True,
    )
    parallel.check()
    expected = single(case, layer)[mine]
    if case.combine == "ordered" and bits:
        assert torch.equal(out, expected), f"forward: {(out - expected).abs().max()} from the bits of one process"
    else:
        close("forward", out, expected.double(), case.dtype)
    out.backward(layer.dy[mine])
    for name, whole in gradients(case, layer).items():
        part = whole[mine] if name in ("x", "weights") else parallel.shard(whole)
        close(f"gradient of {name}", local[name].grad, part, case.dtype)


def close(what: str, got: torch.Tensor | None, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative Frobenius error within 2e-6 in float32 and 1e-2 in bfloat16."""
    assert got is not None and got.shape == expected.shape, what
    if expected.numel() == 0:
        return
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    limit = 2e-6 if dtype == torch.float32 else 1e-2
    assert error <= limit, f"{what}: relative error {error:.2e}, {limit:.0e} allowed"


def uninitialised(rank: int, world: int) -> None:
    """Fixed buffers again, where torch fills what it allocates with NaN and the greatest integer: unused room, which
    comes as it is, decides nothing."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan() and torch.empty(1, dtype=torch.int32) == 2**31 - 1
        for case in CASES:
            if case.max_tokens is not None:
                compare(case, rank, world)
    finally:
        torch.use_deterministic_algorithms(False)


def overflowing(rank: int, world: int) -> None:
    """Tokens that found no room are NaN, all others as they should be, and the next step counts on, also after one of
    inference."""
    case = Case("overflow", experts=8, top_k=1, tokens=(6,), max_tokens=6, capacity=4)
    layer = Layer.of(case, world)
    mine = slice(6 * rank, 6 * rank + 6)
    ids = torch.tensor([[0], [1], [7], [0], [1], [0]], dtype=torch.int32)  # five to rank 0, the last finds no room
    parallel = ExpertParallel(case.config())
    for step, mode in enumerate((torch.inference_mode, torch.no_grad), 1):
        with mode():
            out = parallel.mlp(
                layer.x[mine], parallel.shard(layer.gate_up), parallel.shard(layer.down), ids, layer.weights[mine]
            )
            expected = single(case, replace(layer, ids=ids.repeat(world, 1)))[mine]
            assert torch.equal(out[:5], expected[:5]) and out[5].isnan().all()
            assert parallel.overflow is not None and parallel.overflow.tolist() == [step]
    raises(RuntimeError, f"rank {rank}: 2 slots found no room in buffers of 4 slots", parallel.check)


def quantised(rank: int, world: int) -> None:
    """Quantised experts give the bits of one process, and no gradients."""
    made = torch.Generator().manual_seed(1)
    x, gate_up, down = (
        torch.randn(s, generator=made, dtype=torch.bfloat16) for s in ((10 * world, 128), (9, 256, 128), (9, 128, 128))
    )
    ids = torch.rand(10 * world, 9, generator=made).argsort(1)[:, :3]
    weights = torch.rand(10 * world, 3, generator=made)
    mine = slice(10 * rank, 10 * rank + 10)
    for rounded, options in (
        (partial(Fp8Blocks.quantize, block=(128, 128)), dict(chunks=2)),
        (Int4Weight.quantize, dict(max_tokens=16)),
        (Mxfp4Weight.quantize, dict(chunks=2)),
        (partial(quantize, format="mxfp4_fp8"), dict(chunks=2)),
    ):
        experts = rounded(gate_up), rounded(down)
        parallel = ExpertParallel(ParallelConfig(9, 3, 128, **options))
        local = tuple(map(parallel.shard, experts))
        out = parallel.mlp(x[mine], *local, ids[mine], weights[mine], activation="geglu")
        assert torch.equal(out, moe_mlp(x, *experts, ids, weights, activation="geglu")[mine])
        asked = partial(parallel.mlp, x[mine].requires_grad_(), *local, ids[mine], weights[mine])
        raises(ValueError, "quantised experts have no backward pass", asked)


def module(rank: int, world: int) -> None:
    """MoE and ExpertParallelMoE made from it: bits, gradients, with and without autocast; state; dtypes."""
    torch.manual_seed(5)
    whole = MoE(16, 8, 8, 2, bias=True, shared_intermediate_size=4, score="sigmoid")
    x = torch.randn(world, 2, 7, 16)
    layer = ExpertParallelMoE(whole, chunks=2)
    assert f"on rank {rank} of {world}, chunks=2" in repr(layer)
    assert len(list(layer.expert_parameters())) == 4
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            out, expected = layer(x[rank]), whole(x)
        assert out.dtype is dtype and torch.equal(out, expected[rank])
        expected.float().square().sum().backward()
        gradients = {name: p.grad for name, p in whole.named_parameters()}
        whole.zero_grad()  # router and shared expert are the same parameters
        out.float().square().sum().backward()
        for name, parameter in layer.named_parameters():
            reference, got = gradients[name], parameter.grad
            assert reference is not None and got is not None
            if any(parameter is p for p in layer.expert_parameters()):
                reference = layer.parallel.shard(reference)
            else:
                got = got.clone()
                dist.all_reduce(got)
            close(f"gradient of {name}", got, reference.double(), dtype)
        layer.zero_grad()
    other = ExpertParallelMoE(MoE(16, 8, 8, 2, bias=True, shared_intermediate_size=4, score="sigmoid", device="meta"))
    other.to_empty(device="cpu").load_state_dict(whole.state_dict())
    assert torch.equal(other(x[rank]), out)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x[rank]), out)
    layer.bfloat16()
    assert layer(x[rank].bfloat16()).dtype is torch.bfloat16
    assert layer.correction_bias.dtype is torch.float32
    raises(ValueError, "x: expected torch.bfloat16, the dtype of gate_up, got torch.float32", lambda: layer(x[rank]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x[rank]), whole.bfloat16()(x)[rank])


def on_a_mesh(rank: int, world: int) -> None:
    """The experts of each half of the ranks, for itself: a dimension of a DeviceMesh."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "experts"))
    compare(CASES[1], rank % 2, 2, mesh["experts"])
    if world > 2:
        raises(
            ValueError, "group: expected a one-dimensional DeviceMesh", lambda: ExpertParallel(CASES[0].config(), mesh)
        )


def bad_input(rank: int, world: int) -> None:
    """Refused on every rank before anything is sent."""
    parallel = ExpertParallel(CASES[0].config())
    layer = Layer.of(CASES[0], world)
    good = [layer.x, parallel.shard(layer.gate_up), parallel.shard(layer.down), layer.ids, layer.weights]

    def call(place: int, value: torch.Tensor | None) -> Callable[[], object]:
        return lambda: parallel.mlp(*good[:place], value, *good[place + 1 :], check=True)

    raises(ValueError, "x: expected [T, 16] torch.float32, got", call(0, layer.x.bfloat16()))
    raises(
        ValueError,
        f"gate_up: expected the {8 // world} experts of rank {rank}, got 8",
        lambda: parallel.mlp(good[0], layer.gate_up, layer.down, *good[3:]),
    )
    raises(ValueError, "down: expected shape", call(2, layer.down))
    raises(
        ValueError, "topk_ids: expected -1 … 8 (-1 and 8 = dropped), got 9", call(3, layer.ids + 9 - layer.ids.max())
    )
    raises(
        ValueError,
        "topk_ids: expected [12, 2]" if world == 2 else "topk_ids: expected [24, 2]",
        call(3, layer.ids[:, :1]),
    )
    for weights in (layer.weights[1:], layer.weights.long(), None):
        raises(ValueError, "topk_weights: expected shape", call(4, weights))
    raises(ValueError, "x: expected a torch.Tensor, got NoneType", call(0, None))
    raises(ValueError, "weight: expected 8 experts first", lambda: parallel.shard(layer.gate_up[:3]))


def configs_that_cannot_be(rank: int, world: int) -> None:
    for changed, message in (
        (dict(experts=1), f"num_experts: expected at least {world}, as many as there are ranks, got 1"),
        (dict(top_k=9), "top_k: expected at most num_experts (8), got 9"),
        (dict(chunks=5), "chunks: expected at most"),
        (dict(chunks=2, max_tokens=4), "chunks: expected 1 with max_tokens"),
        (dict(capacity=4), "capacity: expected None without max_tokens"),
        (dict(combine="any"), "combine: expected one of"),
    ):
        config = replace(CASES[0], **changed).config()
        raises(ValueError, message, partial(ExpertParallel, config))


def mismatch(rank: int, world: int) -> None:
    case = replace(CASES[0], chunks=2) if rank == 1 else CASES[0]
    raises(ValueError, "chunks is 2 on rank 1 and 1 on rank 0", lambda: ExpertParallel(case.config()))
    settings = {"activation": "geglu" if rank == world - 1 else "swiglu"}
    raises(
        ValueError,
        f"activation is geglu on rank {world - 1} and swiglu on rank 0",
        lambda: ExpertParallel(CASES[0].config(), settings=settings),
    )


def absent(rank: int, world: int) -> None:
    """A rank that does not make its layer is named after 3/4 of the timeout; when it comes, it finds the others."""
    config = CASES[0].config()
    dist.barrier()
    if rank != 1:
        message = f"comparing configurations failed: of {world} ranks these did not come: 1"
        raises(RuntimeError, message, lambda: ExpertParallel(config, timeout=timedelta(seconds=0.4)))
    dist.barrier()
    if rank == 1:
        ExpertParallel(config)


def dying(rank: int, world: int, folder: Path) -> None:
    """The last rank ends between two steps, or between forward and backward."""
    case = CASES[0]
    layer, parallel = Layer.of(case, world), ExpertParallel(case.config())
    mine = slice(6 * rank, 6 * rank + 6)
    arguments = (
        layer.x[mine],
        parallel.shard(layer.gate_up),
        parallel.shard(layer.down),
        layer.ids[mine],
        layer.weights[mine],
    )
    out = parallel.mlp(*arguments)
    dist.barrier()
    if rank == world - 1:
        os._exit(7)
    start = time.monotonic()
    what, call = (
        ("exchanging counts", lambda: parallel.mlp(*arguments))
        if world == 2
        else ("dispatch of gradients", lambda: out.sum().backward())
    )
    raises(RuntimeError, f"rank {rank}: {what} failed: of {world} ranks these no longer answer: {world - 1}", call)
    assert time.monotonic() - start < TIMEOUT_S


def few_operators(rank: int, world: int) -> None:
    """What the host has to queue does not creep back: a GPU runs a small step sooner than many operators are queued."""
    for case, most_forward, most_backward in (
        (CASES[0], (17, 20), (13, 7)),
        (replace(CASES[0], combine="partial"), (17, 21), (13, 7)),
        (replace(CASES[0], max_tokens=8), (13, 20), (12, 7)),
    ):
        layer, parallel = Layer.of(case, world), ExpertParallel(case.config())
        mine = slice(6 * rank, 6 * rank + 6)
        leaves = [
            x.detach().requires_grad_()
            for x in (layer.x[mine], parallel.shard(layer.gate_up), parallel.shard(layer.down), layer.weights[mine])
        ]

        def forward(call=parallel.mlp, leaves=leaves, ids=layer.ids[mine]) -> torch.Tensor:
            return call(*leaves[:3], ids, leaves[3])

        with torch.no_grad():
            forward()  # tables that are made once
            with counted() as alone:
                forward()
        out = forward()
        with counted() as backward:
            torch.autograd.grad(out, leaves, layer.dy[mine])
        for what, found, most in (("forward", alone, most_forward), ("backward", backward, most_backward)):
            got = len(found.names), found.launches
            assert got[0] <= most[0] and got[1] <= most[1], f"{what} of {case}: {got}, {most} allowed: {found.names}"
            assert sum(name == "c10d::alltoall_base_" for name in found.names) >= 3, "nothing was counted"


def raises(kind: type[Exception], message: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), f"expected {message!r} in {str(error)!r}"
        return
    raise AssertionError(f"expected {kind.__name__}: {message}")


def mismatch_and_end(rank: int, world: int, folder: str) -> None:
    """Configurations that differ, in a group whose store rank 0 keeps; rank 0 ends as soon as it knows, while the
    others look into the store seldom."""
    port = Path(folder) / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        (Path(folder) / "port.new").write_text(str(store.port))
        (Path(folder) / "port.new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=40))
    dist.barrier()
    if rank == 0:
        time.sleep(0.2)
    else:
        _members._POLL_S = 0.6
    found = {}
    try:
        raises(
            ValueError,
            "top_k is 1 on rank 1 and 2 on rank 0",
            lambda: ExpertParallel(replace(CASES[0], top_k=1 if rank == 1 else 2).config()),
        )
        found["mismatch"] = ""
    except Exception:
        found["mismatch"] = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    os._exit(0)


CHECKS = (
    uninitialised,
    overflowing,
    quantised,
    module,
    on_a_mesh,
    few_operators,
    bad_input,
    configs_that_cannot_be,
    mismatch,
    absent,
)


def names() -> list[str]:
    """What a process reports on."""
    return [case.name for case in CASES] + [check.__name__ for check in CHECKS] + ["dying"]


def run(rank: int, world: int, folder: str) -> None:
    """The process of one rank: everything in turn; what went wrong in each goes to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    todo: dict[str, Callable[[], None]] = {case.name: partial(compare, case, rank, world) for case in CASES}
    todo |= {check.__name__: partial(check, rank, world) for check in CHECKS}
    todo["dying"] = partial(dying, rank, world, Path(folder))
    found = {}
    for name, check in todo.items():
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        torch.save(found, Path(folder) / f"{rank}.pt")
    os._exit(0)  # the group has lost a rank; to take it apart in order would mean to wait for that


def run_on_gpu(rank: int, world: int, folder: str) -> None:
    """The same for a GPU of each rank and NCCL, then a rank that ends. Kernels may differ with the number of rows, so
    results are close; test_parallel in the gpu tier has the bits of equal problems."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
        device_id=device,
    )
    found = {}
    for case in CASES:
        # No width below 16 bytes, which no kernel for bfloat16 takes.
        wide = replace(case, hidden=64, intermediate=32, dtype=torch.bfloat16)
        try:
            compare(wide, rank, world, device=device, bits=False)
            found[case.name] = ""
        except Exception:
            found[case.name] = traceback.format_exc()
        torch.save(found, Path(folder) / f"{rank}.pt")
    case = replace(CASES[0], hidden=64, intermediate=32, dtype=torch.bfloat16)
    layer, parallel = Layer.of(case, world).to(device), ExpertParallel(case.config())
    arguments = (layer.x, parallel.shard(layer.gate_up), parallel.shard(layer.down), layer.ids, layer.weights)
    parallel.mlp(*arguments)
    parallel.check()
    if rank == world - 1:
        os._exit(7)
    start = time.monotonic()
    try:
        message = f"exchanging counts failed: of {world} ranks these no longer answer: {world - 1}"
        raises(RuntimeError, message, lambda: parallel.mlp(*arguments))
        assert time.monotonic() - start < 20, "later than the group's timeout"
        found["dying"] = ""
    except Exception:
        found["dying"] = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    os._exit(0)  # NCCL would wait for the rank that ended
