"""DTensor operands on 2 ranks: results, gradients and placements, beside torch's own function where it takes them."""

import multiprocessing
import traceback

import pytest
import torch

WORLD = 2


def check(rank: int, folder: str, dtype: torch.dtype) -> None:
    """Write what went wrong, or nothing, to folder/rank."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    import expertile as xt

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randint(-4, 5, shape, generator=g) / 4).to(dtype)  # sums are exact in any order

    def same(x: torch.Tensor, y: torch.Tensor) -> bool:
        return torch.allclose(x, y, rtol=1e-12, atol=1e-12) if x.dtype is torch.float64 else torch.equal(x, y)

    def compare(name: str, function, plain, placed, expected_placement) -> None:
        plain = [x.clone().requires_grad_() for x in plain]
        placed = [distribute_tensor(x.detach(), mesh, [p]).requires_grad_() for x, p in zip(plain, placed, strict=True)]
        want, got = function(*plain), function(*placed)
        assert isinstance(got, DTensor) and expected_placement in (None, *got.placements), name
        assert same(got.full_tensor(), want), name
        dy = normal(*want.shape)
        want.backward(dy)
        got.backward(distribute_tensor(dy, mesh, [Replicate()]))
        for x, y in zip(plain, placed, strict=True):
            assert same(y.grad.full_tensor(), x.grad), f"{name}: gradient"

    offs = torch.tensor([4, 4, 12], dtype=torch.int32)
    ends = distribute_tensor(offs, mesh, [Replicate()])

    def ragged(product):
        return lambda a, b, *bias: product(
            a, b, offs=ends if isinstance(a, DTensor) else offs, **({"bias": bias[0]} if bias else {})
        )

    whole, a, b, bias = Replicate(), normal(12, 32), normal(3, 32, 48), normal(3, 48)
    cases = {
        "replicated": ((whole, whole), whole),
        "column-parallel": ((whole, Shard(2)), Shard(1)),
        "row-parallel": ((Shard(1), Shard(1)), Partial()),
    }
    try:
        for name, (placed, out) in cases.items():
            compare(name, ragged(xt.grouped_mm), (a, b), placed, out)
            if dtype is torch.bfloat16:  # what torch's own gives
                compare(f"torch's {name}", ragged(F.grouped_mm), (a, b), placed, out)
        compare("column-parallel with bias", ragged(xt.grouped_mm), (a, b, bias), (whole, Shard(2), Shard(1)), Shard(1))
        compare("row-parallel with bias", ragged(xt.grouped_mm), (a, b, bias), (Shard(1), Shard(1), whole), whole)
        compare("ragged K", ragged(xt.grouped_mm), (normal(8, 12), normal(12, 16)), (Shard(0), whole), Shard(1))
        compare("ragged N", ragged(xt.grouped_mm), (normal(3, 8, 16), normal(16, 12)), (Shard(1), whole), Shard(0))
        compare("batched", xt.grouped_mm, (normal(4, 8, 16), normal(4, 16, 8)), (Shard(0), Shard(0)), Shard(0))
        compare("batched rows", xt.grouped_mm, (normal(4, 8, 16), normal(4, 16, 8)), (Shard(1), whole), Shard(1))
        # A rank's rows would belong to other groups: they are gathered first, wherever the product is split then.
        compare("split rows", ragged(xt.grouped_mm), (a, b), (Shard(0), whole), None)
        shortened = distribute_tensor(torch.tensor([4, 4, 9], dtype=torch.int32), mesh, [whole])
        x = distribute_tensor(a, mesh, [Shard(1)]).requires_grad_()
        xt.grouped_mm(x, distribute_tensor(b, mesh, [Shard(1)]), offs=shortened)[:9].sum().backward()
        assert not x.grad.full_tensor()[9:].any() and x.grad.full_tensor()[:9].any(), "gradient of rows past the end"
        rows, ones = normal(4, 6, 8).double(), torch.full((8,), 0.5, dtype=torch.float64)
        for d in (0, 1):  # rows stay where they are
            compare("softmax", xt.softmax, (rows,), (Shard(d),), Shard(d))
            compare("RMS norm", xt.rms_norm, (rows, ones), (Shard(d), whole), Shard(d))
            compare("layer norm", xt.layer_norm, (rows, ones, ones), (Shard(d), whole, whole), Shard(d))
            summed = lambda x, r, w: xt.rms_norm(x, w, residual=r)[0]  # noqa: E731
            compare("with a residual", summed, (rows, rows, ones), (Shard(d), Shard(d), whole), Shard(d))
        compare("split rows of softmax", xt.softmax, (rows,), (Shard(2),), None)
        # Operators without a rule of their own work on whole tensors.
        torch.manual_seed(0)
        layer, tokens = xt.MoE(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2), normal(5, 16).float()
        want = layer(tokens)
        gradients = torch.autograd.grad(want.sum(), list(layer.parameters()))
        for n, p in list(layer.named_parameters()):
            layer.register_parameter(n, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        y = layer(distribute_tensor(tokens, mesh, [whole]))
        y.sum().backward()
        assert torch.allclose(y.full_tensor(), want, atol=1e-6)
        for p, gradient in zip(layer.parameters(), gradients, strict=True):
            assert torch.allclose(p.grad.full_tensor(), gradient, atol=1e-6)
        compiled = torch.compile(ragged(xt.grouped_mm), backend="aot_eager", fullgraph=True)
        compare("compiled", compiled, (a, b), (whole, Shard(2)), Shard(1))
        words = ""
    except Exception:
        words = traceback.format_exc()
    with open(f"{folder}/{rank}", "w") as f:
        f.write(words)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtensors(dtype, tmp_path):
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=check, args=(rank, str(tmp_path), dtype)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    for rank in range(WORLD):
        words = (tmp_path / str(rank)).read_text()
        assert not words, f"rank {rank}: {words}"
