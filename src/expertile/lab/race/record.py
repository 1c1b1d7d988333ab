"""Record: one measured (or refused) figure, and the JSONL files that hold them.

One line of JSON for each record, with exactly these keys (seconds, bytes, FLOPs):

    {"op", "workload", "shape": {…}, "dtype", "backend", "config", "policy": "graph"|"eager",
     "time_s", "ci95_s": [lo, hi], "flops", "nbytes", "tflops", "gbps", "bound_s", "limiter",
     "rel_error", "max_error", "status": "ok"|"wrong"|"refused"|"unsupported"|"failed", "reason",
     "env": {"gpu", "driver", "torch", "triton", "expertile", "commit", "sm_clock_mhz", "power_w", "throttle"},
     "run", "date"}

Records made before expertile named its commit have no "commit".

Files are `results/<gpu-slug>/<date>-<preset>.jsonl`; those that end in `-memory.jsonl` belong to `memory.py`. An
installed package has them compressed (`.jsonl.xz`), and every reader takes them so.
Records of one `run` may be compared with each other; those of two runs only through `compare.py`.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from expertile.lab.measure.env import Env, check_number, check_text, timestamp, with_clocks
from expertile.roofline import Bound, Work

if TYPE_CHECKING:  # the build of the package reads this file, without torch
    from expertile.lab.measure.interleaved import Outcome

MEMORY_SUFFIX = "-memory.jsonl"  # of files that hold `memory.MemoryRecord`s instead
STATUSES = ("ok", "wrong", "refused", "unsupported", "failed")
POLICIES = ("graph", "eager")
LIMITERS = ("compute", "memory", "unknown")


@dataclass(frozen=True)
class Record:
    """One backend on one workload under one policy. See the module for the keys.

    Only status "ok" has a time that counts: it needs `time_s`, `ci95_s`, `tflops`, `gbps` (which must follow
    from `flops`, `nbytes` and `time_s`) and no `time_s` below `bound_s`. "refused" may keep the time that was
    refused; the others have none: "wrong" computed something else, "unsupported" says that it can't or meets a limit
    of the device, "failed" raised an exception, crashed or hung. All but "ok" need a `reason`. A `rel_error` or
    `max_error` that is not finite is kept as None, since JSON has no such number. Raises ValueError naming
    the key, what was expected and what came.
    """

    op: str
    workload: str
    shape: Mapping[str, Any] = field(hash=False)
    dtype: str
    backend: str
    config: Mapping[str, Any] = field(hash=False)
    policy: str
    time_s: float | None
    ci95_s: tuple[float, float] | None
    flops: float
    nbytes: float
    tflops: float | None
    gbps: float | None
    bound_s: float
    limiter: str
    rel_error: float | None
    max_error: float | None
    status: str
    reason: str
    env: Env
    run: str
    date: str

    def __post_init__(self) -> None:
        for name in ("op", "workload", "dtype", "backend", "run"):
            check_text(name, getattr(self, name))
        for name in ("shape", "config"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name}: expected an object, got {getattr(self, name)!r}")
        _choice("policy", self.policy, POLICIES)
        _choice("limiter", self.limiter, LIMITERS)
        _choice("status", self.status, STATUSES)
        if not isinstance(self.date, str) or not re.match(r"\d{4}-\d{2}-\d{2}(T|$)", self.date):
            raise ValueError(f"date: expected an ISO 8601 date or time, got {self.date!r}")
        if not isinstance(self.env, Env):
            raise ValueError(f"env: expected an Env, got {self.env!r}")
        for name in ("flops", "nbytes", "bound_s"):
            check_number(name, getattr(self, name))
        for name in ("rel_error", "max_error"):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, name, None)
            else:
                check_number(name, value, optional=True)
        if self.ci95_s is not None:
            object.__setattr__(self, "ci95_s", _interval(self.ci95_s))
        if not isinstance(self.reason, str):
            raise ValueError(f"reason: expected a string, got {self.reason!r}")
        self._check_status()

    def _check_status(self) -> None:
        if self.status != "ok" and not self.reason:
            raise ValueError(f"reason: expected why the status is {self.status!r}, got ''")
        if self.status in ("wrong", "unsupported", "failed") and self.time_s is not None:
            raise ValueError(f"time_s: expected none for status {self.status!r}, got {self.time_s!r}")
        if self.status == "ok" and (self.time_s is None or self.ci95_s is None):
            raise ValueError(f"time_s, ci95_s: expected both for status 'ok', got {self.time_s!r}, {self.ci95_s!r}")
        if self.time_s is None:
            for name in ("ci95_s", "tflops", "gbps"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: expected none without time_s, got {getattr(self, name)!r}")
            return
        check_number("time_s", self.time_s)
        if self.time_s <= 0:
            raise ValueError(f"time_s: expected more than 0, got {self.time_s!r}")
        if self.status == "ok" and self.time_s < self.bound_s:
            raise ValueError(
                f"status: expected 'refused', since time_s {self.time_s:.4g} is below bound_s "
                f"{self.bound_s:.4g}, a measuring error; got 'ok'"
            )
        for name, expected in zip(("tflops", "gbps"), rates(self.flops, self.nbytes, self.time_s), strict=True):
            value = getattr(self, name)
            check_number(name, value)
            if not math.isclose(value, expected, rel_tol=1e-3, abs_tol=1e-9):
                raise ValueError(f"{name}: expected {expected:.6g} from flops, nbytes and time_s, got {value!r}")

    def to_json(self) -> str:
        """One line of JSON, keys in the order of the fields, without a newline."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(line: str) -> Record:
        """Parse and validate one line. Raises ValueError naming the key, what was expected and what came."""
        return Record(**object_of(line, [f.name for f in fields(Record)]))


def measured(
    *,
    work: Work,
    limit: Bound,
    outcome: Outcome | None,
    env: Env,
    status: str = "ok",
    reason: str = "",
    unmeasured: str = "not measured",
    **fields: Any,
) -> Record:
    """The record of what was timed, now: `status` and `reason` are the gate's, and `outcome` decides where that passed.

    `unmeasured` is the reason of a right backend without an outcome; `fields` are the record's other keys.
    """
    time_s = ci95_s = tflops = gbps = None
    from expertile.lab.measure.interleaved import Measurement

    if isinstance(outcome, Measurement):
        time_s, ci95_s, env = outcome.time_s, outcome.ci95_s, with_clocks(env, outcome.clocks)
        tflops, gbps = rates(work.flops, work.nbytes, time_s)
        if refused := replace(outcome, bound_s=limit.seconds).refused:
            status, reason = "refused", refused
    elif outcome is not None:
        status, reason = outcome.status, outcome.reason
    elif status == "ok":
        status, reason = "unsupported", unmeasured
    return Record(
        time_s=time_s,
        ci95_s=ci95_s,
        flops=work.flops,
        nbytes=work.nbytes,
        tflops=tflops,
        gbps=gbps,
        bound_s=limit.seconds,
        limiter=limit.limiter,
        status=status,
        reason=reason,
        env=env,
        date=timestamp(),
        **fields,
    )


def rates(flops: float, nbytes: float, time_s: float) -> tuple[float, float]:
    """(TFLOP/s, GB/s) of work done in `time_s` seconds."""
    return flops / time_s / 1e12, nbytes / time_s / 1e9


class Line(Protocol):
    """What stands on one line of a JSONL file: a `Record`, or a `memory.MemoryRecord`."""

    def to_json(self) -> str: ...


L = TypeVar("L", bound=Line)


def append(path: str | Path, *records: Line) -> None:
    """Append records, each line in one write, so that an interruption leaves whole lines or none.

    Folders are made as needed. A last line that an earlier interruption cut short is removed first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_cut_line(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        for record in records:
            line = (record.to_json() + "\n").encode()
            while line:
                line = line[os.write(descriptor, line) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str | Path) -> list[Record]:
    """The records of a file, in order; see `read_lines`."""
    return read_lines(path, Record.from_json)


def read_lines(path: str | Path, parse: Callable[[str], L]) -> list[L]:
    """The lines of a file, parsed, in order. A last line without a newline, cut short by an interruption, is left
    out.

    Raises ValueError naming file and line, FileNotFoundError if there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"record file {path} does not exist")
    records = []
    try:
        data = path.read_bytes()
        *lines, _cut = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8").split("\n")
    except (UnicodeDecodeError, lzma.LZMAError):
        raise ValueError(f"{path}: expected records, one JSON object to a line; this is no text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(parse(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return records


def object_of(line: str, keys: Iterable[str]) -> dict[str, Any]:
    """The JSON object on `line`, with exactly `keys` and under "env" an `Env`. ValueError says what is wrong."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected one JSON object, got {line[:60]!r}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"expected one JSON object, got {line[:60]!r}")
    _exact_keys("", data, keys)
    if not isinstance(data["env"], dict):
        raise ValueError(f"env: expected an object, got {data['env']!r}")
    env = {"commit": None, **data["env"]}
    _exact_keys("env.", env, [f.name for f in fields(Env)])
    return {**data, "env": Env(**env)}


def results_path(slug: str, preset: str, date: str, root: str | Path = "results") -> Path:
    """`root`/<gpu-slug>/<date>-<preset>.jsonl; `date` is an ISO date or time, of which the day counts."""
    return Path(root) / slug / f"{date[:10]}-{preset}.jsonl"


def shipped_root() -> Path:
    """Where the records that come with the package lie: `results/` of a source checkout, else of the
    installed package.

    The folder need not exist.
    """
    package = Path(__file__).resolve().parents[2]
    checkout = package.parents[1]
    return checkout / "results" if (checkout / "pyproject.toml").is_file() else package / "results"


def record_files(root: str | Path | None = None) -> tuple[Path, ...]:
    """All files of times under `root` (the shipped ones by default), sorted; those of memory are not among them."""
    root = shipped_root() if root is None else Path(root)
    return tuple(path for path in sorted(root.glob("*/*.jsonl*")) if not of_memory(path))


def of_memory(path: Path) -> bool:
    """Whether a file holds records of memory, by its name."""
    return path.name.removesuffix(".xz").endswith(MEMORY_SUFFIX)


def shown_files(root: str | Path | None = None) -> tuple[Path, ...]:
    """What commands show, and a wheel brings, of the shipped records: of each GPU the newest file of each preset.

    Those of memory are among them. Those of `expertile tune` are not: their problems are drawn to fill a table.
    """
    newest = _newest(shipped_root() if root is None else Path(root))
    return tuple(path for (_, preset), path in newest.items() if preset not in ("tune", "auto"))


def shipped_files(preset: str, slug: str | None = None, root: str | Path | None = None) -> tuple[Path, ...]:
    """The newest shipped file of `preset` for each GPU (or for `slug` alone), in the order of the slugs."""
    newest = _newest(shipped_root() if root is None else Path(root))
    return tuple(path for (gpu, name), path in newest.items() if name == preset and slug in (None, gpu))


def _newest(root: Path) -> dict[tuple[str, str], Path]:
    """The newest file of times or of memory by (slug of the GPU, preset), sorted."""
    newest = {}
    for path in sorted(root.glob("*/????-??-??-*.jsonl*")):
        newest[path.parent.name, path.name.split(".")[0][len("2026-01-01-") :]] = path
    return dict(sorted(newest.items()))


def shipped_records(preset: str, slug: str | None = None, root: str | Path | None = None) -> tuple[Record, ...]:
    """The records of `shipped_files`; none if nothing was shipped for `preset`."""
    return tuple(r for path in shipped_files(preset, slug, root) for r in read(path))


def _drop_cut_line(path: Path) -> None:
    if not path.is_file():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _exact_keys(where: str, data: Mapping[str, Any], expected: Iterable[str]) -> None:
    expected = list(expected)
    missing = [k for k in expected if k not in data]
    unknown = [k for k in data if k not in expected]
    if missing:
        raise ValueError(f"{where}{missing[0]}: missing key; expected {', '.join(expected)}")
    if unknown:
        raise ValueError(f"{where}{unknown[0]}: unknown key; expected {', '.join(expected)}")


def _choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def _interval(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"ci95_s: expected [lo, hi], got {value!r}")
    low, high = value
    check_number("ci95_s[0]", low)
    check_number("ci95_s[1]", high)
    if low > high:
        raise ValueError(f"ci95_s: expected lo <= hi, got {list(value)!r}")
    return low, high
