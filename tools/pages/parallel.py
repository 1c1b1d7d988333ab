"""The figures of docs/results/parallel.md, put between its markers, from files of results/<gpu>/parallel/, the newest
for each number of GPUs: what `tools/measure_parallel.py` wrote in one run (`lab.parallel.lines` has the format).

Blocks `scaling`, `rival` and `communication` stand between <!-- expertile:parallel NAME --> and
<!-- /expertile:parallel NAME -->. A time counts if its result was right and it is not below its bound: the larger of
the roofline bound of the busiest GPU and of the bytes that leave a GPU at the fastest all-to-all of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertile.device import Device
from expertile.lab.parallel.case import BOTH, FORWARD
from expertile.lab.parallel.ways import COMMUNICATION, COMPUTE, ONE_GPU, OURS, STEP
from expertile.lab.race.parts import read_parts
from expertile.lab.race.record import shipped_root
from expertile.lab.report.markers import fill_file
from expertile.lab.report.units import MISSING, markdown_table, percent, significant, times
from expertile.roofline import Bound, Work, bound

NOT_MEASURED = "Not measured yet."
BLOCKS = ("scaling", "rival", "communication")
_PASSES = {FORWARD: "forward", BOTH: "forward + backward"}

Part = Mapping[str, Any]
Key = tuple[tuple[int, ...], str]  # size, scaling


def shipped_parallel(slug: str, root: str | Path | None = None) -> tuple[Path, ...]:
    """Of `results/<slug>/parallel/` the newest file (<date>.jsonl, <date>-….jsonl) for each number of GPUs, fewest
    first. ValueError for one that does not begin with its environment."""
    newest: dict[int, Path] = {}
    folder = (shipped_root() if root is None else Path(root)) / slug / "parallel"
    for path in sorted(folder.glob("????-??-??*.jsonl")):
        newest[_environment(path, read_parts(path))["world"]] = path
    return tuple(newest[world] for world in sorted(newest))


def _environment(path: Path, parts: Sequence[Part]) -> Part:
    if not parts or parts[0]["part"] != "environment":
        raise ValueError(f"{path}: expected an environment first, got {dict(parts[0]) if parts else 'nothing'}")
    return parts[0]


@dataclass(frozen=True)
class Run:
    """The lines of one file; `world` GPUs of kind `device`."""

    parts: Sequence[Part]
    device: Device
    world: int

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s that left a GPU in the fastest all-to-all of the run."""
        rates = [p["leaving_bytes"] / p["seconds"] for p in self.parts if p["part"] == "bandwidth"]
        return max(rates, default=None)

    def bound(self, step: Part, name: str) -> Bound:
        """Of pass `name` of a step; the limiter may be "links"."""
        chip = bound(Work(*step["work"][name]), self.device, "bf16")
        away, rate = step["leaving_bytes"].get(name, 0), self.bandwidth
        links = away / rate if rate else 0.0
        return Bound(links, "links") if links > chip.seconds else chip

    def seconds(self, step: Part, name: str, kind: str = STEP) -> float | None:
        """Of a step that counts."""
        found = step["seconds"].get(name, {})
        if step["status"] != "ok" or STEP not in found or found[STEP] < self.bound(step, name).seconds:
            return None
        return found.get(kind)

    def cases(self) -> dict[Key, list[Part]]:
        """The steps of each race, in the order of the file."""
        found: dict[Key, list[Part]] = {}
        for part in self.parts:
            if part["part"] == "step":
                found.setdefault((tuple(part["size"]), part["scaling"]), []).append(part)
        return found

    def fastest(self, steps: Iterable[Part], name: str) -> Part | None:
        timed = [(s, step) for step in steps if (s := self.seconds(step, name)) is not None]
        return min(timed, key=lambda pair: pair[0])[1] if timed else None


def _ours(steps: Iterable[Part]) -> list[Part]:
    return [step for step in steps if step["way"] == OURS]


def _title(step: Part) -> str:
    if step["way"] != OURS:
        name = step["way"] if step["way"] == ONE_GPU else f"`{step['way']}`"
    else:
        name = f"`{step['combine']}`" + (f", chunks={step['chunks']}" if not step["fixed"] else ", `max_tokens`")
    return name + ", CUDA graph" * step["graph"]


def _case(key: Key) -> str:
    (t, h, i, e, k), scaling = key
    return f"T = {t} {'of each GPU' if scaling == 'weak' else 'in all'}, H = {h}, I = {i}, E = {e}, k = {k}"


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else significant(seconds * 1e3)


def _flops(size: Sequence[int], tokens: int, name: str) -> float:
    """Of the mean GPU's products."""
    _, h, i, _, k = size
    return (18.0 if name == BOTH else 6.0) * tokens * k * h * i


def _scaling(run: Run) -> list[str]:
    body = []
    for key, steps in run.cases().items():
        size, scaling = key
        for name, title in _PASSES.items():
            one = run.fastest((s for s in steps if s["way"] == ONE_GPU), name)
            ours = run.fastest(_ours(steps), name)
            if one is None or ours is None:
                continue
            alone, together = run.seconds(one, name), run.seconds(ours, name)
            assert alone is not None and together is not None
            speed = alone / together * (run.world if scaling == "weak" else 1)
            least = run.bound(ours, name)
            body.append(
                [
                    _case(key),
                    title,
                    _ms(alone),
                    _ms(together),
                    _title(ours),
                    times(speed),
                    percent(speed / run.world),
                    significant(_flops(size, ours["tokens"], name) / together / 1e12),
                    _ms(least.seconds),
                    least.limiter,
                    percent(least.seconds / together),
                ]
            )
    if not body:
        return []
    header = [
        "tokens and sizes",
        "pass",
        "1 GPU, ms",
        f"{run.world} GPUs, ms",
        "our fastest",
        "tokens/s",
        "efficiency",
        "TFLOP/s of a GPU",
        "bound, ms",
        "limited by",
        "of bound",
    ]
    return [
        markdown_table(header, body, left=2),
        f"tokens/s: {run.world} GPUs to one; efficiency: that over {run.world}. One GPU holds all experts and "
        "reads all their weights, so with few tokens the efficiency can exceed 100 %. All GPUs are timed at that, each "
        "for itself, in the same rounds.",
    ]


def _rival(run: Run) -> list[str]:
    lines = []
    for key, steps in run.cases().items():
        best = {name: run.fastest(_ours(steps), name) for name in _PASSES}
        body = []
        for step in (s for s in steps if s["way"] != ONE_GPU and any(run.seconds(s, name) for name in _PASSES)):
            row = [_title(step) if step["way"] != OURS else f"expertile, {_title(step)}"]
            for name in _PASSES:
                seconds, ours = run.seconds(step, name), best[name]
                least = None if ours is None else run.seconds(ours, name)
                row += [_ms(seconds), times(seconds / least if seconds and least else None)]
            away = step["leaving_bytes"].get(FORWARD)
            row += [
                MISSING if away is None else significant(away / 1e6),
                f"{max(step['errors'].values()):.0e}",
                "yes" if step["bits"] else "no",
            ]
            body.append(row)
        if body:
            header = [
                "way",
                "forward, ms",
                "to our fastest",
                "forward + backward, ms",
                "to our fastest",
                "leaves a GPU forward, MB",
                "largest difference",
                "bits of one GPU",
            ]
            lines += [f"**{_case(key)}**", markdown_table(header, body)]
    return lines


def _communication(run: Run) -> list[str]:
    body = []
    for key, steps in run.cases().items():
        for step in _ours(steps):
            for name, title in _PASSES.items():
                whole, compute, alone = (run.seconds(step, name, kind) for kind in (STEP, COMPUTE, COMMUNICATION))
                if whole is None or compute is None or alone is None:
                    continue
                body.append(
                    [
                        _case(key),
                        _title(step),
                        title,
                        _ms(whole),
                        _ms(compute),
                        _ms(alone),
                        percent(alone / whole),
                        _ms(whole - compute),
                        percent((whole - compute) / whole),
                    ]
                )
    if not body:
        return []
    header = [
        "tokens and sizes",
        "way",
        "pass",
        "step, ms",
        "computation alone, ms",
        "communication alone, ms",
        "of step",
        "exposed, ms",
        "of step",
    ]
    lines = [markdown_table(header, body, left=3)]
    messages = {p["leaving_bytes"]: p["seconds"] for p in run.parts if p["part"] == "bandwidth"}
    if messages:
        told = [f"{significant(n / 1e6)} MB at {significant(n / s / 1e9)} GB/s" for n, s in sorted(messages.items())]
        lines.append("An all-to-all of equal parts, alone, by bytes that leave a GPU: " + ", ".join(told) + ".")
    return lines


def _missing(run: Run) -> str:
    """What has no time in this run, and why."""
    found = []
    for part in run.parts:
        if part["part"] == "skipped":
            what = f"{_case((tuple(part['size']), part['scaling']))}" + (f", {part['way']}" if part["way"] else "")
            found.append(f"{what} ({part['reason']})")
        elif part["part"] == "step":
            where = f"{_case((tuple(part['size']), part['scaling']))}, {_title(part)}"
            if part["status"] != "ok":
                found.append(f"{where} ({part['reason'] or part['status']})")
            found += [
                f"{where}, {_PASSES[name]} (refused: {_ms(part['seconds'][name][STEP])} ms is below its bound)"
                for name in part["seconds"]
                if part["status"] == "ok" and run.seconds(part, name) is None
            ]
    return f"Without a time: {'; '.join(found)}." if found else ""


def blocks(paths: Sequence[Path], device: Device) -> dict[str, str]:
    """Markdown of each block, of one file after the other, on GPUs of kind `device`. ValueError for a file without an
    environment line, or of another GPU."""
    found = [_blocks(path, device) for path in paths]
    return {name: "\n\n".join(f[name] for f in found if f[name]) or NOT_MEASURED for name in BLOCKS}


def _blocks(path: Path, device: Device) -> dict[str, str]:
    parts = read_parts(path)
    first = _environment(path, parts)
    if first["gpu"] != device.name:
        raise ValueError(f"{path}: expected the environment of an {device.name} first, got {first['gpu']!r}")
    run = Run(parts, device, first["world"])
    found = {"scaling": _scaling(run), "rival": _rival(run), "communication": _communication(run)}
    versions = f"torch {first['torch']}, NCCL {first['nccl']}"
    source = (
        f"One run on {run.world} GPUs, {device.name}, bf16, {path.stem[:10]} ({versions}): "
        f"`results/{device.slug}/parallel/{path.name}`."
    )
    for name, lines in found.items():
        found[name] = [source, *lines] if lines else []
    if found["scaling"] and (missing := _missing(run)):
        found["scaling"].append(missing)
    return {name: "\n\n".join(lines) for name, lines in found.items()}


def update_page(page: str | Path, paths: Sequence[Path], device: Device, check: bool = False) -> bool:
    """Fill the blocks of the page; returns whether they were up to date. With `check` nothing is written. ValueError
    unless every block's markers stand in the page exactly once, in order."""
    return fill_file(page, {f"parallel {name}": text for name, text in blocks(paths, device).items()}, check)
