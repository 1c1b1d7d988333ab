"""The display of a run: what a narrow terminal, or none, still shows."""

import io

import pytest
from rich.console import Console

from expertile.cli.progress import Display
from expertile.lab.bench.run import Event

LONG = Event("workload", "deepseek-v3/" + "a-long-name-" * 8, done=37, total=110, eta_s=42.0)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_count_and_time_are_never_cut(width):
    out = io.StringIO()
    display = Display(Console(file=out, width=width, force_terminal=True, color_system=None), "deepseek-v3")
    display.on_event(LONG)
    display.console.print(display.progress.get_renderable())
    last = out.getvalue().splitlines()[-1]
    assert "37/110" in last and "~42 s left" in last and "a-long" in last and len(last) <= width


def test_without_a_terminal_each_workload_has_its_place():
    out = io.StringIO()
    Display(Console(file=out, width=200), "cpu").on_event(LONG)
    assert "(37/110 records, ~42 s left)" in out.getvalue()
