"""Nsight Compute (`ncu`) as a counter of memory traffic: run it on a small process, read its table.

Only kernels between cudaProfilerStart and cudaProfilerStop are counted, each with caches flushed before it, so that a
kernel's reads from memory are those of its inputs. What a kernel has written may still lie in L2 when it ends: up to a
cache full is missing in the bytes written to memory. Clocks are left alone.
"""

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SECTOR_BYTES = 32
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_L2_READ, _L2_WRITTEN = "lts__t_sectors_op_read.sum", "lts__t_sectors_op_write.sum"
_TIME = "gpu__time_duration.sum"
METRICS = (_READ, _WRITTEN, _L2_READ, _L2_WRITTEN, _TIME)
_SCALE = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "sector": float(SECTOR_BYTES)}
for _prefix, _factor in (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9)):
    _SCALE |= {f"{_prefix}s": _factor, f"{_prefix}second": _factor}
_PERMISSION = (
    "the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM); "
    "see developer.nvidia.com/ERR_NVGPUCTRPERM"
)


@dataclass(frozen=True)
class Kernel:
    """One launch: bytes read from and written to memory, bytes asked of L2, seconds. None where ncu has no figure."""

    name: str
    read: float | None
    written: float | None
    l2_read: float | None
    l2_written: float | None
    time_s: float | None


@dataclass(frozen=True)
class Profile:
    """The kernels that ran, in order; or none, with the reason."""

    kernels: tuple[Kernel, ...]
    reason: str = ""


def find_ncu() -> str | None:
    """The `ncu` of this machine: on the PATH, of a CUDA toolkit, or of Nsight Compute on its own."""
    found = shutil.which("ncu")
    if found is not None:
        return found
    folders = (Path("/usr/local"), Path("/opt/nvidia"))
    patterns = ("cuda*/bin/ncu", "nsight-compute/*/ncu")
    places = [path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern))]
    return str(places[-1]) if places else None


def command(ncu: str, log: str | Path, child: Sequence[str]) -> list[str]:
    """What counts the kernels of `child`, a command line, into the file `log`."""
    words = "--csv --page raw --print-units base --print-kernel-base function --profile-from-start off"
    words += " --target-processes all --cache-control all --clock-control none"
    return [ncu, *words.split(), "--metrics", ",".join(METRICS), "--log-file", str(log), *child]


def profile(child: Sequence[str], ncu: str | None = None, timeout_s: float = 300.0) -> Profile:
    """Count the kernels of the Python module and arguments `child`, run by this interpreter. What a machine lacks is
    said as the reason."""
    ncu = find_ncu() if ncu is None else ncu
    if ncu is None:
        return Profile((), "Nsight Compute (ncu) is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        line = command(ncu, log, [sys.executable, "-m", *child])
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return Profile((), f"ncu did not finish within {timeout_s:.0f} s")
        except OSError as error:
            return Profile((), f"ncu cannot be started: {error}")
        text = log.read_text(errors="replace") if log.is_file() else ""
        found = parse(text + "\n" + done.stdout)
    if found.kernels or done.returncode == 0:
        return found
    last = [row.strip() for row in done.stderr.splitlines() if row.strip()]
    return Profile((), found.reason if not last or "ERR_" in text + done.stdout else f"the process failed: {last[-1]}")


def parse(text: str) -> Profile:
    """The kernels in what `ncu --csv --page raw` prints, among its messages; the reason if there are none. Columns are
    found by name; thousands may be separated."""
    rows = list(csv.reader(row for row in text.splitlines() if row.startswith('"')))
    headers = [i for i, row in enumerate(rows) if "Kernel Name" in row]
    if not headers:
        return Profile((), _why(text))
    header, body = rows[headers[-1]], rows[headers[-1] + 1 :]
    units: dict[str, str] = {}
    if body and not body[0][0]:
        units, body = dict(zip(header, body[0], strict=False)), body[1:]
    kernels = []
    for row in body:
        cells = dict(zip(header, row, strict=False))
        values = [_number(cells.get(metric), units.get(metric, ""), metric) for metric in METRICS]
        kernels.append(Kernel(cells["Kernel Name"], *values))
    return Profile(tuple(kernels), "" if kernels else _why(text))


def _number(cell: str | None, unit: str, metric: str) -> float | None:
    if cell is None or not re.fullmatch(r"-?[\d,]*\.?\d+(e[+-]?\d+)?", cell.strip(), re.IGNORECASE):
        return None
    default = "sector" if "sectors" in metric else "ns" if metric == _TIME else "byte"
    scale = _SCALE.get((unit or default).lower())
    return None if scale is None else float(cell.replace(",", "")) * scale


def _why(text: str) -> str:
    if "ERR_NVGPUCTRPERM" in text:
        return _PERMISSION
    errors = re.findall(r"==(?:ERROR|WARNING)==\s*(.+)", text)
    return f"ncu counted nothing: {errors[-1].strip()}" if errors else "ncu counted nothing"
