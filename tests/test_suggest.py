import pytest

from expertile.suggest import did_you_mean


@pytest.mark.parametrize(
    ("name", "hint"),
    [("squars", "; did you mean 'squares'?"), ("LOOP", "; did you mean 'loop'?"), ("abacus", ""), ("", "")],
)
def test_only_a_name_that_is_near_is_offered(name, hint):
    assert did_you_mean(name, ("squares", "loop", "models")) == hint
