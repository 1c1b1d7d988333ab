"""Folders are read without running anything in them; inputs are those that a workload describes."""

import json

import pytest
import torch

from expertile.lab.flashinfer import load
from tests.lab.flashinfer import datasets

CPU = torch.device("cpu")


def test_nothing_is_executed_before_the_reference_is_asked_for(tmp_path):
    reference = "raise SystemError('executed')\n\ndef run(A, B):\n    return A\n"
    name = datasets.add(tmp_path, datasets.gemm(reference=reference), ({"M": 3}, {}))
    definitions, tasks = load(tmp_path)
    assert tasks[name][0].make(("A",), CPU, 0)["A"].shape == (3, 64)
    with pytest.raises(SystemError, match="executed"):
        definitions[name].reference()


def test_inputs_are_random_loaded_or_scalars(tmp_path):
    logits, data = torch.arange(40.0).view(5, 8), datasets.moe("moe", 8, 2, (2, 1), 2)
    given = {"routing_logits": logits, "local_expert_offset": 3, "routed_scaling_factor": 2.5}
    name = datasets.add(tmp_path, data, ({"T": 5}, given))
    (task,) = load(tmp_path)[1][name]
    made = task.make(data["inputs"], CPU, 7)
    assert list(made) == list(data["inputs"])
    assert torch.equal(made["routing_logits"], logits) and made["local_expert_offset"] == 3
    x = made["hidden_states"]
    assert x.dtype is torch.float8_e4m3fn and x.shape == (5, 256) and 1.5 < x.float().abs().max() <= 2
    assert made["hidden_states_scale"].shape == (2, 5) and made["hidden_states_scale"].min() < 0
    again, other = (task.make(("hidden_states_scale",), CPU, seed)["hidden_states_scale"] for seed in (7, 8))
    assert torch.equal(again, made["hidden_states_scale"]) and not torch.equal(other, again)


def test_a_tensor_of_another_shape_and_a_pointer_are_refused(tmp_path):
    name = datasets.add(tmp_path, datasets.gemm(), ({"M": 3}, {"A": torch.zeros(4, 64).half()}), ({"M": 4}, {}))
    wrong, _ = load(tmp_path)[1][name]
    with pytest.raises(ValueError, match=r"x: expected \[3, 64\] torch.float16, got \[4, 64\]"):
        wrong.make(("A",), CPU, 0)
    (blob,) = (tmp_path / "blob").iterdir()
    blob.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="no pointer of Git LFS"):
        wrong.make(("A",), CPU, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "../../x"}, "name: expected letters, digits"),
        ({"op_type": "a/b"}, "op_type: expected letters, digits"),
        ({"reference": "def run(:"}, "reference: expected Python"),
        ({"reference": "def walk(A): pass"}, "reference: expected a function run, got none"),
        ({"inputs": {}}, "inputs: expected an object that is not empty"),
        ({"inputs": {"A": {"shape": ["M"]}}}, "inputs.A: expected an object with dtype, shape"),
    ],
)
def test_a_wrong_definition_is_one_sentence(tmp_path, change, message):
    datasets.add(tmp_path, datasets.gemm())
    (path,) = tmp_path.rglob("definitions/*/*.json")
    path.write_text(json.dumps(datasets.gemm() | change))
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert str(path) in str(error.value)


def test_a_folder_of_something_else_and_a_foreign_workload_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="definition: expected .*definitions with JSON files"):
        load(tmp_path)
    datasets.add(tmp_path, datasets.gemm(), ({"M": 3}, {}))
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text(path.read_text().replace("gemm_n24_k64", "gemm_n1_k1"))
    with pytest.raises(ValueError, match=r"jsonl:1: definition: expected one of the folder's, got 'gemm_n1_k1'"):
        load(tmp_path)
