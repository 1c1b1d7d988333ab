import io
import json

from rich.console import Console

from expertile.lab.audit import audit, render, summary, to_json

TEXT = (
    "GPU: V100\n\n- from 4.2 GB to 1.4 GB (a 75% reduction)\n- GEMM in fp16: 100 TFLOPS\n- [bold]markup[/bold]: 3 ms\n"
)


def _printed(**options: bool) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    render(audit(TEXT), console, **options)
    return console.export_text()


def test_the_verdict_comes_first():
    shown = _printed()
    assert shown.startswith(
        "1 of 5 findings are against the report: 0 impossible, 1 inconsistent, 1 possible, 3 not checkable"
    )
    assert "Tesla V100-SXM2-32GB: 900 GB/s" in shown
    assert shown.index("inconsistent (1)") < shown.index("possible (1)") < shown.index("not checkable (3)")


def test_arithmetic_and_markup_are_printed_as_they_are():
    shown = _printed()
    assert "1 − 1.4 GB / 4.2 GB = 66.6%" in shown
    assert "[bold]markup[/bold]: 3 ms" in shown


def test_the_rest_may_be_left_out():
    assert "not checkable (" not in _printed(everything=False)


def test_json():
    data = json.loads(to_json(audit(TEXT)))
    assert data["device"] == "Tesla V100-SXM2-32GB"
    assert data["counts"] == {"impossible": 0, "inconsistent": 1, "possible": 1, "not checkable": 3}
    wrong = next(f for f in data["findings"] if f["verdict"] == "inconsistent")
    assert wrong["line"] == 3
    assert {"quote", "rule", "explanation", "value", "limit", "unit"} <= wrong.keys()


def test_summary():
    assert summary(audit(TEXT)) == "0 impossible, 1 inconsistent, 1 possible, 3 not checkable"
