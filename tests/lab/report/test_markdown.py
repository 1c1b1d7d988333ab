from markdown_it import MarkdownIt

from expertile.lab.report.markdown import markdown
from tests.lab.report import samples


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


def test_names_cannot_break_out_of_a_cell():
    evil = "a|b <script>alert(1)</script> <!-- /expertile:headline --> `code` [link](x)"
    records = [samples.record("p/" + evil, "x"), samples.record("p/" + evil, "y", 300e-6)]
    text = markdown(records)
    assert "<script" not in text
    assert "<!--" not in text
    assert len({len(row) for row in rows_of(text) if row and row[0].startswith("a|b")}) == 1


def test_nothing_measured():
    assert markdown([]) == "No records: nothing was measured.\n"
