"""Repairs for Triton's CPU interpreter (TRITON_INTERPRET=1), and a way to run a test file under it.

What is wrong in Triton 3.6 to 3.9, each shown by a test in test_interpreter.py:

1. bfloat16 lives in uint16 arrays and float8 in uint8 arrays; `tl.dot` on bfloat16, and arithmetic and comparisons on
   either, compute with the bit patterns.
2. float32 -> bfloat16 truncates instead of rounding to nearest even, and where it rounds it loses the carry into the
   exponent (1.99999 becomes 1.0).
3. a comparison's result has the type of what is compared, so a scalar one broadcast to a mask becomes integers; Triton
   3.9 then refuses it as a mask.
4. numpy >= 2.4 refuses int() of an array with one element, so a loop with a run-time bound fails.

What is slow in it, together most of an interpreted test's time:

5. every call of a function within a kernel looks through the whole language for what to replace, again.
6. every sum, difference and product of integers is computed a second time in int64 and compared with what 32 bits
   hold, for an assertion that is then left out (`device_assert` does nothing without `debug`, which is never on here).
7. every value computes anew what follows from its type alone, every type what follows from its element and shape, and
   numpy's type is looked up in a table that is built for each look.
8. blocks of one shape are compared extent by extent, as compile-time constants, before every operation on two of them.
9. a sort's sums modulo two are made element by element, by the language itself.

A descriptor's offset in the last dimension must be a multiple of 16 bytes, which looks like one more error (the
driver's documentation asks it of base and strides only) and is not: the hardware calls anything else an illegal
instruction.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import expertile

_TORCH_DTYPE = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
# The types kept as bit patterns, with the integer that holds them; the finite value at which conversions saturate.
_BITS = {tl.bfloat16: np.uint16, tl.float8e4nv: np.uint8, tl.float8e5: np.uint8}
_SATURATES_AT = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def active() -> bool:
    """Whether this process interprets Triton kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def run_file_interpreted(path: str) -> None:
    """Run the tests of one file in a process with TRITON_INTERPRET=1 (it must be set before Triton is imported) and
    fail with that process's output unless all pass."""
    # Hypothesis tells its failing examples without its plugin, which takes most of a second to load and to close. The
    # one for exceptions in finalisers, which it warns of, collects all garbage at the end.
    plugins = ("cacheprovider", "hypothesispytest", "anyio", "xdist", "unraisableexception")
    without = [f"-pno:{plugin}" for plugin in plugins]
    words = ["-q", "--no-header", *without, "--tb=short", path]
    server = _server()
    assert server.stdin and server.stdout
    with tempfile.NamedTemporaryFile(prefix="interpreted-") as log:
        print(json.dumps([log.name, *words]), file=server.stdin, flush=True)
        while (answer := json.loads(server.stdout.readline()))[0] != log.name:
            pass  # of a file for which nobody waited to the end
        assert answer[1] == 0, f"TRITON_INTERPRET=1 pytest {' '.join(words)}\n{log.read().decode()[-10000:]}"


@lru_cache
def _server() -> subprocess.Popen[str]:
    """A process that has imported what the files need, most of what a file's run would cost; it ends with this one."""
    code = f"from {__name__} import _serve; _serve()"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    pipe = subprocess.PIPE
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen([sys.executable, "-c", code], env=env, cwd=root, stdin=pipe, stdout=pipe, text=True)


def _serve() -> None:
    """Of each line (a file for output and words for pytest) run a session in a fork; tell its exit status."""
    for name in expertile.__all__:
        getattr(expertile, name)
    gc.freeze()
    for line in sys.stdin:
        log, *words = json.loads(line)
        child = os.fork()
        if not child:
            with open(log, "wb") as file:
                for descriptor in (1, 2):
                    os.dup2(file.fileno(), descriptor)
            status = pytest.main(words)
            sys.stdout.flush()
            os._exit(status)  # to take down torch and Triton takes half a second
        print(json.dumps([log, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]), flush=True)


def _decode(data: np.ndarray, dtype: Any) -> torch.Tensor:
    """The values of an interpreter array as a torch tensor of the true dtype."""
    storage = _BITS.get(dtype) or interpreter._get_np_dtype(dtype)
    return torch.from_numpy(np.ascontiguousarray(data).view(storage).copy()).view(_TORCH_DTYPE[dtype])


def _encode(values: torch.Tensor, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Bits of `values` in `dtype`, rounded to nearest even and saturated as the GPU's cvt does for float8."""
    if dtype in _SATURATES_AT:
        values = values.float().clamp(-_SATURATES_AT[dtype], _SATURATES_AT[dtype])
    values = values.to(_TORCH_DTYPE[dtype]).contiguous()
    size = values.element_size()
    return values.view(_SIGNED_TORCH[size]).numpy().view(_UNSIGNED[size]).reshape(shape)


def _float_values(handle: Any) -> np.ndarray:
    """The handle's array, decoded to float32 if it holds bit patterns."""
    dtype = handle.dtype.scalar
    return _decode(handle.data, dtype).float().numpy().reshape(handle.data.shape) if dtype in _BITS else handle.data


def _from_float32(values: np.ndarray, dtype: Any) -> Any:
    return interpreter.TensorHandle(_encode(torch.from_numpy(values.astype(np.float32)), dtype, values.shape), dtype)


def _convert_float(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        source, target = source.scalar, target.scalar
        if source not in _TORCH_DTYPE or target not in _TORCH_DTYPE:
            return original(data, source, target, rounding)
        return _encode(_decode(data, source), target, np.shape(data))

    return convert


def _binary_op(original: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., np.ndarray]) -> Any:
        dtype = lhs.dtype.scalar
        if dtype not in _BITS:
            plain = original(self, lhs, rhs, op)
            return interpreter.TensorHandle(plain.data, tl.int1) if plain.data.dtype == np.bool_ else plain
        result = op(_float_values(lhs), _float_values(rhs))
        if result.dtype == np.bool_:
            return interpreter.TensorHandle(result, tl.int1)
        return _from_float32(result, dtype)

    return binary_op


def _ternary_op(original: Callable[..., Any]) -> Callable[..., Any]:
    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Callable[..., np.ndarray]) -> Any:
        dtype = other.dtype.scalar
        # tl.where selects, which is right on bits; fma and clamp compute
        if dtype not in _BITS or op is np.where:
            return original(self, lhs, rhs, other, op)
        return _from_float32(op(_float_values(lhs), _float_values(rhs), _float_values(other)), dtype)

    return ternary_op


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, handle: Any, target: Any) -> Any:
        source, target = handle.dtype.scalar, target.scalar
        if source not in _BITS and target not in _BITS:
            return original(self, handle, target)
        values = _float_values(handle).astype(np.float32)
        if target in _BITS:
            return _from_float32(values, target)
        return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(target)), target)

    return cast


def _dot(self: Any, a: Any, b: Any, acc: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.matmul(_float_values(a), _float_values(b), dtype=acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


def _patch_tensor(original: Callable[..., None]) -> Callable[..., None]:
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    return patch


def _remembering(original: Callable[..., None], key: Callable[..., Any]) -> Callable[..., None]:
    """An `__init__` that computes an object's attributes once for each `key` of its arguments."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, *given: Any) -> None:
        attributes = known.get(name := key(*given))
        if attributes is None:
            original(self, *given)
            known[name] = dict(vars(self))
        else:
            vars(self).update(attributes)

    return init


def _tensor(original: Callable[..., None]) -> Callable[..., None]:
    of_type = _remembering(original, lambda handle, type: type.name)

    def init(self: Any, handle: Any, type: Any) -> None:
        of_type(self, handle, type)
        self.handle = handle

    return init


def _block_key(element: Any, shape: Any) -> tuple[Any, ...]:
    return (element.name, *[getattr(extent, "value", extent) for extent in shape])


def _np_dtype(original: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    known: dict[str, np.dtype] = {}

    def np_dtype(dtype: Any) -> np.dtype:
        if dtype.name not in known:  # one without fields is false
            known[dtype.name] = original(dtype)
        return known[dtype.name]

    return np_dtype


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        if blocks and lhs.handle.data.shape == rhs.handle.data.shape:
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast


def _generic_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: Any, values: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return original(self, values)
        return [
            self.to_tensor(np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype)
            for x in values
        ]

    return reduce


def _patch_for_good(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # No kernel is compiled in this process: nobody needs the language as it was.
    original(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    return lambda fn: SimpleNamespace(restore=lambda: None)


def repair() -> None:
    """Apply all repairs to this process's Triton; calling it again does nothing. Only for interpreted processes."""
    builder = interpreter.InterpreterBuilder
    if builder.create_dot is _dot:
        return
    interpreter._convert_float = _convert_float(interpreter._convert_float)
    interpreter._patch_lang_tensor = _patch_tensor(interpreter._patch_lang_tensor)
    builder.binary_op = _binary_op(builder.binary_op)
    builder.ternary_op = _ternary_op(builder.ternary_op)
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_dot = _dot
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)
    interpreter.ReduceOps.generic_reduce = _generic_reduce(interpreter.ReduceOps.generic_reduce)
    interpreter._get_np_dtype = _np_dtype(interpreter._get_np_dtype)
    tl.tensor.__init__ = _tensor(tl.tensor.__init__)
    tl.block_type.__init__ = _remembering(tl.block_type.__init__, _block_key)
    running = interpreter.interpreter_builder
    running.options = replace(running.options, sanitize_overflow=False)
    interpreter._patch_lang = _patch_for_good(interpreter._patch_lang)  # last: it takes the repairs above with it
