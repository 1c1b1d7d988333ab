from expertile.lab.audit.context import Context
from expertile.lab.audit.document import parse
from expertile.lab.audit.report import Options, Report
from expertile.lab.audit.workload import Workload, itemsize, nearby


def _context(text: str) -> Context:
    return Context(Report(parse(text), Options()))


def test_bytes_per_value_are_the_narrowest_named_or_plausible():
    def size(text: str, operation: str) -> tuple[float, bool]:
        context = _context(text)
        return itemsize(context.report, context.claims[0].place, operation)

    assert size("fp8 in, bf16 out: 3 ms\n", "gemm") == (1.0, True)
    assert size("fp32 softmax: 3 ms\n", "softmax") == (4.0, True)
    assert size("softmax: 3 ms\n", "softmax") == (2.0, False)
    assert size("gemm: 3 ms\n", "gemm") == (1.0, False)


def test_least_and_standard_readings():
    context = _context("Grouped GEMM: experts=8, hidden=64, ffn=128, tokens=32, 3 ms\n")
    work = nearby(context.report, context.claims[0].place)
    assert isinstance(work, Workload)
    assert work.least_flops is not None
    assert work.least_flops.flops == work.standard.flops == 2 * 32 * 64 * 128
    assert work.least_bytes.nbytes == min(r.nbytes for r in work.readings)


def test_the_reason_for_knowing_nothing():
    context = _context("it took 3 ms\n")
    assert nearby(context.report, context.claims[0].place) == "the text does not say which operation this is"
