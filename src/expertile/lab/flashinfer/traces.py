"""Records as a dataset of flashinfer-bench: definitions, workloads, solutions and traces in a folder.

    definitions/<op_type>/<definition>.json          solutions/expertile/<op_type>/<definition>/<solution>.json
    workloads/<op_type>/<definition>.jsonl           traces/expertile/<op_type>/<definition>.jsonl
    blob/workloads/<op_type>/<definition>/…          the offs of a workload, as safetensors

Records of `grouped_mm` (ragged M) become definitions of ours, `grouped_gemm_<dtype>_g<G>_n<N>_k<K>`. Records of a
definition that the folder holds become traces of it. What is there already stays.

A record has no absolute error: that is NaN. Of two policies that one counts under which the reference was timed as
well, graph before eager; without it there is no speedup.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import torch

from expertile.lab.flashinfer import served
from expertile.lab.flashinfer.definition import Definition, Task, load
from expertile.lab.flashinfer.kinds import kind_of
from expertile.lab.flashinfer.race import OURS, REFERENCE
from expertile.lab.race.record import BASELINES, Record
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ragged import offs_from_sizes

AUTHOR = "expertile"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_STATUS = {"ok": "PASSED", "wrong": "INCORRECT_NUMERICAL", "failed": "RUNTIME_ERROR"}
_GROUPED = """import torch


def run(A, B, offs):
    C = torch.zeros(A.shape[0], B.shape[{n}], dtype=torch.float32, device=A.device)
    start = 0
    for group, end in enumerate(offs.tolist()):
        C[start:end] = A[start:end].float() @ B[group].float(){transposed}
        start = end
    return C.to(A.dtype)
"""


@dataclass(frozen=True)
class Written:
    """How many traces were new, of which definitions, and how many records were left out for which reason."""

    traces: int
    definitions: tuple[str, ...]
    left_out: Mapping[str, int]


@dataclass(frozen=True)
class _Place:
    """Where a record belongs: its workload, and the call that its solution makes. `sizes`: rows of each group
    of a workload of ours."""

    task: Task
    solution: str
    call: partial[Any]
    sizes: Sequence[int] = ()


def write(root: Path, records: Sequence[Record]) -> Written:
    """Add `records` to the dataset in `root`, which is made if need be. Executes nothing of what it holds. ValueError
    for a folder that holds something else under the names of a dataset."""
    definitions, tasks = load(root) if (root / "definitions").is_dir() else ({}, {})
    held = {(name, task.uuid): task for name in definitions for task in tasks[name]}
    references = {_of(r): r for r in records if r.backend == REFERENCE and r.time_s}
    left_out: Counter[str] = Counter()
    placed: dict[tuple[str, ...], list[tuple[Record, _Place]]] = {}
    for record in records:
        place = _place(record, held, root)
        if isinstance(place, str):
            left_out[place] += 1
        elif place is not None:
            key = (record.run, place.task.definition.name, place.task.uuid, place.solution)
            placed.setdefault(key, []).append((record, place))
    lines: dict[Path, list[Any]] = {}
    for found in placed.values():
        record, place = min(
            found, key=lambda p: (p[0].status != "ok", _of(p[0]) not in references, p[0].policy != "graph")
        )
        task, d = place.task, place.task.definition
        below = Path(d.op_type) / d.name
        if (d.name, task.uuid) not in held:
            held[d.name, task.uuid] = task
            _make(place, below)
            line = {"definition": d.name, "workload": task.data, "solution": None, "evaluation": None}
            lines.setdefault(root / "workloads" / f"{below}.jsonl", []).append(line)
        _write(root / "solutions" / AUTHOR / below / f"{place.solution}.json", _solution(record, place))
        trace = {"definition": d.name, "workload": task.data, "solution": place.solution}
        evaluation = _evaluation(record, references.get(_of(record)))
        lines.setdefault(root / "traces" / AUTHOR / f"{below}.jsonl", []).append(trace | {"evaluation": evaluation})
    added = {path: _append(path, made) for path, made in lines.items()}
    traces = {path.stem: count for path, count in added.items() if root / "traces" in path.parents}
    return Written(sum(traces.values()), tuple(traces), left_out)


def _of(r: Record) -> tuple[str, ...]:
    return (r.run, r.workload, str(r.shape.get("uuid")), r.policy)


def _place(r: Record, held: Mapping[tuple[str, str], Task], root: Path) -> _Place | str | None:
    """Where `r` belongs, why it is left out, or None for what is no rival."""
    if r.backend in (*BASELINES, REFERENCE):
        return None
    if r.metric != "seconds" or r.status not in _STATUS:
        return "without a result"
    if "uuid" in r.shape:
        task = held.get((r.workload.partition("/")[0], r.shape["uuid"]))
        if task is None:
            return "of definitions that the folder does not hold"
        if r.backend != OURS:
            return "of weights rearranged before the call"
        return _Place(task, f"{AUTHOR}_{task.definition.name}", partial(kind_of(task.definition).compute))
    if r.op != "grouped_mm" or r.shape["layout"] != "ragged_m" or r.shape["a_layout"] != "mk":
        return "of other operators than grouped_mm with ragged M"
    if r.backend not in ("auto", *(b.name for b in BACKENDS)):
        return "of kernels that are no backend of expertile"
    if "tried" in r.config or r.config.get("sizes") == "host":
        return "of calls with a config of the race or with group sizes on the host, which no solution has"
    task = _grouped(r, root)
    call = partial(kind_of(task.definition).compute, backend=r.backend)
    return _Place(task, f"{AUTHOR}_{r.backend}_{task.definition.name}", call, r.shape["group_sizes"])


def _grouped(r: Record, root: Path) -> Task:
    """Definition and workload of a grouped product."""
    groups, n, k, sizes, stored = (r.shape[key] for key in ("groups", "n", "k", "group_sizes", "b_layout"))
    dtype = _DTYPES[r.dtype]
    name = f"grouped_gemm_{r.dtype}_g{groups}_n{n}_k{k}" + ("_kn" if stored == "kn" else "")
    axes = {"M": None, "G": groups, "N": n, "K": k}
    texts = {"M": "Rows of all groups.", "G": "Groups.", "N": "Columns of the result.", "K": "Summed."}
    kinds = {axis: {"type": "var"} if n is None else {"type": "const", "value": n} for axis, n in axes.items()}

    def tensor(shape: str, of: str, text: str) -> dict[str, Any]:
        return {"shape": list(shape), "dtype": of, "description": text}

    data = {
        "name": name,
        "op_type": "grouped_gemm",
        "description": "C[rows of group g] = A[rows of group g] @ B[g]: rows are sorted by group, as of MoE tokens.",
        "axes": {axis: {**kind, "description": texts[axis]} for axis, kind in kinds.items()},
        "inputs": {
            "A": tensor("MK", dtype, "The rows of each group together."),
            "B": tensor("GKN" if stored == "kn" else "GNK", dtype, "The weight of each group."),
            "offs": tensor("G", "int32", "The end row of each group; the last is M."),
        },
        "outputs": {"C": tensor("MN", dtype, "The product.")},
        "reference": _GROUPED.format(n=2, transposed="") if stored == "kn" else _GROUPED.format(n=1, transposed=".T"),
    }
    definition = Definition(name, "grouped_gemm", axes, data)
    uuid = str(uuid5(NAMESPACE_URL, f"{name}:{list(sizes)}"))
    blob = f"blob/workloads/grouped_gemm/{name}/{name}_{uuid}.safetensors"
    offs = {"type": "safetensors", "path": blob, "tensor_key": "offs"}
    inputs = {"A": {"type": "random"}, "B": {"type": "random"}, "offs": offs}
    rows = {"M": sum(sizes)}
    return Task(definition, uuid, rows, root, {"uuid": uuid, "axes": rows, "inputs": inputs})


def _make(place: _Place, below: Path) -> None:
    """Definition and blob of a grouped product that the folder does not hold yet."""
    from safetensors.torch import save_file

    task = place.task
    _write(task.root / "definitions" / f"{below}.json", task.definition.data)
    blob = task.root / task.data["inputs"]["offs"]["path"]
    blob.parent.mkdir(parents=True, exist_ok=True)
    save_file({"offs": offs_from_sizes(place.sizes).to(torch.int32)}, blob)


def _solution(r: Record, place: _Place) -> dict[str, Any]:
    """The file `served.py`, and a `run` that calls the function of the definition's kind."""
    definition = place.task.definition
    names, call = list(definition.inputs), place.call
    given = ", ".join([*(f"{n}={n}" for n in names), *(f"{k}={v!r}" for k, v in call.keywords.items())])
    run = f"\n\ndef run({', '.join(names)}):\n    return {call.func.__name__}({given})\n"
    return {
        "name": place.solution,
        "definition": definition.name,
        "author": AUTHOR,
        "description": f"{r.backend} of expertile {r.env.expertile}, by expertile's public calls.",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda" if r.env.cores is None else "cpu"],
            "entry_point": "main.py::run",
            "dependencies": ["expertile"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": Path(served.__file__).read_text(encoding="utf-8") + run}],
    }


def _evaluation(r: Record, reference: Record | None) -> dict[str, Any]:
    libs = {name: getattr(r.env, name) for name in ("torch", "triton", "driver", "expertile", "commit")}
    found: dict[str, Any] = {
        "status": _STATUS[r.status],
        "environment": {"hardware": r.env.gpu, "libs": {name: text for name, text in libs.items() if text}},
        "timestamp": r.date,
        "log": r.reason or f"expertile bench, run {r.run}, policy {r.policy}",
    }
    if r.status != "failed":
        over = "the largest of the reference" if "uuid" in r.shape else "|reference| + its root mean square"
        found["correctness"] = {
            "max_relative_error": "NaN" if r.max_error is None else r.max_error,
            "max_absolute_error": "NaN",
            "extra": {"relative_frobenius_error": r.rel_error, "max_relative_error": f"largest error over {over}"},
        }
    if r.time_s:
        found["performance"] = {"latency_ms": r.time_s * 1e3}
        if reference is not None and reference.time_s:
            speedup = reference.time_s / r.time_s
            found["performance"] |= {"reference_latency_ms": reference.time_s * 1e3, "speedup_factor": speedup}
    return found


def _write(path: Path, data: Any) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _append(path: Path, data: Iterable[Any]) -> int:
    """Add lines, but none that is there; how many were new."""
    held = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
    lines = [line for x in data if (line := json.dumps(x, ensure_ascii=False)) not in held]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in dict.fromkeys(lines))
    return len(set(lines))
