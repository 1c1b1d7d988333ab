from expertile.lab.audit.document import clean, parse

REPORT = """# Title

Intro line.

## Setup
- GPU: X
  - nested: 1 ms

| A | B (ms) |
|---|---|
| one | 1.0 |
| **two** | `2.0` |

```
Block head
key: 3 ms
```

```python
x = "4 ms"
```

Under
=====
"""


def test_line_numbers_are_those_of_the_source():
    document = parse(REPORT)
    for statement in document.statements:
        assert statement.text.split()[0] in REPORT.split("\n")[statement.line - 1]
    (table,) = document.tables
    assert (table.line, table.lines) == (9, (11, 12))
    assert table.rows[1] == ("two", "2.0")


def test_kinds_and_leads():
    document = parse(REPORT)
    kinds = {s.text: s.kind for s in document.statements}
    assert kinds["key: 3 ms"] == "fence"
    assert kinds['x = "4 ms"'] == "code"
    nested = next(s for s in document.statements if s.text == "nested: 1 ms")
    assert nested.lead == "GPU: X"


def test_sections_nest_and_underlined_headings_count():
    document = parse(REPORT)
    assert [s.title for s in document.sections] == ["", "Title", "Setup", "Under"]
    setup = document.sections[2]
    assert [s.title for s in document.ancestors(setup.index)] == ["Setup", "Title", ""]


def test_windows_line_ends_and_a_byte_order_mark():
    document = parse("\ufeff# T\r\n\r\nspeed: 2x\r\n")
    assert [s.line for s in document.statements] == [1, 3]


def test_markup_goes():
    assert clean("**0.56x** of [PyTorch](http://x) `loop`<br>end") == "0.56x of PyTorch loop end"


def test_a_rule_between_header_and_rows_does_not_tear_a_plain_table():
    text = "size   a (ms)   b (ms)\n----------------------\n128    1.0      2.0\n256    2.0      4.0\n"
    (table,) = parse(text).tables
    assert table.header == ("size", "a (ms)", "b (ms)")
    assert table.lines == (3, 4)


def test_a_fence_that_is_never_closed_is_read_to_the_end():
    document = parse("```\nfirst: 1 ms\nlast: 2 ms")
    assert [s.text for s in document.statements] == ["first: 1 ms", "last: 2 ms"]
