"""Write the figures of docs/quantised.md from shipped records and arithmetic.

    python tools/quantised_figures.py [RECORDS.jsonl …] [--gpu nvidia-h200] [--doc docs/quantised.md] [--check]

Without files the newest shipped records of the presets on `--gpu` are used. With `--check` nothing is written, and the
exit status is 1 if the page is not what the records say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from expertile.device import Device
from expertile.lab.record import read, shipped_records
from expertile.lab.report.quantised import update_page

PRESETS = ("fp8-sweep", "fp8-large", "fp8-causes", "quantize", "int4-models")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, help="record files (JSONL)")
    parser.add_argument("--gpu", default="nvidia-h200", help="the GPU whose records count")
    parser.add_argument("--doc", type=Path, default=Path("docs/quantised.md"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    device = Device.by_name(options.gpu)
    records = [record for file in options.files for record in read(file)]
    if not options.files:
        records = [record for preset in PRESETS for record in shipped_records(preset, device.slug)]
    current = update_page(options.doc, records, device.name, options.check)
    if options.check and not current:
        print(f"{options.doc}: not what the records say; run python tools/quantised_figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
