"""How operators with several backends come from a user's `backend` and `config` to the ones that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Protocol, TypeVar

from expertile.device import Device


class _Named(Protocol):
    @property
    def name(self) -> str: ...


B = TypeVar("B", bound=_Named)


@lru_cache(maxsize=64)
def device_of(kind: str, index: int | None) -> Device:
    """The device of a tensor whose `device` has that type and index."""
    return Device.current("cpu" if kind != "cuda" else index)


NOT_INVARIANT = "batch_invariant: the order of its sums depends on numbers of rows, or nobody says that it does not"


@cache
def invariantly(backend: Any) -> Any:
    """`backend` with its batch-invariant configs for its configs."""
    return replace(backend, configs=backend.invariant)


def named(backends: Iterable[B], name: str, also: str = "") -> B:
    """The backend called `name`. ValueError lists those there are, and what else would do."""
    for backend in backends:
        if backend.name == name:
            return backend
    raise ValueError(f"backend: expected {also}one of {', '.join(b.name for b in backends)}, got {name!r}")


def selected(
    backend: str,
    config: Any,
    *,
    choose: Callable[[], Any],
    by_name: Callable[[str], B],
    refused: Callable[[B], str | None],
    default: Callable[[B], Any],
) -> tuple[B, Any]:
    """The backend and config to run: those of `choose()` for "auto", which takes no config; else the named backend with
    `config` or its default one. ValueError when that backend is refused, with the reason, or has no such configs."""
    if backend == "auto":
        if config is not None:
            raise ValueError("config: expected None with backend='auto', got " + repr(config))
        choice = choose()
        return choice.backend, choice.config
    chosen = by_name(backend)
    reason = refused(chosen)
    if reason is not None:
        raise ValueError(f"backend: {backend} cannot take this problem: {reason}")
    usual = default(chosen)
    if config is not None and type(config) is not type(usual):
        raise ValueError(f"config: expected a {type(usual).__name__} of backend {backend}, got {config!r}")
    return chosen, usual if config is None else config
