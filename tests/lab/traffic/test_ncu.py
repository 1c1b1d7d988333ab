"""The parser of Nsight Compute's table, on text as it prints it, and what is said where it cannot count."""

import itertools
import stat
import sys

import pytest

from expertile.lab.traffic import ncu
from expertile.lab.traffic.ncu import METRICS, Kernel, parse, profile

COLUMNS = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
    "CC",
)


def line(*cells):
    return ",".join(f'"{cell}"' for cell in cells)


def table(*rows, units=("byte", "byte", "sector", "sector", "ns"), metrics=METRICS):
    body = [
        line(i, 77, "python3", "127.0.0.1", name, 1, 7, "(1024, 1, 1)", "(8192, 1, 1)", 0, "9.0", *values)
        for i, (name, *values) in enumerate(rows)
    ]
    return "\n".join([line(*COLUMNS, *metrics), line(*[""] * len(COLUMNS), *units), *body])


LOG = f"""==PROF== Connected to process 77 (/usr/bin/python3.12)
==PROF== Profiling "cunn_SoftMaxForwardReg" - 0: 0%....50%....100% - 3 passes
==PROF== Disconnected from process 77
{table(("cunn_SoftMaxForwardReg", "268,446,720", "231,735,296", "8,389,120", "8,388,608", "139,808"))}
"""


def test_a_kernel():
    found = parse(LOG)
    assert found.reason == ""
    (kernel,) = found.kernels
    assert kernel.name == "cunn_SoftMaxForwardReg"
    assert (kernel.read, kernel.written) == (268446720.0, 231735296.0)
    assert (kernel.l2_read, kernel.l2_written) == (8389120 * 32.0, 8388608 * 32.0)
    assert kernel.time_s == pytest.approx(139.808e-6)


def test_several_kernels_in_order():
    found = parse(table(("mul", 10, 20, 1, 2, 3), ("softmax_warp_backward", 30, 40, 5, 6, 7)))
    assert [k.name for k in found.kernels] == ["mul", "softmax_warp_backward"]
    assert [k.read for k in found.kernels] == [10.0, 30.0]


def test_units_as_they_are_stated():
    text = table(("k", "1.5", "0.25", "2", "3", "12.5"), units=("Mbyte", "Gbyte", "sector", "sector", "usecond"))
    (kernel,) = parse(text).kernels
    assert (kernel.read, kernel.written, kernel.time_s) == (1.5e6, 0.25e9, pytest.approx(12.5e-6))


def test_without_a_row_of_units():
    rows = table(("k", 10, 20, 1, 2, 3000)).splitlines()
    (kernel,) = parse("\n".join([rows[0], rows[2]])).kernels
    assert kernel == Kernel("k", 10.0, 20.0, 32.0, 64.0, pytest.approx(3e-6))


def test_a_metric_that_the_gpu_lacks_is_none():
    (kernel,) = parse(table(("k", 10, 20, "n/a", "", 3))).kernels
    assert kernel.l2_read is None and kernel.l2_written is None and kernel.read == 10.0
    (kernel,) = parse(table(("k", 10, 20), units=("byte", "byte"), metrics=METRICS[:2])).kernels
    assert kernel.time_s is None


def test_kernel_names_with_commas_and_templates():
    name = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>>"
    (kernel,) = parse(table((name, 1, 2, 3, 4, 5))).kernels
    assert kernel.name == name


def test_what_the_process_prints_does_not_disturb():
    found = parse('warning: something\n"quoted" text\n' + LOG + "\nbye\n")
    assert len(found.kernels) == 1


@pytest.mark.parametrize(
    "text, reason",
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters "
            "on the target device 0.",
            "only administrators",
        ),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.", "No kernels were profiled"),
        ("", "counted nothing"),
    ],
)
def test_reasons(text, reason):
    found = parse(text)
    assert not found.kernels and reason in found.reason


def fake_ncu(tmp_path, body):
    """An ncu that runs `body` (Python) with `log`, the path after --log-file, and `rest`, the child's command."""
    script = tmp_path / "ncu"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nlog = sys.argv[sys.argv.index('--log-file') + 1]\n"
        f"rest = sys.argv[sys.argv.index('--log-file') + 2:]\n{body}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return str(script)


def test_profile_reads_the_log(tmp_path):
    program = fake_ncu(tmp_path, f"open(log, 'w').write({LOG!r})\nassert rest[1:] == ['-m', 'some.module', 'x'], rest")
    assert len(profile(["some.module", "x"], program).kernels) == 1


def test_profile_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    assert "not installed" in profile(["m"]).reason
    assert "cannot be started" in profile(["m"], str(tmp_path / "nowhere")).reason
    failing = fake_ncu(tmp_path, "print('ValueError: way: expected one of …', file=sys.stderr); sys.exit(3)")
    assert "ValueError: way" in profile(["m"], failing).reason
    refused = fake_ncu(tmp_path, "open(log, 'w').write('==ERROR== ERR_NVGPUCTRPERM - no')\nsys.exit(1)")
    assert "ERR_NVGPUCTRPERM" in profile(["m"], refused).reason
    slow = fake_ncu(tmp_path, "import time; time.sleep(30)")
    assert "did not finish" in profile(["m"], slow, timeout_s=1.0).reason


def test_the_command_leaves_clocks_alone_and_flushes_caches():
    line = ncu.command("ncu", "log", ["python", "-m", "m"])
    pairs = list(itertools.pairwise(line))
    for pair in (("--clock-control", "none"), ("--cache-control", "all"), ("--profile-from-start", "off")):
        assert pair in pairs
    assert line[-3:] == ["python", "-m", "m"]
