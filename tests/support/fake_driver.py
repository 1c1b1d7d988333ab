"""A Triton driver for a GPU that is not there: launches on CPU tensors compile for it and stop before running.

The JIT derives the signature, the divisibility and the `== 1` specialisation from the real arguments of the real host
function, so what is compiled is what users will run. Works for plain Triton and Gluon, host descriptors included.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ptxas_logs: dict[bytes, str] = {}  # by what ptxas wrote, of kernels compiled in this process


class FakeDriver:
    """The part of Triton's driver interface that compilation uses, for compute capability `arch` (90 for sm_90)."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 1000 + self.arch  # the JIT keeps one cache of kernels per device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


@contextlib.contextmanager
def compile_only(arch: int) -> Iterator[list[Any]]:
    """Within the block every Triton launch compiles for sm_`arch` and runs nothing; yields the list of kernels."""
    before = driver._active
    original = JITFunction.run
    compiled: list[Any] = []

    def warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("expertile."):
            assert kwargs.get("enable_fp_fusion") is not None, f"{self.fn.__name__}: Triton's default decides"
        with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
            knobs.nvidia.dump_ptxas_log = True
            kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        if "Compiling entry function" in log.getvalue():  # not of a kernel that Triton has from its cache
            ptxas_logs[kernel.asm["cubin"]] = log.getvalue()
        compiled.append(kernel)
        return kernel

    driver.set_active(FakeDriver(arch))
    JITFunction.run = warm_up
    try:
        yield compiled
    finally:
        JITFunction.run = original
        driver._active = before
