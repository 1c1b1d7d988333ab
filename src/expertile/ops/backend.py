"""What a backend of an operator is, and how a caller's `backend` and `config` become the ones that run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from expertile.device import Device
from expertile.suggest import one_of


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)
P = TypeVar("P")  # the operator's Problem
R = TypeVar("R", bound=Callable[..., Any])  # the type of its `run`
NOT_INVARIANT = (
    "batch_invariant: the order of its sums depends on numbers of rows, or is not known to be independent of them"
)


@dataclass(frozen=True)
class NoConfig:
    """The config of a backend that has nothing to configure."""


@dataclass(frozen=True)
class Speed:
    """What a backend reaches on a GPU, as a model of its time takes it: shares of the dense peak and of memory
    bandwidth, and fixed costs in seconds."""

    compute: float
    memory: float
    launch_s: float  # once per call, kernel start and ramp included
    per_group_s: float = 0.0  # for every group (a launch each)
    tile: tuple[int, int] = (128, 128)
    stores: float | None = None  # in place of `memory` where K is ragged: most of the traffic is results
    pads: bool = False  # every group to the longest: copies rows and results unless all are equally long


def never(problem: Any, device: Device) -> tuple[Any, ...]:
    """The batch-invariant configs of a backend that has none."""
    return ()


def one_config(problem: Any, device: Device) -> tuple[NoConfig, ...]:
    """The configs of a backend that has nothing to configure."""
    return (NoConfig(),)


@dataclass(frozen=True)
class Backend(Generic[P, R]):
    """One way to compute an operator.

    `supports(problem, device)` is pure: the reason why not, or None. `configs(problem, device)` lists the configs
    worth trying, the default first. `run(problem, operands, config, out)` queues the work on the current stream; the
    operator's `backend` module says what its operands and results are.
    """

    name: str
    summary: str
    run: R
    supports: Callable[[P, Device], str | None] = lambda problem, device: None
    configs: Callable[[P, Device], tuple[Any, ...]] = one_config
    # Needs the group sizes on the host: synchronises, and cannot be captured in a CUDA graph, unless
    # `problem.group_sizes` is known.
    reads_offs_on_host: bool = False
    # Another library's kernel, measured as a rival and used when it is the fastest.
    peer: bool = False
    # As `run`, but adds the result to the given `out`; None: it cannot.
    add: R | None = None
    # The configs, the default first, with which a row of the result has the same bits in every problem that differs
    # from this one in numbers of rows alone, whichever of these configs each problem takes.
    invariant: Callable[[P, Device], tuple[Any, ...]] = never
    # Whether it copies offs to the host even where the caller knows the sizes; None: `reads_offs_on_host` says all.
    copies_offs: Callable[[P, Device], bool] | None = None
    # On an NVIDIA H200; None: not measured, and no model ranks it.
    speed: Speed | None = None
    # Its place among those that run on a CPU in earnest, the least first, and why it is taken there.
    cpu_place: Callable[[P], int] | None = None
    cpu_why: str = "the first of torch's ways that takes it"

    def waits(self, problem: P, device: Device) -> bool:
        """Whether a call waits for the device, to read group sizes."""
        if self.copies_offs is not None:
            return self.copies_offs(problem, device)
        return self.reads_offs_on_host and problem.group_sizes is None  # type: ignore[attr-defined]


B = TypeVar("B", bound=Backend[Any, Any])


@dataclass(frozen=True)
class Estimate:
    """One backend's expected time in seconds and where it comes from, or the reason why there is none."""

    backend: str
    seconds: float | None
    reason: str


@dataclass(frozen=True)
class Choice(Generic[N]):
    """The backend and config to run, a sentence saying why, and what is known of the others: of all of them where
    times decided, else why each earlier one was passed over."""

    backend: N
    config: Any
    why: str
    estimates: tuple[Estimate, ...] = ()
    measured: bool = False  # whether measurements on this model of GPU decided


class Request(NamedTuple):
    """What a caller asks for: "auto" or a backend's name, one of its configs or None for its default, and whether a
    row's bits may depend on other rows."""

    backend: str = "auto"
    config: Any = None
    batch_invariant: bool = False


AUTO = Request()


@lru_cache(maxsize=64)
def device_of(kind: str, index: int | None) -> Device:
    """The device of a tensor whose `device` has that type and index."""
    return Device.current("cpu" if kind != "cuda" else index)


def planner(
    describe: Callable[..., P], select: Callable[[P, Device, Request], tuple[B, Any]]
) -> Callable[[tuple[Any, ...], torch.device, Request], tuple[P, B, Any]]:
    """A function of tensors as they are `described` and further arguments of `describe`, of their device and a request:
    problem, backend and config, whatever the tensors' values. What it has answered it keeps."""

    @lru_cache(maxsize=4096)
    def planned(fields: tuple[Any, ...], device: torch.device, request: Request) -> tuple[P, B, Any]:
        problem = describe(*fields)
        return problem, *select(problem, device_of(device.type, device.index), request)

    return planned


def by_backend(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run(*arguments, request)` as an operator's kernel, whose last argument is a backend's name."""
    return lambda *arguments: run(*arguments[:-1], Request(arguments[-1]))


def named(backends: Iterable[N], name: str, also: str = "") -> N:
    """The backend called `name`. ValueError lists those there are, and what else would do."""
    for backend in backends:
        if backend.name == name:
            return backend
    known = [b.name for b in backends]
    raise ValueError(f"backend: expected {also}{one_of(name, known)}")


@cache
def invariantly(backend: Any) -> Any:
    """`backend` with its batch-invariant configs for its configs, and no support where there are none."""

    def supports(problem: Any, device: Device) -> str | None:
        reason: str | None = backend.supports(problem, device)
        return NOT_INVARIANT if reason is None and not backend.invariant(problem, device) else reason

    return replace(backend, supports=supports, configs=backend.invariant)


def none_able(reasons: Iterable[tuple[str, str | None]], verb: str = "supports") -> ValueError:
    """The error where no backend supports a problem, from names and reasons."""
    return ValueError(f"backend: none {verb} this problem (" + "; ".join(f"{b}: {r}" for b, r in reasons) + ")")


def first_able(
    problem: P,
    device: Device,
    backends: Sequence[B],
    why: str,
    unwanted: Callable[[B], str | None] = lambda backend: None,
    verb: str = "supports",
) -> Choice[B]:
    """The first backend that supports the problem without waiting for the device, with its default config; else the
    first that waits. `unwanted` may give a reason against one that could. ValueError with every backend's reason when
    none is left."""
    refused: list[Estimate] = []
    waiting: list[B] = []
    for backend in backends:
        reason = backend.supports(problem, device) or unwanted(backend)
        if reason is not None:
            refused.append(Estimate(backend.name, None, reason))
        elif backend.waits(problem, device):
            waiting.append(backend)
        else:
            return Choice(backend, backend.configs(problem, device)[0], f"{backend.name}: {why}", tuple(refused))
    if not waiting:
        raise none_able(((e.backend, e.reason) for e in refused), verb)
    last, why = waiting[0], "no other takes it; it waits for the GPU to read offs"
    return Choice(last, last.configs(problem, device)[0], f"{last.name}: {why}", tuple(refused))


def select(
    problem: P,
    device: Device,
    request: Request,
    by_name: Callable[[str], B],
    choose: Callable[[P, Device], Choice[B]],
    like: Callable[[P], P] | None = None,
) -> tuple[B, Any]:
    """The backend and config to run: those of `choose` for "auto", which takes no config; else the named backend with
    the config asked for, or its default one (of `like(problem)`). ValueError when that backend does not support the
    problem, with the reason, or has no such config."""
    name, config, batch_invariant = request
    if name == "auto":
        if config is not None:
            raise ValueError("config: expected None with backend='auto', got " + repr(config))
        choice = choose(problem, device)
        return choice.backend, choice.config
    chosen: B = invariantly(by_name(name)) if batch_invariant else by_name(name)
    reason = chosen.supports(problem, device)
    if reason is not None:
        raise ValueError(f"backend: {name} cannot take this problem: {reason}")
    usual = chosen.configs(problem if like is None else like(problem), device)[0]
    if config is None:
        return chosen, usual
    if type(config) is not type(usual):
        raise ValueError(f"config: expected a {type(usual).__name__} of backend {name}, got {config!r}")
    if batch_invariant and config not in chosen.configs(problem, device):
        raise ValueError(f"config: expected one of {name}'s batch-invariant configs, got {config!r}")
    return chosen, config
