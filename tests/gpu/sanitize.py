"""Small cases of every own backend under NVIDIA's compute-sanitizer.

    python -m tests.gpu.sanitize [--tool memcheck --tool racecheck] [--backend triton_tma] [--out results]

Kernels are compiled in a first run without the tool, into Triton's disk cache. Under it, operands are made and results
compared on the host and PyTorch caches no memory, so that the kernels seen are ours and every tensor has bounds of its
own. The outcome is printed and written to `<out>/<gpu-slug>/<date>-sanitize.json`: "clean", "not clean", "wrong" (the
results), "unsupported" (the tool refuses, in its own words), "timeout" or "not installed". racecheck follows barriers
in shared memory, but not every order that TMA and mbarrier establish: what it reports on such kernels has to be read,
and its text is kept. Of the warp-specialised kernel it reports one read, by several writes: in the machine code that is
`LDS.U8`, with which each warp learns its partition, between the two `BAR.SYNC 1` of Triton's own hand-over, and the
bytes are stored before the first of them. No pair is of the kernel's buffers. Exit status 1 unless every run is clean
or the tool is not to be had.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import expertile
from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import BACKENDS, by_name
from expertile.ops.grouped_mm.problem import Problem
from tests.ops.grouped_mm.cases import CASES, check, expected, make, poisoned_out

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
OWN = tuple(b.name for b in BACKENDS if not b.peer and not b.reads_offs_on_host)
ENDINGS = (
    "plain",
    "weights-kn",
    "empty-groups",
    "rows-past-the-end",
    "odd-sizes",
    "bias",
    "padded",
    "wgrad",
    "many-groups",
)
_ERROR_EXIT = 86
_REFUSED = re.compile(r"[^\n]*(?:not supported|unsupported|Device not supported|Internal Sanitizer Error)[^\n]*", re.I)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def work(backend_name: str) -> int:
    """Run the cases that `backend_name` takes, checking each on the host; prints how many."""
    backend, device = by_name(backend_name), Device.current()
    done = 0
    for case in (c for c in CASES if c.name.endswith(ENDINGS)):
        host = make(case, "cpu")
        a, b, offs, bias = (_to_gpu(x) for x in host)
        problem = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
        if backend.supports(problem, device) is not None:
            continue
        out = poisoned_out(case, "cpu").cuda()
        backend.run(problem, Operands(a, b, offs, bias), backend.configs(problem, device)[0], out)
        check(case, out.cpu(), expected(case, *host))
        done += 1
    print(f"{done} cases right")
    return 0 if done else 1


def _to_gpu(x: torch.Tensor | None) -> torch.Tensor | None:
    """A copy with the same strides, made by the copy engine alone."""
    if x is None:
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    flat = torch.as_strided(x, (reach,), (1,), x.storage_offset()).cuda()
    return torch.as_strided(flat, x.shape, x.stride())


def verdict(text: str, code: int | None) -> tuple[str, int | None]:
    """(outcome, errors or hazards the tool counted) from the tool's text and exit status (None: it ran out of time)."""
    counted = [int(n) for n in _SUMMARY.findall(text)]
    if code is None:
        return "timeout", None
    if not counted:
        return ("unsupported" if _REFUSED.search(text) else "wrong"), None
    if counted[-1]:
        return "not clean", counted[-1]
    return ("clean" if code == 0 and "cases right" in text else "wrong"), 0


def _run(command: list[str], env: dict[str, str], seconds: float) -> tuple[str, int | None]:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), None
    return done.stdout.decode(errors="replace"), done.returncode


def sanitize(sanitizer: str, tool: str, backend: str, seconds: float) -> dict[str, Any]:
    """One tool on one backend, as the JSON says it."""
    worker = [sys.executable, "-m", "tests.gpu.sanitize", "--work", backend]
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_ERROR_EXIT), "--print-limit", "20", *worker]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    began = time.monotonic()
    text, code = _run(command, env, seconds)
    outcome, errors = verdict(text, code)
    cases = re.search(r"(\d+) cases right", text)
    said = [line for line in text.splitlines() if line.startswith("=========") or "Error" in line]
    return {
        "tool": tool,
        "backend": backend,
        "outcome": outcome,
        "errors": errors,
        "exit": code,
        "cases": int(cases[1]) if cases else None,
        "seconds": round(time.monotonic() - began, 1),
        "command": ["compute-sanitizer", *command[1:5], "python", *worker[1:]],
        "text": (said or text.splitlines())[:60],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="memcheck and racecheck by default")
    parser.add_argument("--backend", action="append", choices=OWN, help="all own kernels by default")
    parser.add_argument("--seconds", type=float, default=200.0, help="time limit of each run")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work:
        return work(options.work)
    tools, backends = options.tool or list(TOOLS[:2]), options.backend or list(OWN)
    device, now = Device.current(), datetime.now(UTC)
    if device.kind != "cuda":
        print("needs a CUDA GPU", file=sys.stderr)
        return 2
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    jobs = [(tool, backend) for tool in tools for backend in backends]
    with ThreadPoolExecutor(max_workers=3) as pool:
        # compile all kernels, without the tool
        plain = list(
            pool.map(lambda b: _run([sys.executable, "-m", __spec__.name, "--work", b], {**os.environ}, 300), backends)
        )
        if sanitizer is None:
            runs = [{"tool": t, "backend": b, "outcome": "not installed", "errors": None, "text": []} for t, b in jobs]
        else:
            runs = list(pool.map(lambda job: sanitize(sanitizer, *job, options.seconds), jobs))
    for backend, (text, code) in zip(backends, plain, strict=True):
        if code != 0:
            failed = {"tool": "none", "backend": backend, "outcome": "wrong", "exit": code, "errors": None}
            runs.insert(0, {**failed, "text": text.splitlines()[-20:]})
    version = _run([sanitizer, "--version"], {**os.environ}, 60)[0].split() if sanitizer else []
    record = {
        "what": "small cases of every own backend under compute-sanitizer",
        "env": {
            "gpu": device.name,
            "torch": torch.__version__,
            "expertile": expertile.__version__,
            "compute_sanitizer": next((w for w in version if re.match(r"\d+\.\d+", w)), None),
        },
        "date": now.isoformat(timespec="seconds"),
        "runs": runs,
    }
    for run in runs:
        print(f"{run['tool']:10} {run['backend']:16} {run['outcome']:14} {run.get('cases') or '-':>4} cases")
        if run["outcome"] not in ("clean", "not installed"):
            print("    " + "\n    ".join(run["text"][:12]))
    target = options.out / device.slug / f"{record['date'][:10]}-sanitize.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(target)
    return 0 if all(run["outcome"] in ("clean", "not installed", "unsupported") for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
