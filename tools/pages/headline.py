"""README's table and chart: ten jobs, ours beside the best rival of each workload, losses included.

A job is one run: of all shipped files of its preset the run that timed most of its workloads, the newest of equals.
The best rival of a workload is the fastest backend of that run which is not ours. `bf16` counts as one where weights
are quantised: a user of 4-bit weights could have kept 16 bits. Ratios of two runs never meet.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from expertile.lab.race.record import Record
from expertile.lab.report.contest import Contest, Run, runs, tied
from expertile.lab.report.rows import Row
from expertile.lab.report.units import cell, listed, markdown_table, times
from tools.pages.headline_chart import Bar, chart
from tools.pages.presets import headline
from tools.pages.recorded import KERNELS, NOT_MEASURED, counts

THEMES = ("light", "dark")


@dataclass(frozen=True)
class Job:
    """One row. `ours`: the backends that count as ours, of which the fastest is taken; `label`: their name there."""

    name: str
    preset: str
    ops: tuple[str, ...]
    ours: tuple[str, ...]
    label: str
    chosen: Callable[[str], bool] = lambda workload: True
    # Libraries made for the job; a row says which of them had no time in its run.
    specialised: tuple[str, ...] = ()


def _forward(workload: str) -> bool:
    return not workload.startswith("wgrad-")


_FASTEST, _AUTO = "fastest of our kernels", "`auto`"
_ROWS = ("softmax", "layer_norm", "rms_norm")

# In the order of the table. Backend `expertile` is the call as a user writes it, with what `auto` takes.
JOBS = (
    Job("Grouped products, forward", "anchors", ("grouped_mm",), KERNELS, _FASTEST, _forward),
    Job("Gradients of products", "gradients", ("grouped_mm",), KERNELS, _FASTEST),
    Job("Random products", "auto", ("grouped_mm",), ("auto",), _AUTO, specialised=("quack",)),
    Job("FP8 products", "fp8-large", ("scaled_grouped_mm",), ("expertile",), _AUTO, specialised=("DeepGEMM",)),
    Job(
        "4-bit products",
        "weight-only",
        ("weight_only_mm",),
        ("expertile",),
        _AUTO,
        specialised=("Marlin", "triton_kernels", "Humming"),
    ),
    Job("MoE layer, forward", "moe-sonic", ("moe",), ("expertile",), _AUTO, specialised=("SonicMoE",)),
    Job("MoE layer, training", "moe-sonic", ("moe_train",), ("expertile",), _AUTO, specialised=("SonicMoE",)),
    Job("MoE layer, decode", "moe-decode", ("moe",), ("expertile",), _AUTO, specialised=("SonicMoE",)),
    Job(
        "Attention, both passes",
        "attention",
        ("attention", "attention_backward"),
        ("expertile-auto",),
        _AUTO,
        specialised=("FlashAttention 3",),
    ),
    Job(
        "Softmax and norms, both passes",
        "rows",
        tuple(f"{op}{end}" for op in _ROWS for end in ("", "_backward")),
        ("expertile",),
        _AUTO,
    ),
)
PRESETS = tuple(dict.fromkeys(job.preset for job in JOBS))
# What the lab calls the libraries of `Job.specialised`.
_BACKENDS = {
    "DeepGEMM": "deepgemm",
    "FlashAttention 3": "fa3",
    "Humming": "humming",
    "Marlin": "marlin",
    "SonicMoE": "sonicmoe",
    "quack": "quack",
    "triton_kernels": "triton_kernels",
}
# The chart has a pair of bars for each of these.
SHOWN = {
    "Grouped products, forward": "Grouped GEMM, bf16",
    "FP8 products": "FP8 experts",
    "4-bit products": "4-bit experts",
    "MoE layer, training": "MoE layer, training",
    "MoE layer, decode": "MoE layer, decode",
}


@dataclass(frozen=True)
class Standing:
    """What one run says of a job. `timed`: workloads with a time of ours. `ratios`: the best rival's time over ours, of
    those with both; above 1 ours is faster."""

    job: Job
    run: Run
    timed: int
    ratios: tuple[float, ...]
    rivals: tuple[str, ...]
    faster: int
    slower: int

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios)

    @property
    def absent(self) -> list[str]:
        """Of the job's specialised libraries those without a time in the run."""
        timed = {row.backend for row in self.run.rows if row.timed}
        return [name for name in self.job.specialised if _BACKENDS[name] not in timed]

    @property
    def weight(self) -> tuple[int, int]:
        """Of two runs the one with more specialised rivals stands, then the one with more workloads."""
        return -len(self.absent), self.timed

    @property
    def ties(self) -> int:
        return len(self.ratios) - self.faster - self.slower


def standings(records: Iterable[Record], gpu: str) -> list[Standing]:
    """One for each job that a run on `gpu` has timed, under CUDA-graph replay; in the order of `JOBS`."""
    here = [r for r in records if r.env.gpu == gpu and r.policy == "graph" and counts(r.workload)]
    found = (_standing(job, here) for job in JOBS)
    return [standing for standing in found if standing is not None]


def _standing(job: Job, records: Sequence[Record]) -> Standing | None:
    of_it = [r for r in records if r.op in job.ops and r.workload.startswith(f"{job.preset}/")]
    best: Standing | None = None
    for run in runs(r for r in of_it if job.chosen(r.workload.partition("/")[2])):
        contests = run.contests_of("graph")
        timed = [ours for contest in contests if (ours := _of(contest, job.ours))]
        pairs = [pair for contest in contests if (pair := _pair(contest, job.ours))]
        if not pairs:
            continue
        ratios = tuple(ratio for ratio, _, _ in pairs)
        faster = sum(ratio > 1 for ratio, _, tie in pairs if not tie)
        slower = sum(ratio < 1 for ratio, _, tie in pairs if not tie)
        found = Standing(job, run, len(timed), ratios, tuple(rival for _, rival, _ in pairs), faster, slower)
        if best is None or found.weight >= best.weight:
            best = found
    return best


def _pair(contest: Contest, names: Sequence[str]) -> tuple[float, str, bool] | None:
    """(the best rival's time over ours, its name, whether the two tie), where both have a time."""
    ours = _of(contest, names)
    rival = contest.fastest(lambda row: not _is_ours(row.backend))
    if ours is None or rival is None:
        return None
    return rival.seconds / ours.seconds, rival.backend, tied(ours, rival)


def _of(contest: Contest, names: Sequence[str]) -> Row | None:
    return contest.fastest(lambda row: row.backend in names)


def _is_ours(backend: str) -> bool:
    return backend in (*KERNELS, "auto", "measure") or backend.startswith("expertile")


def table(found: Sequence[Standing]) -> str:
    """The table, what its words mean, and the libraries that were in none of the runs."""
    if not found:
        return NOT_MEASURED
    body = [
        [
            s.job.name + "\u00a0¹" * bool(s.absent),
            s.job.label,
            _named(s.rivals),
            f"**{times(s.mean)}**",
            times(min(s.ratios)),
            f"{s.faster} / {s.ties} / {s.slower}",
        ]
        for s in found
    ]
    days = sorted(s.run.day for s in found)
    env = found[0].run.rows[0].env
    torch, triton = cell(str(env.torch)), cell(str(env.triton))
    lead = (
        f"{cell(found[0].run.device)}, {days[0]} to {days[-1]}, torch {torch}, Triton {triton}, CUDA-graph replay. The "
        "ratio is the best rival's time over ours, geometric mean over the workloads of one run: above 1× ours is "
        "faster. Each workload has its own best rival. `auto` is the call as a user writes it."
    )
    header = ["job", "ours", "best rival (workloads)", "ratio", "worst", "faster / tie / slower"]
    return "\n\n".join([lead, markdown_table(header, body, left=3), _footnote(found)])


def _named(rivals: Sequence[str]) -> str:
    """The best rivals, the most frequent first: `quack` 9, `loop` 2. Two ways of one rival to combine are one rival."""
    counts = Counter(name.removesuffix("-index-add") for name in rivals).most_common()
    return ", ".join(f"`{cell(name)}`\u00a0{count}" for name, count in counts)


def _footnote(found: Sequence[Standing]) -> str:
    said = "; ".join(f"{listed(s.absent)} ({s.job.name})" for s in found if s.absent)
    notes = [f"¹ Without a time in the row's run: {said}." if said else ""]
    if any("bf16" in s.rivals for s in found):
        notes.append("`bf16` is our own product of unquantised weights.")
    notes += [_choice(s) for s in found if s.job.ours == ("auto",)]
    return " ".join(filter(None, notes))


# docs/notes/grouped_mm.md, "quack".
_FIXED = ", which the best of 13 beats by 7 to 16 % on others (docs/notes/grouped_mm.md)"


def _choice(s: Standing) -> str:
    """What choosing loses: auto beside the fastest of all that ran, our own configurations included."""
    contests = s.run.contests_of("graph")

    def reached(backend: str) -> str | None:
        found = [(contest.ranked[0], ours) for contest in contests if (ours := _of(contest, (backend,)))]
        shares = [best.seconds / ours.seconds for best, ours in found]
        return f"{geometric_mean(shares):.3f} (worst {min(shares):.2f})" if shares else None

    tiles = any(row.backend == "quack" and row.config.get("block_m") for row in s.run.rows)
    fixed = "" if s.absent or tiles else f", quack in its one fixed configuration{_FIXED}"
    measured = reached("measure")
    raced = f', and `backend="measure"`, which races candidates at a problem\'s first call, {measured}'
    return (
        f"Random products: {s.timed} shapes that the tuned table had not seen, {len(s.ratios)} of them with a rival"
        f"{fixed}; beside the fastest configuration of any backend, ours included, `auto` reaches {reached('auto')}"
        f"{raced if measured else ''}."
    )


def bars(found: Sequence[Standing]) -> list[Bar]:
    """The chart's jobs, each with the rival that was most often the best."""
    by_name = {s.job.name: s for s in found}
    shown = [(title, s) for name, title in SHOWN.items() if (s := by_name.get(name))]
    return [Bar(title, _rival(s), s.mean, min(s.ratios), max(s.ratios)) for title, s in shown]


def _rival(s: Standing) -> str:
    name = Counter(s.rivals).most_common(1)[0][0].removesuffix("-index-add")
    return {"bf16": "our own bf16 product"}.get(name, name)


def _note(found: Sequence[Standing]) -> str:
    absent = dict.fromkeys(name for s in found if s.job.name in SHOWN for name in s.absent)
    lacking = f"; no time of {listed(list(absent))}" if absent else ""
    return f"bar: geometric mean, line: worst to best{lacking}"


def blocks(records: Iterable[Record], shown: Iterable[Record], gpu: str) -> dict[str, str]:
    """The table, and below it every preset of `shown`."""
    # Markdown inside of HTML is read as such by GitHub as it is, by mkdocs if told so.
    presets = headline(shown).replace("<details>", "<details markdown>")
    return {"jobs": table(standings(records, gpu)), "headline": presets}


def charts(found: Sequence[Standing], gpu: str) -> dict[str, str]:
    """SVG by name, for each theme."""
    return {f"headline-{theme}": chart(bars(found), gpu, _note(found), theme) for theme in THEMES}
