"""What a user sees of the package in an interactive session."""

import subprocess
import sys

import pytest
import torch

import expertile as xt
from expertile.moe.router import RouterConfig


def test_dir_lists_the_public_names_and_nothing_else():
    code = "import expertile as xt; assert dir(xt) == sorted(xt.__all__), dir(xt); [getattr(xt, n) for n in dir(xt)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MoE" in dir(xt) and "Any" not in dir(xt)


def _explanations():
    a, b = torch.zeros(9, 8), torch.zeros(2, 8, 4)
    yield xt.explain(a, b, offs=torch.tensor([4, 9], dtype=torch.int32))
    q = torch.zeros(1, 2, 3, 8)
    yield xt.explain_attention(q, q, q, causal=True)


@pytest.mark.parametrize("explanation", list(_explanations()), ids=["grouped_mm", "attention"])
def test_an_explanation_is_one_line_and_a_page(explanation):
    assert "\n" not in repr(explanation) and len(repr(explanation)) < 200
    assert str(explanation).splitlines()[0] in repr(explanation)
    page = explanation._repr_html_()
    assert page.startswith("<pre>") and page.endswith("</pre>") and str(explanation).splitlines()[1][:20] in page


def test_a_routing_is_one_line():
    routing = xt.route(torch.zeros(5, 4), RouterConfig(4, 2))
    assert repr(routing) == "Routing(5 tokens, 2 experts each, 4 scores, device=cpu)"
    routing = xt.route(torch.zeros(5, 4), RouterConfig(4, 2), want_scores=False)
    assert repr(routing) == "Routing(5 tokens, 2 experts each, no scores, device=cpu)"
