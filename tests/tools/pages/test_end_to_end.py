"""docs/results/end-to-end.md: one table for each model and call, ours beside the others."""

from dataclasses import replace

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.race.record import PEAK_BYTES, TOKENS_PER_S
from tests.lab.records import timed, untimed
from tools.pages.end_to_end import NOT_MEASURED, blocks
from tools.pages.markers import fill_file

H200 = Device.by_name("h200")


def candidate(backend, rate, name="Small-T64", **details):
    """Made-up records of a candidate: its rate, and 2 GB; a text is why it has no rate."""
    fields = {
        "op": "train_step",
        "workload": f"end-to-end-train/{name}",
        "shape": {"model": "Small", "layers": 2, "tokens": 64},
        "backend": backend,
        "policy": "eager",
        "details": {"transformers": "5.17.0", **details},
        "date": "2026-01-02",
    }
    if isinstance(rate, str):
        return [untimed("unsupported", rate, metric=TOKENS_PER_S, bound=0.0, **fields)]
    of_rate = timed(1.0, **fields, bound=0.0, rel_error=0.01)
    return [
        replace(of_rate, metric=TOKENS_PER_S, value=rate, ci95=None, bound=5000.0),
        replace(of_rate, metric=PEAK_BYTES, value=2e9, ci95=None, bound=0.0),
    ]


RECORDS = [
    *candidate("expertile", 3000.0, experts_share=0.18),
    *candidate("grouped_mm", 2000.0, experts_share=0.35),
    *candidate("grouped_mm-compiled", 2500.0),
    *candidate("expertile-compiled", 4000.0),
    *candidate("sonicmoe", "no module"),
    *candidate("expertile-mxfp4", 900.0, "Other-B1"),
    *candidate("triton_kernels", 600.0, "Other-B1"),
]


def test_ours_is_set_beside_what_ran_on_the_same_weights_in_the_same_way():
    text = blocks(RECORDS, H200)["models"]
    assert text.startswith("NVIDIA H200, transformers 5.17.0") and "**Small-T64** (eager, 2 layers)" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `expertile` | 3,000 | 60 % | 2.00 | 18 % | 1.0e-02 | – |",
        "| `grouped_mm` | 2,000 | 40 % | 2.00 | 35 % | 1.0e-02 | 1.50× |",
        "| `grouped_mm-compiled` | 2,500 | 50 % | 2.00 | – | 1.0e-02 | 1.60× |",
        "| `expertile-compiled` | 4,000 | 80 % | 2.00 | – | 1.0e-02 | – |",
        "| `expertile-mxfp4` | 900 | 18 % | 2.00 | – | 1.0e-02 | – |",
        "| `triton_kernels` | 600 | 12 % | 2.00 | – | 1.0e-02 | 1.50× |",
    ]
    assert "`sonicmoe` has no figure: no module" in text


def test_records_of_another_gpu_do_not_count(tmp_path):
    others = [replace(r, env=Env("another")) for r in RECORDS]
    found = blocks(others, H200)
    page = tmp_path / "page.md"
    page.write_text("<!-- expertile:end-to-end models -->\n<!-- /expertile:end-to-end models -->\n")
    assert not fill_file(page, found, True, "end-to-end") and NOT_MEASURED not in page.read_text()
    assert not fill_file(page, found, kind="end-to-end") and NOT_MEASURED in page.read_text()
