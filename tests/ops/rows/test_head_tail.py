"""Softmax and norms of rows that are no multiple of 16 bytes, cut into body, head and tail: values, neighbours, loads,
spills."""

import re

import pytest
import torch

from expertile.ops.rows import choose, softmax
from expertile.ops.rows import config as _rows
from expertile.ops.rows import norm as norms
from expertile.ops.rows.config import RowConfig, vector
from tests.ops.rows.cases import DTYPES, assert_close, assert_softmax_gradient, random
from tests.ops.rows.compile_cases import MACHINES, compiled
from tests.support import interpreter
from tests.support.aot import most_spills

NAN, INF = float("nan"), float("inf")

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_what_is_cut(dtype):
        def cut(x):
            return vector(torch.empty(x.shape, dtype=dtype), x)

        whole = _rows.CUT_BYTES // dtype.itemsize
        wide = torch.empty(5, 2048, dtype=dtype)
        odd = torch.empty(17, 1001, dtype=dtype)
        assert cut(odd) == cut(odd[:, :]) == cut(odd[whole:]) == whole
        assert cut(wide[:, :1000]) == 1  # whole vectors in any case
        assert cut(wide[:, :1001]) == 1  # the result's rows lie otherwise
        assert cut(odd[1:]) == 1  # starts inside a word
        assert cut(torch.empty(5, 255, dtype=dtype)) == 1  # short
        other = torch.float32 if dtype is torch.float16 else torch.float16
        assert vector(odd, odd, odd.to(other)) == 1

    # Columns, and the most loads and stores of single elements: head and tail, twice where they come a tile ahead.
    @pytest.mark.compile
    @pytest.mark.parametrize("rows, cols", [(8192, 1001), (16384, 4097), (4096, 50257)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("backward", [False, True])
    def test_bodies_move_in_vectors(rows, cols, dtype, backward):
        whole = _rows.CUT_BYTES // dtype.itemsize
        choice = choose.softmax_backward if backward else choose.forward
        config = choice(rows, cols // whole * whole, dtype.itemsize, MACHINES[90])
        x = torch.empty(rows, cols, dtype=dtype)
        (found,) = compiled(90, lambda: softmax.on_rows((x, x) if backward else (x,), config))
        assert found.fits and found.spills <= most_spills(0, 6), str(found)
        moves = re.findall(r"(?:ld|st)\.global[.\w]*|cp\.async[.\w]*[^;]*", found.ptx)
        wide = [m for m in moves if ".v4.b32" in m or ", 0x10" in m]
        assert any(m.startswith("st") for m in wide) and any(not m.startswith("st") for m in wide), moves
        alone = len(moves) - len(wide) - sum(m.startswith(("cp.async.commit", "cp.async.wait")) for m in moves)
        assert alone <= 9, moves

    @pytest.mark.compile
    @pytest.mark.parametrize(
        "rows, cols, centered, residual",
        [(8192, 1001, False, True), (8192, 1001, True, False), (8192, 20001, False, False), (4096, 50257, True, False)],
    )
    def test_bodies_of_norms_move_in_vectors(monkeypatch, rows, cols, centered, residual):
        monkeypatch.setattr(norms, "machine", lambda index: MACHINES[90])
        x = torch.empty(rows, cols, dtype=torch.bfloat16)
        weight = torch.empty(cols)
        arguments = (x, x if residual else None, weight, weight if centered else None, 1e-6, centered, True)
        (found,) = compiled(90, lambda: norms.forward(*arguments))
        assert found.fits and found.spills <= most_spills(4, 6), str(found)
        # No row is stored, none is copied in single elements but its head and tail.
        stores = re.findall(r"st\.global[.\w]*b16\b", found.ptx)
        assert len(re.findall(r"st\.global[.\w]*v4", found.ptx)) >= 2 + residual
        assert len(stores) <= 2 * (1 + residual), stores

else:
    interpreter.repair()

    # Several pieces, tiles of several rows with a last one that is not full, programs that stay.
    CONFIGS = (None, RowConfig(1, 16, 1), RowConfig(4, 128, 4), RowConfig(2, 64, 1, programs_per_sm=1, num_stages=2))
    # 11 rows of an odd length start at every place of a word.
    ROWS = 11

    @pytest.fixture(autouse=True)
    def cut_short_rows_too(monkeypatch):
        monkeypatch.setattr(_rows, "LEAST_CUT", _rows.CUT_BYTES // 2)

    def fits(config, cols):
        return config is None or config.pieces(cols) <= 5

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cols", [1, 9, 63, 257])
    def test_values_and_gradients(cols, dtype, config):
        if not fits(config, cols):
            pytest.skip("too many pieces")
        x, dy = random((ROWS, cols), dtype, 0), random((ROWS, cols), dtype, 1)
        assert vector(torch.empty_like(x), x) == (_rows.CUT_BYTES // dtype.itemsize if cols >= _rows.LEAST_CUT else 1)
        y = softmax.on_rows((x,), config)
        assert_close(y, x.double().softmax(-1), "y", 4.0)
        assert_softmax_gradient(softmax.on_rows((dy, y), config), dy, y)

    @pytest.mark.parametrize("rows, cols", [(3, 1001), (2, 50257)])
    def test_long_rows(rows, cols):
        x, dy = random((rows, cols), torch.bfloat16, 0), random((rows, cols), torch.bfloat16, 1)
        config = RowConfig(1, 16384, 16) if cols > 16384 else None
        y = softmax.on_rows((x,), config)
        assert_close(y, x.double().softmax(-1), "y", 4.0)
        assert_softmax_gradient(softmax.on_rows((dy, y), config), dy, y)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_wide_rows_of_the_same_place(config):
        wide = random((ROWS, 61), torch.float16, 0)
        x = wide[:, :45]  # 16 elements fewer, a whole number of words
        assert vector(torch.empty(x.shape, dtype=x.dtype), x) == _rows.CUT_BYTES // 2
        assert_close(softmax.on_rows((x,), config), x.double().softmax(-1), "y", 4.0)

    @pytest.mark.parametrize("offset", [1, 3, 8, 45])
    def test_views_that_start_elsewhere(offset):
        x = random((ROWS * 45 + offset,), torch.bfloat16, 0)[offset:].view(ROWS, 45)
        dy = random((ROWS, 45), torch.bfloat16, 1)
        y = softmax.on_rows((x,))
        assert_close(y, x.double().softmax(-1), "y", 4.0)
        assert_softmax_gradient(softmax.on_rows((x, y)), x, y)
        assert_softmax_gradient(softmax.on_rows((dy, y)), dy, y)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("value", [NAN, -INF])
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_neighbours_do_not_count(value, config):
        x = random((ROWS, 61), torch.float32, 0)
        x[1::2] = value
        y = softmax.on_rows((x,), config)
        torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True)
        dx = softmax.on_rows((x, torch.softmax(x, -1)), config)
        assert dx[::2].isfinite().all() and dx[1::2].isnan().all()

    @pytest.mark.parametrize("col", [0, 30, 60])
    @pytest.mark.parametrize("value", [NAN, INF, 3e38])
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_every_element_counts(value, col):
        x = random((ROWS, 61), torch.float32, 0)
        x[:, col] = value
        torch.testing.assert_close(softmax.on_rows((x,)), torch.softmax(x, -1), equal_nan=True)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cols", [9, 61])
    @pytest.mark.parametrize("centered, with_residual", [(False, True), (True, False), (True, True)])
    def test_norms(cols, dtype, config, centered, with_residual):
        if not fits(config, cols):
            pytest.skip("too many pieces")
        x, residual = random((ROWS, cols), dtype, 0) + 3, random((ROWS, cols), dtype, 1)
        weight, bias = random((cols,), torch.float32, 2), random((cols,), torch.float32, 3)
        h = (x.float() + residual.float()).to(dtype) if with_residual else x
        wide = h.double()
        mean = wide.mean(-1, keepdim=True) if centered else 0.0
        rstd = ((wide - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        y, total, found_mean, found_rstd = norms.forward(
            x, residual if with_residual else None, weight, bias, 1e-5, centered, True, config
        )
        assert_close(y, (wide - mean) * rstd * weight.double() + bias.double(), "y", 4.0)
        torch.testing.assert_close(found_rstd.double(), rstd[:, 0], rtol=1e-5, atol=0)
        if centered:
            torch.testing.assert_close(found_mean.double(), mean[:, 0], rtol=1e-5, atol=1e-6)
        if with_residual:
            assert torch.equal(total, h)
