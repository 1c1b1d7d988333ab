import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertile.lab.audit.encoding import repair


@pytest.mark.parametrize("charset", ["mac_roman", "latin-1"])
@pytest.mark.parametrize("text", ["1024×1024", "~10μs → 12µs", "⚠️ 2×", "naïve – café"])
def test_undoes_a_wrong_decoding(charset, text):
    assert repair(text.encode("utf-8").decode(charset)) == text


@given(st.text(alphabet="abc 0123456789×→µé–…“”.\n", max_size=80))
def test_leaves_right_text_and_its_lines_alone(text):
    text += " a × b → c – d"
    assert repair(text) == text


def test_never_adds_or_removes_a_line():
    wrong = "a √ó b\n‚Üí c\n"
    assert repair(wrong).count("\n") == wrong.count("\n")
