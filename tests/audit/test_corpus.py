import pytest

from tests.audit import corpus


def test_precision_and_recall():
    score = corpus.score()
    print(score)
    assert score.precision >= 0.95 and score.recall >= 0.95, score


@pytest.mark.parametrize("name", [n for n, e in corpus.EXPECTED.items() if not e["accuse"]])
def test_an_honest_report_is_not_accused(name):
    assert [f"{f.line}: {f.message}" for f in corpus.of(name).accusations] == []


@pytest.mark.parametrize("name", [n for n, e in corpus.EXPECTED.items() if e["accuse"]])
def test_a_planted_error_is_one_finding(name):
    found = corpus.of(name).accusations
    assert [any(line in f.all_lines for f in found) for line in corpus.EXPECTED[name]["accuse"]] == [True] * len(found)


def test_every_report_has_an_expected_verdict():
    names = {path.name for path in corpus.FOLDER.iterdir()} - {"expected.json"}
    assert names == corpus.EXPECTED.keys() and len(names) >= 50


@pytest.mark.parametrize("name", [n for n, e in corpus.EXPECTED.items() if e.get("ask")])
def test_what_is_not_certain_is_asked(name):
    asked = [f for f in corpus.of(name).findings if f not in corpus.of(name).accusations]
    assert {line for f in asked for line in f.all_lines} >= {*corpus.EXPECTED[name]["ask"]}
