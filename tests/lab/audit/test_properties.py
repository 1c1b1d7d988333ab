"""Reports made up from random shapes and times: consistent ones are clean, one wrong figure is found and no other."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from expertile.device import Device
from expertile.lab.audit import INCONSISTENT, audit
from tests.lab.audit.helpers import accusations

H100 = Device.by_name("h100")
PEAK = H100.peak("bf16")
BANDWIDTH = H100.memory_bps
sizes = st.sampled_from([256, 512, 768, 1024, 1536, 2048, 4096, 5120, 8192, 11008, 14336])
shares = st.floats(0.05, 0.6)


@dataclass(frozen=True)
class Row:
    m: int
    n: int
    k: int
    theirs: float  # seconds
    ours: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def floor(self) -> float:
        nbytes = 2 * (self.m * self.k + self.k * self.n + self.m * self.n)
        return max(self.flops / PEAK, nbytes / BANDWIDTH)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    m, n, k = draw(sizes), draw(sizes), draw(sizes)
    floor = Row(m, n, k, 1.0, 1.0).floor
    return Row(m, n, k, floor / draw(shares), floor / draw(shares))


def products(table: list[Row], wrong: tuple[int, str] | None = None, factor: float = 1.0) -> str:
    """A report on matrix products; the figure `wrong` = (row, column) is printed `factor` times too large."""
    lines = [
        "# bf16 GEMM on an NVIDIA H100 80GB HBM3",
        "",
        "| M | N | K | torch (us) | ours (us) | ours TFLOPS | Speedup |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for i, row in enumerate(table):

        def of(column: str, value: float, i: int = i) -> float:
            return value * (factor if wrong == (i, column) else 1.0)

        lines.append(
            f"| {row.m} | {row.n} | {row.k} | {row.theirs * 1e6:.3f} | {row.ours * 1e6:.3f} | "
            f"{of('rate', row.flops / row.ours / 1e12):.2f} | {of('speedup', row.theirs / row.ours):.3f}x |"
        )
    return "\n".join(lines) + "\n"


def blocks(row: Row, wrong: str = "", factor: float = 1.0) -> str:
    """The same as two result blocks with a speed-up below the second."""

    def of(name: str, value: float) -> float:
        return value * (factor if wrong == name else 1.0)

    def block(time: float, rate: float, more: str) -> str:
        return (
            f"```\nGEMM {row.m}x{row.n}x{row.k}\nTotal Time: {time * 1e3:.5f} ms\nThroughput: {rate / 1e12:.3f} "
            f"TFLOPs/s\n{more}```\n"
        )

    first = block(row.theirs, row.flops / row.theirs, "")
    second = block(
        row.ours, of("rate", row.flops / row.ours), f"Speedup: {of('speedup', row.theirs / row.ours):.3f}x\n"
    )
    return f"# bf16 on H100\n\n## Theirs\n\n{first}\n## Ours\n\n{second}"


def streams(shapes: list[tuple[int, int, float]], wrong: int | None = None, factor: float = 1.0) -> str:
    """A softmax report with bandwidths and shares of the peak."""
    lines = ["# fp32 softmax, H100", "", "| Shape | Triton (ms) | Bandwidth (GB/s) | % of peak |", "|---|---|---|---|"]
    for i, (rows_, cols, share) in enumerate(shapes):
        nbytes = 2 * 4 * rows_ * cols
        rate = share * BANDWIDTH
        percent = 100 * rate / BANDWIDTH * (factor if i == wrong else 1.0)
        lines.append(f"| {rows_}×{cols} | {nbytes / rate * 1e3:.6f} | {rate / 1e9:.2f} | {percent:.2f}% |")
    return "\n".join(lines) + "\n"


@settings(max_examples=40, deadline=None)
@given(st.lists(rows(), min_size=3, max_size=6))
def test_consistent_tables_are_clean(table):
    assert accusations(audit(products(table))) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(rows(), min_size=3, max_size=6), st.data(), st.floats(1.3, 1.6), st.booleans())
def test_one_wrong_figure_of_a_table_is_found_alone(table, data, factor, inverse):
    row = data.draw(st.integers(0, len(table) - 1))
    column = data.draw(st.sampled_from(["rate", "speedup"]))
    found = accusations(audit(products(table, (row, column), 1 / factor if inverse else factor)))
    assert [(f.line, f.verdict) for f in found] == [(5 + row, INCONSISTENT)]
    assert ("TFLOPS" if column == "rate" else "Speedup") in found[0].quote


@settings(max_examples=30, deadline=None)
@given(rows())
def test_consistent_blocks_are_clean(row):
    assert accusations(audit(blocks(row))) == []


@settings(max_examples=30, deadline=None)
@given(rows(), st.sampled_from(["rate", "speedup"]), st.floats(1.3, 1.6))
def test_one_wrong_figure_of_a_block_is_found_alone(row, name, factor):
    found = accusations(audit(blocks(row, name, factor)))
    if name == "rate":  # the rates' own ratio changes too, but the speed-up still follows from the times
        assert [f.quote.split(":")[0] for f in found] == ["Throughput"]
    else:
        assert [f.quote.split(":")[0] for f in found] == ["Speedup"]


shape = st.tuples(st.sampled_from([2048, 4096, 16384]), st.sampled_from([4096, 8192, 12288]), st.floats(0.2, 0.95))


@settings(max_examples=30, deadline=None)
@given(st.lists(shape, min_size=3, max_size=6), st.data(), st.floats(0.6, 0.9))
def test_bandwidths(shapes, data, factor):
    assert accusations(audit(streams(shapes))) == []
    row = data.draw(st.integers(0, len(shapes) - 1))
    found = accusations(audit(streams(shapes, row, factor)))
    assert [(f.line, f.rule) for f in found] == [(5 + row, "derived_column")]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=300))
def test_any_text_is_read_without_a_crash(text):
    audit(f"3 ms\n\n{text}\n")


_VOCABULARY = (
    "| --- \n \n \n ms 3.5 1024×1024 GEMM H100 2x = × ( ) 84% GB/s TFLOPS → ``` # - Speedup: Average M=4096 softmax "
    "from to FAIL Correctness: tokens INT4 0 1e9 , attention B=2 <table> <td> E=8 hidden=64 ffn=128 top-2 67.1 MB"
)
_WORDS = st.sampled_from(_VOCABULARY.split(" "))


@settings(max_examples=150, deadline=None)
@given(st.lists(_WORDS, max_size=60))
def test_any_heap_of_report_words_is_read_without_a_crash(words):
    audit("3 ms\n\n" + " ".join(words) + "\n")
