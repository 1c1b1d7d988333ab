"""The shell's completion: what comes back on the tab key, and that every name offered is taken."""

import os
import subprocess
import sys

import pytest

from expertile.cli import complete
from expertile.cli.traffic import OPERATORS
from expertile.device import Device, known_devices
from expertile.lab.bench.presets import ALL_PRESETS
from expertile.lab.report.impact import MODELS
from tests.cli.test_cli import expertile_here


def tab(words):
    """What bash is offered at the end of `words`."""
    settings = {
        "_EXPERTILE_COMPLETE": "complete_bash",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    code = "import sys; sys.argv[0] = 'expertile'; from expertile.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | settings, timeout=120
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("expertile be", ["bench"]),
        ("expertile audit --sh", ["--shape"]),
        ("expertile impact --model qw", ["qwen3-30b-a3b"]),
    ],
)
def test_the_tab_key(words, offered):
    assert tab(words) == offered


def test_names_offered_are_those_that_are_taken():
    assert complete.presets("") == list(dict.fromkeys(ALL_PRESETS))
    assert complete.models("") == list(MODELS) and complete.operators_explained("") == list(OPERATORS)
    assert {Device.by_name(name) for name in complete.gpus("")} == set(known_devices())
    assert not [name for name in complete.gpus("") if " " in name]
    assert complete.backends("GLUON") == ["gluon_hopper"] and set(complete.backends("")) < set(complete.rivals(""))
    assert complete.policies("e") == ["eager"] and complete.presets("no-such") == []


def test_the_shell_is_given_its_script():
    assert "--install-completion" in expertile_here("--help").stdout
    assert "--install-completion" not in expertile_here("compare", "--help").stdout


def test_flags_look_as_if_they_wanted_no_argument():
    for words in (["--help"], ["compare", "--help"]):
        assert "<bool>" not in expertile_here(*words).stdout


def test_the_command_alone_shows_its_help():
    done = expertile_here()
    assert done.returncode == 0 and "bench" in done.stdout and "--version" in done.stdout
