"""Every launch of a pointwise kernel: one compiled kernel for all shapes, called with what its parameters ask for."""

import contextlib
from typing import Any

import pytest
import torch
import triton

from expertile.ops.launch import launch
from expertile.ops.launch.device import Machine
from expertile.ops.pointwise import add_scalar
from expertile.ops.pointwise import laplacian as stencil
from tests.support.fake_driver import compile_only

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter launches nothing"),
]


class OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on GPU 0."""

    def get_device(self) -> int:
        return 0


@pytest.fixture
def launches(monkeypatch):
    """(compiled kernel, arguments) of every direct launch, and the kernels compiled for them."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []
    prepared: list[Any] = []

    def prepare(kernel, cluster=1):
        prepared.append(kernel)
        return lambda device, programs, tensors, rest: seen.append((kernel, (device, programs, tensors, *rest)))

    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(stencil, "machine", lambda index: Machine(132, True))
    caches = launch._compiled, add_scalar._plan, stencil._plan
    for cache in caches:
        cache.cache_clear()
    with compile_only(90):
        yield seen, prepared
    for cache in caches:
        cache.cache_clear()


def on_gpu(*shape, dtype=torch.float32, offset=0):
    room = torch.empty(torch.Size(shape).numel() + 16, dtype=dtype)
    return room[offset : offset + torch.Size(shape).numel()].view(shape).as_subclass(OnGpu)


def test_one_kernel_serves_every_size_and_value(launches):
    seen, prepared = launches
    config = add_scalar.Config(1024, 4)
    for numel, value in ((1, 1.0), (1000, 2.5), (4096, 0.0), (10**6, -1.0)):
        x, out = on_gpu(numel), on_gpu(numel)
        add_scalar.launch(x, out, value, config)
        _, (device, programs, tensors, *rest) = seen[-1]
        assert (device, programs, [*tensors]) == (0, -(-numel // 1024), [])
        assert rest[:4] == [x.data_ptr(), out.data_ptr(), value, numel]
        assert len(rest) == len(add_scalar._add_scalar_kernel.arg_names)
    assert len(prepared) == 1
    add_scalar.launch(on_gpu(1000, offset=1), on_gpu(1000), 1.0, config)
    add_scalar.launch(on_gpu(1000, dtype=torch.bfloat16), on_gpu(1000, dtype=torch.bfloat16), 1.0, config)
    assert len(prepared) == 3, "another alignment and another dtype need code of their own"


def test_one_kernel_serves_every_grid(launches):
    seen, prepared = launches
    config = stencil.Config(8, 4)
    for shape in ((1, 64, 4096), (3, 1000, 512), (1, 1, 4)):
        u, out = on_gpu(*shape), on_gpu(*shape)
        stencil.launch(u, out, "zero", 0.5, config)
        _, (_, programs, _, *rest) = seen[-1]
        named = dict(zip(stencil._laplacian_kernel.arg_names, rest, strict=True))
        grids, rows, columns = shape
        assert programs == grids * -(-rows // 8) * -(-columns // 512)
        assert (named["u_ptr"], named["out_ptr"], named["scale"]) == (u.data_ptr(), out.data_ptr(), 0.5)
        assert (named["rows"], named["columns"] * 4, named["u_stride_row"] * 4) == (rows, columns, columns)
    (kernel,) = prepared
    constants = {kernel.src.fn.arg_names[i]: value for (i,), value in kernel.src.constants.items()}
    assert [constants[name] for name in ("BOUNDARY", "VECTOR", "LANES", "BLOCK_ROWS")] == ["zero", 4, 128, 8]


def test_signature_of_the_compiled_kernel_takes_wide_numbers(launches):
    _, prepared = launches
    add_scalar.launch(on_gpu(8), on_gpu(8), 1, add_scalar.Config(512, 4))
    stencil.launch(on_gpu(1, 4, 4), on_gpu(1, 4, 4), "zero", 1)
    add, laplacian = (kernel.src.signature for kernel in prepared)
    assert (add["numel"], add["value"]) == ("i64", "fp32")
    assert (laplacian["u_stride_grid"], laplacian["u_stride_row"], laplacian["scale"]) == ("i64", "i64", "fp32")


def test_profilers_are_shown_launches_by_triton(launches, monkeypatch):
    seen, _ = launches
    monkeypatch.setattr(launch, "hooked", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    add_scalar.launch(on_gpu(8), on_gpu(8), 1.0, add_scalar.Config(512, 4))
    assert not seen
