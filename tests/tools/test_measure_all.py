"""tools/measure_all.py: jobs are spread over GPUs, end at the limit, and are presets and tools that there are."""

import subprocess
import sys

import pytest

from expertile.lab.bench.presets import ALL_PRESETS
from tools import measure_all


def test_jobs_are_presets_and_tools():
    assert set(measure_all.ALL) - set(measure_all.TOOLS) - {measure_all.AUTO} <= set(ALL_PRESETS)
    assert len(measure_all.ALL) == len(set(measure_all.ALL))


@pytest.mark.parametrize("tool", measure_all.TOOLS)
def test_a_tool_takes_the_words_that_it_is_given(tool, tmp_path):
    [[command]] = measure_all.commands(tool, tmp_path, 60.0, 0)
    done = subprocess.run([*command, "--help"], cwd=measure_all.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and {"--out", "--seconds"} <= set(done.stdout.split()), done.stderr


def test_each_gpu_takes_the_next_job_and_parallel_takes_all(monkeypatch, tmp_path):
    seen = tmp_path / "seen"
    code = f"import os,time; open({str(seen)!r},'a').write('%s %s\\n'); time.sleep(0.3)"

    def commands(job, out, seconds, warm):
        return [[[sys.executable, "-c", code.replace("%s %s", f"{job} ' + os.environ['CUDA_VISIBLE_DEVICES'] + '")]]]

    monkeypatch.setattr(measure_all, "commands", commands)
    outcomes = measure_all.measure(["parallel", "a", "b", "c", "d"], ["0", "3"], tmp_path, 60.0, 0)
    lines = [line.split() for line in seen.read_text().splitlines()]
    assert {job for job, _ in lines} == {"a", "b", "c", "d", "parallel"} and lines[-1] == ["parallel", "0,3"]
    assert {gpu for _, gpu in lines[:-1]} == {"0", "3"}
    assert all(text.startswith("done") for text in outcomes.values())


def test_time_is_up(monkeypatch, tmp_path, capsys):
    sleep = [sys.executable, "-c", "import time; time.sleep(30)"]
    monkeypatch.setattr(measure_all, "commands", lambda *_: [[sleep]])
    outcomes = measure_all.measure(["a", "b"], ["0"], tmp_path, 1.0, 0)
    assert outcomes.keys() == {"a"} and outcomes["a"].startswith("time is up")


def test_what_stays_silent_is_begun_once_more(monkeypatch, tmp_path):
    begun = tmp_path / "begun"
    code = (
        f"import time; open({str(begun)!r}, 'a').write('x')\n"
        f"if len(open({str(begun)!r}).read()) > 1: print('a workload', flush=True)\n"
        "else: time.sleep(30)"
    )
    monkeypatch.setattr(measure_all, "commands", lambda *_: [[[sys.executable, "-c", code]]])
    monkeypatch.setattr(measure_all, "_SILENT_SECONDS", 1.0)
    assert measure_all.measure(["rows"], ["0"], tmp_path, 20.0, 0)["rows"].startswith("done")
    assert begun.read_text() == "xx"
    # The tools may be as silent as they like.
    begun.unlink()
    monkeypatch.setattr(measure_all, "commands", lambda *_: [[[sys.executable, "-c", "import time; time.sleep(1.5)"]]])
    assert measure_all.measure(["transformers"], ["0"], tmp_path, 20.0, 0)["transformers"].startswith("done")


def test_a_failure_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(measure_all, "commands", lambda *_: [[[sys.executable, "-c", "raise SystemExit(3)"]]])
    assert measure_all.measure(["a"], ["0"], tmp_path, 60.0, 0)["a"].startswith("failed, see")


def test_commands_warm_only_what_compiles_for_every_shape(tmp_path):
    warm, timed = measure_all.commands("rows", tmp_path, 60.0, 3)
    assert len(warm) == 3 and len(timed) == 1 and "--resume" in timed[0]
    assert len(measure_all.commands("skew", tmp_path, 60.0, 3)) == 1
    policies = [measure_all.commands(job, tmp_path, 60.0, 0)[0][0] for job in ("skew", "fp8-sweep")]
    assert [words[words.index("--policy") + 1] for words in policies] == ["graph", "both"]
    ((layers,),) = measure_all.commands("moe", tmp_path, 60.0, 0)
    assert "--memory" in layers and layers[layers.index("--policy") + 1] == "eager"
    assert "measure_transformers.py" in measure_all.commands("transformers", tmp_path, 60.0, 3)[0][0][1]
    ((auto,),) = measure_all.commands("auto", tmp_path, 90.0, 3)
    assert auto[auto.index("--minutes") + 1] == "1.50" and "--verify" in auto


def test_bad_words(capsys):
    with pytest.raises(SystemExit):
        measure_all.main(["nothing-like-it"])
    assert "no job called nothing-like-it" in capsys.readouterr().err
    assert measure_all.main(["--list"]) == 0
