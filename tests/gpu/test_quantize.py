"""The FP8 quantisers on a GPU: every config bit for bit, fused forms, graphs, torch.compile, other streams of rows."""

from dataclasses import replace

import pytest
import torch

from expertile.formats.fp8 import Fp8Blocks
from expertile.ops.quantize import launch as launches
from expertile.ops.quantize.api import quantize_activations, quantize_rms_norm, quantize_swiglu, quantize_weights
from expertile.ragged import offs_from_sizes
from tests.ops.quantize.test_api import (
    DTYPES,
    assert_near,
    assert_same,
    check_per_row,
    check_rows,
    check_tokens,
    check_weights,
    data,
    odd_blocks,
    rms,
    swiglu,
    transposed,
)

CUDA = torch.device("cuda")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="converts no e4m3"
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(1, 128), (1000, 7168), (513, 2048), (77, 2880), (300, 1001), (3, 17)])
def test_rows(shape, dtype, power_of_two):
    check_rows(data(*shape, dtype=dtype).cuda(), power_of_two)
    if not power_of_two:
        check_per_row(data(*shape, dtype=dtype).cuda())


def test_odd_blocks():
    for dtype in (torch.float32, torch.bfloat16):
        for power_of_two in (False, True):
            check_rows(odd_blocks().to(dtype).cuda(), power_of_two)
        check_per_row(odd_blocks().to(dtype).cuda())
    check_weights(odd_blocks().cuda())
    check_tokens(odd_blocks().cuda(), (5, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_float_that_decides_a_tie(dtype):
    """Blocks whose largest element and others run through all significands of bfloat16."""
    significands = 1 + torch.arange(128) / 128
    x = significands[None, :] * torch.tensor([1.0, 0.5, 0.25, 2.0**-14, 2.0**-17])[:, None]
    x = x.repeat(128, 1, 1)
    x[:, :, 0] = 2 * significands[:, None]
    check_rows(x.view(-1, 128).to(dtype).cuda())


def test_rows_of_a_wider_tensor():
    check_rows(data(333, 4352).cuda()[:, :4096])


@pytest.mark.parametrize("k", [256, 2048, 2880, 7168, 9000])
def test_norms(k):
    x, weight = data(300, k, spread=1.0).cuda(), data(1, k, dtype=torch.float32, seed=3)[0].cuda()
    for w in (weight, weight.bfloat16()):
        assert_near(quantize_rms_norm(x, w, eps=1e-3), rms(x, w, 1e-3))


RAGGED = (300, 0, 1, 128, 211)


def check_config_of_tokens(config, source, k=1024):
    """Groups that end within a block of 128 tokens, an empty one, and 60 rows behind them."""
    offs = offs_from_sizes(RAGGED).cuda()
    x = data(700, 2 * k if source.startswith("swiglu") else k, spread=1.0).cuda()
    truth = {
        "plain": lambda: x,
        "swiglu": lambda: swiglu(x, False),
        "swiglu_interleaved": lambda: swiglu(x, True),
        "rms_norm": lambda: rms(x, None, 1e-6),
    }[source]()
    rows, turned, found = launches.quantize_tokens(x, offs, source, eps=1e-6, config=config)
    want, ends = Fp8Blocks.quantize_tokens(truth.float(), offs)
    assert torch.equal(found, ends)
    if source == "plain":
        assert_same(Fp8Blocks(*rows), Fp8Blocks.quantize(x), str(config))
        assert_same(Fp8Blocks(*turned), want, str(config), True)
    else:
        assert_near(Fp8Blocks(*rows), truth)
        assert_near(Fp8Blocks(*turned), transposed(truth, RAGGED, turned[0].shape[1]))


@pytest.mark.parametrize("source", ["plain", "swiglu", "rms_norm"])
def test_configs_of_tokens(source):
    for by in (16, 1):
        check_config_of_tokens(launches.tokens_config(source, by), source)


@pytest.mark.parametrize("source", launches.SOURCES)
def test_configs_of_strips(source):
    default = launches.strips_config(source)
    for config in (default, replace(default, per_program=3), replace(default, staged=not default.staged)):
        check_config_of_tokens(config, source)
    check_config_of_tokens(default, source, 1000)


@pytest.mark.parametrize(
    "sizes, past, k", [((5, 0, 128, 129), 0, 256), ((0, 0), 3, 200), ((1000,), 7, 1001), ((100,) * 200, 50, 128)]
)
def test_tokens(sizes, past, k):
    for dtype in DTYPES:
        check_tokens(data(sum(sizes) + past, k, dtype=dtype).cuda(), sizes)


@pytest.mark.parametrize("shape", [(3, 256, 512), (2, 300, 1000), (1, 129, 131), (4096, 7168)])
def test_weights(shape):
    for dtype in DTYPES:
        check_weights(data(*shape, dtype=dtype).cuda())
    check_weights(data(*shape).cuda().transpose(-2, -1), power_of_two=True)
    w = data(*shape).cuda()
    for blocks in (1, 10**6):
        config = launches.weights_config(blocks, 2, 132)
        made = Fp8Blocks(*launches.quantize_weights(w, config=config), (128, 128))
        assert_same(made, Fp8Blocks.quantize(w, (128, 128)), str(config))


@pytest.mark.parametrize("k", [128, 1000, 2880, 7168])
def test_fused(k):
    x = data(300, 2 * k, spread=1.0).cuda()
    for interleaved in (False, True):
        assert_near(quantize_swiglu(x, interleaved=interleaved), swiglu(x, interleaved))
    weight = data(1, k, seed=3)[0].cuda()
    assert_near(quantize_rms_norm(x[:, :k], weight, eps=1e-3), rms(x[:, :k], weight, 1e-3))


def test_rows_of_a_norm_longer_than_a_program_holds():
    x = data(9, 40000, spread=1.0).cuda()
    assert_near(quantize_rms_norm(x, eps=1e-3), rms(x, None, 1e-3))


def test_silu_far_from_zero():
    gate = torch.linspace(-120, 120, 4096, device=CUDA).view(32, 128)
    x = torch.cat([gate, torch.ones_like(gate)], -1)
    made = quantize_swiglu(x).dequantize()
    truth = torch.nn.functional.silu(gate)
    assert (made - truth).abs().max() < 120 * 2.0**-4 and torch.isfinite(made).all()


def test_graph_with_other_offs():
    x, offs = data(700, 512).cuda(), offs_from_sizes((300, 200, 200)).cuda()
    quantize_activations(x, offs=offs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, turned, ends = quantize_activations(x, offs=offs)
    offs.copy_(offs_from_sizes((1, 600, 50)))
    graph.replay()
    want, want_ends = Fp8Blocks.quantize_tokens(x, offs)
    assert_same(turned, want, turned=True)
    assert_same(rows, Fp8Blocks.quantize(x))
    assert torch.equal(ends, want_ends)


def test_compiled_in_a_graph_of_torch():
    def both(x, w):
        return quantize_activations(x * 2).values, quantize_weights(w).scales

    x, w = data(64, 512).cuda(), data(256, 512).cuda()
    for got, want in zip(torch.compile(both, fullgraph=True, dynamic=True)(x, w), both(x, w), strict=True):
        assert torch.equal(got.float(), want.float())
