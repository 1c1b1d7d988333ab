import pytest

from expertile.lab.audit import NOT_CHECKABLE, audit, audit_file


def test_every_claim_gets_one_verdict_or_its_accusations():
    result = audit("# H100, bf16\n\n4096x4096x4096 GEMM: 0.2 ms, 687 TFLOPS, 60% of something\n")
    assert [f.verdict for f in result.findings] == ["possible", "possible", NOT_CHECKABLE]


def test_findings_are_ordered_by_line_and_name_the_device():
    result = audit("GPU: H100\n\nb: 3 ms\n\na: 2x\n")
    assert [f.line for f in result.findings] == [3, 5]
    assert result.device is not None and result.device.name == "NVIDIA H100 80GB HBM3"
    assert audit("b: 3 ms").notes == ("the text names no GPU (say which with --gpu)",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "GeForce 256"}, "gpu: no known device"),
        ({"dtype": "int3"}, "dtype: expected one of"),
        ({"shapes": ("big",)}, "shape: expected sizes such as"),
    ],
)
def test_options_that_cannot_be_read(options, message):
    with pytest.raises(ValueError, match=message):
        audit("a: 3 ms", **options)


def test_a_text_without_figures():
    with pytest.raises(ValueError, match="expected at least one figure"):
        audit("# Title\n\nNothing here.\n")


def test_files(tmp_path):
    report = tmp_path / "r.md"
    report.write_text("GPU: H100\n\nours: 3 ms\n", encoding="utf-16")
    assert len(audit_file(report).findings) == 1
    empty, binary = tmp_path / "e.md", tmp_path / "b.bin"
    empty.write_text(" \n")
    binary.write_bytes(b"\x00\x01 3 ms")
    for path, message in (
        (empty, "is empty"), (binary, "is binary"), (tmp_path / "absent", "does not exist"), (tmp_path, "not a file"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            audit_file(path)


def test_legacy_encodings(tmp_path):
    report = tmp_path / "r.md"
    report.write_bytes("GPU: H100\n\nours: 3 \u00b5s\n".encode("cp1252"))
    assert audit_file(report).findings[0].quote == "ours: 3 µs"


def test_shapes_given_by_the_caller():
    (finding,) = audit("kernel: 0.05 ms", shapes=("4096x4096x4096",), dtype="bf16", gpu="h100").findings
    assert finding.verdict == "impossible"
    (finding,) = audit("kernel: 0.05 ms", shapes=("softmax 64x64",), dtype="bf16", gpu="h100").findings
    assert finding.verdict == "possible"
    (finding,) = audit("kernel: 0.05 ms", shapes=("512x512x512", "8192x8192x8192"), gpu="h100").findings
    assert finding.verdict == NOT_CHECKABLE
