"""Expert parallelism over NCCL: one rank with the bits of `moe_mlp`, graphs; several GPUs where there are."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from expertile.formats.fp8 import Fp8Blocks
from expertile.moe.experts import moe_mlp
from expertile.moe.parallel import ExpertParallel, ParallelConfig
from tests.moe import parallel_worker
from tests.moe.test_parallel import outcome_of

T, H, I, E, K = 500, 256, 128, 16, 4


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    path = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group(
        "nccl",
        init_method=f"file://{path}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    yield
    dist.destroy_process_group()


def operands(seed=0, tokens=T):
    made = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=made, device="cuda") * scale).bfloat16()

    ids = torch.rand(tokens, E, generator=made, device="cuda").argsort(1)[:, :K].int()
    ids[1::7, 1] = E  # some are dropped
    weights = torch.rand(tokens, K, generator=made, device="cuda")
    return normal(tokens, H), normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5), ids, weights


def close(got, expected, limit=1e-2):
    assert (got.double() - expected.double()).norm() <= limit * expected.double().norm()


OPTIONS = ({}, {"chunks": 4}, {"combine": "partial"}, {"max_tokens": T}, {"max_tokens": T + 9, "combine": "partial"})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_rank_is_moe_mlp(options):
    x, gate_up, down, ids, weights = operands()
    leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    parallel = ExpertParallel(ParallelConfig(E, K, H, **options))
    dy = torch.randn_like(x)
    out, expected = (
        f(x, gate_up, down, ids, weights, activation="swiglu", check=True) for f in (parallel.mlp, moe_mlp)
    )
    parallel.check()
    # Chunks are other problems for the kernels, which may take other tiles; sums of partial results are rounded twice.
    if "chunks" in options or options.get("combine") == "partial":
        close(out, expected)
    else:
        assert torch.equal(out, expected)
    for got, reference in zip(*(torch.autograd.grad(o, leaves, dy) for o in (out, expected)), strict=True):
        close(got, reference)


@pytest.mark.parametrize("combine", ["ordered", "partial"])
def test_fixed_buffers_replay_in_a_graph(combine):
    x, gate_up, down, ids, weights = operands(tokens=32)
    parallel = ExpertParallel(ParallelConfig(E, K, H, max_tokens=32, combine=combine))
    with torch.no_grad():
        for _ in range(2):
            parallel.mlp(x, gate_up, down, ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = parallel.mlp(x, gate_up, down, ids, weights)
        for seed in (1, 2):
            other = operands(seed, tokens=32)
            for target, source in zip((x, ids, weights), (other[0], other[3], other[4]), strict=True):
                target.copy_(source)
            graph.replay()
            close(out, moe_mlp(x, gate_up, down, ids, weights))
    parallel.check()


def test_exact_lengths_refuse_a_graph():
    x, gate_up, down, ids, weights = operands(tokens=8)
    parallel = ExpertParallel(ParallelConfig(E, K, H))
    with torch.no_grad():
        parallel.mlp(x, gate_up, down, ids, weights)
        with pytest.raises(ValueError, match="max_tokens: expected a number"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            parallel.mlp(x, gate_up, down, ids, weights)


def test_overflow_is_counted_on_the_device_and_replayed():
    x, gate_up, down, ids, weights = operands(tokens=8)
    ids = torch.arange(8 * K, device="cuda", dtype=torch.int32).view(8, K) % E
    parallel = ExpertParallel(ParallelConfig(E, K, H, max_tokens=8, capacity=6 * K - 1))
    with torch.no_grad():
        out = parallel.mlp(x, gate_up, down, ids, weights)
        close(out[:5], moe_mlp(x, gate_up, down, ids, weights)[:5])
    assert out[5:].isnan().all()
    assert parallel.overflow.item() == 2 * K + 1
    with pytest.raises(RuntimeError, match=f"{2 * K + 1} slots found no room"):
        parallel.check()


def test_fp8_experts():
    x, gate_up, down, ids, weights = operands()
    experts = [Fp8Blocks.quantize(w, (128, 128)) for w in (gate_up, down)]
    out = ExpertParallel(ParallelConfig(E, K, H)).mlp(x, *experts, ids, weights)
    close(out, moe_mlp(x, *experts, ids, weights))


def test_several_gpus(tmp_path):
    world = min(4, torch.cuda.device_count())
    if world < 2:
        pytest.skip("needs two GPUs")
    found, codes = outcome_of(parallel_worker.run_on_gpu, world, str(tmp_path))
    assert codes == [0] * (world - 1) + [7], "the last rank ends by itself, and nobody else"
    for rank, words in enumerate(found):
        failed = {name: word for name, word in words.items() if word}
        assert not failed, f"rank {rank}: {failed}"
    for words in found[:-1]:
        assert words["dying"] == ""
