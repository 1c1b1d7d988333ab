"""`python -m expertile.audit`: what a reviewer runs without torch, Triton or the command line's libraries."""

import subprocess
import sys

import pytest

from expertile.audit.command import HELP, main

WRONG, RIGHT = "So 51.44 / 17.52 = 3.44x.\n", "So 51.44 / 17.52 = 2.94x.\n"
# None in sys.modules makes an import fail.
ALONE = """
import runpy, sys
for absent in ("torch", "triton", "typer", "rich", "numpy"):
    sys.modules[absent] = None
sys.argv = ["audit", *sys.argv[1:]]
runpy.run_module("expertile.audit", run_name="__main__")
"""
ENTRY = """
import sys
for absent in ("torch", "triton", "typer", "rich", "numpy"):
    sys.modules[absent] = None
sys.argv = ["expertile", "audit", *sys.argv[1:]]
from expertile.cli import main
main()
"""


@pytest.mark.parametrize("start", [ALONE, ENTRY], ids=["module", "command"])
@pytest.mark.parametrize(("text", "code"), [(WRONG, 1), (RIGHT, 0)])
def test_markdown_it_is_all_it_needs(tmp_path, text, code, start):
    report = tmp_path / "report.md"
    report.write_text(text)
    done = subprocess.run([sys.executable, "-c", start, str(report)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert ("2.936, not 3.44x" in done.stdout) == bool(code)


def test_several_files_one_verdict(tmp_path, capsys):
    for name, text in (("a.md", RIGHT), ("b.md", WRONG)):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("a.md", "b.md")]
    assert main(files) == 1
    assert main([*files, "--fail-on", "impossible"]) == 0
    assert capsys.readouterr().out.count("a.md: nothing contradicts") == 2


def test_out_takes_the_place_of_the_terminal(tmp_path, capsys):
    report, out = tmp_path / "a.md", tmp_path / "a.json"
    report.write_text(WRONG)
    assert main([str(report), "--format", "json", "--out", str(out)]) == 1
    assert '"rule": "arithmetic"' in out.read_text()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [["absent.md"], ["--gpu", "no such part", __file__]])
def test_a_mistake_is_one_line(arguments, capsys):
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path, capsys):
    report = tmp_path / "a.md"
    report.write_text("1 ms")
    nothing = tmp_path / "nothing.jsonl"
    nothing.touch()
    noise = tmp_path / "noise.bin"
    noise.write_bytes(bytes(range(128, 256)) + b"1 ms")
    for arguments, named in (
        ([str(tmp_path / "none.md")], "none.md: No such file or directory"),
        ([str(tmp_path)], f"{tmp_path.name}: Is a directory"),
        ([sys.executable], f"{sys.executable}: expected text, got bytes that are none"),
        ([str(noise)], "noise.bin: expected text, got bytes that are none"),
        ([str(nothing)], "nothing.jsonl: expected JSON, got something else: no value"),
        ([str(report), "--out", str(tmp_path / "none" / "b.md")], "b.md: No such file or directory"),
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err.endswith(f"{named}\n")


def test_two_bytes_to_a_character_are_text(tmp_path, capsys):
    report = tmp_path / "a.md"
    report.write_text(WRONG, encoding="utf-16")
    assert main([str(report)]) == 1 and "2.936, not 3.44x" in capsys.readouterr().out


def test_the_help_names_what_the_overview_documents(capsys):
    typer = pytest.importorskip("typer")
    from expertile.cli.audit import audit

    app = typer.Typer()
    app.command()(audit)
    documented = {o for p in typer.main.get_command(app).params for o in p.opts if o.startswith("--")}
    with pytest.raises(SystemExit):
        main(["--help"], "expertile audit")
    said = capsys.readouterr().out
    assert documented - {"--install-completion", "--show-completion"} == {*HELP} - {"files"}
    assert said.startswith("usage: expertile audit") and all(flag in said for flag in HELP)


def test_options_may_stand_between_files(tmp_path, capsys):
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text(WRONG)
    assert main([str(tmp_path / "a.md"), "--json", str(tmp_path / "b.md")]) == 1
    assert capsys.readouterr().out.count('"rule": "arithmetic"') == 2
