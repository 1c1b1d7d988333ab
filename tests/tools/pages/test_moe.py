"""docs/results/moe.md: its figures are those of the shipped run and of arithmetic; docs/reference/moe-layer.md: its
code prints what stands below it."""

import contextlib
import importlib
import io
import re
from pathlib import Path

from expertile.device import Device
from expertile.lab.operators import moe, moe_routing, moe_stages
from expertile.lab.operators.moe_stages import stage_works
from expertile.lab.race.record import append
from tests.lab.records import timed, untimed
from tools.pages.moe import NOT_MEASURED, STAGES, blocks, rounded

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "moe.md"
LAYER = ROOT / "docs" / "reference" / "moe-layer.md"
H200 = Device.by_name("h200")
NAMES = ("layer", "stages", "decode", "sonic", "rounding")
EMPTY = "".join(f"<!-- expertile:moe {n} -->\n<!-- /expertile:moe {n} -->\n" for n in NAMES)


SIZE = (64, 32, 16, 4, 2)


def layer(backend, forward, both, peaks=(), distance=None):
    """Milliseconds and GiB, of a layer of 4 GFLOP forward."""
    found = []
    for train, ms in ((False, forward), (True, both)):
        w = moe.workload("made-up", "moe", SIZE, train)
        fields = {"op": w.op, "workload": f"moe/{w.name}", "shape": w.shape(), "backend": backend, "policy": "eager"}
        details = {} if distance is None else {"distance": distance}
        if isinstance(ms, str):
            found.append(untimed("failed", ms, **fields))
            continue
        found.append(timed(ms * 1e-3, flops=12e9 if train else 4e9, details=details, date="2026-01-02", **fields))
        if peaks:
            found.append(timed(value=peaks[train] * 2**30, metric="peak_bytes", ci95=None, bound=0.0, **fields))
    return found


def stage(size, name, ms):
    w = moe_stages.workload(size, name)
    work = stage_works(size)[name]
    fields = {"shape": w.shape(), "flops": work.flops, "nbytes": work.nbytes, "bound": 0.0, "date": "2026-01-02"}
    return timed(
        ms * 1e-3, op="moe_stage", workload=f"moe-stages/{w.name}", backend="expertile", policy="eager", **fields
    )


def kernel(op, backend, us):
    w = moe_routing.workload(op, 64, 4, 2)
    return timed(us * 1e-6, op=op, workload=f"moe-routing/{w.name}", backend=backend, shape=w.shape(), bound=0.0)


# Made up: ours twice as fast forward and 1.5 times as fast in both.
RECORDS = [
    *layer("expertile", 1.0, 3.0, (1.0, 2.0), 0.0),
    *layer("torch.compile", 2.0, 6.0, (3.0, 4.0), 1e-5),
    *layer("torch.compile-index-add", 3.0, 4.5, (), 4e-3),
    *layer("torch-index-add", "OutOfMemoryError", 9.0),
    *(stage(SIZE, name, 1.0) for name in STAGES),
    *(stage((128, *SIZE[1:]), name, 7.0 if name == "down" else 1.0) for name in STAGES),
    kernel("moe_permutation", "expertile", 2.5),
    kernel("moe_route", "expertile", 3.5),
    kernel("moe_route", "torch.topk", 9.0),
]


def test_work_is_that_of_the_page():
    t, h, i, e, k = size = (24, 40, 16, 5, 3)
    r = t * k
    expected = {  # FLOPs, elements, bytes of indices and weights
        "router linear": (2 * t * h * e, t * h + e * h + t * e, 0),
        "route": (0, t * e, 8 * r),
        "permutation": (0, 0, 20 * r + 4 * e),
        "up+act (keeps pre)": (4 * r * h * i, t * h + 2 * e * i * h + 3 * r * i, 4 * r),
        "up+act (infer)": (4 * r * h * i, t * h + 2 * e * i * h + r * i, 4 * r),
        "down": (2 * r * h * i, r * i + e * i * h + r * h, 0),
        "combine": (2 * r * h, r * h + t * h, 8 * r),
        "B order dy": (0, t * h + r * h, 4 * r),
        "B gated_backward": (2 * r * h * i, r * h + e * i * h + 5 * r * i, 12 * r),
        "B wgrad down": (2 * r * h * i, r * h + r * i + e * i * h, 0),
        "B wgrad up": (4 * r * h * i, t * h + 2 * r * i + 2 * e * i * h, 4 * r),
        "B dgrad": (4 * r * h * i, 2 * r * i + 2 * e * i * h + r * h, 0),
        "B combine": (r * h, r * h + t * h, 4 * r),
    }
    found = {name: (work.flops, work.nbytes) for name, work in stage_works(size).items()}
    assert found == {name: (flops, 2 * moved + more) for name, (flops, moved, more) in expected.items()}
    assert list(found) == list(STAGES)


def test_ratios_are_to_ours_and_to_the_fastest_other():
    text = blocks(RECORDS, [], H200)["layer"]
    assert "One run on NVIDIA H200, 2026-01-02: `results/nvidia-h200/2026-01-02-moe.jsonl`." in text
    assert "| expertile | 1.00 | 4.00 | 1.00× | 3.00 | 4.00 | 1.00× | 1.00 | 2.00 | – |" in text
    assert "| 2.00 | 2.00 | 2.00× | 6.00 | 2.00 | 2.00× | 3.00 | 4.00 | 1e-05 |" in text
    assert "takes 2.00× our time forward and 1.50× forward and backward" in text
    assert "runs at 4.00 TFLOP/s" in text and "eager" not in text


def test_stages_are_set_beside_their_bounds():
    text = blocks(RECORDS, [], H200)["stages"]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0].removeprefix("| ") for row in rows] == list(STAGES.values())
    down = next(row for row in rows if "down-projection" in row[0])
    assert down[5] == "1.00" and down[-1] == "7.00 |" and "ms at (128, 32, 16, 4, 2)" in text
    assert "sum to 6.00 ms forward and 6.00 ms backward" in text  # the form that keeps no pre is no part of it
    assert "3.50 µs and 2.50 µs" in text


def test_without_a_run_only_arithmetic_stands():
    found = blocks([], [], H200)
    assert {name for name in NAMES if found[name] == NOT_MEASURED} == set(NAMES) - {"rounding"}
    assert "| adaptive |" in found["rounding"]


def test_rounding_down_drops_what_makes_no_tile_and_up_adds():
    effects = rounded(1024, 0.0)
    assert effects["down"].rows_after == 0 and effects["down"].weight_dropped == 1.0
    assert effects["up"].weight_dropped == 0.0 and effects["up"].rows_after > effects["up"].rows_before == 8 * 1024
    assert effects["up"].tiles_after == effects["up"].tiles_before


def test_the_tool_fills_a_page(tmp_path, capsys):
    tool = importlib.import_module("tools.pages.__main__")
    page = tmp_path / "moe.md"
    page.write_text(EMPTY)
    append(tmp_path / "x.jsonl", *RECORDS)
    arguments = ["moe", "--records", str(tmp_path / "x.jsonl"), "--doc", str(page)]
    assert tool.main([*arguments, "--check"]) == 1 and "not what the records say" in capsys.readouterr().err
    assert page.read_text() == EMPTY
    assert tool.main(arguments) == 0 and tool.main([*arguments, "--check"]) == 0


def test_the_code_of_the_page_prints_what_stands_below_it():
    shown = re.findall(r"```python\n((?:(?!```).)*?)```\n\n```text\n(.*?)```", LAYER.read_text(encoding="utf-8"), re.S)
    assert len(shown) == 2
    names = {}
    for code, expected in shown:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == expected
