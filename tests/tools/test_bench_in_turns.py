"""Two sides measure the same workloads, and neither while the other does."""

import subprocess
import sys
from pathlib import Path

from expertile.lab.race.record import read
from tools import bench_in_turns

SRC = Path(__file__).parents[2] / "src"


def test_both_sides_have_the_records_of_all_workloads(tmp_path, capsys):
    sides = [f"{name}={SRC}" for name in ("old", "new")]
    few = ["--preset", "cpu", "--only", "cpu-4x256*", "--backend", "loop", "--rounds", "3", "--warm", "1"]
    assert bench_in_turns.main([*sides, *few, "--out", str(tmp_path)]) == 0
    found = [[r for p in sorted((tmp_path / name).rglob("*.jsonl")) for r in read(p)] for name in ("old", "new")]
    keys = [[(r.workload, r.backend, r.status) for r in records] for records in found]
    assert keys[0] == keys[1] and {b for _, b, _ in keys[0]} >= {"loop", "dense", "copy"}
    turns = [line for line in capsys.readouterr().out.splitlines() if "turns" in line]
    assert len(turns) == 2 and turns[0].split(": ")[1] == turns[1].split(": ")[1]


def test_one_has_the_device_at_a_time(tmp_path):
    """Each turn writes down its beginning and its end: none begins before the one before it has ended."""
    log = tmp_path / "log"
    code = (
        "import sys, time\n"
        "for i in range(int(sys.argv[2])):\n"
        "    sys.stdout.write('turn\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
        f"    f = open({str(log)!r}, 'a'); f.write(sys.argv[1]); f.flush(); time.sleep(0.01); f.write('.'); f.close()\n"
    )
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", code, name, count], stdin=pipe, stdout=pipe)
        for name, count in (("a", "5"), ("b", "3"))
    ]
    assert bench_in_turns.take_turns(processes) == [5, 3]
    assert log.read_text() == "a.b.a.b.a.b.a.a."
