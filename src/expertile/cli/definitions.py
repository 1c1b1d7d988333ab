"""bench --definition: the parts that a folder of flashinfer-bench's definitions gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from expertile.cli.parts import Part
from expertile.lab.bench.config import BenchSpec
from expertile.lab.flashinfer import load, operator, workload


def definition_parts(root: Path, spec: BenchSpec, tell: Callable[[str], None]) -> tuple[Part, ...]:
    """A part for each definition in `root` that expertile serves and that has workloads; `tell` why others are not.

    `only` goes by the names of definitions and of workloads, `include` and `skip` by those of rivals. Raises ValueError
    where nothing is left to measure, and for options that definitions do not have.
    """
    if spec.presets or spec.inline or spec.candidates or spec.memory:
        raise ValueError("definition: expected no presets, workloads, candidates or memory beside it, got some")
    definitions, tasks = load(root)
    reasons: Counter[str] = Counter()
    found = []
    for name, definition in definitions.items():
        try:
            op = operator(definition, tasks[name])
            workloads = tuple(map(workload, tasks[name]))
            if not workloads:
                raise ValueError("it has no workloads")
        except ValueError as error:
            if _asked(spec, name):
                reasons[str(error)] += 1
                if reasons[str(error)] == 1:
                    tell(f"{name} is left out: {error}.")
            continue
        workloads = tuple(w for w in workloads if _asked(spec, name, w.name))
        rivals = tuple(r for r in op.rivals if (not spec.include or r.name in spec.include) and r.name not in spec.skip)
        if not rivals:
            raise ValueError(f"backend: expected some of {', '.join(r.name for r in op.rivals)} for {name}, got none")
        if workloads:
            found.append(Part(name, workloads, (), (replace(op, rivals=rivals),), ()))
    if alike := sum(reasons.values()) - len(reasons):
        tell(f"{alike} more are left out for the same reasons.")
    if not found:
        asked = f" and --only names ({', '.join(spec.only)})" if spec.only else ""
        raise ValueError(f"definition: expected one with workloads in {root} that expertile serves{asked}, got none")
    return tuple(found)


def _asked(spec: BenchSpec, *names: str) -> bool:
    return not spec.only or any(fnmatchcase(name, pattern) for pattern in spec.only for name in names)
