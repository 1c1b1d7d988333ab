"""Run PyTorch's own tests of `torch.nn.functional.grouped_mm` with ours in its place.

    python -m tests.gpu.torch_contract path/to/pytorch/test/test_matmul_cuda.py [--out results]

The file comes from a PyTorch checkout of the installed version and is not part of this repository; it needs the
package expecttest. Every `test_grouped_gemm_*` in it runs. What passed, failed and was skipped is printed, and written
to `<out>/<gpu-slug>/<date>-torch-contract.json`. Exit status 1 if a test failed or none passed.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import expertile

TESTS = "test_grouped_gemm"


@contextmanager
def replaced(function: Any) -> Iterator[None]:
    """`torch.nn.functional.grouped_mm` and `torch._grouped_mm` are `function` while this lasts."""
    originals = F.grouped_mm, torch._grouped_mm
    F.grouped_mm = torch._grouped_mm = function
    try:
        yield
    finally:
        F.grouped_mm, torch._grouped_mm = originals


def _reason(longrepr: Any) -> str:
    """The first line of what pytest says about a failure or skip; empty for a pass."""
    if isinstance(longrepr, tuple):
        return str(longrepr[2])
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(longrepr or "")
    return text.strip().split("\n")[0]


@dataclass
class Outcomes:
    """A pytest plugin that keeps each test's outcome: "passed", "failed" or "skipped", and why."""

    of: dict[str, tuple[str, str]] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.split("::")[-1]
        self.of[name] = (report.outcome, _reason(report.longrepr))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.of[report.nodeid] = ("failed", _reason(report.longrepr))

    def named(self, outcome: str) -> dict[str, str]:
        return {name: why for name, (got, why) in sorted(self.of.items()) if got == outcome}


def run(path: Path) -> Outcomes:
    """Run the tests of `path` in this process with ours in place of PyTorch's."""
    outcomes = Outcomes()
    # An empty configuration: our own pytest settings are not PyTorch's.
    arguments = [str(path), "-k", TESTS, "-c", os.devnull, "--rootdir", str(path.parent), "-p", "no:cacheprovider"]
    with replaced(expertile.grouped_mm):
        pytest.main([*arguments, "-q", "--tb=short"], plugins=[outcomes])
    return outcomes


def summary(path: Path, outcomes: Outcomes) -> dict[str, Any]:
    """What ran, on what, and with which result, for the results folder."""
    device = expertile.Device.current()
    return {
        "what": "PyTorch's test_grouped_gemm_* with torch.nn.functional.grouped_mm replaced by expertile.grouped_mm",
        "file": path.name,
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "env": {"gpu": device.name, "torch": torch.__version__, "expertile": expertile.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "passed": list(outcomes.named("passed")),
        "failed": outcomes.named("failed"),
        "skipped": outcomes.named("skipped"),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path, help="PyTorch's test/test_matmul_cuda.py")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results (default: results)")
    options = parser.parse_args(argv)
    outcomes = run(options.path.resolve())
    record = summary(options.path, outcomes)
    for outcome in ("passed", "skipped", "failed"):
        for name, why in outcomes.named(outcome).items():
            print(f"{outcome:8} {name}{f'  ({why})' if why else ''}")
    counts = {k: len(record[k]) for k in ("passed", "failed", "skipped")}
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    folder = options.out / expertile.Device.current().slug
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{record['date'][:10]}-torch-contract.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(target)
    return 0 if counts["passed"] and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
