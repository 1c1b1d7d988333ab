"""The generated parts of docs/results/traffic.md, docs/results/elementwise.md and docs/results/stencil.md."""

from dataclasses import replace
from pathlib import Path

import pytest

from expertile.lab.measure.env import Env
from expertile.lab.race.record import shipped_records
from expertile.lab.traffic import formulas
from expertile.lab.traffic.explain import shipped
from expertile.lab.traffic.measured import measure
from tests.lab.records import timed
from tests.lab.traffic.test_formulas import H200
from tests.lab.traffic.test_measured import ENV, SOFTMAX, WAYS, two_kernels
from tools.pages.traffic import (
    NOT_MEASURED,
    counted_block,
    formulas_block,
    launch_block,
    stencil_block,
    times_block,
    update_pages,
)

DOCS = Path(__file__).parents[3] / "docs" / "results"


def test_the_pages_show_formulas_and_shipped_records():
    stale = update_pages(DOCS, [*shipped(), *shipped_records("traffic", H200.slug)], H200, check=True)
    assert not stale, f"run python -m tools.pages traffic: {stale}"


def cells(block, first):
    (line,) = (line for line in block.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_operator_has_its_formulas():
    block = formulas_block(H200)
    for op in formulas():
        assert f"`{op}`" in block
    assert cells(block, "`softmax`")[2:4] == ["4.00× in 5", "1.00× in 1"]
    assert "torch math" in cells(block, "`attention`")[6]


SHAPE = {"rows": 8192, "cols": 8192}


def softmax(backend, time_s, **changes):
    values = {"op": "softmax_backward", "workload": "rows/x", "shape": SHAPE, "dtype": "fp32", "nbytes": 8e8}
    return timed(time_s, backend=backend, **(values | changes))


def test_bytes_beside_times():
    records = [softmax("expertile", 2e-4), softmax("torch", 5e-4), softmax("copy", 2e-4), softmax("liger", 3e-4)]
    found = cells(times_block(records, H200), "`softmax_backward`")
    assert found[:5] == ["`softmax_backward`", "8192 × 8192, fp32", "torch", "2.00×", "2.50×"]
    assert found[6] == "84 %"  # 805 MB at 4.8 TB/s take 168 µs


def test_times_of_two_runs_are_not_mixed():
    records = [softmax("expertile", 2e-4), softmax("torch", 5e-4, run="other")]
    assert times_block(records, H200) == NOT_MEASURED
    assert (
        times_block([softmax("expertile", 2e-4, nbytes=1e6), softmax("torch", 5e-4, nbytes=1e6)], H200) == NOT_MEASURED
    )


def test_laplacian_by_slices_is_the_unfused_way():
    shape = {"grids": 1, "rows": 8192, "columns": 8192, "boundary": "zero"}
    values = {"op": "laplacian", "workload": "laplacian/a", "shape": shape, "dtype": "fp32", "nbytes": 5.4e8}
    records = [timed(1.3e-4, backend="expertile", **values), timed(1.3e-3, backend="torch", **values)]
    assert cells(times_block(records, H200), "`laplacian`")[2:5] == ["torch", "8.50×", "10.0×"]


def test_counted():
    records = list(measure(SOFTMAX, WAYS, ENV, "run", two_kernels, has_gpu=True))
    block = counted_block(records)
    assert "2 / 4" in block and "NVIDIA H200" in block and NOT_MEASURED not in block
    refused = [replace(r, value=None, status="unsupported", reason="no permission") for r in records]
    assert counted_block(refused) == f"{NOT_MEASURED}\n\nNot counted: no permission."
    assert counted_block([]) == NOT_MEASURED


def add(backend, elements, time_s, policy="graph"):
    shape = {"elements": elements, "value": 1.0}
    return timed(
        time_s,
        backend=backend,
        policy=policy,
        op="add_scalar",
        workload=f"add-scalar/{elements}-fp32",
        shape=shape,
        dtype="fp32",
        nbytes=8.0 * elements,
        bound=1e-9,
    )


def test_where_the_launch_ends():
    records = [
        add(name, elements, time_s, policy)
        for name, launch in (("expertile", 9e-6), ("torch", 5e-6))
        for elements in (32_000, 100_000_000)
        for policy, time_s in (("graph", 8.0 * elements / 4e12), ("eager", launch + 8.0 * elements / 4e12))
    ]
    block = launch_block(records)
    # L B / 8 = 9 µs * 4 TB/s / 8 bytes
    assert "expertile: B = 4.00 TB/s from 100,000,000 elements, L = 9.00 µs" in block
    assert "equal at 4,500,000 elements" in block and "equal at 2,500,000 elements" in block
    assert cells(block, "32,000")[4] == "9.06"
    assert launch_block([]) == NOT_MEASURED


def test_stencils_beside_copy():
    shape = {"grids": 1, "rows": 8192, "columns": 8192, "boundary": "zero"}
    values = {"op": "laplacian", "workload": "laplacian/big", "shape": shape, "dtype": "fp32", "nbytes": 5.4e8}
    times = {"expertile": 1.3e-4, "torch": 1.3e-3, "copy": 1.3e-4}
    block = stencil_block([timed(t, backend=name, **values) for name, t in times.items()])
    assert cells(block, "big")[3:7] == ["100 %", "10 %", "–", "–"]
    assert stencil_block([]) == NOT_MEASURED


def test_only_records_of_the_device_count(tmp_path):
    for name, keys in (
        ("traffic.md", ("traffic formulas", "traffic times", "traffic counted")),
        ("elementwise.md", ("elementwise launch",)),
        ("stencil.md", ("stencil times",)),
    ):
        blocks = "\n".join(f"<!-- expertile:{key} -->\n<!-- /expertile:{key} -->" for key in keys)
        (tmp_path / name).write_text(f"# Title\n\n{blocks}\nend\n")
    other = [replace(r, env=Env("NVIDIA B200")) for r in (add("expertile", 1000, 1e-6),)]
    assert len(update_pages(tmp_path, other, H200)) == 3
    assert NOT_MEASURED in (tmp_path / "elementwise.md").read_text()
    assert update_pages(tmp_path, other, H200, check=True) == []
    assert (tmp_path / "traffic.md").read_text().startswith("# Title") and "end" in (
        tmp_path / "stencil.md"
    ).read_text()
    here = [add("expertile", 1000, 1e-6)]
    assert update_pages(tmp_path, here, H200, check=True) == [tmp_path / "elementwise.md"]


def test_a_page_without_its_markers_is_an_error(tmp_path):
    (tmp_path / "traffic.md").write_text("nothing")
    with pytest.raises(ValueError, match="expected <!-- expertile:traffic formulas -->"):
        update_pages(tmp_path, [], H200)
