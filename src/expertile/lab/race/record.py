"""Record: one figure of one backend, measured or refused, and the JSONL files that hold such figures.

A line of JSON for each record, its keys the fields of `Record` and under "env" those of `Env`;
docs/reference/records.md says what they mean. `value`, `ci95` and `bound` are in the unit of `metric`: the time of a
call, the memory that it allocates at its peak, the bytes that it moves as counted, the tokens in a second. `details`
holds what one kind of measurement adds. Bounds of a CPU are of what the run itself measured: a copy and a product, or
the fastest call. Records made before expertile named its commit have no "commit".

Files are `results/<gpu-slug>/<date>-<preset>.jsonl`, in an installed package compressed (`.jsonl.xz`). Records of one
`run` may be compared with each other; those of two runs only through `compare.py`.
"""

import json
import lzma
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertile.lab.measure.env import OF_CPU, Env, check_number, check_text, known_keys, timestamp, with_clocks
from expertile.roofline import Bound, Work

if TYPE_CHECKING:  # the build of the package reads this file, without torch
    from expertile.lab.measure.interleaved import Failure, Outcome
    from expertile.lab.race.operator import Verdict

SECONDS, PEAK_BYTES, MOVED_BYTES, TOKENS_PER_S = METRICS = ("seconds", "peak_bytes", "moved_bytes", "tokens/s")
STATUSES = ("ok", "wrong", "refused", "unsupported", "failed")
POLICIES = ("graph", "eager")
DENSE, COPY = BASELINES = ("dense", "copy")  # deliberately wrong backends, never rivals: see race/baselines.py
LIMITERS = ("compute", "memory", "unknown")
_UNSHOWN = re.compile(
    "tune|tune-.*|auto|moe|moe-(memory|stages|routing)|parallel-.*|traffic|transformers|end-to-end-.*"
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One figure of one backend on one workload under one policy.

    Only status "ok" has a value that counts, never better than `bound`. "refused" may keep the value that was refused;
    "wrong" computed something else, "unsupported" can't or meets a limit of the device, "failed" raised, crashed or
    hung. All but "ok" need a `reason`. `ci95` is the 95 % interval of a median; None for what was counted once. Where
    the limit is not known, `bound` is 0 and `limiter` "unknown". Errors that are not finite are kept as None.
    ValueError names the key, what was expected and what came."""

    op: str
    workload: str
    shape: Mapping[str, Any] = field(hash=False)
    dtype: str
    backend: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    policy: str
    metric: str = SECONDS
    value: float | None = None
    ci95: tuple[float, float] | None = None
    bound: float = 0.0
    limiter: str = "unknown"
    flops: float = 0.0
    nbytes: float = 0.0
    rel_error: float | None = None
    max_error: float | None = None
    status: str = "ok"
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    env: Env
    run: str
    date: str

    def __post_init__(self) -> None:
        for name in ("op", "workload", "dtype", "backend", "run"):
            check_text(name, getattr(self, name))
        for name in ("shape", "config", "details"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name}: expected an object, got {getattr(self, name)!r}")
        for name, known in (("policy", POLICIES), ("metric", METRICS), ("limiter", LIMITERS), ("status", STATUSES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not isinstance(self.date, str) or not re.match(r"\d{4}-\d{2}-\d{2}(T|$)", self.date):
            raise ValueError(f"date: expected an ISO 8601 date or time, got {self.date!r}")
        if not isinstance(self.env, Env):
            raise ValueError(f"env: expected an Env, got {self.env!r}")
        for name in ("flops", "nbytes", "bound"):
            check_number(name, getattr(self, name))
        for name in ("rel_error", "max_error"):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, name, None)
            else:
                check_number(name, value, optional=True)
        if self.ci95 is not None:
            object.__setattr__(self, "ci95", _interval(self.ci95))
        if not isinstance(self.reason, str):
            raise ValueError(f"reason: expected a string, got {self.reason!r}")
        self._check_value()

    def _check_value(self) -> None:
        if self.status != "ok" and not self.reason:
            raise ValueError(f"reason: expected why the status is {self.status!r}, got ''")
        if self.status in ("wrong", "unsupported", "failed") and self.value is not None:
            raise ValueError(f"value: expected none for status {self.status!r}, got {self.value!r}")
        if self.status == "ok" and self.value is None:
            raise ValueError("value: expected one for status 'ok', got None")
        if self.value is None:
            if self.ci95 is not None:
                raise ValueError(f"ci95: expected none without a value, got {self.ci95!r}")
            return
        check_number("value", self.value)
        if self.value == 0 and not self.metric.endswith("bytes"):
            raise ValueError(f"value: expected more than 0 {self.metric}, got {self.value!r}")
        if self.status == "ok" and self.bound and self.better(self.value, self.bound):
            raise ValueError(
                f"status: expected 'refused', since value {self.value:.4g} is better than bound {self.bound:.4g} "
                f"({self.metric}), a measuring error; got 'ok'"
            )

    def better(self, value: float, than: float) -> bool:
        """Whether one value of this metric is better than another: less of all but tokens/s."""
        return value > than if self.metric == TOKENS_PER_S else value < than

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two records figures of the same thing; the last of it is the backend."""
        shape = json.dumps(self.shape, sort_keys=True)
        return (self.op, self.workload, shape, self.dtype, self.metric, self.policy, self.backend)

    @property
    def time_s(self) -> float | None:
        """The value in seconds; None for another metric."""
        return self.value if self.metric == SECONDS else None

    @property
    def ci95_s(self) -> tuple[float, float] | None:
        """The 95 % interval of `time_s`."""
        return self.ci95 if self.metric == SECONDS else None

    @property
    def bound_s(self) -> float:
        """The least seconds; 0 where they are not known, and for another metric."""
        return self.bound if self.metric == SECONDS else 0.0

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of useful work; None without a time."""
        return self.flops / self.time_s / 1e12 if self.time_s else None

    @property
    def gbps(self) -> float | None:
        """GB/s of useful bytes; None without a time."""
        return self.nbytes / self.time_s / 1e9 if self.time_s else None

    def to_json(self) -> str:
        """One line of JSON, keys in the order of the fields, without a newline."""
        data = asdict(self)
        for name in OF_CPU:
            if data["env"][name] is None:
                del data["env"][name]
        return json.dumps(data, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(line: str) -> "Record":
        """Parse and validate one line. Raises ValueError naming the key, what was expected and what came."""
        return Record(**_object_of(line, [f.name for f in fields(Record)]))


def measured(
    *,
    work: Work,
    limit: Bound,
    outcome: "Outcome | None",
    env: Env,
    status: str = "ok",
    reason: str = "",
    verdict: "Verdict | Failure | None" = None,
    unmeasured: str = "not measured",
    **fields: Any,
) -> Record:
    """The record of what was timed, now: `status` and `reason` are the gate's, or `verdict` is, with the errors;
    `outcome` decides where that passed. `unmeasured`: the reason of a right backend without an outcome; `fields`: other
    keys."""
    if verdict is not None:
        status, reason = verdict.status, verdict.reason
        fields |= {key: getattr(verdict, key, None) for key in ("rel_error", "max_error")}
    value = ci95 = None
    from expertile.lab.measure.interleaved import Measurement

    if isinstance(outcome, Measurement):
        value, ci95, env = outcome.time_s, outcome.ci95_s, with_clocks(env, outcome.clocks)
        if value < limit.seconds:
            status, reason = (
                "refused",
                (
                    f"measured {value * 1e6:.3g} us, below the bound of {limit.seconds * 1e6:.3g} us: "
                    f"{limit.seconds / value:.2f} times what the device can do, so the measurement is wrong"
                ),
            )
    elif outcome is not None:
        status, reason = outcome.status, outcome.reason
    elif status == "ok":
        status, reason = "unsupported", unmeasured
    fields |= {"flops": work.flops, "nbytes": work.nbytes, "bound": limit.seconds, "limiter": limit.limiter}
    return Record(value=value, ci95=ci95, status=status, reason=reason, env=env, date=timestamp(), **fields)


def append(path: str | Path, *records: Record) -> None:
    """Append records, each line in one write, so that an interruption leaves whole lines or none. A last line that an
    earlier interruption cut short is removed first."""
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


def kept(records: Iterable[Record], path: str | Path | None) -> Iterator[Record]:
    """`records` as they are made, each appended to `path`, if there is one, before it is handed on."""
    for record in records:
        if path is not None:
            append(path, record)
        yield record


def read(path: str | Path) -> list[Record]:
    """The records of a file, in order, without a last line that an interruption cut short. ValueError names file and
    line; FileNotFoundError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"record file {path} {'is a folder' if path.is_dir() else 'does not exist'}")
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
            records.append(Record.from_json(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return records


def _object_of(line: str, keys: Collection[str]) -> dict[str, Any]:
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
    env = {"commit": None, **dict.fromkeys(OF_CPU), **data["env"]}
    _exact_keys("env.", env, [f.name for f in fields(Env)])
    return {**data, "env": Env(**env)}


def results_path(slug: str, preset: str, date: str, root: str | Path = "results") -> Path:
    """`root`/<gpu-slug>/<date>-<preset>.jsonl; `date` is an ISO date or time, of which the day counts."""
    return Path(root) / slug / f"{date[:10]}-{preset}.jsonl"


def shipped_root() -> Path:
    """Where the records that come with the package lie, if there are any: `results/` of a source checkout, else of the
    installed package."""
    package = Path(__file__).resolve().parents[2]
    checkout = package.parents[1]
    return checkout / "results" if (checkout / "pyproject.toml").is_file() else package / "results"


def shown_files(root: str | Path | None = None) -> tuple[Path, ...]:
    """What commands show, and a wheel brings, of the shipped records: of each GPU the newest file of each preset. Not
    those of `expertile tune`, nor those of which a page of the documentation shows every figure."""
    newest = _newest(shipped_root() if root is None else Path(root))
    return tuple(path for (_, preset), path in newest.items() if not _UNSHOWN.fullmatch(preset))


def shipped_files(preset: str, slug: str | None = None, root: str | Path | None = None) -> tuple[Path, ...]:
    """The newest shipped file of `preset` for each GPU (or for `slug` alone), in the order of the slugs."""
    newest = _newest(shipped_root() if root is None else Path(root))
    return tuple(path for (gpu, name), path in newest.items() if name == preset and slug in (None, gpu))


def _newest(root: Path) -> dict[tuple[str, str], Path]:
    """The newest file by (slug of the GPU, preset), sorted."""
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


def _exact_keys(where: str, data: Mapping[str, Any], expected: Collection[str]) -> None:
    for key in expected:
        if key not in data:
            raise ValueError(f"{where}{key}: missing key; expected {', '.join(expected)}")
    known_keys(where, data, expected)


def _interval(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"ci95: expected [lo, hi], got {value!r}")
    low, high = value
    check_number("ci95[0]", low)
    check_number("ci95[1]", high)
    if low > high:
        raise ValueError(f"ci95: expected lo <= hi, got {list(value)!r}")
    return low, high
