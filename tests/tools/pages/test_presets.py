"""Every preset on the results page, from made-up records; and how a page's blocks are filled."""

import pytest

from expertile.lab.report.contest import runs
from tests.lab.report import samples
from tests.lab.report.test_markdown import rows_of
from tests.lab.report.test_operators import TIMES, fused
from tools.pages.markers import fill_file
from tools.pages.presets import headline, operator_table

README = "# Title\n\nbefore <!-- expertile:headline -->old<!-- /expertile:headline --> after\n"


def fill(path, records, check=False):
    return fill_file(path, {"headline": headline(records)}, check)


def test_headline_is_a_table_of_relative_speeds():
    records = [
        samples.record("p/1", "a", 100e-6),
        samples.record("p/1", "b", 200e-6),
        samples.record("p/2", "a", 100e-6),
        samples.record("p/2", "b", 200e-6),
        samples.record("p/2", "c", 50e-6),
    ]
    text = headline(records)
    header, body = rows_of(text)[:2]
    assert header == ["preset", "workloads", "c", "a", "b", "fastest, of bound"]
    assert body[:2] == ["p", "2"]
    assert body[2:5] == ["1.00 (1)", "0.71", "0.35"]
    assert "**0.71**" in text  # the fastest of those that ran everything
    assert "Imaginary GPU, 2026-01-02, torch 2.13.0" in text


def test_headline_lists_every_workload():
    records = [samples.record(f"p/{i}", backend, 1e-4 * (1 + i)) for i in range(3) for backend in ("a", "dense")]
    names = [row[0] for row in rows_of(headline(records))]
    assert {"0", "1", "2"} <= set(names)


def test_runs_of_two_machines_do_not_share_a_table():
    records = [samples.record(device="GPU one", run="1"), samples.record(device="GPU two", run="2")]
    text = headline(records)
    assert text.index("GPU one") < text.index("| preset") < text.index("GPU two") < text.rindex("| preset")


def test_fill_round_trip(tmp_path):
    path, records = tmp_path / "README.md", samples.lab(seed=4, workloads=3)
    path.write_text(README)
    assert fill(path, records, check=True) is False
    assert path.read_text() == README
    assert fill(path, records) is False
    text = path.read_text()
    assert headline(records) in text
    assert text.startswith("# Title\n\nbefore <!--")
    assert text.endswith("--> after\n")
    assert fill(path, records, check=True) is True
    assert fill(path, records) is True
    assert path.read_text() == text


def test_fill_keeps_line_ends(tmp_path):
    path = tmp_path / "README.md"
    path.write_bytes(README.replace("\n", "\r\n").encode())
    fill(path, [samples.record()])
    assert b"\n" not in path.read_bytes().replace(b"\r\n", b"")
    assert fill(path, [samples.record()], check=True) is True


@pytest.mark.parametrize("text", ["no markers", README + README, README.replace("<!-- exp", "<!-- x")])
def test_fill_wants_each_marker_once(tmp_path, text):
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="each exactly once, got"):
        fill(path, [samples.record()])
    assert path.read_text() == text


def test_fill_wants_the_markers_in_order(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("<!-- /expertile:headline --> <!-- expertile:headline -->")
    with pytest.raises(ValueError, match="and then .* got 1 and 1"):
        fill(path, [samples.record()])


def test_names_cannot_break_out_of_a_cell_or_forge_a_marker(tmp_path):
    evil = "a|b <script>alert(1)</script> <!-- /expertile:headline --> `code` [link](x)"
    records = [samples.record("p/" + evil, "x"), samples.record("p/" + evil, "y", 300e-6)]
    text = headline(records)
    assert "<script" not in text
    assert "<!--" not in text
    assert len({len(row) for row in rows_of(text) if row and row[0].startswith("a|b")}) == 1
    path = tmp_path / "README.md"
    path.write_text(README)
    fill(path, records)
    assert fill(path, records, check=True) is True


def test_nothing_measured():
    assert headline([]) == "No records: nothing was measured."


def test_a_line_for_each_operator_of_a_preset():
    records = fused() + fused("softmax_backward", factors={**TIMES, "quack": 0.99 * 1.1})
    text = operator_table(runs(records))
    assert "Imaginary GPU, 2026-01-02" in text
    assert text.splitlines()[-2:] == [
        "| softmax-v100 | softmax | 3 | 1.09× | 1.09× | `quack` | 1.09× | 95 % | 91 % |",
        "| softmax-v100 | softmax_backward | 3 | 0.99× | 0.99× | `quack` | 0.99× | 95 % | 91 % |",
    ]


def test_variants_are_ours_and_races_without_a_rival_do_not_count():
    text = operator_table(runs(fused(factors={"expertile-cluster": 1.0, "expertile": 2.0, "torch": 1.5})))
    assert text.splitlines()[-1] == "| softmax-v100 | softmax | 3 | 1.50× | 1.50× | `torch` | 0.75× | – | 100 % |"
    assert operator_table(runs(fused(factors={"expertile": 1.0, "copy": 1.0}))) == ""


def test_what_auto_chose_is_neither_ours_nor_another():
    times = {"expertile": 1.5, "expertile-auto": 1.0, "sdpa_cudnn": 1.0, "copy": 1.0}
    text = operator_table(runs(fused(factors=times)))
    assert text.splitlines()[-1] == (
        "| softmax-v100 | softmax | 3 | 0.67× | 0.67× | `sdpa_cudnn` | 1.00× | 67 % | 67 % |"
    )


def test_the_headline_keeps_grouped_products_and_operators_apart():
    product = samples.record("p/1", "a", 100e-6)
    alone = headline([product])
    both = headline([product, *fused()])
    assert both.startswith(alone) and "Fused operators, recorded on Imaginary GPU" in both
    assert "| `expertile` |" not in both.splitlines()[2]
    only = headline(fused())
    assert only.startswith("Fused operators") and "| preset | operator |" in only
