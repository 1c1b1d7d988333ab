import pytest

from expertile.lab.operators import operators
from expertile.lab.report.palette import styles, text_on


def test_a_backend_looks_the_same_whoever_it_races():
    assert styles(["loop", "quack"])["quack"] == styles(["quack", "triton_tma", "mine"])["quack"]


def test_all_of_a_usual_race_differ_in_colour_and_marker():
    looks = styles(
        [
            "triton_tma",
            "triton_pointer",
            "torch_grouped",
            "cublas_grouped",
            "quack",
            "padded_bmm",
            "loop",
            "gluon_hopper",
            "mine",
            "yours",
            "theirs",
        ]
    )
    assert len({colour for colour, _ in looks.values()}) == len(looks)
    assert len({symbol for _, symbol in looks.values()}) == len(looks)


@pytest.mark.parametrize("op", operators())
def test_rivals_of_an_operator_differ_in_colour_and_marker(op):
    looks = styles(rival.name for rival in operators()[op].rivals)
    assert len({colour for colour, _ in looks.values()}) == len({symbol for _, symbol in looks.values()}) == len(looks)


def test_baselines_have_no_rival_style():
    assert styles(["dense", "copy"]) == {}


def test_text_contrasts():
    assert text_on("#ffffff") == "#000000"
    assert text_on("#0000aa") == "#ffffff"
