from expertile.lab.audit.document import parse
from expertile.lab.audit.htmltable import find

SOURCE = """<table>
<tr><th>Size</th><th>ms</th></tr>
<tr><td>128 × 128</td><td>0.5</td></tr>
</table>"""


def test_reads_rows_with_their_lines():
    (grid,) = find(SOURCE, 10)
    assert grid.header == ("Size", "ms")
    assert grid.rows == (("128 × 128", "0.5"),)
    assert (grid.line, grid.lines) == (11, (12,))


def test_inside_markdown():
    (table,) = parse("# T\n\n" + SOURCE).tables
    assert table.lines == (5,)
