import pytest

from expertile.device import Device
from expertile.lab.audit.context import Context
from expertile.lab.audit.document import parse
from expertile.lab.audit.report import Options, Report
from expertile.lab.audit.wholes import stated_and_known_peaks


def _peaks(text: str, kind: str) -> list[float]:
    context = Context(Report(parse(text), Options()))
    return [value for value, _ in stated_and_known_peaks(context, context.claims[-1].place, kind)]


def test_stated_peaks_come_first_then_the_format_in_force():
    found = _peaks("GPU: H100, peak 990 TFLOPS\n\nbf16: 400 TFLOPS\n", "flop_rate")
    assert found[0] == pytest.approx(990e12)
    assert found[1] == pytest.approx(Device.by_name("h100").peak("bf16"))


def test_gpus_that_work_together_count_singly_and_together():
    found = _peaks("GPU: 8x H100\n\n400 GB/s\n", "byte_rate")
    assert found == [pytest.approx(3.35e12), pytest.approx(8 * 3.35e12)]


def test_nothing_is_known_of_an_unnamed_gpu():
    assert _peaks("400 GB/s\n", "byte_rate") == []
