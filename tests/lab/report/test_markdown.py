import pytest
from markdown_it import MarkdownIt

from expertile.lab.report import headline, markdown
from expertile.lab.report.markers import fill_file
from tests.lab.report import samples

README = "# Title\n\nbefore <!-- expertile:headline -->old<!-- /expertile:headline --> after\n"


def fill(path, records, check=False):
    return fill_file(path, {"headline": headline(records)}, check)


def rows_of(text):
    """Cells of every table row, as a Markdown parser sees them."""
    found, row = [], None
    for token in MarkdownIt().enable("table").parse(text):
        if token.type == "tr_open":
            row = []
        elif token.type == "inline" and row is not None:
            row.append("".join(child.content for child in token.children))
        elif token.type == "tr_close":
            found.append(row)
            row = None
    return found


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
    for text in (headline(records), markdown(records)):
        assert "<script" not in text
        assert "<!--" not in text
        assert len({len(row) for row in rows_of(text) if row and row[0].startswith("a|b")}) == 1
    path = tmp_path / "README.md"
    path.write_text(README)
    fill(path, records)
    assert fill(path, records, check=True) is True


def test_summary_has_the_verdict_a_table_and_the_failures():
    records = [
        samples.record("p/1", "a", 100e-6),
        samples.record("p/1", "b", 200e-6),
        samples.record("p/1", "c", status="wrong", reason="relative error 0.5"),
    ]
    text = markdown(records)
    assert "- CUDA-graph replay: a is fastest on 1 of 1 workload, by 2.00× over the next." in text
    table = rows_of(text[text.index("### p, CUDA-graph") :])
    assert table[2][:4] == ["1", "b", "200", "±0.2 %"]
    assert table[2][-1] == "2.00×"
    assert ["wrong", "c", "1 workload", "relative error 0.5"] in rows_of(text)


def test_nothing_measured():
    assert headline([]) == "No records: nothing was measured."
    assert markdown([]) == "No records: nothing was measured.\n"
