"""Write the figures of docs/traffic.md, docs/elementwise.md and docs/stencil.md from formulas and shipped records.

    python tools/traffic_figures.py [--gpu nvidia-h200] [--docs docs] [--check]

With `--check` nothing is written, and the exit status is 1 if a page is not what the records say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from expertile.device import Device
from expertile.lab.traffic.explain import shipped
from expertile.lab.traffic.measured import shipped_traffic
from expertile.lab.traffic.page import update_pages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpu", default="nvidia-h200", help="the GPU whose shipped records count")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    device = Device.by_name(options.gpu)
    stale = update_pages(options.docs, shipped(), shipped_traffic(device.slug), device, options.check)
    for page in stale if options.check else ():
        print(f"{page}: not what the records say; run python tools/traffic_figures.py", file=sys.stderr)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
