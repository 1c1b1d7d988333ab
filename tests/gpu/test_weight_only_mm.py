"""weight_only_mm on a real GPU: every backend over the shared case table, and the public call."""

import pytest
import torch

from expertile.device import Device
from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
from expertile.ops.weight_only_mm.api import weight_only_mm
from expertile.ops.weight_only_mm.backends import BACKENDS, by_name
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem
from expertile.ragged import offs_from_sizes
from tests.ops.weight_only_mm.cases import CASES, LARGE, Case, check, make, poisoned_out, problem_of
from tests.ops.weight_only_mm.reference import reference

OURS = [b for b in BACKENDS if not b.reads_offs_on_host]
KERNELS = [b for b in OURS if b.name != "dequant"]
SIZES = [13, 0, 57, 64, 1]
G, K, N = len(SIZES), 512, 384


def run(backend, case: Case, which) -> int:
    """Run the configs that `which` picks from those of `backend`; how many there were."""
    device, operands = Device.current(), make(case, "cuda")
    problem = problem_of(case, operands)
    if backend.supports(problem, device) is not None:
        return 0
    configs = which(backend.configs(problem, device))
    for config in configs:
        out = poisoned_out(case, "cuda")
        assert backend.run(problem, operands, config, out) is out
        try:
            check(case, out, operands)
        except AssertionError as e:
            raise AssertionError(f"{backend.name} {config}: {e}") from None
    return len(configs)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_cases(backend, case):
    if not run(backend, case, lambda configs: configs[:1]):
        pytest.skip(f"{backend.name} does not take this case")


@pytest.mark.parametrize("backend", KERNELS, ids=lambda b: b.name)
@pytest.mark.parametrize("name", ["past-the-end", "mxfp4", "mxfp4-fp16"])
def test_every_config(backend, name):
    case = next(c for c in CASES if c.name == name)
    if not run(backend, case, lambda configs: configs[1:]):
        pytest.skip(f"{backend.name} does not take this case")


def operands(sizes=SIZES, past=0, group=128, symmetric=True):
    gen = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(sum(sizes) + past, K, device="cuda", generator=gen).bfloat16()
    w = torch.randn(len(sizes), N, K, device="cuda", generator=gen).bfloat16()
    kept = Mxfp4Weight.quantize(w) if group == "mxfp4" else Int4Weight.quantize(w, group, symmetric)
    return a, kept, offs_from_sizes(sizes, "cuda")


def close(out, want):
    used = ~want.isnan()
    assert (out[used].float() - want[used]).abs().max() <= 2.0**-7 * want[used].abs().max()


@pytest.mark.parametrize("backend", OURS, ids=lambda b: b.name)
@pytest.mark.parametrize("group, symmetric", [(128, True), (32, False), (None, False)])
def test_one_hot_activations_decode_every_weight(backend, group, symmetric):
    _, w, _ = operands(group=group, symmetric=symmetric)
    a, offs = torch.eye(K, device="cuda").bfloat16().repeat(G, 1), offs_from_sizes([K] * G, "cuda")
    problem, device = WeightOnlyProblem.of(a, w, offs), Device.current()
    if reason := backend.supports(problem, device):
        pytest.skip(reason)
    for config in backend.configs(problem, device)[:4]:  # some scale sums, some scale weights
        out = weight_only_mm(a, w, offs=offs, backend=backend.name, config=config)
        assert torch.equal(out.view(G, K, N).transpose(1, 2), w.dequantize()), config


@pytest.mark.parametrize("backend", OURS, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_hot_activations_decode_every_mxfp4_weight(backend, dtype):
    """Every code beside every scale of the range in which a kernel is exact."""
    low, high = (127 - 93, 127 + 33) if dtype is torch.bfloat16 else (127 - 23, 127 + 1)
    blocks = torch.arange(N * K // 32, device="cuda")[:, None] + torch.arange(32, device="cuda")
    codes = blocks.remainder(16).to(torch.uint8).view(1, N, K).repeat(G, 1, 1)
    scales = (low + torch.arange(G * N * K // 32, device="cuda") % (high - low + 1)).to(torch.uint8)
    w = Mxfp4Weight.of_codes(codes, scales.view(G, N, K // 32))
    a, offs = torch.eye(K, device="cuda", dtype=dtype).repeat(G, 1), offs_from_sizes([K] * G, "cuda")
    problem, device = WeightOnlyProblem.of(a, w, offs, check=True), Device.current()
    if reason := backend.supports(problem, device):
        pytest.skip(reason)
    for config in backend.configs(problem, device)[:4]:
        out = weight_only_mm(a, w, offs=offs, backend=backend.name, config=config)
        assert torch.equal(out.view(G, K, N).transpose(1, 2), w.dequantize(dtype)), config


@pytest.mark.parametrize("k", [32, 96, 512])
def test_dequantize_mxfp4_bit_for_bit(k):
    blocks = torch.randint(0, 256, (3, 130, k // 32, 16), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0, 255, blocks.shape[:3], dtype=torch.uint8, device="cuda")
    given = Mxfp4Weight.from_blocks(blocks, scales)
    assert torch.equal(given.blocks(), blocks) and torch.equal(given.scale_bytes(), scales)
    for w in (given, Mxfp4Fp8Weight.of(given)):
        fields = (w.packed, w.scales, None, w.format, 32, k)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            got, want = torch.ops.expertile.weight_only_dequantize(*fields, dtype), w.to("cpu").dequantize(dtype)
            assert torch.equal(got.cpu(), want)
            if k > 128:
                part = torch.ops.expertile.weight_only_dequantize(*fields, dtype, 128, 384)
                assert torch.equal(part.cpu(), want[..., 128:384])


def test_rounding_is_that_of_a_cpu():
    w = torch.randn(2, 40, 256, generator=torch.Generator().manual_seed(0))
    here, there = Mxfp4Weight.quantize(w), Mxfp4Weight.quantize(w.cuda())
    assert torch.equal(here.packed, there.packed.cpu()) and torch.equal(here.scales, there.scales.cpu())


@pytest.mark.parametrize("k, group, zeros", [(512, 128, False), (192, 32, True), (192, None, True)])
def test_dequantize_bit_for_bit(k, group, zeros):
    w = Int4Weight.quantize(torch.randn(3, 130, k, device="cuda"), group, symmetric=not zeros)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        fields = (w.packed, w.scales, w.zeros, "int4", w.group_size, k)
        got = torch.ops.expertile.weight_only_dequantize(*fields, dtype)
        assert torch.equal(got, w.dequantize(dtype))


@pytest.mark.parametrize("backend", ["auto", *(b.name for b in OURS)])
def test_no_host_synchronisation(backend):
    a, w, offs = operands()
    try:
        weight_only_mm(a, w, offs=offs, backend=backend)  # compiled outside the check
    except ValueError as e:
        pytest.skip(str(e))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        weight_only_mm(a, w, offs=offs, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("group", [128, "mxfp4"])
@pytest.mark.parametrize("backend", ["auto", *(b.name for b in OURS)])
def test_graph_replays_with_new_offs(backend, group):
    a, w, offs = operands(group=group, symmetric=False)
    try:
        weight_only_mm(a, w, offs=offs, backend=backend)
    except ValueError as e:
        pytest.skip(str(e))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = weight_only_mm(a, w, offs=offs, backend=backend)
    for sizes in (SIZES, [0, 100, 5, 20, 10], [135, 0, 0, 0, 0]):
        offs.copy_(offs_from_sizes(sizes, "cuda"))
        graph.replay()
        close(out, reference(a, w, offs))


@pytest.mark.parametrize("group, range_bytes", [(128, 2**28), (128, 2), ("mxfp4", 2**28), ("mxfp4", 2)])
def test_gradient_and_compile(group, range_bytes, monkeypatch):
    monkeypatch.setattr("expertile.ops.weight_only_mm.api._RANGE_BYTES", range_bytes)
    a, w, offs = operands(past=3, group=group, symmetric=False)
    a.requires_grad_()
    used = sum(SIZES)
    want = torch.cat([torch.ones(s, N, device="cuda") @ w.dequantize(torch.float32)[g] for g, s in enumerate(SIZES)])
    compiled = torch.compile(lambda a: weight_only_mm(a, w, offs=offs), fullgraph=True)
    for call in (compiled, lambda a: weight_only_mm(a, w, offs=offs)):
        out = call(a)
        close(out[:used], reference(a.detach(), w, offs)[:used])
        (da,) = torch.autograd.grad(out[:used].sum(), a)
        close(da[:used], want)
        assert (da[used:] == 0).all()


@pytest.mark.parametrize("group", [64, "mxfp4"])
@pytest.mark.parametrize("backend", KERNELS, ids=lambda b: b.name)
def test_same_bits_every_time(backend, group):
    a, w, offs = operands([300, 0, 64, 1, 20], group=group, symmetric=False)
    problem = WeightOnlyProblem.of(a, w, offs)
    if reason := by_name(backend.name).supports(problem, Device.current()):
        pytest.skip(reason)
    first = weight_only_mm(a, w, offs=offs, backend=backend.name)
    for _ in range(20):
        assert torch.equal(weight_only_mm(a, w, offs=offs, backend=backend.name), first)
