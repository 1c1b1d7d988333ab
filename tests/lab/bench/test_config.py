"""Bench files: every key reaches the spec; every mistake is named with file, key, expected and got."""

import json
import textwrap
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from expertile.lab.bench.config import BenchSpec, read_bench_file
from expertile.lab.bench.presets import preset
from expertile.lab.race.routing import draw


def _read(tmp_path, text):
    path = tmp_path / "bench.toml"
    path.write_text(textwrap.dedent(text))
    return read_bench_file(path)


def test_the_example_of_the_guide_has_every_key_and_is_read(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "guide" / "race.md"
    example = page.read_text().split("```toml\n")[1].split("```")[0]
    assert {f.name for f in fields(BenchSpec)} - {"inline"} <= tomllib.loads(example).keys()
    spec = _read(tmp_path, example)
    assert spec.presets == ("squares", "models")
    assert spec.policy == "both" and spec.policies == ("graph", "eager")
    assert (spec.rounds, spec.quick, spec.batch, spec.seq, spec.seed) == (30, False, 16, 512, 0)
    assert (spec.include, spec.skip, spec.out) == (("torch_grouped", "loop"), ("padded_bmm",), "results")
    assert spec.only == ("*",)
    assert spec.candidates == (f"{tmp_path}/my_kernel.py:fn",)
    assert (spec.routing, spec.tokens) == ("zipf(1.2)", (128, 8192))
    up, wgrad, vocabulary = spec.inline
    assert (up.name, up.groups, up.m, up.n, up.k, up.dtype) == ("my-up", 64, 4096 * 8, 2048, 4096, "bf16")
    assert up.group_sizes == draw("skewed", 4096, 64, 8)[0].group_sizes
    assert (wgrad.layout.value, wgrad.m, wgrad.n, wgrad.k) == ("ragged_k", 512, 1024, 512)
    assert (wgrad.group_sizes, wgrad.a_layout, wgrad.b_layout) == ((100, 0, 412), "km", "kn")
    assert (vocabulary.op, vocabulary.dtype, vocabulary.preset) == ("softmax", "bf16", "file")
    assert (vocabulary["rows"], vocabulary["cols"]) == (4096, 50257)
    names = [w.name for w in spec.workloads()]
    assert names[-3:] == ["my-up", "my-wgrad", "my-vocabulary"] and "4x512" in names and "debug-down-tokens128" in names


def test_an_empty_file_is_the_defaults(tmp_path):
    assert _read(tmp_path, "") == BenchSpec()
    assert BenchSpec(presets=("cpu",)).workloads() == preset("cpu")
    assert BenchSpec(policy="eager").policies == ("eager",)


def test_batched_and_routing_files_are_relative_to_the_bench_file(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"num_experts": 2, "layers": [{"counts": [5, 6]}]}))
    spec = _read(
        tmp_path,
        """
        routing = "one.json"
        [[workload]]
        name = "b"
        layout = "batched"
        dtype = "fp16"
        groups = 3
        m = 4
        n = 8
        k = 16
        [[workload]]
        name = "real"
        dtype = "bf16"
        n = 8
        k = 16
        groups = 2
        routing = "one.json"
        """,
    )
    assert spec.routing == str(tmp_path / "one.json")
    batched, real = spec.inline
    assert (batched.group_sizes, batched.a_shape) == ((4, 4, 4), (3, 4, 16))
    assert (real.group_sizes, real.routing) == ((5, 6), "one.json:0")


WORKLOAD = '[[workload]]\nname = "w"\ndtype = "bf16"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("presets = [", "expected TOML: "),
        ("round = 3", "round: unknown key; expected presets, .*rounds, .*workload"),
        ('presets = "squares"', "presets: expected a list of strings, got 'squares'"),
        ('presets = ["square"]', "presets: expected one of .*, got 'square'; did you mean 'squares'"),
        ('policy = "fast"', "policy: expected one of graph, eager, both, got 'fast'"),
        ("policy = 1", "policy: expected a string, got 1"),
        ("rounds = 2.5", "rounds: expected an integer, got 2.5"),
        ("rounds = true", "rounds: expected an integer, got True"),
        ("rounds = 0", "rounds: expected 1 or more, got 0"),
        ("quick = 1", "quick: expected true or false, got 1"),
        ("full = 1", "full: expected true or false, got 1"),
        ("memory = 'yes'", "memory: expected true or false, got 'yes'"),
        (WORKLOAD + "op = 'soft'\ndims = {}", r"workload\[0\]\.op: expected one of add_scalar, .*, got 'soft'"),
        (WORKLOAD + "op = 'softmax'\nrows = 3", r"workload\[0\]\.rows: unknown key; expected name, op, dtype, dims"),
        (WORKLOAD + "op = 'softmax'", r"workload\[0\]\.dims: expected a table of dimensions, got None"),
        (WORKLOAD + "op = 'softmax'\ndims = {rows = 3}", r"workload\[0\]\.dims\.cols: expected rows .* got no 'cols'"),
        ("tokens = [1, 'a']", r"tokens\[1\]: expected an integer, got 'a'"),
        ("tokens = 0", "tokens: expected 1 or more, got 0"),
        ('include = ["loop"]\nskip = ["loop"]', "include, skip: expected a backend in one .*, got 'loop' in both"),
        ('candidates = ["kernel.py"]', r"candidates: expected FILE\.py:FUNCTION, got 'kernel\.py'"),
        ("workload = 3", r"workload: expected \[\[workload\]\] tables, got 3"),
        ("[[workload]]\nn = 1", r"workload\[0\]\.name: expected a string, got nothing"),
        (WORKLOAD + "rows = 3", r"workload\[0\]\.rows: unknown key; expected name, layout"),
        (WORKLOAD + "k = 8", r"workload\[0\]\.n: expected an integer for ragged_m, got nothing"),
        (WORKLOAD + "n = 8\nk = 8\nm = 8", r"workload\[0\]\.m: expected none, since group_sizes decide it"),
        (WORKLOAD + "n = 8\nk = 8", r"workload\[0\]\.group_sizes: expected a list of integers, or groups"),
        (WORKLOAD + "n = 8\nk = 8\ngroups = 4", r"workload\[0\]\.tokens: expected an integer beside groups"),
        (WORKLOAD + "n = 8\nk = 8\ngroups = 4\ntokens = 8\ntop_k = 9", r"workload\[0\]: top_k: expected 1 to 4"),
        (WORKLOAD + "n = 8\nk = 8\ngroups = 4\ntokens = 8\nrouting = 'x'", r"workload\[0\]: routing: expected"),
        (WORKLOAD + "n = 8\nk = 8\ngroup_sizes = [1]\ntop_k = 2", r"workload\[0\]\.top_k: expected none beside"),
        (WORKLOAD + "n = 8\nk = 8\ngroup_sizes = [-1]", r"workload\[0\]: workload 'w': group_sizes\[0\]: .* got -1"),
        (WORKLOAD + "n = 'a'\nk = 8\ngroup_sizes = [1]", r"workload\[0\]\.n: expected an integer, got 'a'"),
        (WORKLOAD + "layout = 'ragged'", r"workload\[0\]\.layout: expected one of ragged_m, .*, got 'ragged'"),
        (
            WORKLOAD + "layout = 'batched'\nm = 8\nn = 8\nk = 8\ngroups = 2\ntokens = 4",
            r"workload\[0\]\.tokens: expected none for a batched product",
        ),
        ((WORKLOAD + "n = 8\nk = 8\ngroup_sizes = [1]\n") * 2, "workload: name: expected a name of its own, got 'w'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=r"bench\.toml: " + message):
        _read(tmp_path, text)


def test_an_option_that_nothing_takes_is_named(tmp_path):
    spec = _read(tmp_path, 'presets = ["squares"]\nbatch = 4')
    with pytest.raises(ValueError, match=r"batch: expected a preset that takes this option \(models\), got squares"):
        spec.workloads()
    workload = "seq = 4\n" + WORKLOAD + 'layout = "batched"\ngroups = 2\nm = 4\nn = 16\nk = 16\n'
    with pytest.raises(ValueError, match="seq: expected a preset that takes this option .*, got no preset"):
        _read(tmp_path, workload).workloads()


def test_the_seed_is_of_a_files_own_workloads_too(tmp_path):
    (tmp_path / "own.toml").write_text(
        'seed = 3\n[[workload]]\nname = "own"\ndtype = "bf16"\n'
        'n = 16\nk = 16\ngroups = 4\ntokens = 64\nrouting = "skewed"\n'
    )
    for given, seed in ((None, 3), (5, 5)):
        (own,) = read_bench_file(tmp_path / "own.toml", given).workloads()
        assert own.group_sizes == draw("skewed", 64, 4, 1, seed)[0].group_sizes


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"bench file .*none\.toml does not exist"):
        read_bench_file(tmp_path / "none.toml")
