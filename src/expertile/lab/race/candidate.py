"""`--candidate my_kernel.py:fn`: a user's own function, gated and raced like any backend. By its parameters it is

    fn(a, b, offs) -> out                      a [rows, K], b [G, K, N], offs [G] int32 on the device, as `grouped_mm`
                                               takes them (offs may be keyword-only); out [rows, N]
    fn(group_A, group_B) -> list of tensors    a pair of 2-D matrices for each group with rows, a product of each

Results have the dtype of the operands. Splitting the operands into views is part of the second's call, stacking its
results is not.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from expertile.lab.race.reference import products
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.problem import Layout, Problem

_PRINTS = 5
SIGNATURES = "fn(a, b, offs) -> out, or fn(group_A, group_B) -> list of products"


def parse_spec(spec: str) -> tuple[Path, str]:
    """ "my_kernel.py:fn" -> (path, "fn"). ValueError naming what is wrong; the file is not run."""
    file, colon, function = spec.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise ValueError(f"candidate: expected FILE.py:FUNCTION, got {spec!r}")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"candidate: no file {file!r} (from {spec!r})")
    return path.resolve(), function


def candidate_name(spec: str) -> str:
    """How a candidate is called in tables: "my_kernel.py:fn", without folders."""
    path, _, function = spec.rpartition(":")
    return f"{Path(path).name}:{function}"


def load(spec: str) -> Backend:
    """Run the candidate's file and make its function a backend. ValueError with a message for the author: no such file
    or function, an exception during import (with its line), or a signature that is neither of the two."""
    path, name = parse_spec(spec)
    module = _import(path)
    function = getattr(module, name, None)
    if function is None:
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_") and n != "print"]
        raise ValueError(f"candidate: {path.name} has no {name!r}; its functions: {', '.join(names) or 'none'}")
    if type(function).__name__ in ("JITFunction", "GluonJITFunction", "Autotuner", "Heuristics"):
        raise ValueError(f"candidate: {name!r} is a Triton kernel; name the Python function that launches it")
    if not callable(function):
        raise ValueError(f"candidate: {name!r} in {path.name} is a {type(function).__name__}, not a function")
    style = _style(function, f"{path.name}:{name}")

    def call(problem: Problem, operands: Operands) -> Any:
        if style == "pairs":
            groups = _groups(problem, operands, problem.sizes(operands.offs))
            return function([a for _, a, _ in groups], [b for _, _, b in groups])
        if style == "offs":
            return function(operands.a, operands.b, operands.offs)
        return function(operands.a, operands.b, offs=operands.offs)

    def run(problem: Problem, operands: Operands, config: Any, out: torch.Tensor | None) -> Any:
        try:
            result = call(problem, operands)
        except SystemExit as error:  # which would end the bench
            raise RuntimeError(f"it exits with code {error.code}") from None
        return result if out is None else gather(result, problem, operands, out)

    return Backend(
        name=candidate_name(spec),
        summary="a candidate given on the command line",
        supports=lambda problem, device: "candidates take no bias" if problem.has_bias else None,
        configs=lambda problem, device: (NoConfig(),),
        run=run,
        reads_offs_on_host=style == "pairs",
        peer=True,
    )


def gather(result: Any, problem: Problem, operands: Operands, out: torch.Tensor) -> torch.Tensor:
    """Write what a candidate returned (a tensor, or one product per non-empty group) into `out`. ValueError says what
    was expected and what came."""
    sizes = problem.sizes(operands.offs)
    if isinstance(result, torch.Tensor):
        _plain(result, "result")
        _same_dtype(result, problem, "result")
        end = sum(sizes)
        ragged_dim = {Layout.RAGGED_M: 0, Layout.RAGGED_N: 1}.get(problem.layout)
        if ragged_dim is not None and result.dim() == 2 and result.shape[ragged_dim] >= end:
            _same_shape(result.narrow(ragged_dim, 0, end), out.narrow(ragged_dim, 0, end), "result")
            out.narrow(ragged_dim, 0, end).copy_(result.narrow(ragged_dim, 0, end))
            return out
        _same_shape(result, out, "result")
        return out.copy_(result)
    if not isinstance(result, list | tuple):
        raise ValueError(f"result: expected a tensor or a list of tensors, got {type(result).__name__}")
    blocks = [out[where] for where, _, _ in _groups(problem, operands, sizes)]
    if len(result) != len(blocks):
        raise ValueError(f"result: expected {len(blocks)} products, one per group with rows, got {len(result)}")
    for i, (product, block) in enumerate(zip(result, blocks, strict=True)):
        if not isinstance(product, torch.Tensor):
            raise ValueError(f"result[{i}]: expected a tensor, got {type(product).__name__}")
        _plain(product, f"result[{i}]")
        _same_dtype(product, problem, f"result[{i}]")
        _same_shape(product, block, f"result[{i}]")
        block.copy_(product)
    if problem.layout is Layout.RAGGED_K:
        for g, size in enumerate(sizes):
            if size == 0:
                out[g].zero_()
    return out


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"expertile_candidate_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"candidate: expected a Python file, got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    # Triton looks a kernel's module up by name to read its source; a file may import its neighbours.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    module.__dict__["print"] = _few_prints(path.name)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ValueError(
            f"candidate: importing {path.name} failed{_line_in(error, path)}: {_describe(error)}"
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _few_prints(name: str) -> Callable[..., None]:
    """A `print` for the candidate's file: a race calls it thousands of times, and the first few lines tell as much."""
    left = _PRINTS

    def few(*values: Any, **options: Any) -> None:
        nonlocal left
        if options.get("file") in (None, sys.stdout, sys.stderr):
            left -= 1
            if left < 0:
                return
            if not left:
                values, options = (f"({name}: what it prints from here on is cut)",), {}
        print(*values, **options)

    return few


def _style(function: Callable[..., Any], name: str) -> str:
    """How it is called: "offs", "offs_keyword" or "pairs". ValueError for another signature."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ValueError(f"candidate: the signature of {name} cannot be read; wrap it in {SIGNATURES}") from None
    kinds = inspect.Parameter
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is kinds.empty]
    keyword = {p.name: p for p in parameters if p.kind is kinds.KEYWORD_ONLY}
    extra = [p.name for p in keyword.values() if p.default is kinds.empty and p.name != "offs"]
    takes_offs = len(positional) >= 3 and ("offs" in positional[2].name or len(required) == 3)
    if not extra and len(required) <= 3:
        if takes_offs:
            return "offs"
        if "offs" in keyword and len(positional) >= 2:
            return "offs_keyword"
        if len(required) == 2:
            return "pairs"
    raise ValueError(f"candidate: expected {SIGNATURES}; got {name}{inspect.signature(function)}")


def _groups(problem: Problem, operands: Operands, sizes: Sequence[int]) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """(where in the result, a, b) of each group that has something to sum or rows."""
    return [(where, a, b) for where, a, b, _ in products(problem.layout, operands, sizes) if a.shape[-1]]


def _plain(result: torch.Tensor, name: str) -> None:
    """ValueError for a subclass of tensors: it may compute when it is read, which a race doesn't time."""
    if type(result) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"{name}: expected a torch.Tensor, got its subclass {type(result).__name__}")


def _same_dtype(result: torch.Tensor, problem: Problem, name: str) -> None:
    if result.dtype != problem.out_dtype:
        raise ValueError(f"{name}: expected dtype {problem.out_dtype}, got {result.dtype}")


def _same_shape(result: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if result.shape != expected.shape:
        raise ValueError(f"{name}: expected shape {list(expected.shape)}, got {list(result.shape)}")


def _describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _line_in(error: BaseException, path: Path) -> str:
    """ " at line 12", the last line of the candidate's own file in the traceback."""
    if isinstance(error, SyntaxError):
        return f" at line {error.lineno}"
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" at line {line}" if line else ""
