import pytest

from expertile.lab.audit.claims import claims
from expertile.lab.audit.document import parse
from expertile.lab.audit.report import Options, Report


def _claims(text: str):
    return claims(Report(parse(text), Options()))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("Overall: 45 TFLOPs/s (vs 990 TFLOPs/s peak)", [False, True]),
        ("- Peak Bandwidth: 900 GB/s", [True]),
        ("- trtllm peak: 1753 TFLOPs/s", [False]),
        ("theoretical bandwidth 3350 GB/s", [True]),
    ],
)
def test_what_the_hardware_could_do_is_told_from_what_was_measured(text, limit):
    assert [c.is_limit for c in _claims(text)] == limit


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("kernel time: 3 ms", True),
        ("launch overhead: 3 µs", False),
        ("saves 3 ms per inference", False),
        ("compile time 3 s", False),
        ("average per GEMM: 3 µs", False),
    ],
)
def test_times_that_are_not_of_a_whole_run(text, run):
    assert [c.is_run for c in _claims(text)] == [run]


def test_cells_are_quoted_with_row_and_column():
    (claim,) = _claims("| case | ours (ms) |\n|-|-|\n| 64x64 | 0.5 |\n")
    assert claim.quote == "64x64 · ours (ms): 0.5"


def test_code_is_not_read():
    assert _claims("```python\nx = 3  # 2x faster than 5 ms\n```\n") == []


def test_sentences_are_told_apart():
    first, second = _claims("It takes 3 ms here. It takes 5 ms there.")
    assert (first.sentence, second.sentence) == ("It takes 3 ms here.", "It takes 5 ms there.")


def test_memory_in_the_name_of_a_gpu_claims_nothing():
    assert _claims("# Kernels on A100 40GB\n") == []
    assert len(_claims("A100 uses 40GB\n")) == 1
