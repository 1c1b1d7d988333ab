"""What one call of bench measures, part by part: each preset, or each of flashinfer-bench's definitions, with its
workloads and those that race on them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from expertile.device import Device
from expertile.lab.bench.config import BenchSpec
from expertile.lab.bench.presets import check_options, preset_options
from expertile.lab.flashinfer import load, operator, workload
from expertile.lab.operators import Operator, end_to_end, for_cpu, operators
from expertile.lab.race.operator import Workload
from expertile.lab.race.workloads import GroupedWorkload
from expertile.ladder import RUNGS
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.suggest import one_of

LADDER = "ladder"
CUSTOM = "custom"
_NAMED = 12  # so many names of workloads in an error
_CPU_FLOPS = 2e10  # of a rung's call: about a second on a few cores
COMPILED = "torch.compile"  # it takes a CPU ten seconds and more to compile for each workload


@dataclass(frozen=True)
class Part:
    """The workloads of a preset (or the TOML file's own, "custom"), which have a record file of their own. `backends`
    and `candidates` race on its grouped products, the rivals of `operators` on the others. `note` says what was left
    out."""

    name: str
    workloads: tuple[Workload, ...]
    backends: tuple[Backend, ...]
    operators: tuple[Operator, ...]
    candidates: tuple[str, ...]
    note: str = ""

    @property
    def op_workloads(self) -> tuple[Workload, ...]:
        """Those of operators other than the grouped product."""
        return tuple(w for w in self.workloads if not isinstance(w, GroupedWorkload))


def parts(spec: BenchSpec, device: Device) -> tuple[Part, ...]:
    """The parts of `spec` on `device`, in order.

    Candidates take part wherever there are grouped products; presets in which `only` leaves no workload are left out.
    Raises ValueError for a name in `include` or `skip` that no rival has, for a pattern in `only` that matches no name
    of a workload, for a part in which they leave none, and for candidates with nothing to compute.
    """
    _check_names(spec)
    check_options(spec.presets, **spec.options)
    _check_patterns(spec)
    alone = [(name, _alone(spec, name)) for name in (*spec.presets, *[CUSTOM] * bool(spec.inline))]
    found = [_part(name, part, device) for name, part in alone if not spec.only or part.workloads()]
    if spec.candidates and not any(part.candidates for part in found):
        raise ValueError(f"candidate: expected a preset of grouped products for it, got {', '.join(spec.presets)}")
    return tuple(found)


def _alone(spec: BenchSpec, name: str) -> BenchSpec:
    """`spec` with one preset, or with none and its own workloads, and of the options those that this takes."""
    own = name == CUSTOM
    takes = () if own else preset_options(name)
    spec = replace(spec, presets=() if own else (name,), inline=spec.inline if own else ())
    unset: dict[str, Any] = {option: None for option in spec.options if option not in takes}
    return replace(spec, **unset)


def _part(name: str, spec: BenchSpec, device: Device) -> Part:
    every = spec.workloads()
    spared = device.kind == "cpu" and not spec.full and name != CUSTOM
    workloads = for_cpu(every) if spared else every
    if name == LADDER and device.kind != "cuda":
        workloads = tuple(map(_within_minutes, workloads))
    products = any(isinstance(w, GroupedWorkload) for w in workloads)
    racing = (RUNGS if name == LADDER else BACKENDS) if products else ()
    rivals = [operators()[op] for op in dict.fromkeys(w.op for w in workloads if not isinstance(w, GroupedWorkload))]
    backends = tuple(b for b in racing if spec.chooses(b.name))
    compiled = not spared or COMPILED in spec.include
    left = tuple(
        replace(o, rivals=tuple(r for r in o.rivals if spec.chooses(r.name) and (compiled or COMPILED not in r.name)))
        for o in rivals
    )
    candidates = spec.candidates if racing else ()
    if workloads and not (backends or candidates or any(o.rivals for o in left)):
        names = dict.fromkeys([*(b.name for b in racing), *(r.name for o in rivals for r in o.rivals)])
        asked = ", ".join(spec.include) if spec.include else f"none but {', '.join(spec.skip)}"
        raise ValueError(f"backend: expected some of {', '.join(names)} for {name}, got {asked}")
    note = ""
    if spared and rivals:
        sizes = f"{len(every) - len(workloads)} of {len(every)} workloads"
        also = "" if compiled else f" and {COMPILED}"
        note = f"{name}: {sizes}{also} are left out, since a CPU takes long over them; --full measures them too"
    return Part(name, workloads, backends, left, candidates, note)


def _within_minutes(w: Workload) -> Workload:
    """A product of the ladder as a CPU has it: one that would take minutes is listed with the reason."""
    slow = isinstance(w, GroupedWorkload) and w.problem("cpu").work().flops > _CPU_FLOPS
    return replace(w, unsupported=f"needs a GPU: more than {_CPU_FLOPS / 1e9:.0f} GFLOP a call") if slow else w


def _check_names(spec: BenchSpec) -> None:
    if not (spec.include or spec.skip):
        return
    rivals = (rival.name for operator in operators().values() for rival in operator.rivals)
    of_models = (name for names in end_to_end.BACKENDS.values() for name in names)
    known = dict.fromkeys([*(b.name for b in BACKENDS), *(b.name for b in RUNGS), *rivals, *of_models])
    for option, name in (*(("backend", n) for n in spec.include), *(("skip", n) for n in spec.skip)):
        if name not in known:
            raise ValueError(f"{option}: expected {one_of(name, known)}")


def _check_patterns(spec: BenchSpec) -> None:
    for pattern in spec.only:
        if not replace(spec, only=(pattern,)).workloads():
            names = [w.name for w in replace(spec, only=()).workloads()]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ValueError(f"only: expected a pattern of {', '.join(names[:_NAMED])}{more}, got {pattern!r}")


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
        rivals = tuple(r for r in op.rivals if spec.chooses(r.name))
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
