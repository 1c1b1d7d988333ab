"""Write the figures of docs/grouped_mm.md from shipped records.

    python tools/grouped_figures.py [--gpu nvidia-h200] [--doc docs/grouped_mm.md] [--check]

With `--check` nothing is written, and the exit status is 1 if the page is not what the records say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from expertile.device import Device
from expertile.lab.record import shipped_records, shipped_root
from expertile.lab.report.grouped import PRESETS, read_checks, update_page


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpu", default="nvidia-h200", help="the GPU whose records count")
    parser.add_argument("--doc", type=Path, default=Path("docs/grouped_mm.md"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    device = Device.by_name(options.gpu)
    records = [record for preset in PRESETS for record in shipped_records(preset, device.slug)]
    checks = read_checks(shipped_root() / device.slug)
    current = update_page(options.doc, records, checks, device.name, options.check)
    if options.check and not current:
        print(f"{options.doc}: not what the records say; run python tools/grouped_figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
