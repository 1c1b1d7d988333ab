"""The runner of PyTorch's own tests, on a file of three tests."""

import json
import subprocess
import sys
from pathlib import Path

FILE = """
import torch, torch.nn.functional as F, expertile

def test_grouped_gemm_is_ours():
    assert F.grouped_mm is expertile.grouped_mm and torch._grouped_mm is expertile.grouped_mm

def test_grouped_gemm_wrong():
    assert 1 == 2, "one is not two"

def test_scaled_grouped_gemm():
    raise RuntimeError("out of scope")
"""


def test_runs_the_grouped_tests_with_ours(tmp_path):
    path = tmp_path / "test_matmul_cuda.py"
    path.write_text(FILE)
    command = [sys.executable, "-m", "tests.gpu.torch_contract", str(path), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], text=True, capture_output=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (written,) = tmp_path.glob("*/*-torch-contract.json")
    record = json.loads(written.read_text())
    assert record["passed"] == ["test_grouped_gemm_is_ours"] and record["skipped"] == {}
    assert list(record["failed"]) == ["test_grouped_gemm_wrong"]
    assert "one is not two" in record["failed"]["test_grouped_gemm_wrong"]
    assert record["env"].keys() == {"gpu", "torch", "expertile"}
