import json
import subprocess
import sys

import pytest

from expertile.audit import audit_text
from expertile.audit.render import FORMATS, render

WRONG = "Fusing cut the time from 9.6 ms to 6.4 ms, a 2.1x speedup.\n<b>3 ms</b> & more\n"


def test_every_format_names_the_line_and_the_figure():
    audit = audit_text(WRONG, "a|b.md")
    for form in FORMATS:
        out = render([audit], form)
        assert "2.1x" in out and "9.6 ms" in out, form
    assert "line 1: inconsistent (ratio)" in render([audit], "text")
    assert json.loads(render([audit], "json"))[0]["findings"][0]["line"] == 1
    sarif = json.loads(render([audit], "sarif"))["runs"][0]["results"][0]
    assert sarif["level"] == "error" and sarif["locations"][0]["physicalLocation"]["region"]["startLine"] == 1
    page = render([audit], "html")
    assert "&lt;b&gt;3 ms&lt;/b&gt;" in page and 'class="bad"' in page
    with pytest.raises(ValueError, match="format: expected one of text, .*, got 'pdf'"):
        render([audit], "pdf")


def run(*args: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from expertile.cli import main; main()", "audit", *args]
    return subprocess.run(command, capture_output=True, text=True, input=text, check=False)


def test_command_line(tmp_path):
    wrong, right = tmp_path / "wrong.md", tmp_path / "right.md"
    wrong.write_text(WRONG)
    right.write_text("Nothing here.")
    done = run(str(wrong), str(right))
    assert done.returncode == 1 and "wrong.md: 1 claim" in done.stdout and "right.md: no figure" in done.stdout
    assert run("-", text=WRONG).returncode == 1
    assert run(str(wrong), "--fail-on", "impossible").returncode == 0
    assert run(str(wrong), "--fail-on", "maybe").returncode == 2
    out = tmp_path / "a.html"
    assert run(str(wrong), "--format", "html", "--out", str(out), "--fail-on", "never").returncode == 0
    assert out.read_text().startswith("<!doctype html>")
