import pytest

from expertile.suggest import did_you_mean, one_of


@pytest.mark.parametrize(
    ("name", "hint"),
    [("squars", "; did you mean 'squares'?"), ("LOOP", "; did you mean 'loop'?"), ("abacus", ""), ("", "")],
)
def test_only_a_name_that_is_near_is_offered(name, hint):
    assert did_you_mean(name, ("squares", "loop", "models")) == hint


def test_two_that_are_as_near_are_both_offered():
    assert did_you_mean("h20O", ("h200", "h20", "a100")) == "; did you mean 'h20' or 'h200'?"


def test_many_names_are_not_all_listed():
    many = [f"name-{letter}" for letter in "abcdefghijklmnop"]
    assert one_of("x", ["a", "b", "a"]) == "one of a, b, got 'x'"
    assert one_of("xyz", many) == f"one of {', '.join(many[:12])} and 4 more, got 'xyz'"
    assert one_of("NAME-A", many[:1] + ["z" * 20 + str(i) for i in range(12)]) == (
        "one of 13 names, got 'NAME-A'; did you mean 'name-a'?"
    )
