from expertile.lab.audit.columns import understand
from expertile.lab.audit.document import parse
from expertile.lab.audit.units import with_units


def _kinds(text: str) -> list[list[str]]:
    document = parse(text)
    return [[c.kind for c in t.columns] for t in with_units(document, [understand(t) for t in document.tables])]


TABLE = "| m | ours | cubin | ratio |\n|-|-|-|-|\n| 64 | 27.4 | 337.7 | 0.08x |\n| 512 | 614.9 | 1753.3 | 0.35x |\n"


def test_a_line_that_names_a_column_and_prints_its_best_cell():
    assert _kinds(f"{TABLE}\ncubin peak: 1753 TFLOPs/s\n") == [["dim", "flop_rate", "flop_rate", "ratio"]]


def test_the_line_above_may_say_the_unit():
    text = "All values in GB/s, higher is better.\n\n| size | a | b |\n|-|-|-|\n| x | 1.5 | 2.5 |\n| y | 3.5 | 4.5 |\n"
    assert _kinds(text) == [["label", "byte_rate", "byte_rate"]]


def test_nothing_is_guessed():
    assert _kinds(TABLE) == [["dim", "number", "number", "ratio"]]
    assert _kinds(f"{TABLE}\ncubin peak: 1600 TFLOPs/s\n") == [["dim", "number", "number", "ratio"]]
