"""bench: measure workloads on this machine, with live progress; verdict, table, JSONL record, HTML report."""

import datetime
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from expertile.cli.complete import policies, presets, rivals
from expertile.cli.given import given
from expertile.cli.output import check_folder, print_json
from expertile.cli.parts import Part, definition_parts, parts
from expertile.cli.progress import Display
from expertile.device import Device
from expertile.lab.bench.config import BenchSpec, read_bench_file
from expertile.lab.bench.diagnosis import conclude
from expertile.lab.bench.presets import ALL_PRESETS, default_preset
from expertile.lab.bench.run import run
from expertile.lab.operators import end_to_end, for_cpu, memory_workloads
from expertile.lab.race.candidate import candidate_name
from expertile.lab.race.candidate_gate import UserCandidates
from expertile.lab.race.case import Site
from expertile.lab.race.memory import measure_memory
from expertile.lab.race.record import SECONDS, Record, kept, read, results_path, shipped_records
from expertile.lab.report.leaderboard import leaderboard, tables
from expertile.lab.report.page import html
from expertile.lab.report.table import elsewhere_lines, table
from expertile.lab.report.verdict import of_candidate, verdict

PRESET_NAMES = ", ".join(ALL_PRESETS)
# The field of a bench file that an option stands for.
_SPEC = {"preset": "presets", "backend": "include", "candidate": "candidates"}
_SPEC |= {name: name for name in ("skip", "only", "tokens", "policy", "routing", "batch", "seq", "seed")}
_SPEC |= {name: name for name in ("quick", "full", "memory")}


def bench(
    ctx: typer.Context,
    preset: Annotated[
        list[str],
        Option(help=f"Preset, or several: {PRESET_NAMES}. By default what suits this machine.", autocompletion=presets),
    ] = [],
    config: Annotated[Path | None, Option(help="TOML file with presets, workloads and settings.")] = None,
    definition: Annotated[
        Path | None,
        Option(help="Folder of flashinfer-bench definitions and workloads; RUNS the Python references in it."),
    ] = None,
    backend: Annotated[list[str], Option(help="Only these backends (again for more).", autocompletion=rivals)] = [],
    skip: Annotated[list[str], Option(help="All backends but these.", autocompletion=rivals)] = [],
    only: Annotated[
        list[str], Option(help="Only workloads whose names match, such as 'wgrad-*' (again for more).")
    ] = [],
    candidate: Annotated[list[str], Option(help="FILE.py:FUNCTION, gated and raced like any backend.")] = [],
    timeout: Annotated[
        float, Option(help="Seconds that a candidate has for the checks of a workload before it counts as hung.")
    ] = 180.0,
    policy: Annotated[str, Option(help="graph, eager or both.", autocompletion=policies)] = "",
    routing: Annotated[
        str, Option(help="balanced, uniform, uneven(d), skewed, zipf(s), one-expert, half-empty, a FILE.json / .npz.")
    ] = "",
    tokens: Annotated[list[int], Option(help="Tokens (preset models; again for more).")] = [],
    batch: Annotated[int | None, Option(help="Sequences (preset models).")] = None,
    seq: Annotated[int | None, Option(help="Tokens of each sequence (preset models).")] = None,
    seed: Annotated[int | None, Option(help="Seed of the routing.", min=0)] = None,
    quick: Annotated[bool, Option("--quick", help="Fewer rounds, wider intervals.")] = False,
    full: Annotated[bool, Option("--full", help="All sizes of operators other than grouped_mm, on a CPU too.")] = False,
    memory: Annotated[bool, Option("--memory", help="The peak memory of their calls as well.")] = False,
    tune_configs: Annotated[bool, Option("--tune-configs", help="Also screen every config of each backend.")] = False,
    resume: Annotated[bool, Option("--resume", help="Go on with an interrupted run of today.")] = False,
    out: Annotated[Path | None, Option(help="Folder for records and reports; out/ by default.")] = None,
    no_html: Annotated[bool, Option("--no-html", help="Write no HTML report.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON; all else goes to standard error.")] = False,
) -> None:
    """Measure workloads: every backend is checked against a float32 reference, then all are timed in turns."""
    spec = BenchSpec() if config is None else read_bench_file(config, seed)
    typed = {_SPEC[name]: value for name, value in given(ctx).items() if name in _SPEC}
    told: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in typed.items()}
    spec = replace(spec, **told)
    if not timeout > 0:
        raise ValueError(f"timeout: expected more than 0 seconds, got {timeout:g}")
    device = Device.current()
    console = Console(emoji=False, stderr=as_json)
    aside = redirect_stdout(sys.stderr if as_json else sys.stdout)  # what candidates and references print
    if definition is not None:
        with aside:
            found = definition_parts(definition, spec, lambda line: console.print(escape(line), highlight=False))
    else:
        if not spec.presets and not spec.inline:
            spec = replace(spec, presets=default_preset(device))
        found = parts(spec, device)
    folder = check_folder("out", out or Path(spec.out or "out"))
    if spec.candidates and not found[0].candidates:
        with UserCandidates(spec.candidates, torch.device("cuda" if device.kind == "cuda" else "cpu"), timeout):
            pass  # one that cannot be loaded is to be noticed before an earlier part is measured
    sitting = _Sitting(spec, device, console, timeout, resume, tune_configs)
    paths, interrupted = [], False
    for part in found:
        paths.append(results_path(device.slug, part.name, datetime.date.today().isoformat(), root=folder))
        with aside:
            interrupted = not sitting.measure(part, paths[-1])
        if interrupted:
            break
    sitting.conclude(paths, not no_html)
    records = sitting.records
    if as_json:
        every = [*records, *sitting.peaks]
        print_json({"verdict": verdict(records), "leaderboard": leaderboard(records), "paths": paths, "records": every})
    if interrupted:
        console.print("Interrupted; what was measured is kept. Go on with the same command and --resume.")
        raise typer.Exit(130)
    right = {r.backend for r in records if r.status == "ok"}
    if any(candidate_name(c) not in right for c in spec.candidates):
        raise typer.Exit(1)  # a candidate without any right result: so that a script can tell


@dataclass
class _Sitting:
    """One call of bench: what it was asked, and what it has measured so far."""

    spec: BenchSpec
    device: Device
    console: Console
    timeout_s: float
    resume: bool
    tune_configs: bool
    records: list[Record] = field(default_factory=list)
    peaks: list[Record] = field(default_factory=list)

    def measure(self, part: Part, path: Path) -> bool:
        """Measure a part into the file `path`; False if it was interrupted."""
        made: list[Record] = []
        finished = True
        try:
            for record in self._records(part, path):
                made.append(record)
            if self.spec.memory and part.op_workloads:
                self._measure_memory(part, path.with_name(f"{path.stem}-memory.jsonl"))
        except KeyboardInterrupt:
            finished = False
        self.console.print(f"[dim]{escape(part.name)}: {len(made)} new records in {escape(str(path))}[/dim]")
        if self.resume and path.is_file():
            # The file may hold earlier runs as well, and runs are not to be mixed.
            held = read(path)
            made = [r for r in held if r.run == held[-1].run]
        self.records += made
        return finished

    def _records(self, part: Part, path: Path) -> Iterator[Record]:
        spec = self.spec
        if self.device.kind != "cuda" and spec.policy == "graph":
            raise ValueError("policy: expected eager on a CPU (there are no CUDA graphs), got 'graph'")
        if part.name in end_to_end.BACKENDS:
            chosen = tuple(n for n in end_to_end.BACKENDS[part.name] if spec.chooses(n))
            seconds = 4.0 if spec.quick else 12.0
            with self.console.status(f"{part.name}: whole models"):
                for record in end_to_end.measure(
                    part.name, Site.current(), out_path=path, seconds=seconds, backends=chosen
                ):
                    self.console.print(escape(end_to_end.line(record)), highlight=False)
                    yield record
            return
        if part.note:
            self.console.print(f"[dim]{escape(part.note)}[/dim]", highlight=False)
        with Display(self.console, part.name) as display:
            yield from run(
                part.workloads,
                part.backends,
                operators=part.operators,
                policies=spec.policies,
                out_path=path,
                resume=self.resume,
                quick=spec.quick,
                candidates=part.candidates,
                candidate_timeout_s=self.timeout_s,
                rounds=spec.rounds,
                tune_configs=self.tune_configs,
                on_event=display.on_event,
            )

    def _measure_memory(self, part: Part, path: Path) -> None:
        workloads = memory_workloads(part.name, part.op_workloads)
        if self.device.kind == "cpu" and not self.spec.full:
            workloads = for_cpu(workloads)
        rivals = {operator.name: operator for operator in part.operators}
        with self.console.status(f"{part.name}: peak memory"):
            found = list(kept(measure_memory(workloads, rivals, Site.current()), path))
        self.peaks += found
        self.console.print(f"[dim]{escape(part.name)}: {len(found)} new records of memory in {escape(str(path))}[/dim]")

    def conclude(self, paths: list[Path], write_html: bool) -> None:
        """Print table, leaderboard and verdict, and write the report."""
        records, console = self.records, self.console
        if not records:
            console.print("Nothing was measured.")
            return
        kept_in = "Records: " + ", ".join(escape(str(p)) for p in paths)
        if all(r.metric != SECONDS for r in records):  # each was shown when it was made
            console.print(kept_in, highlight=False)
            return
        presets = {r.workload.split("/")[0] for r in records}
        files = [*presets, *(f"{name}-memory" for name in presets)]
        shipped = [r for name in files for r in shipped_records(name) if r.env.gpu != self.device.name]
        console.print(table(records), *tables(leaderboard(records)), sep="\n")
        lines = elsewhere_lines(records, shipped)
        if lines:
            where = " (all of it is in the report)" if write_html else ""
            console.print(f"[dim]The same work elsewhere{where}:[/dim]")
        for line in lines:
            console.print(f"[dim]  {escape(line)}[/dim]", highlight=False)
        # Last, so that it stands on the screen when the run is over; of a user's own kernel first.
        candidates = [candidate_name(c) for c in self.spec.candidates]
        found = [sentence for name in candidates for sentence in of_candidate(records, name)]
        found += verdict(records, told=candidates)
        for sentence in found:
            console.print(f"[bold]•[/bold] {escape(sentence)}", highlight=False)
        for sentence in conclude(records):
            console.print(f"• {escape(sentence)}", highlight=False)
        console.print(kept_in, highlight=False)
        if write_html:
            # One page for everything that this call measured.
            page = paths[0].with_suffix(".html") if len(paths) == 1 else paths[0].with_name("report.html")
            console.print(f"Report:  {escape(str(html([*records, *self.peaks], page, shipped)))}", highlight=False)
