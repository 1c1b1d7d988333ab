import json
import re

import pytest

from expertile.audit import audit_text
from expertile.audit.blocks import Line, split_code
from expertile.audit.facts import facts, size_of_name
from expertile.audit.interval import Interval, printed
from expertile.audit.pattern import says
from expertile.audit.quantity import clean, quantities
from expertile.audit.read import format_of, read, repair
from expertile.audit.report import Report
from expertile.audit.units import unit_of_name


@pytest.mark.parametrize(
    "text, kinds, values",
    [
        (
            "Average elapsed time: (0.012345) second, performance: (11234.5) GFLOPS.",
            ["time", "rate"],
            [0.012345, 11234.5e9],
        ),
        ("from 12.4 ms to 3.1 ms, a 4.0x speedup", ["time", "time", "ratio"], [12.4e-3, 3.1e-3, 4.0]),
        ("TFLOPS: 102T", ["rate"], [102e12]),
        (r"it reaches $102 \text{ TFLOPS}$ on 8x H100", ["rate"], [102e12]),
        ("22.13 ms per token, 45.20 tokens per second", ["s_per_token", "tokens_per_s"], [0.02213, 45.2]),
        ("time_ms: 3.2, size 4096, RTX 4090", ["time"], [0.0032]),
        ("1.23 ms ± 12 µs per loop", ["time", "time"], [1.23e-3, 12e-6]),
        ("$2.40 per GPU-hour, 16 bytes per parameter", ["$/gpu*s", "B/param"], [2.4 / 3600, 16]),
        ("1.2, 1.4 and 1.3 ms, 2.0 FLOP/byte", ["time"] * 3 + ["intensity"], [1.2e-3, 1.4e-3, 1.3e-3, 2.0]),
        ("312 W over 2 days, 4.7 tokens/J", ["power", "time", "token/J"], [312, 172800, 4.7]),
        ("400 Gb/s link, 7B model", ["bandwidth", "params"], [50e9, 7e9]),
        ("tps: 5,210  tflops: 301.7  mfu: 30.50%", ["tokens_per_s", "rate", "percent"], [5210, 301.7e12, 0.305]),
        ("peak for the mfu: 9.89e14", [], []),
        ("min=1204, max=9021", [], []),
        ("2M tokens (2,097,152)", ["tokens"], [2097152]),
        ("wall_time = 2:03:04.50", ["time"], [7384.5]),
        ("events per second: 812.5", ["items_per_s"], [812.5]),
        ("total number of events: 8126", ["items"], [8126]),
        ("a step of 9 ms, per step from 9 ms to 6 ms", ["time", "s_per_item", "s_per_item"], [9e-3, 9e-3, 6e-3]),
        ("2 h 50 min of it", ["time"], [10200]),
    ],
)
def test_quantities_of_a_line(text, kinds, values):
    found = quantities(clean(text), 1)
    assert [q.kind for q in found] == kinds
    assert [q.value.mid for q in found] == pytest.approx(values)


def test_bounds_and_ranges_equal_nothing():
    assert [q.exact for q in quantities("up to 3x, 2-5x slower, over 100 GB/s, 4 ms", 1)] == [False, False, False, True]


def test_a_printed_figure_is_an_interval():
    assert printed("0.21").lo == pytest.approx(0.205) and printed("0.21").hi == pytest.approx(0.22)
    assert printed("4,000").lo == pytest.approx(3900)
    assert Interval(1, 2, 3).meets(Interval(2.9, 4, 5)) and not Interval(1, 2, 3).meets(3.2)
    with pytest.raises(ValueError, match="interval: expected lo <= mid <= hi"):
        Interval(2, 1, 3)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("Latency (ms)", "time"),
        ("avg_time_us", "time"),
        ("TFLOPS/GPU", "rate"),
        ("tokens_per_sec", "tokens_per_s"),
        ("GB/s [read]", "bandwidth"),
        ("img/s", "items_per_s"),
        ("% of peak", "percent"),
        ("power_w", "power"),
        ("Throughput - TF32 [mol/ms]", "items_per_s"),
        ("Latency 95%", None),
        ("FTL(min)(s)", "time"),
        ("% of 2039 GB/s", "percent"),
        ("M", None),
        ("GBS", None),
    ],
)
def test_units_of_columns(name, kind):
    unit = unit_of_name(name)
    assert (unit and unit.kind) == kind


def test_facts_as_people_write_them():
    found = facts("Batch Size (B): 16, seq_len=1024, M=N=K=4096 on 8x RTX 4060 Ti in bfloat16")
    assert found.of("batch") == (16,) and found.of("seq") == (1024,) and found.of("gpus") == (8,)
    assert [found.of(s) for s in "mnk"] == [(4096,)] * 3
    assert found.of("formats") == ("bf16",) and [d.name for d in found.of("devices")] == ["NVIDIA GeForce RTX 4060 Ti"]
    assert size_of_name("Batch Size (B)") == "batch" and size_of_name("Latency") is None


def test_a_wrong_decoding_is_undone():
    assert repair("8 ms ¬∑ 1024√ó1024 ‚úÖ 10Œºs") == "8 ms · 1024×1024 ✅ 10μs"
    assert repair("1024×1024 at 3 µs") == "1024×1024 at 3 µs"


@pytest.mark.parametrize(
    "name, text, kind",
    [
        ("a.md", "", "markdown"),
        ("", "# T\n\n| a | b |\n|---|---|\n", "markdown"),
        ("", '{"a": 1}', "json"),
        ("", '{"a": 1}\n{"a": 2}', "json"),
        ("", '{"nbformat": 4, "cells": []}', "json"),
        ("", "[1] done\n[2] done", "log"),
        ("", "<table></table>", "html"),
        ("a.csv", "", "csv"),
        ("", "M=1 N=2\ntime: 3 ms", "log"),
    ],
)
def test_formats_are_told_by_name_or_text(name, text, kind):
    assert format_of(name, text) == kind


PIPES = "| n | ms |\n|---|---|\n| 1 | 2.5 |\n"
SAME = {
    "x.md": PIPES,
    "x.html": "<table><tr><th>n</th><th>ms</th></tr><tr><td>1</td><td>2.5</td></tr></table>",
    "x.csv": "n,ms\n1,2.5\n",
    "x.json": '[{"n": 1, "ms": 2.5}]',
    "x.jsonl": '{"n": 1, "ms": 2.5}\n',
    "x.ipynb": json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown", "source": [PIPES]}]}),
    "y.md": "```\n" + PIPES.replace("|---|---|\n", "") + "```\n",
}


@pytest.mark.parametrize("name", SAME)
def test_one_table_in_every_format(name):
    (table,) = [b.table for b in read(SAME[name], name) if b.table]
    assert table.header == ("n", "ms") and [cells for _, cells in table.rows] == [("1", "2.5")]
    (grid,) = Report(SAME[name], name).grids
    assert grid.rows[0].own == {"n": 1.0} and grid.rows[0].quantities[0].value.mid == pytest.approx(2.5e-3)


def test_spanned_heads_of_html_name_each_column():
    text = (
        "<table><tr><th rowspan=2>n</th><th colspan=2>Time (ms)</th></tr><tr><th>a</th><th>b</th></tr>"
        "<tr><td>1</td><td>2</td><td>3</td></tr></table>"
    )
    (table,) = [b.table for b in read(text, "x.html") if b.table]
    assert table.header == ("n", "Time (ms) a", "Time (ms) b")


@pytest.mark.parametrize("table", ["<table></table>", "<table><tr><th>n</th></tr></table>"])
def test_a_table_that_a_script_fills_is_no_table(table):
    blocks = read(f"<h1>Run</h1>{table}<p>It took 2.5 ms.</p>", "x.html")
    assert [(b.kind, b.text) for b in blocks] == [("heading", "Run"), ("prose", "It took 2.5 ms.")]


def test_aligned_columns_with_row_numbers():
    lines = ["       N    Triton     Torch", "0  256.0   410.2   399.1", "1  512.0   780.4   702.9", "done"]
    blocks = split_code([Line(i, text) for i, text in enumerate(lines, 1)])
    assert blocks[0].table is not None and blocks[0].table.header == ("N", "Triton", "Torch")
    assert [number for number, _ in blocks[0].table.rows] == [2, 3] and blocks[1].text == "done"


def test_lines_are_those_of_the_file():
    text = '{"gpu": "A100",\n "runs": [\n  {"n": 1,\n   "ms": 2.5},\n  {"n": 2,\n   "ms": 5.0}]}'
    (grid,) = Report(text, "x.json").grids
    assert [row.quantities[0].line for row in grid.rows] == [4, 6]


def test_a_column_of_noughts_divides_nothing():
    text = "n,ms,GB/s\n0,1.0,10\n0,2.0,5\n4,4.0,2.5\n0,5.0,2\n"
    assert Report(text, "x.csv").grids and audit_text(text, "x.csv").accusations == ()


def test_yaml_is_read_as_json_is():
    runs = "runs:\n- batch: 8\n  tokens_per_s: 900\n- batch: 16\n  tokens_per_s: 1500\n"
    text = "gpu: H100  # one\nprice_per_hour: 2.50\n" + runs
    report = Report(text, "x.yaml")
    assert [(q.kind, q.line) for r in report.lines_of_text for q in r.quantities] == [("$/s", 2)]
    assert [(r.own, [q.text for q in r.quantities], r.line) for r in report.grids[0].rows] == [
        ({"batch": 8.0}, ["900"], 4),
        ({"batch": 16.0}, ["1500"], 6),
    ]


def test_terms_of_chinese_reports_are_english():
    row = Report("每步耗时 11.2 s,吞吐为 232,000 tokens/s,即每卡 29,000 tokens/s。", "x.md").rows[0]
    assert [(q.kind, q.per_device) for q in row.quantities] == [
        ("time", False),
        ("tokens_per_s", False),
        ("tokens_per_s", True),
    ]


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("per million output tokens it is $0.20", "$/token", 0.2e-6),
        ("each request takes 7 J", "J/item", 7.0),
        ("8.2 GFLOPs per image", "flop/item", 8.2e9),
        ("cost_per_1k_tokens: 0.4", "$/token", 0.4e-3),
    ],
)
def test_what_a_figure_is_of_may_stand_before_it(text, kind, value):
    q = Report(text, "x.md").rows[0].quantities[0]
    assert (q.kind, q.value.mid) == (kind, pytest.approx(value))


def test_columns_are_as_wide_as_the_dashes_below_their_names():
    text = (
        " Name                 Unit      Value\n ----------------- -------- ----------\n"
        " read rate         Tbyte/second       2.10\n a name that is wider Gbyte       1.05\n"
    )
    (block,) = split_code([Line(i, line) for i, line in enumerate(text.splitlines(), 1)])
    assert block.table is not None
    assert [cells[:2] for _, cells in block.table.rows] == [
        ("read rate", "Tbyte/second"),
        ("a name that is wider", "Gbyte"),
    ]


def test_a_measure_called_mean_is_no_summary():
    text = (
        "| | old | new | change |\n|---|---|---|---|\n"
        "| Mean TTFT (ms) | 40.0 | 30.0 | -25 % |\n| Total (ms) | 40.0 | 30.0 | |\n"
    )
    (grid,) = [g for g in Report(text, "x.md").grids if len(g.header) == 4]
    assert [row.summary for row in grid.rows] == [False, False]


def test_columns_in_camel_case_have_units():
    (grid,) = Report("Name,TotalDurationNs,AverageNs\na,1000,100\nb,3000,300\n", "x.csv").grids
    assert [q.kind for row in grid.rows for q in row.quantities] == ["time"] * 4


@pytest.mark.parametrize("text", ['{"cells": null}', '{"cells": [1]}', "[1, null]", '{"a": {"cells": []}}'])
def test_json_that_looks_like_a_notebook_is_data(text):
    assert audit_text(text, "x.ipynb").findings == ()


@pytest.mark.parametrize(
    "cell",
    [
        '{"outputs": "x"}',
        '{"outputs": [3, null, {"data": 3}, {"data": null, "text": 4}, {"text": {"a": 1}}]}',
        '{"cell_type": "markdown", "source": {"a": 1}}',
        '{"cell_type": "markdown", "source": [3, null, {"a": 1}, "So 51.44 / 17.52 = 3.44x."]}',
    ],
)
def test_a_notebook_of_odd_cells_is_read_as_far_as_it_is_one(cell):
    found = audit_text(f'{{"cells": [{cell}]}}', "x.ipynb").findings
    assert bool(found) is ("51.44" in cell)


def test_a_number_of_hundreds_of_digits_is_no_error():
    assert audit_text(f"It took {'9' * 400} ms at {'9' * 320}.5 GB/s for {'8' * 350} bytes.", "x.md").findings == ()


@pytest.mark.parametrize("text", ["", "{", "[1] and more"])
def test_a_json_file_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"JSON|Expecting|expecting"):
        audit_text(text, "x.json")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("on node-08 gpu=0", ()),
        ("Llama 70B, TP4, vLLM", (4,)),
        ("TP99 20 ms, TP50 12 ms", ()),
        ("nodes: 6\n  gpus_per_node: 8\n", (48,)),
    ],
)
def test_tensor_parallelism_is_a_count_of_gpus_and_a_percentile_none(text, count):
    assert facts(text).of("gpus") == count


@pytest.mark.parametrize(
    ("above", "kind"),
    [
        ("All times are in ms.", "time"),
        ("All times are in ms, rates in GB/s.", "number"),  # which of them?
        ("All times are in ms." + 60 * "\n\nx", "number"),  # of other tables
    ],
)
def test_one_unit_of_all_figures_is_that_of_the_tables_near_it(above, kind):
    report = Report(f"{above}\n\n| op | a | b |\n|-|-|-|\n| x | 1.5 | 2.5 |\n| y | 3.5 | 4.5 |\n", "x.md")
    assert {q.kind for row in report.grids[0].rows for q in row.quantities} == {kind}


@pytest.mark.parametrize(
    "text, has",
    [
        ("no LoRA, no offload to the host, no sharding", False),
        ("Nothing is offloaded.", False),
        ("offload: none", False),
        ("offload is\nnot used here", False),
        ("CPU RAM / host offload: **off**", False),
        ("It does not fit, so we offload the moments.", True),
        ("offload: optimizer", True),
    ],
)
def test_what_a_text_denies_it_does_not_say(text, has):
    assert says(re.compile("(?i)offload"), text) == has
