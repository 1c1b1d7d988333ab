"""Records whose lines are told apart by "part": what a tool that measures whole layers leaves in
results/<gpu>/<subject>/<date>.jsonl.

The first part is "run": the machine, versions and run id. Each other one is a figure, or "failed" with the reason why
there is none. A file that stands already is gone on with: what it holds is kept, what it lacks is measured, on the same
machine and versions alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expertile.device import Device
from expertile.lab.measure.env import timestamp
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.measure.interleaved import Measurement, Outcome

Part = Mapping[str, Any]
_MACHINE = ("gpu", "driver", "torch", "triton", "expertile", "commit")


def newest_parts(folder: Path) -> Path | None:
    """The newest file <date>.jsonl of `folder`, or None."""
    return max(folder.glob("????-??-??.jsonl"), default=None)


def read_parts(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file. ValueError for a line that is no JSON object with a "part"."""
    parts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        part = json.loads(line)
        if not isinstance(part, dict) or "part" not in part:
            raise ValueError(f'{path}:{number}: expected an object with a "part", got {line[:60]}')
        parts.append(part)
    return parts


class PartsFile:
    """A file of parts in the order in which they were first put; on the disk as soon as they are.

    What a part is about is said by its kind ("part", or "of" of one that "failed") and its values of `names`; one about
    the same takes the place of the earlier. ValueError if the file was made on another machine or with other versions.
    """

    def __init__(self, path: str | Path, device: Device, names: Sequence[str], **versions: str) -> None:
        self.path, self.names, self.run = Path(path), tuple(names), new_run_id()
        self._parts: dict[str, Part] = {}
        env = asdict(capture_env(device)) | versions
        found = {name: env[name] for name in (*_MACHINE, *versions)}
        earlier = read_parts(self.path) if self.path.exists() else []
        for part in earlier:
            if part["part"] == "run":
                kept = {name: part.get(name) for name in found}
                if kept != found:
                    raise ValueError(f"{path}: expected a file made with {found}, got one made with {kept}")
            self._parts[self._key(part)] = part
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.put({"part": "run", "date": timestamp(), **found})

    def has(self, part: Part) -> bool:
        """Whether a finished figure of the part's key stands in the file."""
        there = self._parts.get(self._key(part))
        return there is not None and there["part"] != "failed" and not there.get("unfinished")

    def put(self, part: Part) -> None:
        """Write a part, with this run's id."""
        part = {**part, "run": self.run}
        self._parts[self._key(part)] = part
        self._write()

    def _key(self, part: Part) -> str:
        if part["part"] == "run":
            return f"run {part.get('run')}"
        return json.dumps([part.get("of", part["part"]), *(part.get(name) for name in self.names)])

    def _write(self) -> None:
        """All of it under another name first: whoever interrupts finds the old file or the new."""
        text = "".join(json.dumps(part, ensure_ascii=False, allow_nan=False) + "\n" for part in self._parts.values())
        draft = self.path.with_name(f"{self.path.name}.part")
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)


class TimeLimit:
    """Seconds from now on."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._end = now, now() + seconds

    @property
    def left(self) -> float:
        return self._end - self._now()


def figures(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """By name: "seconds", or the reason why there are none; "ci95_s" of the median; "sm_clock_mhz" where it is read."""
    seconds: dict[str, Any] = {}
    intervals, clocks = {}, {}
    for name, outcome in outcomes.items():
        if not isinstance(outcome, Measurement):
            seconds[name] = outcome.reason
        elif outcome.refused:
            seconds[name] = outcome.refused
        else:
            seconds[name], intervals[name] = outcome.time_s, list(outcome.ci95_s)
            if outcome.clocks.sm_clock_mhz is not None:
                clocks[name] = outcome.clocks.sm_clock_mhz
    return {"seconds": seconds, "ci95_s": intervals, "sm_clock_mhz": clocks}
