"""docs/results/parallel.md: its figures are those of the shipped run on several GPUs."""

import importlib
from dataclasses import replace
from pathlib import Path

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.race.record import append
from tests.lab.records import timed, untimed
from tools.pages.parallel import BLOCKS, NOT_MEASURED, blocks, presets
from tools.parallel.records import OPS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "parallel.md"
H200 = Device.by_name("h200")
EMPTY = "".join(f"<!-- expertile:parallel {n} -->\n<!-- /expertile:parallel {n} -->\n" for n in BLOCKS)

SHAPE = {"tokens": 1000, "hidden": 64, "intermediate": 32, "experts": 16, "top_k": 8, "scaling": "weak", "gpus": 2}
VERSIONS = {"collectives": "nccl", "nccl": "2.28.9"}


def fields(scaling="weak", **changed):
    name = f"parallel/T1000-H64-I32-E16-k8-{scaling}-2-gpus"
    return {"workload": name, "shape": SHAPE | {"scaling": scaling}, "policy": "eager", "date": "2026-01-02"} | changed


def all_to_all(leaving_nbytes, seconds):
    shape = SHAPE | {"leaving_nbytes": leaving_nbytes}
    return timed(seconds, op="all_to_all", backend="nccl", details=VERSIONS, **fields(shape=shape))


def step(way, forward, both, *, scaling="weak", leaving=(100_000_000, 2e8), bits=False, chunks=1, combine="ordered"):
    """`forward` and `both`: ms of step, and of computation and communication alone."""
    config = {"combine": combine, "chunks": chunks, "fixed": False} if way == "expertile" else {}
    backend = f"expertile {combine} {chunks}" if config else way
    found = []
    for op, given, work, away in zip(OPS, (forward, both), ((1e8, 4.8e9), (3e8, 9.6e9)), leaving, strict=True):
        details = VERSIONS | {
            "tokens_of_gpu": 1000 if scaling == "weak" else 500,
            "leaving_nbytes": away,
            "same_bits": bits,
        }
        for kind, ms in zip(("step", "compute", "communication"), given, strict=False):
            more = {"backend": backend if kind == "step" else f"{backend}: {kind} alone", "bound": 0.0}
            more |= {"config": {"kind": kind, **config}, "details": details, "rel_error": 4e-3}
            found.append(timed(ms * 1e-3, op=op, flops=work[0], nbytes=work[1], **fields(scaling), **more))
    return found


def without(way, status, reason, scaling="weak", **more):
    return untimed(
        status, reason, op=OPS[0], backend=way, config={"kind": "step"}, details=VERSIONS, **fields(scaling), **more
    )


MESSAGES = [all_to_all(50_000_000, 0.25e-3), all_to_all(100_000_000, 1e-3)]
ONE = step("one GPU", (4.0,), (9.0,), bits=True)
ORDERED = step("expertile", (5.0, 4.2, 1.5), (12.0, 9.0, 4.0), bits=True)
RECORDS = [
    *MESSAGES,
    *ONE,
    *ORDERED,
    *step("expertile", (4.4, 4.2, 1.0), (12.5, 9.0, 4.0), chunks=4, combine="partial"),
    *step("torch", (8.0,), (24.0,)),
    without("torch.compile", "failed", "failed: no compiler"),
    *step("one GPU", (4.0,), (9.0,), scaling="strong", bits=True),
    *step("expertile", (2.5, 2.0, 1.0), (5.0, 4.0, 2.0), scaling="strong"),
    without("torch", "unsupported", "no time left", "strong"),
]


def rows(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_scaling_is_to_one_gpu_of_the_same_race():
    text = blocks(RECORDS, H200)["scaling"]
    assert "One run on 2 GPUs, NVIDIA H200, bf16, 2026-01-02 (torch 2.11, NCCL 2.28.9)" in text
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
    assert "T = 1000 in all, H = 64, I = 32, E = 16, k = 8, `torch` (no time left)" in text


def test_links_bound_a_step_whose_rows_travel_longer_than_its_products_take():
    far = (400_000_000, 400_000_000)
    ours = [
        *step("expertile", (5.0, 4.2, 1.5), (12.0, 9.0, 4.0), leaving=far),
        *step("expertile", (4.4, 4.2, 1.0), (12.5, 9.0, 4.0), chunks=4, combine="partial", leaving=far),
    ]
    weak = rows(blocks([*MESSAGES, *ONE, *ours], H200)["scaling"])[2]
    assert weak[8:] == ["2.00", "links", "45 %"]


def test_rivals_are_set_beside_the_fastest_of_ours():
    text = blocks(RECORDS, H200)["rival"]
    _, _, ordered, partial, torch, *_ = rows(text)
    assert ordered == ["expertile, `ordered`, chunks=1", "5.00", "1.14×", "12.0", "1.00×", "100", "4e-03", "yes"]
    assert partial[:5] == ["expertile, `partial`, chunks=4", "4.40", "1.00×", "12.5", "1.04×"]
    assert torch == ["`torch`", "8.00", "1.82×", "24.0", "2.00×", "100", "4e-03", "no"]
    assert "torch.compile" not in text and text.count("**T = 1000") == 2


def test_what_a_step_takes_beyond_its_computation_is_exposed():
    text = blocks(RECORDS, H200)["communication"]
    first = rows(text)[2]
    assert first[2:] == ["forward", "5.00", "4.20", "1.50", "30 %", "0.800", "16 %"]
    assert len(rows(text)) == 2 + 6
    assert "50.0 MB at 200 GB/s, 100 MB at 100 GB/s" in text


def test_a_time_below_its_bound_is_refused():
    found = blocks([*MESSAGES, *ONE, *step("expertile", (0.9, 0.5, 0.1), (12.0, 9.0, 4.0))], H200)
    assert [row[1] for row in rows(found["scaling"])[2:]] == ["forward + backward"]
    assert "`ordered`, chunks=1, forward (refused: 0.900 ms is below its bound)" in found["scaling"]
    assert "0.900" not in found["rival"] + found["communication"]


def test_what_is_wrong_has_no_time_and_other_gpus_do_not_count():
    nothing = dict.fromkeys(BLOCKS, NOT_MEASURED)
    assert blocks([*MESSAGES, *ONE, without("expertile ordered 1", "wrong", "out: relative error 1")], H200) == nothing
    assert blocks([replace(r, env=Env("NVIDIA H20")) for r in RECORDS], H200) == nothing == blocks([], H200)


def test_one_preset_for_each_number_of_gpus(tmp_path):
    folder = tmp_path / "gpu"
    assert presets("gpu", tmp_path) == ()
    for name in ("2026-01-02-parallel-16-gpus", "2026-01-03-parallel-2-gpus", "2026-01-10-parallel-2-gpus", "notes"):
        append(folder / f"{name}.jsonl", timed())
    assert presets("gpu", tmp_path) == ("parallel-2-gpus", "parallel-16-gpus")


def test_the_last_runs_on_two_and_four_gpus_stand_one_after_the_other():
    four = [replace(r, run="four", shape={**r.shape, "gpus": 4}) for r in RECORDS]
    earlier = [replace(r, run="earlier", value=2 * r.value, ci95=None) for r in ONE]
    text = blocks([*four, *earlier, *RECORDS], H200)["scaling"]
    assert text.index("One run on 2 GPUs") < text.index("One run on 4 GPUs, NVIDIA H200, bf16, 2026-01-02 (")
    # The same times on four GPUs: 4 * 4 / 4.4 forward, weak.
    assert [row[5:7] for row in rows(text) if row[1] == "forward"][::2] == [["1.82×", "91 %"], ["3.64×", "91 %"]]


def test_the_tool_fills_a_page(tmp_path, capsys):
    tool = importlib.import_module("tools.pages.__main__")
    page = tmp_path / "parallel.md"
    page.write_text(EMPTY)
    append(tmp_path / "x.jsonl", *RECORDS)
    arguments = ["parallel", "--records", str(tmp_path / "x.jsonl"), "--doc", str(page)]
    assert tool.main([*arguments, "--check"]) == 1 and "not what the records say" in capsys.readouterr().err
    assert page.read_text() == EMPTY
    assert tool.main(arguments) == 0 and tool.main([*arguments, "--check"]) == 0
