"""Write the generated blocks of the documentation's pages from shipped records; figures under docs/figures with them.

    python -m tools.pages [NAME …] [--gpu nvidia-h200] [--check]
    python -m tools.pages NAME --records FILE.jsonl … [--doc PAGE.md]

Without names all pages are written. `--records` are taken in place of the shipped ones, the newest of results/<gpu>.
With `--check` nothing is written, and the exit status is 1 if a page is not what the records say; it is 2 where a page
that was named has no records.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from expertile.device import Device
from expertile.lab.race.record import read, shipped_records, shipped_root, shown_files
from expertile.lab.traffic import explain
from tools.pages import end_to_end, grouped, headline, ladder, memory, moe, parallel, quantised, scaling, transformers
from tools.pages.markers import fill_file
from tools.pages.moe_presets import PRESETS as MOE_PRESETS
from tools.pages.recorded import NOT_MEASURED, shipped
from tools.pages.traffic import update_pages


class Job(NamedTuple):
    """One page to write: from `files`, or the shipped records of `device` where there are none."""

    doc: Path
    device: Device
    files: Sequence[Path]
    check: bool

    def records(self, presets: Iterable[str]) -> list[Any]:
        """Of `files`, or of the newest file of each preset."""
        if self.files:
            return [record for file in self.files for record in read(file)]
        return [record for preset in presets for record in shipped_records(preset, self.device.slug)]

    def fill(
        self,
        kind: str,
        blocks: Mapping[str, str],
        svgs: Mapping[str, str] = MappingProxyType({}),
        folder: str = "figures",
    ) -> bool:
        """The page's blocks `kind` NAME, and the figures in a folder beside it."""
        files = {self.doc.parent / folder / f"{name}.svg": text for name, text in svgs.items()}
        return fill_file(self.doc, blocks, self.check, kind, files)


def _grouped(job: Job) -> bool:
    checks = grouped.read_checks(shipped_root() / job.device.slug)
    return job.fill("grouped", grouped.blocks(job.records(grouped.PRESETS), checks, job.device.name))


def _ladder(job: Job) -> bool:
    return job.fill("ladder", ladder.blocks(job.records(("ladder",))))


def _memory(job: Job) -> bool | None:
    records = job.records(("attention-memory",))
    text = memory.memory_text(records) or NOT_MEASURED
    return job.fill("", {"memory": text}, memory.memory_svg(records)) if records else None


def _moe(job: Job) -> bool:
    every = () if job.files else ("moe",)  # whose newest file may be a race of some of its layers, in a graph
    records = [*shipped(every, job.device.slug), *job.records([p for p in moe.PRESETS if p not in every])]
    return job.fill("moe", moe.blocks(records, shipped(MOE_PRESETS, job.device.slug), job.device))


def _parallel(job: Job) -> bool:
    return job.fill("parallel", parallel.blocks(job.records(parallel.presets(job.device.slug)), job.device))


def _readme(job: Job) -> bool:
    records = [r for file in job.files for r in read(file)] or shipped(headline.PRESETS, job.device.slug)
    found = headline.standings(records, job.device.name)
    charts = headline.charts(found, job.device.name)
    return job.fill("", {"jobs": headline.table(found)}, charts, "docs/results/figures")


def _results(job: Job) -> bool:
    """The same table, and every preset as `expertile report` shows it."""
    shown = [r for file in job.files or shown_files() for r in read(file)]
    return job.fill("", headline.blocks(shipped(headline.PRESETS, job.device.slug), shown, job.device.name))


def _scaling(job: Job) -> bool | None:
    records = job.records(("scaling", "skew"))
    return job.fill("scaling", scaling.blocks(records), scaling.scaling_svg(records)) if records else None


def _traffic(job: Job) -> bool:
    """With elementwise.md and stencil.md, which lie beside it."""
    if job.files:
        raise ValueError("--records: expected none for traffic, whose pages join shipped times and counts")
    records = [*explain.shipped(), *shipped_records("traffic", job.device.slug)]
    return not update_pages(job.doc.parent, records, job.device, job.check)


def _plain(kind: str, module: Any) -> Callable[[Job], bool]:
    """A page whose blocks `kind` NAME are `module.blocks` of the records of `module.PRESETS`."""
    return lambda job: job.fill(kind, module.blocks(job.records(module.PRESETS), job.device))


# Each says whether its page was what the records say; None where there are no records.
PAGES: dict[str, tuple[str, Callable[[Job], bool | None]]] = {
    "end-to-end": ("docs/results/end-to-end.md", _plain("end-to-end", end_to_end)),
    "grouped_mm": ("docs/results/grouped_mm.md", _grouped),
    "ladder": ("docs/notes/ladder.md", _ladder),
    "memory": ("docs/results/attention.md", _memory),
    "moe": ("docs/results/moe.md", _moe),
    "parallel": ("docs/results/parallel.md", _parallel),
    "quantised": ("docs/results/quantised.md", _plain("quantised", quantised)),
    "readme": ("README.md", _readme),
    "results": ("docs/results/index.md", _results),
    "scaling": ("docs/results/scaling.md", _scaling),
    "traffic": ("docs/results/traffic.md", _traffic),
    "transformers": ("docs/results/transformers.md", _plain("transformers", transformers)),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PAGES)}; all without a name")
    parser.add_argument("--gpu", default="nvidia-h200", help="the GPU whose records count")
    parser.add_argument("--records", nargs="+", type=Path, default=[], help="record files in place of the shipped ones")
    parser.add_argument("--doc", type=Path, help="the page, where it is not the usual one")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in PAGES]
    if unknown:
        parser.error(f"NAME: expected {', '.join(PAGES)}, got {unknown[0]!r}")
    if (options.records or options.doc) and len(options.names) != 1:
        parser.error(f"--records, --doc: expected with one NAME, got {len(options.names)}")
    device, status = Device.by_name(options.gpu), 0
    for name in options.names or PAGES:
        usual, update = PAGES[name]
        doc = options.doc or Path(usual)
        try:
            current = update(Job(doc, device, options.records, options.check))
        except ValueError as error:
            parser.error(str(error))
        if current is None and options.names:
            print(f"{name}: no records for {device.name}", file=sys.stderr)
            status = 2
        elif current is False and options.check:
            print(f"{doc}: not what the records say; run python -m tools.pages {name}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
