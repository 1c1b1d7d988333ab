"""Thousands of random problems on `auto` and every own backend, spread over processes that compile side by side.

pytest tests/gpu/test_random_shapes.py --random-shapes 10000 --random-seed 1 --random-out summary.json
"""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import expertile
from expertile.device import Device
from tests.gpu.random_shapes import Summary

ROOT = Path(__file__).parents[2]
_SECONDS = 500  # for all processes together; one that hangs is stopped and its case told


def _start(count: int, seed: int, part: int, parts: int, folder: Path) -> subprocess.Popen[bytes]:
    out = folder / f"{part}.json"
    words = ["--count", str(count), "--seed", str(seed), "--part", f"{part}/{parts}", "--out", str(out)]
    # one thread each: the processes share the cores
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{part}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.random_shapes", *words], cwd=ROOT, env=env, stdout=log, stderr=log
        )


def _outcome(process: subprocess.Popen[bytes], part: int, folder: Path, seconds: float) -> dict | str:
    """The summary of one part, or why there is none."""
    try:
        code = str(process.wait(seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = f"stopped after {_SECONDS} s"
    out = folder / f"{part}.json"
    if out.is_file():
        return json.loads(out.read_text())
    now = out.with_suffix(".now")
    last = now.read_text() if now.is_file() else "(before its first case)"
    log = (folder / f"{part}.log").read_text(errors="replace")[-1500:]
    return f"part {part} ended without a summary (exit status {code}) while it ran\n{last}\n{log}"


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS + 60)
def test_random_shapes(pytestconfig, tmp_path):
    count, seed = pytestconfig.getoption("--random-shapes"), pytestconfig.getoption("--random-seed")
    parts = max(1, min(12, (os.cpu_count() or 1) - 2))
    torch.cuda.empty_cache()
    started = datetime.now(UTC)
    processes = [_start(count, seed, part, parts, tmp_path) for part in range(parts)]
    summary, lost = Summary(seed, count), []
    for part, process in enumerate(processes):
        left = _SECONDS - (datetime.now(UTC) - started).total_seconds()
        outcome = _outcome(process, part, tmp_path, max(left, 1.0))
        if isinstance(outcome, str):
            lost.append(outcome)
        else:
            summary.add(outcome)
    record = {
        "what": "random problems against the float32 (float32 inputs: float64) reference, thresholds of race/gate.py",
        "env": {"gpu": Device.current().name, "torch": torch.__version__, "expertile": expertile.__version__},
        "date": started.isoformat(timespec="seconds"),
        "parts": parts,
        **summary.as_dict(),
        "lost": lost,
    }
    target = pytestconfig.getoption("--random-out")
    if target:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(record, indent=1) + "\n")
    told = [f"{f['backend']} ({f['ran']}): {f['reason']}\n{f['program']}" for f in summary.failures[:5]]
    assert not summary.failures and not lost, f"{len(summary.failures)} wrong\n\n" + "\n".join([*told, *lost])
    assert summary.cases == count and set(summary.runs), f"{summary.cases} of {count} cases were run"
