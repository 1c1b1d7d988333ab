"""Batch-invariant products: numbers of rows decide neither the backend nor, where that matters, the config."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.ops.backend import Request
from expertile.ops.gathered_mm.choose import choose as choose_gathered
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.grouped_mm.api import select
from expertile.ops.grouped_mm.backends import by_name, gluon_hopper, triton_pointer
from expertile.ops.grouped_mm.choose import choose_invariant
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.launch import nvrtc

H200, A100 = Device.by_name("h200"), Device.by_name("a100")
ROWS = (1, 2, 7, 64, 65, 500, 1024, 8192, 65536)


def problem(rows, dtype=torch.bfloat16, k=2048, n=1536, groups=128, **more):
    return Problem(Layout.RAGGED_M, groups, rows, n, k, dtype, dtype, (k, 1), (k * n, 1, k), **more)


@pytest.mark.parametrize(
    "device, dtype, k, backend",
    [
        (H200, torch.bfloat16, 2048, "gluon_hopper"),
        (H200, torch.float16, 2048, "gluon_hopper"),
        (H200, torch.bfloat16, 2047, "triton_pointer"),
        (H200, torch.float32, 2048, "triton_pointer"),
        (A100, torch.bfloat16, 2048, "triton_pointer"),
        (A100, torch.float32, 2048, "triton_pointer"),
    ],
)
def test_one_backend_for_all_numbers_of_rows(device, dtype, k, backend):
    found = [choose_invariant(problem(rows, dtype, k), device) for rows in ROWS]
    assert {c.backend.name for c in found} == {backend}
    if backend == "triton_pointer":  # the order in which programs take tiles may differ
        tiles = {replace(c.config, group_m=1, blocks_per_sm=1) for c in found}
        assert len(tiles) == 1
    else:
        assert len({c.config for c in found}) > 1, "any config will do"


@pytest.mark.parametrize("bias, tf32", [(True, False), (False, True)])
def test_a_product_of_one_group(bias, tf32):
    """The router's."""
    found = set()
    for rows in ROWS:
        p = replace(
            problem(rows, torch.float32, n=128, groups=1),
            layout=Layout.BATCHED,
            has_bias=bias,
            a_strides=(rows * 2048, 2048, 1),
            allow_tf32=tf32,
        )
        choice = choose_invariant(p, H200)
        found.add((choice.backend.name, replace(choice.config, group_m=1, blocks_per_sm=1)))
    assert len(found) == 1


def test_gathered_products(monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    for interleaved in (False, True):
        for product, name in ((Product.GATED, "gluon_gather"), (Product.BACKWARD, "cuda_gather")):
            found = {
                choose_gathered(
                    GatherProblem(
                        product,
                        128,
                        rows,
                        1536,
                        2048,
                        max(1, rows // 8),
                        torch.bfloat16,
                        (2048, 1),
                        (2048 * 1536, 1, 2048),
                        activation="swiglu",
                        interleaved=interleaved,
                        weights_shape=(rows, 1),
                    ),
                    H200,
                    batch_invariant=True,
                ).backend.name
                for rows in ROWS
            }
            assert found == {name}
    wgrad = GatherProblem(Product.WGRAD, 8, 64, 64, 512, 512, torch.bfloat16, (64, 1), (64, 1))
    with pytest.raises(ValueError, match="depends on numbers of rows"):
        choose_gathered(wgrad, H200, batch_invariant=True)


def test_backends_and_configs_by_name():
    p = problem(100)
    assert select(p, H200, Request("gluon_hopper", None, True))[0].name == "gluon_hopper"
    fixed = select(p, H200, Request("triton_pointer", None, True))[1]
    other = next(c for c in triton_pointer.configs(p, H200) if c != fixed)
    with pytest.raises(ValueError, match="config: expected one of triton_pointer's batch-invariant configs"):
        select(p, H200, Request("triton_pointer", other, True))
    assert select(p, H200, Request("gluon_hopper", gluon_hopper.configs(p, H200)[-1], True))
    for name in ("loop", "torch_grouped", "padded_bmm", "triton_tma"):
        with pytest.raises(ValueError, match="batch_invariant"):
            select(p, H200, Request(name, None, True))
    ragged_k = Problem(Layout.RAGGED_K, 8, 64, 64, 512, torch.bfloat16, torch.bfloat16, (1, 64), (64, 1))
    assert not any(by_name(n).invariant(ragged_k, H200) for n in ("loop", "gluon_hopper", "triton_pointer"))
