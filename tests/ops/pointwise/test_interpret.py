"""The kernels of add_scalar and laplacian on the CPU, through Triton's interpreter."""

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import pytest
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from expertile.ops.pointwise import add_scalar, laplacian
    from tests.ops.pointwise.test_add_scalar import strided, summed
    from tests.ops.pointwise.test_laplacian import assert_right, dense

    interpreter.repair()

    DTYPES = (torch.float32, torch.bfloat16, torch.float16)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("numel", [1, 63, 64, 65, 128, 1000])
    def test_add_scalar(numel, dtype):
        x = torch.randn(numel).to(dtype)
        wide = torch.full((numel + 2,), float("nan"), dtype=dtype)
        add_scalar.launch(x, wide[1:-1], 1.7, add_scalar.Config(64, 1))
        assert torch.equal(wide[1:-1], summed(x, 1.7))
        assert wide[[0, -1]].isnan().all(), "written past the end"

    @pytest.mark.parametrize("x", [pytest.param(x, id=name) for name, x in strided()])
    def test_add_scalar_strides(x):
        assert torch.equal(add_scalar.add_scalar(x, 2.5), x + 2.5)

    def test_add_scalar_special_values():
        x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3e38])
        torch.testing.assert_close(add_scalar.add_scalar(x, 3e38), x + 3e38, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("boundary", laplacian.BOUNDARIES)
    # Rows of whole vectors, of none; several tiles across and down; thin ones.
    @pytest.mark.parametrize("shape", [(2, 9, 272), (1, 5, 135), (3, 3, 3), (2, 2, 16)])
    def test_laplacian(shape, boundary):
        # Dtypes take turns over the boundaries.
        dtype = DTYPES[(shape[-1] + laplacian.BOUNDARIES.index(boundary)) % len(DTYPES)]
        u = torch.randn(shape).to(dtype)
        assert_right(laplacian.laplacian(u, boundary=boundary, scale=0.5), u, boundary, scale=0.5)

    @pytest.mark.parametrize("boundary", ["zero", "replicate", "circular"])
    @pytest.mark.parametrize("shape", [(1, 1), (1, 8), (8, 1), (2, 2)])
    def test_laplacian_thin(shape, boundary):
        u = torch.randn(shape)
        assert_right(laplacian.laplacian(u, boundary=boundary), u, boundary)

    @pytest.mark.parametrize("boundary", laplacian.BOUNDARIES)
    @pytest.mark.parametrize("shape", [(2, 6, 136), (1, 5, 11)])
    def test_laplacian_gradient(shape, boundary):
        u = torch.randn(shape, requires_grad=True)
        out = laplacian.laplacian(u, boundary=boundary, scale=2.0)
        grad = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, u, grad)
        truth = grad.double().flatten(-2) @ dense(*shape[-2:], boundary) * 2.0
        torch.testing.assert_close(found.flatten(-2).double(), truth, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("config", [laplacian.Config(r, w) for r in (1, 2, 8, 16) for w in (1, 2)], ids=str)
    @pytest.mark.parametrize("columns", [260, 263])
    def test_laplacian_configs_write_every_point_and_no_other(columns, config):
        u = torch.randn(2, 11, columns)
        room = torch.full((2 * 11 * columns + 16,), float("nan"))
        out = room[8:-8].view(2, 11, columns)
        laplacian.launch(u, out, "circular", 1.0, config)
        assert_right(out, u, "circular")
        assert room[:8].isnan().all() and room[-8:].isnan().all()

    def test_laplacian_reads_slices_in_place():
        base = torch.randn(3, 12, 264)
        for u in (
            base[:, 2:-2, 4:-4],
            base[::2, :, 1:-1],
            base[:, ::2],
            base[0, :, :8].t(),
            base[:, :1].expand(3, 4, 264),
        ):
            assert_right(laplacian.laplacian(u, boundary="replicate"), u, "replicate")

    @settings(max_examples=20, deadline=None)
    @given(
        grids=st.integers(1, 3),
        rows=st.integers(2, 12),
        columns=st.integers(2, 300),
        boundary=st.sampled_from(laplacian.BOUNDARIES),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 10),
    )
    def test_laplacian_random_shapes(grids, rows, columns, boundary, dtype, seed):
        u = torch.randn(grids, rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
        assert_right(laplacian.laplacian(u, boundary=boundary), u, boundary)
