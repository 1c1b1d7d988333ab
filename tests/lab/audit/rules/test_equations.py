import pytest

from expertile.lab.audit import INCONSISTENT, POSSIBLE
from tests.lab.audit.helpers import against, the


@pytest.mark.parametrize(
    "line",
    [
        "PyTorch: 24 × 0.170ms = 4.07ms",
        "Overhead = 10μs / 300μs = 3.3%",
        "100 × (10μs compute + 10μs launch) = 2000μs",
        "500 launches × 10μs = 5ms overhead",
        "4096×4096 = 16,777,216 elements",
        "201 MB - 134 MB = 67 MB saved",
        "100 MB / 50 GB/s = 2 ms",
        "1536 / 1024 = 1 block",
    ],
)
def test_right_arithmetic(line):
    assert the(f"- {line}\n- other: 1x\n", "equation").verdict == POSSIBLE


@pytest.mark.parametrize(
    "line",
    ["24 × 0.170ms = 5.07ms", "10μs / 300μs = 33%", "100 × (10μs + 10μs) = 1000μs", "4096×4096 = 16,777,217 elements"],
)
def test_wrong_arithmetic(line):
    assert [v for _, v, _ in against(f"- {line}\n- other: 1x\n")] == [INCONSISTENT]


@pytest.mark.parametrize(
    "line",
    [
        "ceil(8000 / 1024) = 4 at 2x",
        "sqrt(256 / 12) = 1 at 2x",
        "2n + 1 = 5 at 2x",
        "grid=2×2, block=16×16 at 2x",
        "x = 2^3 * 4 = 5 at 2x",
        "H100 / A100 = 3 at 2x",
        "M=4096, N=4096 at 2x",
    ],
)
def test_what_is_no_plain_arithmetic_is_left_alone(line):
    assert against(f"- {line}\n") == []
