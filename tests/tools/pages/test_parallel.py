"""docs/results/parallel.md: its figures are those of the shipped run on several GPUs."""

import importlib
import json
from copy import deepcopy
from pathlib import Path

import pytest

from expertile.device import Device
from tools.pages.parallel import BLOCKS, NOT_MEASURED, blocks, shipped_parallel, update_page

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "parallel.md"
H200 = Device.by_name("h200")
EMPTY = "".join(f"<!-- expertile:parallel {n} -->\n<!-- /expertile:parallel {n} -->\n" for n in BLOCKS)

_ENVIRONMENT = {"part": "environment", "gpu": "NVIDIA H200", "torch": "2.11.0", "nccl": "2.28.9", "world": 2}
_CASE = {"size": [1000, 64, 32, 16, 8], "scaling": "weak", "decode": False}


def step(way, forward, both, *, scaling="weak", **changed):
    """`forward` and `both`: ms of step, and of computation and communication alone."""
    kinds = ("step", "compute", "communication")
    return {
        "part": "step",
        **_CASE,
        "scaling": scaling,
        "world": 2,
        "tokens": 1000 if scaling == "weak" else 500,
        "way": way,
        "chunks": 1,
        "combine": "ordered",
        "fixed": False,
        "graph": False,
        "status": "ok",
        "reason": "",
        "bits": False,
        "errors": {"out": 1e-3, "x": 4e-3},
        "leaving_bytes": {"forward": 100_000_000, "both": 2e8},
        "work": {"forward": [1e8, 4.8e9], "both": [3e8, 9.6e9]},
        "seconds": {
            name: {k: ms * 1e-3 for k, ms in zip(kinds, given, strict=False)}
            for name, given in (("forward", forward), ("both", both))
            if given
        },
        **changed,
    }


PARTS = [
    _ENVIRONMENT,
    {"part": "bandwidth", **_CASE, "world": 2, "leaving_bytes": 50_000_000, "seconds": 0.25e-3},
    {"part": "bandwidth", **_CASE, "world": 2, "leaving_bytes": 100_000_000, "seconds": 1e-3},
    step("one GPU", (4.0,), (9.0,), bits=True, world=1),
    step("expertile", (5.0, 4.2, 1.5), (12.0, 9.0, 4.0), bits=True),
    step("expertile", (4.4, 4.2, 1.0), (12.5, 9.0, 4.0), chunks=4, combine="partial"),
    step("torch", (8.0,), (24.0,)),
    step("torch.compile", (), (), status="failed", reason="failed: no compiler"),
    step("one GPU", (4.0,), (9.0,), scaling="strong", bits=True, world=1),
    step("expertile", (2.5, 2.0, 1.0), (5.0, 4.0, 2.0), scaling="strong"),
    {"part": "skipped", **_CASE, "scaling": "strong", "way": "torch", "reason": "no time left"},
]


def written(tmp_path, parts):
    path = tmp_path / "2026-01-02.jsonl"
    path.write_text("".join(json.dumps(part) + "\n" for part in parts))
    return path


def rows(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_scaling_is_to_one_gpu_of_the_same_race(tmp_path):
    text = blocks([written(tmp_path, PARTS)], H200)["scaling"]
    assert "One run on 2 GPUs, NVIDIA H200, bf16, 2026-01-02 (torch 2.11.0, NCCL 2.28.9)" in text
    header, _, weak, weak_both, strong, strong_both = rows(text)
    assert header[2:4] == ["1 GPU, ms", "2 GPUs, ms"]
    # The fastest of ours counts: 4.4 forward, 12.0 both. Weak: 2 * 4 / 4.4; strong: 4 / 2.5.
    assert weak[1:7] == ["forward", "4.00", "4.40", "`partial`, chunks=4", "1.82×", "91 %"]
    assert weak_both[2:7] == ["9.00", "12.0", "`ordered`, chunks=1", "1.50×", "75 %"]
    assert strong[2:7] == ["4.00", "2.50", "`ordered`, chunks=1", "1.60×", "80 %"]
    assert strong_both[2:7] == ["9.00", "5.00", "`ordered`, chunks=1", "1.80×", "90 %"]
    # 6 T k H I FLOPs of a GPU; 4.8 GB at 4.8 TB/s is more than 100 MB at the faster all-to-all's 200 GB/s.
    assert weak[7:] == [f"{6 * 1000 * 8 * 64 * 32 / 4.4e-3 / 1e12:.3f}", "1.00", "memory", "23 %"]
    assert "T = 1000 of each GPU, H = 64" in weak[0] and "T = 1000 in all" in strong[0]
    assert "Without a time: " in text and "`torch.compile` (failed: no compiler)" in text
    assert "T = 1000 in all, H = 64, I = 32, E = 16, k = 8, torch (no time left)" in text


def test_links_bound_a_step_whose_rows_travel_longer_than_its_products_take(tmp_path):
    parts = deepcopy(PARTS)
    for part in parts[4:6]:
        part["leaving_bytes"] = {"forward": 400_000_000, "both": 400_000_000}
    weak = rows(blocks([written(tmp_path, parts)], H200)["scaling"])[2]
    assert weak[8:] == ["2.00", "links", "45 %"]


def test_rivals_are_set_beside_the_fastest_of_ours(tmp_path):
    text = blocks([written(tmp_path, PARTS)], H200)["rival"]
    _, _, ordered, partial, torch, *_ = rows(text)
    assert ordered == ["expertile, `ordered`, chunks=1", "5.00", "1.14×", "12.0", "1.00×", "100", "4e-03", "yes"]
    assert partial[:5] == ["expertile, `partial`, chunks=4", "4.40", "1.00×", "12.5", "1.04×"]
    assert torch == ["`torch`", "8.00", "1.82×", "24.0", "2.00×", "100", "4e-03", "no"]
    assert "torch.compile" not in text and text.count("**T = 1000") == 2


def test_what_a_step_takes_beyond_its_computation_is_exposed(tmp_path):
    text = blocks([written(tmp_path, PARTS)], H200)["communication"]
    first = rows(text)[2]
    assert first[2:] == ["forward", "5.00", "4.20", "1.50", "30 %", "0.800", "16 %"]
    assert len(rows(text)) == 2 + 6
    assert "50.0 MB at 200 GB/s, 100 MB at 100 GB/s" in text


def test_a_time_below_its_bound_is_refused(tmp_path):
    parts = [*PARTS[:4], step("expertile", (0.9, 0.5, 0.1), (12.0, 9.0, 4.0))]
    found = blocks([written(tmp_path, parts)], H200)
    assert [row[1] for row in rows(found["scaling"])[2:]] == ["forward + backward"]
    assert "`ordered`, chunks=1, forward (refused: 0.900 ms is below its bound)" in found["scaling"]
    assert "0.900" not in found["rival"] + found["communication"]


def test_what_is_wrong_has_no_time(tmp_path):
    wrong = step("expertile", (), (), status="wrong", reason="out: relative error 1", errors={"out": None})
    parts = [*PARTS[:4], wrong]
    found = blocks([written(tmp_path, parts)], H200)
    assert found == dict.fromkeys(BLOCKS, NOT_MEASURED)


def test_a_file_of_another_gpu_is_refused(tmp_path):
    path = written(tmp_path, [{**_ENVIRONMENT, "gpu": "NVIDIA H20"}])
    with pytest.raises(ValueError, match="expected the environment of an NVIDIA H200 first, got 'NVIDIA H20'"):
        blocks([path], H200)


def test_without_a_run_nothing_is_said():
    assert blocks([], H200) == dict.fromkeys(BLOCKS, NOT_MEASURED)


def test_the_newest_file_for_each_number_of_gpus_is_shipped(tmp_path):
    folder = tmp_path / "gpu" / "parallel"
    folder.mkdir(parents=True)
    assert shipped_parallel("gpu", tmp_path) == ()
    for name, world in (("2026-01-02", 2), ("2026-01-03-4-gpus", 4), ("2026-01-10", 2)):
        (folder / f"{name}.jsonl").write_text(json.dumps({**_ENVIRONMENT, "world": world}) + "\n")
    (folder / "notes.jsonl").touch()
    assert [path.stem for path in shipped_parallel("gpu", tmp_path)] == ["2026-01-10", "2026-01-03-4-gpus"]
    (folder / "2026-01-11.jsonl").touch()
    with pytest.raises(ValueError, match="2026-01-11.jsonl: expected an environment first, got nothing"):
        shipped_parallel("gpu", tmp_path)


def test_runs_on_two_and_four_gpus_stand_one_after_the_other(tmp_path):
    four = [{**_ENVIRONMENT, "world": 4}, *({**p, "world": 4} if "world" in p else p for p in PARTS[1:])]
    path = tmp_path / "2026-01-02-4-gpus.jsonl"
    path.write_text("".join(json.dumps(part) + "\n" for part in four))
    text = blocks([written(tmp_path, PARTS), path], H200)["scaling"]
    assert text.index("One run on 2 GPUs") < text.index("One run on 4 GPUs, NVIDIA H200, bf16, 2026-01-02 (")
    # The same times on four GPUs: 4 * 4 / 4.4 forward, weak.
    assert ["3.64×", "91 %"] in [row[5:7] for row in rows(text)]


def test_the_page_shows_the_shipped_run():
    assert update_page(PAGE, shipped_parallel(H200.slug), H200, check=True), "run python -m tools.pages parallel"


def test_the_tool_fills_a_page(tmp_path, capsys):
    tool = importlib.import_module("tools.pages.__main__")
    page = tmp_path / "parallel.md"
    page.write_text(EMPTY)
    arguments = ["parallel", "--records", str(written(tmp_path, PARTS)), "--doc", str(page)]
    assert tool.main([*arguments, "--check"]) == 1 and "not what the records say" in capsys.readouterr().err
    assert page.read_text() == EMPTY
    assert tool.main(arguments) == 0 and tool.main([*arguments, "--check"]) == 0
