"""Looking records up, and saying where they come from."""

from expertile.lab.measure.env import Env
from tests.lab.records import timed, untimed
from tools.pages.recorded import by_name, ok, recorded, to_ours


def test_only_a_time_that_counts_is_found_and_the_last_one_at_that():
    found = by_name([timed(2e-3), timed(3e-3), untimed("failed", backend="torch")])
    assert ok(found, "grouped_mm", "w", "loop").time_s == 3e-3
    assert ok(found, "grouped_mm", "w", "torch") is None
    assert ok(found, "grouped_mm", "w", "loop", "eager") is None


def test_ratios_are_times_over_ours():
    assert to_ours(timed(3e-3), timed(2e-3)) == "1.50×"
    assert to_ours(None, timed()) == to_ours(timed(), untimed("failed")) == "–"


def test_days_and_versions_are_named_once_each():
    env = Env("A [GPU]", torch="2.1", triton="3.1")
    first, second = timed(env=env, date="2026-01-02T03:04:05Z"), timed(env=Env("A [GPU]"), date="2026-01-03")
    assert recorded([first, first, second]) == r"Recorded on A \[GPU\], 2026-01-02, 2026-01-03, torch 2.1, triton 3.1."
