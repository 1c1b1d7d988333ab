"""What the site's reference says of commands, backends and GPUs is what the code has."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from expertile.cli.app import COMMANDS, app
from expertile.device import known_devices
from expertile.ops.grouped_mm.backends import BACKENDS
from tools.pages.site import GENERATED, generated, on_page_markdown

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_options_of_its_help(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # no name is cut
    said = CliRunner().invoke(app, [command, "--help"]).output
    section = generated("cli").partition(f"## {command}\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]+(?= )", said.partition("Options")[2])) - {"--help"}
    assert options <= set(re.findall(r"--[a-z][\w-]+", section)) and section


def test_every_backend_and_gpu_stands_there():
    backends, gpus = generated("backends"), generated("gpus")
    products = backends.partition("## grouped_mm")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", products, re.M) == [b.name for b in BACKENDS]
    assert all(f"| {device.name} |" in gpus for device in known_devices())


def test_the_pages_ask_for_what_there_is():
    asked = {name for page in DOCS.rglob("*.md") for name in re.findall(r"<!-- generated: (\w+) -->", page.read_text())}
    assert asked == set(GENERATED)
    assert on_page_markdown("a\n<!-- generated: gpus -->\nb").startswith("a\n| GPU |")
    with pytest.raises(ValueError, match="expected one of .*, got 'nope'"):
        on_page_markdown("<!-- generated: nope -->")
