"""add_scalar and laplacian on a GPU: numerics, strides, gradients, graphs, torch.compile, and what a call costs."""

import pytest
import torch

from expertile.ops.launch.device import machine
from expertile.ops.pointwise import add_scalar as elementwise
from expertile.ops.pointwise import laplacian as stencil
from expertile.ops.pointwise.add_scalar import add_scalar
from expertile.ops.pointwise.laplacian import BOUNDARIES, laplacian, laplacian_transpose
from tests.gpu.test_launch import host_seconds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Whole vectors, rows of odd length, several tiles and a remainder of each, thin ones, many small grids.
GRIDS = ((1, 1024, 2048), (3, 517, 1021), (2, 9, 8192), (1, 3000, 8), (5, 2, 2), (700, 28, 28), (16, 256, 256))


def strided_tensors():
    base = torch.randn(64, 48, 40, device="cuda")
    yield "contiguous", base
    yield "transposed", base.transpose(0, 2)
    yield "sliced", base[:, ::2]
    yield "expanded", base[:, :1].expand(64, 48, 40)
    yield "off by an element", base.flatten()[1:]
    yield "empty", base[:0]
    yield "scalar", base[0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 31, 1000, 32_000, 10**6 + 3, 2**24])
def test_add_scalar_is_torch_add(numel, dtype):
    x = torch.randn(numel, device="cuda").to(dtype)
    for value in (1.0, -0.3, float("inf"), float("nan")):
        assert torch.equal(add_scalar(x, value).nan_to_num(7), (x + value).nan_to_num(7))


def test_add_scalar_strides():
    for name, x in strided_tensors():
        out = add_scalar(x, 2.5)
        assert torch.equal(out, x + 2.5) and out.stride() == torch.empty_like(x).stride(), name


def test_add_scalar_configs_write_all_and_nothing_else():
    for dtype in DTYPES:
        for numel in (10**5 + 1, 2**20):
            x = torch.randn(numel, device="cuda").to(dtype)
            for config in (elementwise.Config(512, 4), elementwise.Config(1024, 4), elementwise.Config(4096, 8)):
                room = torch.full((numel + 32,), float("nan"), device="cuda", dtype=dtype)
                elementwise.launch(x, room[16:-16], 1.0, config)
                assert torch.equal(room[16:-16], x + 1.0), config
                assert room[:16].isnan().all() and room[-16:].isnan().all(), config


def on_cpu(u, boundary, scale):
    return laplacian(u.cpu().double(), boundary=boundary, scale=scale).to(u.dtype).cuda()


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_laplacian(shape, dtype, boundary):
    u = torch.randn(shape, device="cuda").to(dtype)
    bound = 8 * 0.5 * TOLERANCE[dtype] * float(u.abs().max())
    out = laplacian(u, boundary=boundary, scale=0.5)
    torch.testing.assert_close(out, on_cpu(u, boundary, 0.5), rtol=0, atol=bound)
    grad = torch.randn_like(out)
    u.requires_grad_()
    (found,) = torch.autograd.grad(laplacian(u, boundary=boundary, scale=0.5), u, grad)
    truth = laplacian_transpose(grad.cpu().double(), boundary=boundary, scale=0.5).to(dtype).cuda()
    largest = float(grad.abs().max()) if grad.numel() else 0.0  # no point of a 2 x 2 grid lies inside
    torch.testing.assert_close(found, truth, rtol=0, atol=8 * 0.5 * TOLERANCE[dtype] * (largest + 1))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_laplacian_strides(boundary):
    base = torch.randn(6, 130, 264, device="cuda")
    cases = (base[:, 2:-2, 4:-4], base[::2, :, 1:-1], base[:, ::2], base.transpose(1, 2), base[:, :1].expand(6, 9, 264))
    for u in cases:
        torch.testing.assert_close(laplacian(u, boundary=boundary), on_cpu(u, boundary, 1.0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1000, 1024])
def test_laplacian_configs_write_all_and_nothing_else(columns, dtype):
    u = torch.randn(3, 67, columns, device="cuda").to(dtype)
    truth = on_cpu(u, "circular", 1.0)
    lanes = columns * dtype.itemsize // 16
    for config in stencil.configs(3, 67, lanes, machine(u.get_device()).sm_count):
        room = torch.full((u.numel() + 32,), float("nan"), device="cuda", dtype=dtype)
        stencil.launch(u, room[16:-16].view_as(u), "circular", 1.0, config)
        bound = 8 * TOLERANCE[dtype] * float(u.abs().max())
        torch.testing.assert_close(room[16:-16].view_as(u), truth, rtol=0, atol=bound, msg=str(config))
        assert room[:16].isnan().all() and room[-16:].isnan().all(), config


def test_laplacian_of_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    u = torch.zeros(3, 32768, 32768, device="cuda", dtype=torch.bfloat16)
    u[2, 30000, 30000] = 1.0
    out = laplacian(u)
    assert out[2, 29999:30002, 29999:30002].tolist() == [[0, 1, 0], [1, -4, 1], [0, 1, 0]]
    assert int(out.count_nonzero()) == 5


def test_add_scalar_of_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    x = torch.zeros(2**31 + 5, device="cuda", dtype=torch.bfloat16)
    out = add_scalar(x, 1.0)
    assert bool((out == 1).all())


@pytest.mark.parametrize("call", [lambda x: add_scalar(x, 1.5), laplacian], ids=["add_scalar", "laplacian"])
def test_graph_capture(call):
    x = torch.randn(64, 512, device="cuda")
    call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, call(x), rtol=0, atol=0)


def test_torch_compile_and_opcheck():
    u = torch.randn(4, 64, 128, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda u: laplacian(u * 2, boundary="interior").sin(), fullgraph=True, dynamic=True)
    eager = laplacian(u * 2, boundary="interior").sin()
    torch.testing.assert_close(compiled(u), eager)
    torch.testing.assert_close(torch.autograd.grad(compiled(u).sum(), u), torch.autograd.grad(eager.sum(), u))
    torch.library.opcheck(torch.ops.expertile.laplacian, (u, "replicate", 1.0))
    torch.library.opcheck(torch.ops.expertile.add_scalar, (u, 1.0))


def test_on_another_stream():
    x = torch.randn(2**22, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = add_scalar(x, 1.0)
    stream.synchronize()
    assert torch.equal(out, x + 1.0)


def test_eager_overhead_is_near_that_of_torch():
    """Report 000's s000 was twice as slow as torch at every size: what it measured was the launch."""
    x, u = torch.randn(32_000, device="cuda"), torch.randn(1, 64, 64, device="cuda")
    seconds = host_seconds(
        {
            "torch.add": lambda: torch.add(x, 1.0),
            "add_scalar": lambda: add_scalar(x, 1.0),
            "laplacian": lambda: laplacian(u),
        }
    )
    told = ", ".join(f"{name} {s * 1e6:.1f} µs" for name, s in seconds.items())
    assert seconds["add_scalar"] <= 3 * seconds["torch.add"], told
    assert seconds["laplacian"] <= 4 * seconds["torch.add"], told
