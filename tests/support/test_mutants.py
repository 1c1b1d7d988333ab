"""Faults are found by the syntax tree, wherever a function stands and whatever its variables are called."""

import importlib
import sys

import pytest

from tests.support.mutants import Fault, before, planted

PARTS = """
import triton

@triton.jit
def put_down(seen, what, count=1):
    seen.append(what * count)  # what `count` is for

@triton.jit
def both(seen, x, wide):
    if wide:
        put_down(seen, x + 1, count=2)
        put_down(seen, x + 2)
    else:
        put_down(seen, x + 3)
    put_down(seen, 0)
    put_down(seen, x - (5 - x), count=3)
    return [x, x + 7]

@triton.jit
def not_called(seen):
    put_down(seen, 9)
"""
KERNEL = """
import triton
from parts_of_mutants import both, not_called

@triton.jit
def kernel(seen, x, wide):
    return both(seen, x, wide)
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, source in (("parts_of_mutants", PARTS), ("kernel_of_mutants", KERNEL)):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("kernel_of_mutants").kernel


def _results(kernel, patch):
    """[what it returns, what it puts down …], wide and not."""
    patch.setattr("triton.runtime.jit.JITFunction.__call__", lambda self, *a, **k: self.fn(*a, **k))
    both = []
    for wide in (True, False):
        seen: list = []
        both.append([kernel.fn(seen, 10, wide), *seen])
    return both


RIGHT = [[[10, 17], 22, 12, 0, 45], [[10, 17], 13, 0, 45]]


@pytest.mark.parametrize(
    ("fault", "results"),
    [
        (Fault("both", "a_ + 7", "a_"), [[[10, 10], 22, 12, 0, 45], [[10, 10], 13, 0, 45]]),
        (Fault("both", "return [a_, ...]", "return [..., a_]"), [[[17, 10], 22, 12, 0, 45], [[17, 10], 13, 0, 45]]),
        (Fault("both", "a_ - (_ - a_)", "all_ + 1"), [[[10, 17], 22, 12, 0, 48], [[10, 17], 13, 0, 48]]),
        (Fault("both", "put_down(_, 0)"), [[[10, 17], 22, 12, 45], [[10, 17], 13, 45]]),
        (Fault("both", "put_down(..., count=3)", "put_down(..., 2)"), [[*r[:-1], 30] for r in RIGHT]),
        (Fault("both", "put_down(a_, _, ...)", "put_down(a_, 1, ...)", nth=0), [[[10, 17], 2, 12, 0, 45], RIGHT[1]]),
        (Fault("both", "put_down(...)", nth=-1), [[[10, 17], 22, 12, 0], [[10, 17], 13, 0]]),
        (Fault("both", "put_down(...)", nth=...), [[[10, 17]], [[10, 17]]]),
        (Fault("both", "if _: ...\nelse: _", "if 1: ..."), [RIGHT[0], RIGHT[0]]),
        (Fault("both", "if _: ...\nelse: _"), [[[10, 17], 0, 45]] * 2),
        (Fault("put_down", "a_ * _", "a_"), [[[10, 17], 11, 12, 0, 15], [[10, 17], 13, 0, 15]]),
        (
            Fault("both", "put_down(_, 0)", before("put_down(...)")),
            [[[10, 17], 0, 22, 0, 12, 45], [[10, 17], 0, 13, 45]],
        ),
        (
            [Fault("both", "put_down(_, 0)", "all_; all_"), Fault("put_down", "a_ * b_", "a_ + b_")],
            [[[10, 17], 13, 13, 1, 1, 18], [[10, 17], 14, 1, 1, 18]],
        ),
    ],
    ids=str,
)
def test_faults(kernel, fault, results, tmp_path, monkeypatch):
    assert _results(kernel, monkeypatch) == RIGHT
    (mutant,) = planted([kernel], fault, tmp_path, monkeypatch)
    assert _results(mutant, monkeypatch) == results
    assert _results(kernel, monkeypatch) == RIGHT


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("neither", "put_down(...)"), "calls no neither"),
        (Fault("not_called", "put_down(...)"), "calls no not_called"),
        (Fault("both", "put_down(_, 4)"), "has no put_down"),
        (Fault("both", "put_down(_, _, count=9)"), "has no"),
        (Fault("both", "put_down(...)"), "has 5 times"),
        (Fault("both", "put_down(_, _)"), "has 3 times"),
        (Fault("both|put_down", "put_down(...)", nth=5), "has 5 times"),
    ],
    ids=str,
)
def test_a_fault_has_one_place(kernel, fault, words, tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match=words):
        planted([kernel], fault, tmp_path, monkeypatch)
