"""laplacian on the CPU: values against the matrix of the operator, gradients, the operator's contract, errors."""

import pytest
import torch
import torch.nn.functional as F

from expertile.ops.pointwise.laplacian import BOUNDARIES, _plan, configs, laplacian

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-14}


def dense(rows, columns, boundary):
    """The operator as a matrix [points of the result, points of the grid], entry by entry from its definition."""
    first = 1 if boundary == "interior" else 0
    centres = [(i, j) for i in range(first, rows - first) for j in range(first, columns - first)]
    matrix = torch.zeros(len(centres), rows * columns, dtype=torch.float64)
    for index, (i, j) in enumerate(centres):
        matrix[index, i * columns + j] -= 4.0
        for p, q in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            if boundary == "zero" and not (0 <= p < rows and 0 <= q < columns):
                continue
            if boundary == "replicate":
                p, q = min(max(p, 0), rows - 1), min(max(q, 0), columns - 1)
            matrix[index, p % rows * columns + q % columns] += 1.0
    return matrix


def expected(u, boundary, scale=1.0):
    rows, columns = u.shape[-2:]
    cut = 2 if boundary == "interior" else 0
    flat = u.double().flatten(-2) @ dense(rows, columns, boundary).t() * scale
    return flat.unflatten(-1, (rows - cut, columns - cut)).to(u.dtype)


def assert_right(out, u, boundary, scale=1.0):
    truth = expected(u, boundary, scale)
    assert out.dtype is u.dtype and out.is_contiguous()
    bound = TOLERANCE[u.dtype] * 8.0 * scale * float(u.abs().max()) if u.numel() else 0.0
    torch.testing.assert_close(out, truth, rtol=0, atol=bound)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (3, 2, 5), (2, 1, 3, 7), (2, 9, 3)])
def test_values(shape, dtype, boundary):
    u = torch.randn(shape, dtype=dtype)
    assert_right(laplacian(u, boundary=boundary, scale=2.5), u, boundary, scale=2.5)


@pytest.mark.parametrize("boundary", ["zero", "replicate", "circular"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (2, 2)])
def test_thin_grids(shape, boundary):
    u = torch.randn(shape)
    assert_right(laplacian(u, boundary=boundary), u, boundary)


def test_interior_is_what_slices_give():
    u = torch.randn(3, 6, 5)
    slices = u[:, :-2, 1:-1] + u[:, 2:, 1:-1] + u[:, 1:-1, :-2] + u[:, 1:-1, 2:] - 4.0 * u[:, 1:-1, 1:-1]
    torch.testing.assert_close(laplacian(u, boundary="interior"), slices)


def test_zero_is_a_convolution():
    u = torch.randn(2, 6, 5)
    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(laplacian(u), F.conv2d(u[:, None], kernel[None, None], padding=1)[:, 0])


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_constant_and_harmonic_fields(boundary):
    """No flux: constants vanish. Inside: so does every harmonic polynomial."""
    i, j = torch.meshgrid(torch.arange(6.0), torch.arange(7.0), indexing="ij")
    if boundary in ("replicate", "circular", "interior"):
        assert not laplacian(torch.full((6, 7), 3.0), boundary=boundary).any()
    inside = laplacian(i**2 - j**2, boundary=boundary)
    inside = inside if boundary == "interior" else inside[1:-1, 1:-1]
    assert not inside.any()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_strided_grids(boundary):
    base = torch.randn(4, 9, 10, 2)
    for u in (base[..., 0], base[0].transpose(0, 2), base[:, ::2, :, 1], base[:, :1, :1, 0].expand(4, 5, 6)):
        torch.testing.assert_close(laplacian(u, boundary=boundary), laplacian(u.contiguous(), boundary=boundary))


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 0, 4), (2, 2)])
def test_empty(shape, boundary):
    if boundary == "interior" and 0 in shape[-2:]:
        pytest.skip("refused: nothing that could have an interior")
    cut = 2 if boundary == "interior" else 0
    out = laplacian(torch.randn(shape), boundary=boundary)
    assert out.shape == (*shape[:-2], shape[-2] - cut, shape[-1] - cut)


def test_not_a_number_spreads_to_neighbours_alone():
    u = torch.zeros(5, 5)
    u[2, 2] = float("nan")
    found = laplacian(u).isnan().nonzero().tolist()
    assert found == [[1, 2], [2, 1], [2, 2], [2, 3], [3, 2]]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_gradients_are_the_transpose(boundary):
    u = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda u: laplacian(u, boundary=boundary, scale=0.5), (u,))
    torch.autograd.gradgradcheck(lambda u: laplacian(u, boundary=boundary) ** 2, (u,))
    out = laplacian(u, boundary=boundary)
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, u, grad)
    torch.testing.assert_close(found.flatten(-2), grad.flatten(-2) @ dense(4, 5, boundary))


@pytest.mark.parametrize("boundary", ["zero", "replicate", "circular"])
def test_symmetric(boundary):
    matrix = dense(4, 5, boundary)
    assert torch.equal(matrix, matrix.t())


def test_gradient_of_an_empty_interior():
    u = torch.randn(2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(laplacian(u, boundary="interior").sum(), u)
    assert grad.shape == (2, 2) and not grad.any()


@pytest.mark.parametrize("boundary", [*BOUNDARIES, "interior_transpose"])
def test_opcheck(boundary):
    for u in (
        torch.randn(2, 5, 6),
        torch.randn(5, 6, requires_grad=True),
        torch.randn(2, 6, 5, dtype=torch.bfloat16).transpose(1, 2),
        torch.randn(0, 4, 4),
        torch.randn(3, 2, 2),
    ):
        torch.library.opcheck(torch.ops.expertile.laplacian, (u, boundary, 0.5))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_compiles_whole_with_changing_shapes(boundary):
    def run(u):
        return laplacian(u * 2, boundary=boundary).sin()

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 5, 7), (3, 4, 9), (6, 3)):
        u = torch.randn(shape, requires_grad=True)
        eager = run(u)
        out = compiled(u)
        torch.testing.assert_close(out, eager)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), u), torch.autograd.grad(eager.sum(), u))


def test_meta_tensors_have_a_shape():
    assert laplacian(torch.empty(3, 4, 5, device="meta"), boundary="interior").shape == (3, 2, 3)


def test_loads_are_vectors_where_rows_allow_it():
    def vector(shape, strides, boundary="zero", aligned=True, dtype=torch.float32):
        return dict(_plan(shape, strides, dtype, boundary, 1.0, aligned, 132, None).options)["VECTOR"]

    whole = ((2, 64, 512), (64 * 512, 512, 1))
    assert vector(*whole) == 4 and vector(*whole, dtype=torch.float16) == 8
    assert vector(*whole, "interior") == 4
    assert vector((2, 62, 510), (62 * 510, 510, 1), "interior_transpose") == 4
    assert vector(*whole, aligned=False) == 1
    assert vector((2, 64, 510), (64 * 510, 510, 1)) == 1
    assert vector((2, 64, 512), (64 * 513, 513, 1)) == 1


def test_configs_keep_the_sms_busy():
    assert configs(1, 8192, 2048, 132)[0].block_rows == 8
    small = configs(1, 512, 128, 132)[0]
    assert small.block_rows < 8 and -(-512 // small.block_rows) >= 132
    assert configs(4, 256, 3, 132)[0].num_warps == 1
    for found in (configs(1, 8192, 2048, 132), configs(1, 8, 8, 132)):
        assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "args, kwargs, error, message",
    [
        ((None,), {}, TypeError, "u: expected a torch.Tensor, got NoneType"),
        ((torch.ones(3),), {}, ValueError, r"u: expected 2 dimensions or more, got shape \[3\]"),
        ((torch.ones(3, 3, dtype=torch.int64),), {}, ValueError, "u: expected float32, bfloat16 or float16"),
        ((torch.ones(3, 3),), {"boundary": "mirror"}, ValueError, "boundary: expected one of zero.*got 'mirror'"),
        ((torch.ones(3, 3),), {"boundary": "interior_transpose"}, ValueError, "boundary: expected one of"),
        ((torch.ones(1, 3),), {"boundary": "interior"}, ValueError, r"at least 2 rows.*got shape \[1, 3\]"),
        ((torch.ones(3, 3),), {"scale": "1"}, TypeError, "scale: expected a number, got str"),
    ],
)
def test_errors(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        laplacian(*args, **kwargs)
