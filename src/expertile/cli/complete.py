"""What the shell offers after an option that wants a name: each function is called on the tab key alone."""

from collections.abc import Iterable


def presets(incomplete: str) -> list[str]:
    from expertile.lab.bench.presets import ALL_PRESETS

    return _of(ALL_PRESETS, incomplete)


def rivals(incomplete: str) -> list[str]:
    """Backends of grouped products, and rivals of the other operators."""
    from expertile.lab.operators import operators
    from expertile.ops.grouped_mm.backends import BACKENDS

    return _of([*(b.name for b in BACKENDS), *(r.name for o in operators().values() for r in o.rivals)], incomplete)


def backends(incomplete: str) -> list[str]:
    """Backends of grouped products."""
    from expertile.ops.grouped_mm.backends import BACKENDS

    return _of([b.name for b in BACKENDS], incomplete)


def gpus(incomplete: str) -> list[str]:
    """Short names without spaces, which no shell has to quote."""
    from expertile.device import known_devices

    return _of([min(d.aliases, key=len).replace(" ", "-") for d in known_devices() if d.aliases], incomplete)


def models(incomplete: str) -> list[str]:
    from expertile.lab.report.impact import MODELS

    return _of(MODELS, incomplete)


def operators_explained(incomplete: str) -> list[str]:
    from expertile.cli.traffic import OPERATORS

    return _of(OPERATORS, incomplete)


def policies(incomplete: str) -> list[str]:
    return _of(("graph", "eager", "both"), incomplete)


def _of(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.lower().startswith(incomplete.lower())]
