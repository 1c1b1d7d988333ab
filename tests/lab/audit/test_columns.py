import pytest

from expertile.lab.audit.columns import TypedTable, header_unit, understand
from expertile.lab.audit.document import parse


def _typed(text: str) -> TypedTable:
    return understand(parse(text).tables[0])


@pytest.mark.parametrize(
    ("header", "unit"),
    [
        ("PyTorch (ms)", ("time", 1e-3)),
        ("Latency (µs)", ("time", 1e-6)),
        ("time [us]", ("time", 1e-6)),
        ("TFLOPS", ("flop_rate", 1e12)),
        ("Triton TFLOP/s", ("flop_rate", 1e12)),
        ("Bandwidth (GB/s)", ("byte_rate", 1e9)),
        ("Memory GB", ("bytes", 1e9)),
        ("tokens/s", ("token_rate", 1.0)),
        ("t/s", ("token_rate", 1.0)),
        ("M", None),
        ("Status", None),
    ],
)
def test_units_in_headers(header, unit):
    assert header_unit(header) == (unit if unit is None else (unit[0], pytest.approx(unit[1])))


def test_kinds_of_columns():
    typed = _typed(
        "| Stage | M | Triton (ms) | torch | speedup | % of peak | LLM/Expert |\n|-|-|-|-|-|-|-|\n"
        "| up | 64 | 0.5 | 12.5 | 1.2 | 45.1 | 0.21x |\n| down | 128 | 0.7 ms | 11.5 | 1.3 | 46 | 0.42x |\n"
    )
    assert [c.kind for c in typed.columns] == ["label", "dim", "time", "number", "ratio", "percent", "ratio"]
    assert typed.columns[2].system == ("triton",)
    assert typed.at(0, typed.columns[5]).value == pytest.approx(0.451)


def test_a_second_figure_in_a_cell_is_kept():
    typed = _typed("| S | saved (MB) |\n|-|-|\n| 256 | 4.2 (84%) |\n| 512 | 16.8 (84%) |\n")
    cell = typed.cells[0][1]
    assert cell.value.value == pytest.approx(4.2e6)
    assert [q.kind for q in cell.extra] == ["percent"]


@pytest.mark.parametrize(
    ("label", "what"),
    [("**AVERAGE**", "average"), ("Geomean", "geomean"), ("Total", "total"), ("all experts", ""), ("x", "")],
)
def test_summary_rows(label, what):
    assert _typed(f"| a | ms |\n|-|-|\n| x | 1 ms |\n| {label} | 2 ms |\n").summary(1) == what


def test_powers_and_suffixes_are_not_numbers():
    typed = _typed("| Axis | Elem/s |\n|-|-|\n| 2^1 | 511.5K |\n| 2^2 | 1.1M |\n")
    assert [c.kind for c in typed.columns] == ["label", "label"]
