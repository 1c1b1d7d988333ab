"""composed and triton_gather over the shared case table, on the CPU through Triton's interpreter."""

import pytest

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    from dataclasses import replace
    from types import SimpleNamespace

    import torch

    from expertile.device import Device
    from expertile.ops.gathered_mm import combine as combine_module
    from expertile.ops.gathered_mm import pointwise
    from expertile.ops.gathered_mm.backends import composed, triton_gather
    from expertile.ops.gathered_mm.combine import combine, forward
    from expertile.ops.gathered_mm.sum_rows import sum_rows
    from tests.ops.gathered_mm.cases import BACKWARD, CASES, WGRAD, Case, make, run_case
    from tests.ops.gathered_mm.test_combine import dense_combine, routed

    interpreter.repair()

    TILE = triton_gather.Config(32, 16, 32, 4, 2, group_m=2)

    @pytest.mark.parametrize("case", [c for c in CASES if c.product is not BACKWARD], ids=str)
    def test_triton_gather(case):
        problem, _ = make(case)
        assert triton_gather.BACKEND.supports(problem, Device.current("cpu")) is None
        run_case(triton_gather.BACKEND, case, TILE)

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_composed(case, monkeypatch):
        # Several tiles across and down.
        for name in ("GATHER", "ACTIVATION", "BACKWARD"):
            monkeypatch.setattr(pointwise, name, pointwise.Config(64, 16))
        run_case(composed.BACKEND, case, composed.Config("loop"))

    @pytest.mark.parametrize("case", [c for c in CASES if c.product is BACKWARD], ids=str)
    def test_dpre_over_pre(case):
        run_case(composed.BACKEND, case, composed.Config("loop"), overwrite_pre=True)

    @pytest.mark.parametrize("gathered", ["a", "b"])
    def test_composed_copies_columns_at_a_time(gathered, monkeypatch):
        monkeypatch.setattr(composed, "COPY_NBYTES", 2 * 71 * 24)
        monkeypatch.setattr(composed, "_COLUMNS", 8)
        made = []

        def gather_rows(x, *rest):
            made.append(x.shape[1])
            return pointwise.gather_rows(x, *rest)

        monkeypatch.setattr(composed, "pointwise", SimpleNamespace(gather_rows=gather_rows))
        case = Case("wgrad", WGRAD, (20, 0, 45), n=56, k=56, past=6, gathered=gathered)
        run_case(composed.BACKEND, case, composed.Config("loop"))
        assert made == [24, 24, 8]

    def test_offsets_of_64_bits():
        case = next(c for c in CASES if c.name == "gated-interleaved-bias")
        problem, _ = make(case)
        wide = replace(problem, tokens=2**31)  # says that tokens may lie that far apart; none does
        launch = triton_gather._launch(wide, TILE, (None,) * 11, (0, 0), -1)
        assert dict(launch.options)["OFFSET"].name == "int64"

    def test_gather_rows_reads_any_strides():
        base = torch.randn(7, 40)
        rows = torch.tensor([6, 0, 3, 3, 0], dtype=torch.int32)
        offs = torch.tensor([2, 4], dtype=torch.int32)
        for x in (base, base[:, ::2], base[1:, 3:20].expand(6, 17), base[::2], base.t()):
            rows_of = rows % x.shape[0]
            got = pointwise.gather_rows(x, rows_of, offs)
            assert torch.equal(got[:4], x[rows_of.long()][:4])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("cols, top_k, columns", [(48, 2, 16), (272, 3, 256), (37, 4, 64), (64, 33, 64)])
    @pytest.mark.parametrize("tokens", [1, 4])
    def test_combine(monkeypatch, cols, top_k, columns, dtype, tokens):
        y, positions, weights = routed(5, top_k, cols, dtype)
        monkeypatch.setattr(combine_module, "_program", lambda *_: (columns, 1, tokens))
        want = dense_combine(y, positions, weights)
        tolerance = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
        got = forward(y, positions, weights)
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        got = forward(y, positions, None)
        want = dense_combine(y, positions, torch.ones_like(weights))
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=4 * tolerance)

    @pytest.mark.parametrize("cols", [48, 19])
    def test_combine_gradients(cols):
        y, positions, weights = routed(6, 3, cols, torch.float32)
        y, weights = y.nan_to_num().requires_grad_(), weights.nan_to_num().requires_grad_()
        grad = torch.randn(6, cols)
        got = torch.autograd.grad(combine(y, positions, weights), (y, weights), grad)
        wide = y.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
        want = torch.autograd.grad(dense_combine(wide[0], positions, wide[1]), wide, grad.double())
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)

    def test_sum_rows():
        d = torch.randn(9, 21)
        rows = torch.tensor([4, 0, 4, 1, 4, 0, 0, 0, 0], dtype=torch.int32)
        got = sum_rows(d, rows, torch.tensor([3, 6], dtype=torch.int32), 6)
        want = torch.zeros(6, 21).index_add_(0, rows[:6], d[:6])
        torch.testing.assert_close(got, want)
