"""The notebook runs on a CPU from top to bottom in under a minute, and says what its text promises."""

import ast
import json
from pathlib import Path

import pytest
import torch

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


@pytest.fixture(scope="module")
def cells():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run(code, names):
    """Run a cell; the value of a last line that is an expression, as a notebook shows it."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last else None


def test_it_runs_and_shows_something_in_every_part(cells, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names, shown = {}, []
    for cell in cells:
        if cell["cell_type"] == "code":
            value = run("".join(cell["source"]), names)
            printed = capsys.readouterr().out
            shown.append(printed or value)
    imports, *parts = shown
    assert imports is None and len(parts) == 6 and all(part is not None for part in parts)
    assert "backend:" in str(parts[1]) and parts[2].startswith("least µs")
    # Fewer bits never raise a bound.
    bits = names["bounds"]
    assert all(bits["INT4"][t] <= bits["bf16"][t] and bits["FP8"][t] < bits["bf16"][t] for t in bits["bf16"])
    assert sum(names["counts"].tolist()) == names["tokens"] * names["top_k"]


def test_it_is_kept_without_outputs_and_its_links_lead_somewhere(cells):
    text = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)
