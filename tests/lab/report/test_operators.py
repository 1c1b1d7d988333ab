"""Operators other than the grouped product in the report, from made-up records."""

from expertile.lab.report.contest import runs
from expertile.lab.report.figures_run import growth_figures
from expertile.lab.report.page import html
from expertile.lab.report.rows import rows
from expertile.lab.report.units import bound_rate, rate
from expertile.lab.report.verdict import verdict
from tests.lab.report import samples

TIMES = {"expertile": 1.1, "quack": 1.2, "torch": 2.0, "copy": 1.05}  # over the bound


def fused(op="softmax", preset="softmax-v100", sizes=(1024, 2048, 4096), factors=None, run="f", **more):
    """Records of a memory-bound operator over square sizes on a device of 2 TB/s."""
    found = []
    for size in sizes:
        nbytes, flops = 8.0 * size * size, 5.0 * size * size
        bound = nbytes / samples.MEMORY_BPS
        for backend, factor in (factors or TIMES).items():
            time = bound * factor
            work = 0.0 if backend == "copy" else flops
            fields = {"shape": {"rows": size, "cols": size}, "flops": work, "nbytes": nbytes, "op": op}
            fields |= {"limiter": "memory", "bound": bound, "dtype": "fp32"}
            found.append(samples.record(f"{preset}/{size}x{size}-fp32", backend, time, run=run, **{**fields, **more}))
    return found


def test_bytes_per_second_where_little_is_computed_even_if_no_bandwidth_is_known():
    (row, *_) = rows(fused(limiter="compute"))
    assert rate(row) == "1.82 TB/s" and bound_rate(row) == "1.25 TFLOP/s"  # the bound that is known
    (product,) = rows([samples.record(rows=65536, time_s=1e-3)])
    assert rate(product) == "550 TFLOP/s"


def test_rate_against_size_for_operators_alone():
    (run,) = runs(fused())
    found = growth_figures(run.contests)
    assert list(found) == ["softmax, fp32"]
    traces = {m["backend"]: m for m in found["softmax, fp32"]["marks"]}
    assert set(traces) == {"bound", *TIMES}
    assert [round(x, 3) for x in traces["expertile"]["x"]] == [8.389, 33.554, 134.218]
    assert all(abs(y - 2000 / 1.1) < 1e-6 for y in traces["expertile"]["y"])
    assert all(abs(y - 2000) < 1e-6 for y in traces["bound"]["y"])
    (grouped,) = runs(samples.lab(seed=1))
    assert growth_figures(grouped.contests) == {}


def test_compute_bound_operators_are_drawn_over_their_flops():
    records = fused("attention", "attention", flops=1e12, limiter="compute", sizes=(1024, 2048))
    (run,) = runs(records)
    assert growth_figures(run.contests) == {}  # all of one size
    fields = {"limiter": "compute"}
    sizes = ((1024, 1e11), (2048, 4e11), (4096, 16e11))
    more = [r for size, f in sizes for r in fused("attention", "attention", sizes=(size,), flops=f, **fields)]
    (run,) = runs(more)
    (figure,) = growth_figures(run.contests).values()
    assert figure["x"]["title"] == "GFLOP (logarithmic)"


def test_the_page_and_the_verdict_speak_of_operators(tmp_path):
    text = html(fused(), tmp_path / "r.html").read_text()
    assert "Rate against size: softmax, fp32" in text and "softmax-v100" in text
    lead = verdict(fused())[1]
    assert lead.startswith("CUDA-graph replay: expertile is fastest on 3 of 3 workloads, by a geometric mean of 1.09×")
