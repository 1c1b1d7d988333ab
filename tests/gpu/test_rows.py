"""softmax, layer norm and RMS norm on a real GPU: values and gradients of every way to lay out rows, what a call costs
the host, capture in a graph, torch.compile, and the same bits in every run."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from expertile.ops.launch.device import capability, machine
from expertile.ops.rows import choose
from expertile.ops.rows import ring_launch as ring
from expertile.ops.rows.config import RowConfig
from expertile.ops.rows.layer_norm import layer_norm
from expertile.ops.rows.rms_norm import rms_norm
from expertile.ops.rows.softmax import softmax, softmax_backward
from tests.gpu.test_launch import host_seconds
from tests.ops.rows import norm_checks
from tests.ops.rows.cases import DTYPES, assert_close, assert_softmax_gradient, random
from tests.ops.rows.norm_checks import KINDS

NORMS = {"layer_norm": (layer_norm, True), "rms_norm": (rms_norm, False)}
SHAPES = (
    (3, 1),
    (513, 2),
    (129, 37),
    (7, 64),
    (2, 3, 100),
    (1000, 768),
    (65, 1000),
    (33, 1023),
    (17, 4100),
    (9, 5120),
    (5, 8191),
    (3, 20000),
    (2, 33333),
    (3, 50257),
    (2, 131071),
    (2, 262144),
)
CONFIGS = (
    RowConfig(1, 1024, 4),
    RowConfig(4, 512, 2),
    RowConfig(2, 256, 4),
    RowConfig(2, 1024, 4, programs_per_sm=4, num_stages=3),
    RowConfig(1, 2048, 8, cluster=2),
    RowConfig(1, 1024, 4, cluster=8),
    RowConfig(1, 1024, 4, streamed=True),
)


def fits(config, cols):
    if config.cluster > 1 and not machine(0).clusters:
        return False
    return config.streamed or config.pieces(cols) <= 4


def check_softmax(shape, dtype, config=None):
    x, dy = random(shape, dtype, 0, "cuda").requires_grad_(), random(shape, dtype, 1, "cuda")
    y = softmax(x, config=config, backward_config=config)
    y.backward(dy)
    assert_close(y, x.detach().double().softmax(-1), "y", 4.0)
    assert_softmax_gradient(x.grad, dy, y)


def check_norm(norm, centered, shape, kind, config=None):
    norm_checks.check(norm, centered, shape, kind, config, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax(shape, dtype):
    check_softmax(shape, dtype)


@pytest.mark.parametrize("cols", [257, 4097, 20001, 50257, 131071])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_of_odd_rows_do_not_count(cols, dtype):
    """Their words of 16 bytes hold the end of one row and the start of the next."""
    x, dy = random((19, cols), dtype, 0, "cuda"), random((19, cols), dtype, 1, "cuda")
    x[1::2] = float("nan")
    y = softmax(x)
    assert y[1::2].isnan().all()
    assert_close(y[::2], x[::2].double().softmax(-1), "y", 4.0)
    dx = softmax_backward(dy, y)
    assert dx[1::2].isnan().all()
    assert_softmax_gradient(dx[::2], dy[::2], y[::2])


@pytest.mark.parametrize("cols", [257, 4097, 20001, 50257])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_odd_rows(norm, cols):
    """More rows than programs, so that those that stay take several; every second row is NaN, which is next to all."""
    norm, centered = NORMS[norm]
    for dtype in DTYPES:
        x = random((601, cols), dtype, 0, "cuda")
        x[1::2] = float("nan")
        weight, bias = random((cols,), torch.float32, 1, "cuda"), random((cols,), torch.float32, 2, "cuda")
        y = norm(x, weight, bias, eps=1e-5) if centered else norm(x, weight, eps=1e-5)
        assert y[1::2].isnan().all()
        want = norm_checks.norm64(x[::2].double(), weight.double(), bias.double() if centered else None, 1e-5, centered)
        assert_close(y[::2], want, "y")


# Rows that pass through a ring in shared memory: see ring.py.
ODD = (10001, 16385, 20001, 50257, 57343)


@pytest.fixture
def ring_launches(monkeypatch):
    """Grows by the config of every launch of a ring kernel; skips on GPUs that have none."""
    if capability(0) != (9, 0):
        pytest.skip("the ring is for compute capability 9.0")
    seen = []

    def noted(f):
        return lambda *args: (seen.append(args[-1]), f(*args))[1]

    monkeypatch.setattr(ring, "run", noted(ring.run))
    return seen


def guarded(shape, dtype):
    """A tensor of 7s between others that must stay as they are, and those."""
    size = shape[0] * shape[1]
    whole = torch.full((size + 2048,), 7.0, dtype=dtype, device="cuda")
    return whole[1024 : 1024 + size].view(shape), (whole[:1024], whole[1024 + size :])


@pytest.mark.parametrize("more_rows_than_programs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", ODD)
def test_long_odd_rows(cols, dtype, more_rows_than_programs, ring_launches):
    """Every second row is NaN, which is next to all rows, also at the tensor's end."""
    rows = 601 if more_rows_than_programs else machine(0).sm_count
    x, dy = random((rows, cols), dtype, 0, "cuda"), random((rows, cols), dtype, 1, "cuda")
    x[1::2] = float("nan")
    y = softmax(x)
    dx = softmax_backward(dy, y)
    expected = [ring.choose(cols, dtype.itemsize, tensors) for tensors in (1, 2)]
    assert ring_launches == [c for c in expected if c is not None]
    assert y[1::2].isnan().all() and dx[1::2].isnan().all()
    assert_close(y[::2], x[::2].double().softmax(-1), "y", 4.0)
    assert_softmax_gradient(dx[::2], dy[::2], y[::2])


def test_fewer_rows_than_sms_stay_where_they_were(ring_launches):
    x = random((machine(0).sm_count - 1, 20001), torch.bfloat16, 0, "cuda")
    assert_close(softmax(x), x.double().softmax(-1), "y", 4.0)
    assert not ring_launches


@pytest.mark.parametrize("view", ["starts inside a word", "wide rows", "every second row", "transposed"])
def test_other_rows_do_not_pass_through_the_ring(view, ring_launches):
    """They are copied first, or take the other kernels."""
    x = random((400, 20001), torch.bfloat16, 0, "cuda")
    x = {
        "starts inside a word": x.view(-1)[1 : 1 + 300 * 20001].view(300, 20001),
        "wide rows": x[:, :19999],
        "every second row": x[::2],
        "transposed": x.t().contiguous().t(),
    }[view]
    y = softmax(x)
    assert_close(y, x.double().softmax(-1), "y", 4.0)
    assert_softmax_gradient(softmax_backward(x, y), x, y)
    # Copied rows are contiguous ones.
    assert bool(ring_launches) == (view == "transposed")


RINGS = (
    ring.RingConfig(),
    ring.RingConfig(8, 8, 8, 2),
    ring.RingConfig(8, 16, 8, 1, 2),
    ring.RingConfig(4, 8, 8, 2, 2),
)


@pytest.mark.parametrize("config", RINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, cols", [(1, 16385), (5, 17003), (700, 20001)])
def test_every_ring(rows, cols, dtype, config):
    if capability(0) != (9, 0) or not config.fits(cols, dtype.itemsize):
        pytest.skip("not for this GPU, or not for these rows")
    x, dy = random((rows, cols), dtype, 0, "cuda"), random((rows, cols), dtype, 1, "cuda")
    y, around = guarded((rows, cols), dtype)
    ring.run((x,), y, machine(0).sm_count, config)
    assert_close(y, x.double().softmax(-1), "y", 4.0)
    assert all((g == 7).all() for g in around)
    if config.fits(cols, dtype.itemsize, 2):
        dx, around = guarded((rows, cols), dtype)
        ring.run((dy, y), dx, machine(0).sm_count, config)
        assert_softmax_gradient(dx, dy, y)
        assert all((g == 7).all() for g in around)


@pytest.mark.parametrize("cols", [16385, 50257])
def test_masks_of_the_lowest_number(cols):
    """Most of a row, and a whole row, of what masks are made of."""
    for dtype in DTYPES:
        x = random((300, cols), dtype, 0, "cuda")
        x[:, 100:16000] = torch.finfo(dtype).min
        x[7] = torch.finfo(dtype).min
        x[8] = float("-inf")
        x[9, 5], x[10, 6] = float("inf"), float("nan")
        torch.testing.assert_close(softmax(x), torch.softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_odd_rows_that_start_inside_a_word(offset):
    x = random((19 * 4097 + offset,), torch.bfloat16, 0, "cuda")[offset:].view(19, 4097)
    assert_close(softmax(x), x.double().softmax(-1), "y", 4.0)


# Every kind of operands meets several lengths; all of them with all would be ten minutes of compiling.
SHAPES_AND_KINDS = [(shape, KINDS[(i + j) % len(KINDS)]) for i, shape in enumerate(SHAPES) for j in (0, 3)]


@pytest.mark.parametrize("shape, kind", SHAPES_AND_KINDS, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm, shape, kind):
    check_norm(*NORMS[norm], shape, kind)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", [(301, 100), (77, 1000), (11, 8000)], ids=str)
def test_every_layout(shape, config):
    if not fits(config, shape[-1]):
        pytest.skip("not for these rows, or not on this GPU")
    for dtype in (torch.float32, torch.bfloat16):
        check_softmax(shape, dtype, config)
    check_norm(layer_norm, True, shape, KINDS[4], config)
    check_norm(rms_norm, False, shape, KINDS[0], config)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 600), st.integers(1, 9000), st.sampled_from(KINDS), st.sampled_from(DTYPES))
def test_random_shapes(rows, cols, kind, dtype):
    check_softmax((rows, cols), dtype)
    for norm, centered in NORMS.values():
        check_norm(norm, centered, (rows, cols), kind)


@pytest.mark.parametrize("cols", [40, 5000, 70000])
def test_infinities_and_nan_as_torch(cols):
    x, weight = random((7, cols), torch.float32, 2, "cuda"), random((cols,), torch.float32, 3, "cuda")
    inf, nan = float("inf"), float("nan")
    x[0, 3], x[1, 5], x[2, :], x[3, 7:], x[4, cols - 1] = nan, inf, -inf, -inf, -inf
    x[5, 1], x[5, cols - 1] = nan, inf
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), equal_nan=True)
    x[2:4] = random((2, cols), torch.float32, 4, "cuda")
    torch.testing.assert_close(layer_norm(x, weight), F.layer_norm(x, (cols,), weight), equal_nan=True)
    expected = F.rms_norm(x, (cols,), weight, eps=1e-6)
    torch.testing.assert_close(rms_norm(x, weight), expected, equal_nan=True)


def test_variance_about_a_large_mean():
    norm_checks.check_large_mean(layer_norm, device="cuda")
    x = random((4, 70000), torch.float32, 0, "cuda") + 4096.0
    rstd = layer_norm(x, eps=0.0, return_stats=True)[2]
    assert_close(rstd, torch.rsqrt(x.double().var(-1, unbiased=False)), "rstd", 20.0)


@pytest.mark.parametrize("norm", NORMS)
def test_strides_and_wanted_gradients(norm):
    norm_checks.check_strides(NORMS[norm][0], "cuda")
    norm_checks.check_parts(NORMS[norm][0], "cuda")


def test_offsets_beyond_31_bits():
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of memory")
    for cols in (16385, 16384):
        x = torch.randn(140000, cols, device="cuda", dtype=torch.bfloat16)
        y = softmax(x)
        assert_close(y[-8:], x[-8:].double().softmax(-1), "y", 4.0)
    y = layer_norm(x)
    assert_close(y[-8:], norm_checks.norm64(x[-8:].double(), None, None, 1e-5, True), "y")


def runs(cols, rows=1500):
    """name -> a call on fixed inputs whose outputs are compared bit by bit."""
    x, dy = (random((rows, cols), torch.bfloat16, i, "cuda") for i in range(2))
    y = softmax(x)

    def train(norm):
        leaves = [
            x.clone().requires_grad_(),
            *(random((cols,), torch.float32, i, "cuda").requires_grad_() for i in (2, 3)),
        ]
        out = norm(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dy))

    return {
        "softmax": lambda: (softmax(x), softmax_backward(dy, y)),
        "layer_norm": lambda: train(layer_norm),
        "rms_norm": lambda: train(rms_norm),
    }


@pytest.mark.parametrize("cols", [300, 4096, 20001, 32768, 50257, 100000])
def test_the_same_bits_in_every_run(cols):
    for name, call in runs(cols).items():
        first = call()
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(first, call(), strict=True)), name


@pytest.mark.parametrize("cols", [300, 4096, 20001, 40000, 50257])
def test_graph_capture(cols):
    x = random((200, cols), torch.float32, 0, "cuda")
    weight = random((cols,), torch.float32, 1, "cuda")

    def step():
        y = softmax(x)
        n, total, _, rstd = layer_norm(x, weight, residual=y, return_stats=True)
        return softmax_backward(n, y), rms_norm(total, weight), rstd

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    x.copy_(random((200, cols), torch.float32, 5, "cuda"))
    graph.replay()
    for actual, expected in zip(outputs, step(), strict=True):
        assert torch.equal(actual, expected)


def test_never_waits_for_the_gpu():
    for call in (*runs(5000).values(), *runs(20001).values()):
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_compiles_without_a_break():
    def block(x, weight, bias, residual):
        y, total = layer_norm(x * 2.0, weight, bias, residual=residual)
        return softmax(y) + rms_norm(total, weight)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for shape in ((64, 256), (30, 1000), (2, 7, 520), (2, 100, 20001)):
        ours, theirs = (norm_checks.tensors(shape, (torch.float32,) * 4, device="cuda") for _ in range(2))
        dy = random(shape, torch.float32, 9, "cuda")
        a, b = compiled(*ours), block(*theirs)
        torch.testing.assert_close(a, b)
        a.backward(dy)
        b.backward(dy)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_host_cost_is_near_that_of_torch():
    x, weight = torch.randn(256, 256, device="cuda"), torch.randn(256, device="cuda")
    pairs = {
        "softmax": {"ours": lambda: softmax(x), "torch": lambda: torch.softmax(x, -1)},
        "layer_norm": {
            "ours": lambda: layer_norm(x, weight, weight),
            "torch": lambda: F.layer_norm(x, (256,), weight, weight),
        },
    }
    for name, calls in pairs.items():
        seconds = host_seconds(calls)
        # Triton's own launch alone takes as long as four of torch's calls.
        told = ", ".join(f"{who} {s * 1e6:.1f} µs" for who, s in seconds.items())
        assert seconds["ours"] <= 3.5 * seconds["torch"], f"{name}: {told}"


def test_config_is_that_of_the_shape():
    """What is chosen for this GPU is what a given config does."""
    x = torch.randn(100, 3000, device="cuda")
    chosen = choose.forward(100, 3000, 4, machine(0))
    assert torch.equal(softmax(x), softmax(x, config=chosen))
    torch.testing.assert_close(softmax(x), softmax(x, config=replace(chosen, num_warps=8)))
