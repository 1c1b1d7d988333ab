"""Kernels with a fault planted in their source: what an emulator and its cases have to notice."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def planted(
    parts: Sequence[ModuleType],
    old: str,
    new: str,
    folder: Path,
    patch: pytest.MonkeyPatch,
    within: Sequence[ModuleType] | None = None,
) -> Any:
    """The modules `parts`, imported from sources with `old` replaced by `new` (in those of `within` alone, if given),
    each other's mutants in them; written to `folder`, and forgotten at the end of the test. AssertionError where `old`
    stands in none of them."""
    names = {module.__name__: f"mutant{module.__name__.rpartition('.')[2]}" for module in parts}
    found = False
    for module in parts:
        source = Path(module.__file__ or "").read_text()
        if within is None or module in within:
            found |= old in source
            source = source.replace(old, new)
        for original, mutant in names.items():
            source = source.replace(f"from {original} ", f"from {mutant} ")
        (folder / f"{names[module.__name__]}.py").write_text(source)
        # Removed now, and again when the test is over.
        patch.setitem(sys.modules, names[module.__name__], module)
        patch.delitem(sys.modules, names[module.__name__])
    assert found, "the source has changed"
    patch.syspath_prepend(folder)
    return [importlib.import_module(name) for name in names.values()]
