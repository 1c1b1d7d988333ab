"""What is written for flashinfer-bench: read back here, field by field, and where it is installed by its own loader."""

import json

import pytest
import torch

from expertile.lab.bench.run import run
from expertile.lab.flashinfer import load, operator, workload, write
from tests.lab.flashinfer import datasets
from tests.lab.records import timed, untimed

SHAPE = {"layout": "ragged_m", "groups": 3, "m": 12, "n": 24, "k": 64, "group_sizes": [5, 0, 7], "a_layout": "mk"}
NK, KN = SHAPE | {"b_layout": "nk"}, SHAPE | {"b_layout": "kn"}
NAME = "grouped_gemm_bf16_g3_n24_k64"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def grouped():
    """Records of three backends, two policies and two layouts, and such as have no place in the format."""
    return [
        timed(2e-3, backend="loop", shape=NK, policy="eager"),
        timed(1e-3, backend="loop", shape=NK),
        timed(5e-4, backend="loop", shape=NK, config={"tried": 3}),
        timed(5e-4, backend="cublas_grouped", shape=NK, config={"sizes": "host"}),
        untimed("failed", "not captured", backend="auto", shape=KN),
        timed(3e-3, backend="auto", shape=KN, policy="eager"),
        untimed("wrong", "relative error 1", backend="padded_bmm", shape=NK),
        untimed("failed", "out of luck", backend="torch_grouped", shape=NK),
        untimed("unsupported", backend="gluon_hopper", shape=NK),
        timed(backend="mine.py:fn", shape=NK),
        timed(backend="dense", shape=NK),
        timed(op="softmax", shape={"rows": 3}, backend="expertile"),
    ]


@pytest.fixture
def dataset(tmp_path):
    found = write(tmp_path, grouped())
    assert found.traces == 4 and found.definitions == (NAME, f"{NAME}_kn")
    assert sorted(found.left_out.values()) == [1, 1, 1, 2]
    return tmp_path


def test_traces_have_the_fields_of_the_format(dataset):
    traces = lines(dataset / f"traces/expertile/grouped_gemm/{NAME}.jsonl")
    assert [t["evaluation"]["status"] for t in traces] == ["PASSED", "INCORRECT_NUMERICAL", "RUNTIME_ERROR"]
    passed, wrong, failed = (t["evaluation"] for t in traces)
    assert traces[0]["solution"] == f"expertile_loop_{NAME}" and passed["performance"] == {"latency_ms": 1.0}
    assert passed["correctness"]["max_relative_error"] == 1e-2 and wrong["correctness"]["max_relative_error"] == "NaN"
    assert passed["correctness"]["extra"]["relative_frobenius_error"] == 1e-3
    assert "performance" not in wrong and failed.keys() == {"status", "environment", "timestamp", "log"}
    (eager,) = lines(dataset / f"traces/expertile/grouped_gemm/{NAME}_kn.jsonl")
    assert eager["evaluation"]["performance"] == {"latency_ms": 3.0}  # a call that cannot be captured is no failure
    assert failed["log"] == "out of luck" and failed["environment"]["hardware"] == "NVIDIA H200"
    assert all(isinstance(text, str) for text in passed["environment"]["libs"].values())
    for trace in traces:
        (held,) = lines(dataset / f"workloads/grouped_gemm/{NAME}.jsonl")
        assert trace["workload"] == held["workload"] and held["solution"] is held["evaluation"] is None
        path = dataset / f"solutions/expertile/grouped_gemm/{NAME}/{trace['solution']}.json"
        assert json.loads(path.read_text())["definition"] == trace["definition"] == NAME


def test_solutions_compute_what_their_definitions_say(dataset):
    definitions, tasks = load(dataset)
    for name, stored in ((NAME, "GNK"), (f"{NAME}_kn", "GKN")):
        (task,) = tasks[name]
        assert "".join(definitions[name].inputs["B"]["shape"]) == stored
        given = task.make(("A", "B", "offs"), torch.device("cpu"), 1)
        assert given["offs"].tolist() == [5, 5, 12]
        want = definitions[name].reference()(**given)
        paths = list((dataset / "solutions").rglob(f"{name}/*.json"))
        assert paths
        for path in paths:
            solution, space = json.loads(path.read_text()), {"__name__": "main"}
            (source,) = solution["sources"]
            exec(source["content"], space)
            torch.testing.assert_close(space["run"](*given.values()), want, rtol=2e-2, atol=2e-1)


def test_what_was_written_races(dataset):
    definitions, tasks = load(dataset)
    op = operator(definitions[NAME], tasks[NAME])
    found = {r.backend: r for r in run([workload(tasks[NAME][0])], operators=[op], rounds=3)}
    assert found["expertile"].status == found["reference"].status == "ok"
    assert found["expertile"].flops == 2 * 12 * 24 * 64
    assert found["expertile"].nbytes == 2 * (12 * 64 + 2 * 24 * 64 + 12 * 24) + 4 * 3  # one of three groups has no rows


def test_what_is_there_stays_and_nothing_is_written_twice(dataset):
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    (foreign,) = (path for path in before if path.name == f"{NAME}.jsonl" and "traces" in path.parts)
    foreign.write_bytes(b'{"another": "line"}\n' + before[foreign])
    assert write(dataset, grouped()).traces == 0
    assert foreign.read_bytes() == b'{"another": "line"}\n' + before[foreign]
    assert {path for path in dataset.rglob("*") if path.is_file()} == before.keys()
    assert write(dataset, [timed(9e-4, backend="loop", shape=NK, run="r2")]).traces == 1
    assert len(lines(foreign)) == 5


def test_records_of_a_definition_become_its_traces(tmp_path):
    name = datasets.add(tmp_path, datasets.moe("moe_renorm", 8), ({"T": 9}, {}))
    held = workload(load(tmp_path)[1][name][0])
    common = {"op": "moe", "workload": f"{name}/{held.name}", "shape": held.shape(), "dtype": "fp8"}
    records = [
        timed(4e-3, backend="reference", policy="eager", **common),
        timed(1e-3, backend="expertile", policy="graph", **common),
        timed(2e-3, backend="expertile", policy="eager", **common),
        timed(1e-3, backend="expertile-arranged", policy="eager", **common),
        timed(1e-3, backend="expertile", **common | {"workload": "moe_other/T9"}),
    ]
    found = write(tmp_path, records)
    assert found.definitions == (name,) and found.traces == 1 and sum(found.left_out.values()) == 2
    (trace,) = lines(tmp_path / f"traces/expertile/moe/{name}.jsonl")
    # Under the policy that the reference was timed under as well.
    assert trace["evaluation"]["performance"] == {"latency_ms": 2.0, "reference_latency_ms": 4.0, "speedup_factor": 2.0}
    (solution,) = (tmp_path / "solutions").rglob("*.json")
    assert "moe_fp8(" in json.loads(solution.read_text())["sources"][0]["content"].rpartition("def run(")[2]


def test_the_owner_loads_builds_and_runs_it(dataset, tmp_path_factory, monkeypatch):
    pytest.importorskip("flashinfer_bench")
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.data import TraceSet

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path_factory.mktemp("cache")))
    moe = datasets.add(dataset, datasets.moe("moe_renorm", 8), ({"T": 9}, {}))
    held = workload(load(dataset)[1][moe][0])
    common = {"op": "moe", "workload": f"{moe}/{held.name}", "shape": held.shape(), "dtype": "fp8"}
    write(dataset, [timed(backend="expertile", **common)])
    found = TraceSet.from_path(str(dataset))
    assert found.definitions.keys() == {NAME, f"{NAME}_kn", moe}
    assert {name: len(held) for name, held in found.traces.items()} == {NAME: 3, f"{NAME}_kn": 1, moe: 1}
    assert sum(t.is_successful() for held in found.traces.values() for t in held) == 3
    builders = BuilderRegistry.get_instance()
    for name, solutions in found.solutions.items():
        definition, task = found.definitions[name], found.workloads[name][0].workload
        torch.manual_seed(0)  # of other inputs a near tie in the router may go to another expert
        given = gen_inputs(definition, task, "cpu", load_safetensors(definition, task, found.root))
        want = builders.build_reference(definition)(*given).float()
        for solution in solutions:
            error = (builders.build(definition, solution)(*given).float() - want).norm() / want.norm()
            assert error < (2.0**-4 if name == moe else 2.0**-7), solution.name
