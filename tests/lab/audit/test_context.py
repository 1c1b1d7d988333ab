from expertile.lab.audit.context import Context
from expertile.lab.audit.document import parse
from expertile.lab.audit.report import Options, Report

TEXT = (
    "One takes 3 ms. Two takes 5 ms.\n\nPeak bandwidth: 900 GB/s\n\n| n | ms | speedup |\n|-|-|-|\n| 1 | 2.0 | 1.5x |\n"
)


def _context() -> Context:
    return Context(Report(parse(TEXT), Options()))


def test_claims_are_found_by_line_sentence_and_cell():
    context = _context()
    assert [c.quantity.text for c in context.by_line[1]] == ["3 ms", "5 ms"]
    assert [len(s) for s in context.by_sentence] == [1, 1, 1]
    cell = context.in_cell(0, 0, 1)
    assert cell is not None and cell.quantity.text == "2.0"
    assert context.of(cell.quantity) is cell
    assert [c.quantity.text for c in context.ratio_cells] == ["1.5x"]
    assert [c.quantity.text for c in context.limits] == ["900 GB/s"]


def test_findings_quote_their_claim():
    context = _context()
    finding = context.finding(context.claims[0], "possible", "rule", "because")
    assert (finding.line, finding.anchor) == (1, context.claims[0].anchor)
