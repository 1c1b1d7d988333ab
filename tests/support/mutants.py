"""Kernels with a fault planted in their source: what an emulator and its cases have to notice.

A fault is found by the syntax tree: `Fault(where, find, put)` looks in function `where` for `find`, a piece of Python
in which

    _      stands for any expression, and
    a_     (a letter and an underline) for any, the same wherever it stands; `put` may name it
    ...    stands for any arguments, elements or statements, once in a `find`; `put` may have them too
    all_   in `put` is the whole of what was found,

so that neither line breaks nor names of local variables, nor the module of a function, matter. A `find` that is an
expression becomes the expression `put`, a statement becomes the statements `put`, and an empty `put` takes away the
whole statement. `put=before(find)` moves it in front of the last one before it that has `find` in it: in front of each
such statement in there, if they are branches.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from triton.runtime.jit import JITCallable

_NAMED = re.compile(r"[a-z]_")
_PLACE = {"lineno", "col_offset", "end_lineno", "end_col_offset", "ctx", "type_comment", "kind"}


@dataclass(frozen=True)
class before:
    """Where a statement is moved to: in front of the last one before it with that in it."""

    find: str


@dataclass(frozen=True)
class Fault:
    """What is done to the one place of function `where` (or functions, "f|g") that `find` fits; to place `nth` of
    several, or with nth=... to each. The module's docstring says how `find` and `put` are written."""

    where: str
    find: str
    put: str | before = ""
    nth: int | Any = None


def planted(kernels: Sequence[Any], faults: Fault | Sequence[Fault], folder: Path, patch: pytest.MonkeyPatch) -> list:
    """The kernels with faults in them or in what they call; their modules are written to `folder` and forgotten at the
    end of the test. AssertionError where a fault has no place, or several that it does not ask for."""
    functions = _called(kernels)
    modules = {f.__module__: sys.modules[f.__module__] for f in functions}
    trees: dict[str, ast.Module] = {}  # of the modules that a fault is looked for in
    changed: set[str] = set()
    for fault in [faults] if isinstance(faults, Fault) else faults:
        there = [f for f in functions if f.__name__ in fault.where.split("|")]
        assert there, f"the kernel calls no {fault.where}"
        trees |= {name: _tree(modules[name]) for name in {f.__module__ for f in there} - trees.keys()}
        homes = [(f.__module__, _definition(trees[f.__module__], f.__name__)) for f in there]
        places = [(home, f, *place) for home, f in homes for place in _places(f, fault.find)]
        assert places, f"{fault.where} has no {fault.find}"
        if fault.nth is not ...:
            nth = 0 if fault.nth is None and len(places) == 1 else fault.nth
            assert nth is not None and nth < len(places), f"{fault.where} has {len(places)} times {fault.find}"
            places = [places[nth]]
        for _, function, node, found in places:
            _change(function, node, found, fault.put)
        changed |= {home for home, *_ in places}
    return _imported(kernels, modules, {name: trees[name] for name in changed}, folder, patch)


def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(module.__file__ or "").read_text())


@lru_cache
def _imports(module: ModuleType) -> set[str | None]:
    """The modules that a module imports, or imports names from."""
    froms = [node for node in ast.walk(_tree(module)) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in froms} | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def _called(kernels: Sequence[Any]) -> list[Any]:
    """The functions that kernels call, themselves included, in the order of their modules and lines; not Triton's."""
    found: dict[Any, None] = {}
    waiting = [kernel.fn for kernel in kernels]
    while waiting:
        function = waiting.pop()
        if function in found or function.__module__.startswith("triton."):
            continue
        found[function] = None
        known = function.__globals__
        for name in function.__code__.co_names:
            for value in (known.get(name), *(vars(m).get(name) for m in known.values() if isinstance(m, ModuleType))):
                if isinstance(value, JITCallable):
                    waiting.append(value.fn)
    return sorted(found, key=lambda f: (f.__module__, f.__code__.co_firstlineno))


def _definition(tree: ast.Module, name: str) -> ast.FunctionDef:
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return found


def _imported(
    kernels: Sequence[Any],
    modules: dict[str, ModuleType],
    changed: dict[str, ast.Module],
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> list:
    """The kernels from copies of the changed modules and of those that import them."""
    froms = {name: _imports(module) for name, module in modules.items()}
    copies = changed.keys() | {kernel.fn.__module__ for kernel in kernels}
    while more := {name for name in froms if froms[name] & copies} - copies:
        copies |= more
    mutants = {name: f"mutant{number}_{name.rpartition('.')[2]}" for number, name in enumerate(sorted(copies))}
    for name, mutant in mutants.items():
        tree = changed.get(name) or _tree(modules[name])
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]:
            for alias in list(node.names):
                if (whole := mutants.get(f"{node.module}.{alias.name}")) is not None:  # a module by a name of its own
                    node.names.remove(alias)
                    tree.body.insert(0, ast.Import([ast.alias(whole, alias.asname or alias.name)]))
            if not node.names:
                tree.body.remove(node)
            node.module = mutants.get(node.module or "", node.module)
        (folder / f"{mutant}.py").write_text(ast.unparse(tree))
        # Removed now, and again when the test is over.
        patch.setitem(sys.modules, mutant, modules[name])
        patch.delitem(sys.modules, mutant)
    patch.syspath_prepend(folder)
    importlib.invalidate_caches()
    made = [getattr(importlib.import_module(mutants[k.fn.__module__]), k.fn.__name__) for k in kernels]
    missed = changed.keys() & {f.__module__ for f in _called(made)}
    assert not missed, f"the mutant calls {missed}, not their mutants"
    return made


# ------------------------------------------------------------------------------------------------- finding


def _pattern(find: str) -> ast.AST:
    (statement,) = ast.parse(find).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in the order of the source."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _inside(child)


def _places(function: ast.AST, find: str) -> list[tuple[ast.AST, dict[str, Any]]]:
    """The nodes that fit, with what the names in `find` stand for."""
    pattern, places = _pattern(find), []
    for node in _inside(function):
        found: dict[str, Any] = {"all_": node}
        if _fits(pattern, node, found):
            places.append((node, found))
    return places


def _is_rest(node: Any) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is ...


def _fits(pattern: Any, node: Any, found: dict[str, Any]) -> bool:
    if isinstance(pattern, list):
        return isinstance(node, list) and _fit_all(pattern, node, found)
    if isinstance(pattern, ast.Name) and isinstance(node, ast.expr):
        if pattern.id == "_":
            return True
        if _NAMED.fullmatch(pattern.id):
            return ast.dump(found.setdefault(pattern.id, node)) == ast.dump(node)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    fields = [name for name in pattern._fields if name not in _PLACE]
    if isinstance(pattern, ast.Call):
        wanted = {k.arg: k.value for k in pattern.keywords}
        others = [k for k in node.keywords if k.arg not in wanted]
        if len(others) + len(wanted) != len(node.keywords) or (others and not any(map(_is_rest, pattern.args))):
            return False
        if any(map(_is_rest, pattern.args)):
            found["keywords"] = others
        fields = ["func", "args"]
        if not all(_fits(wanted[k.arg], k.value, found) for k in node.keywords if k.arg in wanted):
            return False
    return all(_fits(getattr(pattern, name), getattr(node, name), found) for name in fields)


def _fit_all(patterns: list, nodes: list, found: dict[str, Any]) -> bool:
    """Lists fit; one element of the pattern may stand for any number."""
    rest = [i for i, pattern in enumerate(patterns) if _is_rest(pattern)]
    if rest:
        first, more = rest[0], len(nodes) - len(patterns) + 1
        if more < 0:
            return False
        found["..."] = nodes[first : first + more]
        patterns, nodes = patterns[:first] + patterns[first + 1 :], nodes[:first] + nodes[first + more :]
    return len(patterns) == len(nodes) and all(_fits(p, n, found) for p, n in zip(patterns, nodes, strict=True))


# ------------------------------------------------------------------------------------------------- changing


class _Put(ast.NodeTransformer):
    """Fills a `put` with what its names stand for."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return deepcopy(self.found.get(node.id, node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if any(map(_is_rest, node.args)):
            node.keywords += deepcopy(self.found["keywords"])
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        return deepcopy(self.found["..."]) if _is_rest(node) else node

    def visit_Expr(self, node: ast.Expr) -> Any:
        value = self.visit(node.value)
        return ast.Expr(value) if isinstance(value, ast.expr) else value


def _home(function: ast.AST, node: ast.AST) -> tuple[list[Any], int]:
    """The innermost statement that a node is, or stands in: a body and the statement's place there."""
    for parent in reversed(list(ast.walk(function))):
        for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            for at, statement in enumerate(body if isinstance(body, list) else ()):
                if node in _inside(statement):
                    return body, at
    raise ValueError("the node stands in no statement")


def _change(function: ast.AST, node: ast.AST, found: dict[str, Any], put: str | before) -> None:
    body, at = _home(function, node)
    if isinstance(put, before):
        places = next((p for p in ([*_places(s, put.find)] for s in reversed(body[:at])) if p), None)
        assert places, f"nothing before it has {put.find}"
        statement, body[at] = body[at], ast.Pass()
        for there, _ in places:
            other, place = _home(function, there)
            other.insert(place, statement)
        return
    new = ast.parse(put or "pass").body
    if len(new) == 1 and isinstance(new[0], ast.Expr) and isinstance(node, ast.expr):
        expression = _Put(found).visit(new[0].value)
        for parent in _inside(function):
            for name, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, name, expression)
                elif isinstance(value, list):
                    value[:] = [expression if x is node else x for x in value]
    else:
        body[at : at + 1] = _Put(found | {"all_": body[at]}).visit(ast.Module(new, [])).body
