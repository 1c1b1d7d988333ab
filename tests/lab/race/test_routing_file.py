"""The routing file format: both spellings read alike, and every error names file, field, expected and got."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertile.lab.race.routing import draw, parse_routing, topk_ids
from expertile.lab.race.routing_file import read_routing_file

GOOD = {"num_experts": 4, "layers": [{"name": "a", "counts": [3, 0, 1, 2]}, {"topk_ids": [[0, 3], [3, 1], [2, 3]]}]}


def _write(tmp_path, data):
    path = tmp_path / "routing.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_counts_and_ids_are_read(tmp_path):
    assert read_routing_file(_write(tmp_path, GOOD)).counts == {"a": (3, 0, 1, 2), "1": (1, 1, 1, 3)}


@given(st.integers(1, 6).flatmap(lambda e: st.lists(st.lists(st.integers(0, 999), min_size=e, max_size=e), min_size=1)))
@settings(max_examples=30, deadline=None)
def test_npz_and_json_say_the_same(tmp_path_factory, counts):
    folder = tmp_path_factory.mktemp("routing")
    experts = len(counts[0])
    layers = [{"name": f"layer.{i}", "counts": c} for i, c in enumerate(counts)]
    from_json = read_routing_file(_write(folder, {"num_experts": experts, "layers": layers}))
    arrays = {f"counts/layer.{i}": np.array(c) for i, c in enumerate(counts)}
    np.savez(folder / "routing.npz", num_experts=experts, **arrays)
    from_npz = read_routing_file(folder / "routing.npz")
    assert from_npz == from_json and from_npz.num_experts == experts and len(from_npz.counts) == len(counts)


def test_npz_ids(tmp_path):
    np.savez(tmp_path / "ids.npz", **{"num_experts": 3, "topk_ids/x": np.array([[0, 2], [2, 1]], np.int32)})
    assert read_routing_file(tmp_path / "ids.npz").counts == {"x": (1, 1, 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "expected JSON"),
        ([], "expected an object with num_experts and layers, got a list of 0"),
        ({"layers": []}, "num_experts: expected an integer of 1 or more, got nothing"),
        ({"num_experts": 2.0, "layers": []}, "num_experts: expected an integer of 1 or more, got 2.0"),
        ({"num_experts": True, "layers": []}, "num_experts: expected an integer of 1 or more, got True"),
        ({"num_experts": 2, "layers": []}, "layers: expected a list with at least one layer, got a list of 0"),
        ({"num_experts": 2, "layer": []}, "layer: unknown key; expected num_experts, layers"),
        ({"num_experts": 2, "layers": [5]}, r"layers\[0\]: expected an object with counts or topk_ids, got 5"),
        ({"num_experts": 2, "layers": [{"count": []}]}, r"layers\[0\]\.count: unknown key"),
        ({"num_experts": 2, "layers": [{}]}, r"layers\[0\]: expected counts or topk_ids, got neither"),
        ({"num_experts": 2, "layers": [{"counts": [1, 2], "topk_ids": [[0]]}]}, r"layers\[0\]: .* got both"),
        ({"num_experts": 2, "layers": [{"name": 3, "counts": [1, 2]}]}, r"layers\[0\]\.name: expected .* got 3"),
        (
            {"num_experts": 2, "layers": [{"counts": [1]}]},
            r"layers\[0\]\.counts: expected a list of 2 .*, got a list of 1",
        ),
        (
            {"num_experts": 2, "layers": [{"counts": [1, -3]}]},
            r"layers\[0\]\.counts\[1\]: expected an integer of 0 or more, got -3",
        ),
        ({"num_experts": 2, "layers": [{"topk_ids": []}]}, r"topk_ids: expected a list with one row per token"),
        ({"num_experts": 2, "layers": [{"topk_ids": [[0], [0, 1]]}]}, r"topk_ids\[1\]: expected 1 ids .*, got 2"),
        ({"num_experts": 2, "layers": [{"topk_ids": [[2]]}]}, r"topk_ids\[0\]\[0\]: .* from 0 to 1, got 2"),
        ({"num_experts": 2, "layers": [{"topk_ids": [[1, 1]]}]}, r"topk_ids\[0\]: expected distinct ids, got \[1, 1\]"),
        (
            {"num_experts": 1, "layers": [{"name": "a", "counts": [1]}, {"name": "a", "counts": [1]}]},
            r"layers\[1\]\.name: expected a name of its own, got 'a'",
        ),
    ],
)
def test_errors_name_file_and_field(tmp_path, change, message):
    with pytest.raises(ValueError, match=r"routing\.json: .*" + message):
        read_routing_file(_write(tmp_path, change))


def test_bad_npz(tmp_path):
    np.savez(tmp_path / "a.npz", **{"num_experts": 2, "counts/x": np.array([0.5, 1.5])})
    with pytest.raises(ValueError, match=r"a\.npz: counts/x: expected integers, got dtype float64"):
        read_routing_file(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", num_experts=2, sizes=np.array([1, 2]))
    with pytest.raises(ValueError, match=r"b\.npz: sizes: unknown array; expected num_experts, counts/<layer>"):
        read_routing_file(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"c\.npz: expected an archive of arrays \(numpy\.savez\), got another file"):
        read_routing_file(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", num_experts=2, **{"counts/x": np.array([{}, 1])})
    with pytest.raises(ValueError, match=r"d\.npz: counts/x: expected integers, got objects"):
        read_routing_file(tmp_path / "d.npz")


def test_missing_file_and_wrong_ending(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json does not exist"):
        parse_routing(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"expected a routing file ending in \.json or \.npz, got '\.csv'"):
        read_routing_file(tmp_path / "counts.csv")


def test_each_layer_is_a_draw(tmp_path):
    path = str(_write(tmp_path, GOOD))
    draws = draw(path, tokens=99, num_experts=4, top_k=2)
    assert [(d.layer, d.group_sizes) for d in draws] == [("a", (3, 0, 1, 2)), ("1", (1, 1, 1, 3))]
    assert draws[0].label == "routing.json:a"
    with pytest.raises(ValueError, match=r"num_experts: expected 4 as routing\.json has, got 8"):
        draw(path, 99, 8)
    with pytest.raises(ValueError, match=r"routing: expected a distribution, got the file routing\.json"):
        topk_ids(path, 99, 4)
