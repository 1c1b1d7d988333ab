"""What the shell offers after an option that wants a name; names are looked up on the tab key alone."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any


def _in(module: str, name: str) -> Any:
    return getattr(import_module(f"expertile.{module}"), name)


def _backends() -> list[str]:
    return [b.name for b in _in("ops.grouped_mm.backends", "BACKENDS")]


def _rivals() -> list[str]:
    """Backends of grouped products, and rivals of the other operators."""
    return [*_backends(), *(r.name for o in _in("lab.operators", "operators")().values() for r in o.rivals)]


def _gpus() -> list[str]:
    """Short names without spaces, which no shell has to quote."""
    return [min(d.aliases, key=len).replace(" ", "-") for d in _in("device", "known_devices")() if d.aliases]


def _offers(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in dict.fromkeys(names()) if name.lower().startswith(incomplete.lower())]

    return complete


presets = _offers(lambda: _in("lab.bench.presets", "ALL_PRESETS"))
rivals, backends, gpus = _offers(_rivals), _offers(_backends), _offers(_gpus)
models = _offers(lambda: _in("lab.report.impact", "MODELS"))
operators_explained = _offers(lambda: _in("cli.traffic", "OPERATORS"))
policies = _offers(lambda: ("graph", "eager", "both"))
