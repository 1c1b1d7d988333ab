"""mkdocs' hook: fills `<!-- generated: NAME -->` of the reference with what the code says while the site is built."""

import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import typer

import expertile.ops
from expertile.cli.app import COMMANDS, app
from expertile.device import DTYPES, Device, known_devices
from expertile.lab.report.units import MISSING, cell, markdown_table, significant


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page. ValueError for a name that nothing generates."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: generated(found[1]), markdown)


def generated(name: str) -> str:
    if name not in GENERATED:
        raise ValueError(f"generated: expected one of {', '.join(GENERATED)}, got {name!r}")
    return GENERATED[name]()


def backends() -> str:
    """A table for each operator that has backends."""
    parts = []
    for operator, found in _operators():
        body = [[f"`{b.name}`", cell(b.summary)] for b in found]
        parts += [f"## {operator}", markdown_table(["backend", "what it is"], body, left=2)]
    return "\n\n".join(parts)


def _operators() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for module in pkgutil.iter_modules(expertile.ops.__path__):
        if module.ispkg and any(m.name == "backends" for m in _modules(f"expertile.ops.{module.name}")):
            yield module.name, import_module(f"expertile.ops.{module.name}.backends").BACKENDS


def _modules(package: str) -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(import_module(package).__path__))


def gpus() -> str:
    return markdown_table(
        ["GPU", "capability", "memory, GB", "TB/s", *DTYPES], [_gpu(device) for device in known_devices()]
    )


def _gpu(device: Device) -> list[str]:
    peaks = [significant(peak / 1e12) if (peak := device.peak(key)) else MISSING for key in DTYPES]
    capability = ".".join(map(str, device.capability)) if device.capability else MISSING
    speed = significant(device.memory_bps / 1e12) if device.memory_bps else MISSING
    return [cell(device.name), capability, f"{device.memory_bytes / 1e9:.0f}", speed, *peaks]


def cli() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("expertile", [], resilient_parsing=True)
    parts = []
    for name in COMMANDS:
        command = group.resolve_command(context, [name])[1]
        body = [row for parameter in command.params if (row := _parameter(parameter))]
        parts += [f"## {name}", *map(cell, (command.help or "").split("\n\n"))]
        if body:
            parts.append(markdown_table(["option", "meaning"], body, left=2))
    return "\n\n".join(parts)


def _parameter(parameter: Any) -> list[str] | None:
    help_text = getattr(parameter, "help", None) or ""
    if getattr(parameter, "hidden", False):
        return None
    names = (
        [str(parameter.name).upper()]
        if parameter.param_type_name == "argument"
        else [*parameter.opts, *parameter.secondary_opts]
    )
    default = parameter.default
    shown = (
        f" Default: `{default}`."
        if default not in ("", None, False, True) and isinstance(default, int | float | str)
        else ""
    )
    return [", ".join(f"`{name}`" for name in names), cell(help_text) + shown]


GENERATED: dict[str, Callable[[], str]] = {"backends": backends, "cli": cli, "gpus": gpus}
