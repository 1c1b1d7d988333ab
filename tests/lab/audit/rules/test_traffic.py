"""Report 004's softmax in other words: claimed traffic over the measured time of the same shape and system."""

from expertile.lab.audit import IMPOSSIBLE, INCONSISTENT, POSSIBLE, audit
from tests.lab.audit.helpers import accusations

TEXT = """# Tesla V100

## Fused softmax

- Matrix size: 4096×4096
- Precision: FP32

| Matrix Size | PyTorch (ms) | Triton (ms) |
|---|---|---|
| 4096×4096 | {} | 0.169 |

- Memory traffic reduced (201.3 MB → 134.2 MB)

## Memory analysis

- Matrix size: 4096×4096

PyTorch softmax:
- Total Traffic: {}
"""


def _verdicts(time: str, total: str) -> list[tuple[int, str, str]]:
    result = audit(TEXT.format(time, total))
    return [(f.line, f.verdict, r) for f in result.findings for r in f.rule.split(", ") if r.startswith("traffic")]


def test_traffic_that_the_memory_cannot_carry():
    assert (12, IMPOSSIBLE, "traffic_over_time") in _verdicts("0.177", "201.3 MB")
    assert (12, POSSIBLE, "traffic_over_time") in _verdicts("0.277", "201.3 MB")


def test_two_totals_for_one_system():
    assert (19, INCONSISTENT, "traffic_conflict") in _verdicts("0.477", "402.72 MB")
    assert all(rule != "traffic_conflict" for _, _, rule in _verdicts("0.477", "201.3 MB"))


def test_the_fused_side_is_left_alone():
    assert all(
        "134.2" not in f.explanation.split(" in ")[0] for f in accusations(audit(TEXT.format("0.177", "201.3 MB")))
    )
