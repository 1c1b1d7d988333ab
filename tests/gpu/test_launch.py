"""What a call costs the host, and that many calls with ever new shapes leave memory as it was."""

import gc
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from triton.runtime.jit import JITFunction

import expertile as xt
from expertile.device import Device
from expertile.formats.fp8 import Fp8Blocks
from expertile.ops.gathered_mm.api import gathered_gated_mm, gathered_mm
from expertile.ops.gathered_mm.backends import cuda_gated, cuda_gather, gluon_gather
from expertile.ops.grouped_mm.backends import BACKENDS, by_name, gluon_hopper
from expertile.ops.grouped_mm.choose import choose
from expertile.ops.grouped_mm.problem import Problem
from expertile.ops.launch import counter
from expertile.ops.scaled_grouped_mm.backends import cuda_fp8
from expertile.ragged import offs_from_sizes
from tests.ops.grouped_mm.reference import reference

OWN = [b.name for b in BACKENDS if not b.reads_offs_on_host and not b.peer]
_MIB = 2**20


def operands(groups=8, rows=64, k=64, n=64):
    a = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return a, b, offs_from_sizes([rows // groups] * groups, "cuda")


def host_seconds(calls, count=2000, block=100):
    """Median host time of one call of each of `calls`, in blocks taken in turn, no synchronisation inside a block.

    A block's launches fit the GPU's queue, so that nobody waits for the GPU."""
    times = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(50):
            call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(count // block):
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(block):
                    call()
                times[name].append((time.perf_counter() - start) / block)
    finally:
        gc.enable()
        torch.cuda.synchronize()
    return {name: statistics.median(each) for name, each in times.items()}


def test_eager_overhead_is_near_that_of_torch():
    a, b, offs = operands()
    calls = {"F.grouped_mm": lambda: F.grouped_mm(a, b, offs=offs), "auto": lambda: xt.grouped_mm(a, b, offs=offs)}
    for name in OWN:
        calls[name] = lambda name=name: xt.grouped_mm(a, b, offs=offs, backend=name)
    seconds = host_seconds(calls)
    told = ", ".join(f"{name} {s * 1e6:.1f} µs" for name, s in seconds.items())
    ratio = seconds["auto"] / seconds["F.grouped_mm"]
    assert ratio <= 1.5, f"auto costs the host {ratio:.2f} times what F.grouped_mm does ({told})"


def test_choosing_again_costs_little():
    a, b, offs = operands()
    problem, device = Problem.from_tensors(a, b, offs), Device.current()
    seconds = host_seconds(
        {
            "F.grouped_mm": lambda: F.grouped_mm(a, b, offs=offs),
            "from_tensors": lambda: Problem.from_tensors(a, b, offs),
            "choose": lambda: choose(problem, device),
        }
    )
    told = ", ".join(f"{name} {s * 1e6:.2f} µs" for name, s in seconds.items())
    assert seconds["choose"] <= 0.5 * seconds["F.grouped_mm"], told


@pytest.mark.parametrize("backend", ["triton_pointer", "triton_tma", "gluon_hopper"])
def test_other_numbers_of_rows_and_groups_launch_past_triton(backend, monkeypatch):
    """No compilation and none of Triton's own launches, once a kernel of such operands has run; results as before."""
    device = Device.current()
    for groups, rows in ((8, 512), (8, 40), (5, 333), (13, 4096)):
        a, b, _ = operands(groups, rows)
        offs = offs_from_sizes([rows // groups] * groups, "cuda")
        problem = Problem.from_tensors(a, b, offs)
        backend_of = by_name(backend)
        if (reason := backend_of.supports(problem, device)) is not None:
            pytest.skip(reason)
        config = backend_of.configs(Problem.from_tensors(*operands()), device)[0]
        out = xt.grouped_mm(a, b, offs=offs, backend=backend, config=config)
        used = int(offs[-1])
        torch.testing.assert_close(out[:used].float(), reference(a, b, offs)[:used], rtol=0.02, atol=0.5)

        def triton_launch(*args, **kwargs):
            raise AssertionError("Triton compiles or launches")

        monkeypatch.setattr(JITFunction, "run", triton_launch)


def dynamic_products():
    """By name, products whose tiles are drawn from a counter."""
    rows = torch.arange(1000, device="cuda", dtype=torch.int32).flip(0)
    x, w = torch.randn(1000, 512, device="cuda").bfloat16(), torch.randn(4, 4096, 512, device="cuda").bfloat16()
    offs, wt = offs_from_sizes([300, 0, 600, 99], "cuda"), w.transpose(1, 2)
    a, b = Fp8Blocks.quantize(x), Fp8Blocks.quantize(w, (128, 128))
    scaled = (a.values, b.values.transpose(1, 2), a.scales, b.scales)
    hopper = gluon_hopper.Config(num_stages=4, store_parts=2, dynamic=True)
    gluon = gluon_gather.Config(dynamic=True)
    cuda, halves = cuda_gather.Config(dynamic=True), {"interleaved": False}
    return {
        "gluon_hopper": lambda: xt.grouped_mm(x, wt, offs=offs, backend="gluon_hopper", config=hopper),
        "gluon_gather": lambda: gathered_mm(x, wt, rows, offs, backend="gluon_gather", config=gluon),
        "cuda_gather": lambda: gathered_gated_mm(x, wt, rows, offs, backend="cuda_gather", config=cuda, **halves)[0],
        "cuda_gated": lambda: gathered_gated_mm(
            x, wt, rows, offs, backend="cuda_gated", config=cuda_gated.Config(num_stages=4), **halves
        )[0],
        "cuda_fp8": lambda: xt.scaled_grouped_mm(*scaled, offs=offs, backend="cuda_fp8", config=cuda_fp8.Config()),
    }


@pytest.mark.parametrize("name", ["gluon_hopper", "gluon_gather", "cuda_gather", "cuda_gated", "cuda_fp8"])
def test_counters_of_tiles(name):
    """Calls of a stream share one, graphs and other streams have theirs; all are left at zero."""
    if Device.current().capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    call = dynamic_products()[name]
    want = call()[:999].clone()
    torch.cuda.synchronize()
    graphs, of_graphs, places = [torch.cuda.CUDAGraph() for _ in range(2)], [], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            of_graphs.append([call() for _ in range(3)])
            places.append(counter.tile_counter(True, want).data_ptr())
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            results.append(call())
            places += [counter.tile_counter(True, want).data_ptr()] * (i < 4)
            if i % 4 < 2:
                for x in of_graphs[i % 4]:
                    x.fill_(float("nan"))
                graphs[i % 4].replay()
                results += [x.clone() for x in of_graphs[i % 4]]
    torch.cuda.synchronize()
    assert all(torch.equal(x[:999], want) for x in results)
    assert not counter._counters[torch.cuda.current_device()].zeros.any() and len({*places}) == 6


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("backend", ["auto", *OWN])
def test_memory_stays_flat_over_1e5_calls(backend):
    """Every call has a shape of its own: caches must be bounded, and no descriptor, plan or output may stay."""
    most = 65536
    a = torch.randn(most, 64, device="cuda", dtype=torch.bfloat16)
    weights = {
        (g, n): torch.randn(g, n, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for g in (4, 33)
        for n in (64, 72)
    }
    offs = {g: offs_from_sizes([i % 5 for i in range(g)], "cuda") for g in (4, 33)}
    shapes = list(weights)

    def call(i):
        rows = 256 + i * 7919 % (most - 256)  # 7919 is prime: 65280 calls before a number of rows comes again
        g, n = shapes[i % len(shapes)]
        xt.grouped_mm(a[:rows], weights[g, n], offs=offs[g], backend=backend)

    def memory():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return resident_bytes(), torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    for i in range(64):
        call(i)
    torch.cuda.synchronize()
    seconds = []
    for i in range(64, 164):
        start = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    # Now and then a number of rows is the first to want some tile, and that kernel compiles, in 0.1 s or more.
    usual, slow = statistics.median(seconds), sum(s > 20e-3 for s in seconds)
    told = f"a call with a new shape takes {usual * 1e3:.2f} ms, {slow} of {len(seconds)} more than 20 ms"
    assert usual < 2e-3, f"{told}: something compiles or measures every time"
    assert slow <= 5, f"{told}: something compiles or measures again and again"
    first = 20_000  # fills every bounded cache
    for i in range(164, first):
        call(i)
    host, allocated, free = memory()
    for i in range(first, first + 100_000):
        call(i)
    host_after, allocated_after, free_after = memory()
    grown = host_after - host
    assert grown <= 16 * _MIB, f"host memory grew by {grown / _MIB:.1f} MiB over 1e5 calls"
    assert allocated_after == allocated, f"{allocated_after - allocated} bytes of the GPU's memory are still held"
    assert free - free_after <= 16 * _MIB, f"the driver holds {(free - free_after) / _MIB:.1f} MiB more"
