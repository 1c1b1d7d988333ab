"""cuda_grouped without a GPU: what it accepts, what it compiles to, and its numbers on the host."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import cuda_grouped, gluon_hopper
from expertile.ops.grouped_mm.backends.cuda_grouped import BACKEND, Config
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.launch import nvrtc
from tests.ops.grouped_mm import cases
from tests.ops.grouped_mm.cases import Case
from tests.support import aot
from tests.support.cuda_emulator import Fault, grouped_on_host, needs_compiler, shows, without

H200, A100 = Device.by_name("h200"), Device.by_name("a100")
M, K = Layout.RAGGED_M, Layout.RAGGED_K
# Rings of few stages come round several times in a small case.
SMALL = (
    Config(num_stages=3),
    Config(64, 256, 3, store_slots=2, dynamic=False),
    Config(128, 64, 2, store_slots=4),
    Config(128, 144, 3, "split", dynamic=False),
    Config(128, 256, 3, "split", store_slots=2),
)
LONGER = (
    Case("longer", M, (130, 0, 200), n=264, k=1168, past=9),
    Case("kn-bias", M, (130, 1, 70, 300), n=328, k=256, b_storage="row", bias=True),
    Case("wgrad", K, (1100, 0, 70), m=200, n=264, past=5, a_storage="column", b_storage="row"),
)


@pytest.fixture
def with_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: None)


def problem_of(case: Case, operands) -> Problem:
    problem = Problem.from_tensors(*operands, case.out_dtype)
    return replace(problem, device_type="cuda").with_sizes(None)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_supports(case, with_nvrtc):
    """Of what `gluon_hopper` takes: ragged rows and a ragged K of 16-bit elements, with results of the same dtype or in
    float32."""
    problem = problem_of(case, cases.make(case))
    reason = BACKEND.supports(problem, H200)
    taken = case.layout in (M, K) and case.dtype.itemsize == 2 and case.out_torch_dtype in (case.dtype, torch.float32)
    assert (reason is None) == (taken and gluon_hopper.supports(problem, H200) is None), reason


def test_refusals(with_nvrtc, monkeypatch):
    problem = problem_of(LONGER[0], cases.make(LONGER[0]))
    assert "9.0" in str(BACKEND.supports(problem, A100))
    assert "32 bits" in str(BACKEND.supports(replace(problem, layout=K, groups=2048, m=2**20), H200))
    monkeypatch.setattr(nvrtc, "missing", lambda: "needs NVRTC")
    assert BACKEND.supports(problem, H200) == "needs NVRTC"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_n": 208}, "block_n: expected one of 64, .*, 192, got 208"),
        ({"block_n": 100}, "block_n"),
        ({"block_m": 64, "mode": "split"}, "block_m: expected one of 128, got 64"),
        ({"mode": "cooperative"}, "mode: expected one of split, pingpong, got cooperative"),
        ({"num_stages": 1}, "num_stages"),
        ({"store_slots": 0}, "store_slots"),
    ],
)
def test_configs_that_no_kernel_has(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields)


@pytest.mark.parametrize("groups", [1, 32, 2048])
def test_configs_fit(groups):
    """Into a multiprocessor, and no two are alike."""
    for n, k in ((1536, 512), (1496, 1000), (4096, 7168)):
        strides = (k, 1), (n * k, 1, k)
        problem = Problem(M, groups, 64 * groups, n, k, torch.bfloat16, torch.bfloat16, *strides)
        found = BACKEND.configs(problem, H200)
        assert len(set(found)) == len(found) == 5
        assert all(c.smem_bytes(max(32, groups), k_major=True) <= H200.smem_bytes for c in found)
        # Rows of 1000 elements begin anywhere in L2's lines: the largest tile first.
        assert found[0].block_n == (256 if k == 1000 else 192)
        assert {c.store_slots for c in found} == {2 if k == 512 else 1}


# Layout, whether K is contiguous in b, bytes of an element of the bias and of the result, whether it is added.
FORMS = {
    "m": (M, True, 0, 2, False),
    "m-kn-bias": (M, False, 2, 2, False),
    "k": (K, False, 0, 2, False),
    "k-added": (K, False, 0, 4, True),
}
FULL = (
    Config(),
    cuda_grouped._LOW,
    Config(block_n=160, store_slots=2, num_stages=4),
    Config(block_n=256, num_stages=4, mode="split"),
)


@pytest.mark.compile
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", FULL, ids=str)
def test_compiles(config, form):
    """Nothing spills, and a step's products are queued without a wait between them."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    layout, k_major, bias_bytes, out_bytes, add = FORMS[form]
    source = config.source(torch.bfloat16, layout, k_major, bias_bytes, out_bytes=out_bytes, add=add)
    code = aot.machine_code(nvrtc.compiled(source))
    assert not re.search(r"\b(LDL|STL)\b", code)
    products = re.findall(r"HGMMA\.64x(\d+)x16[^\n]*", code)
    assert str(config.block_n) in products
    # ptxas ends every product with gsb0 where it takes them for dependent ("wgmma serialized").
    waited = len(re.findall(r"HGMMA[^\n]*gsb0", code))
    assert 4 * waited <= len(products), (waited, len(products))
    assert "UTMALDG" in code and ("UTMAREDG.2D.ADD" if form == "k-added" else "UTMASTG.2D") in code
    assert "BRA.U.ANY" not in code  # a loop over lanes around an instruction of TMA


on_the_host = partial(grouped_on_host, module=cuda_grouped)


def run(case: Case, config: Config) -> None:
    """And check the result."""
    operands = cases.make(case)
    out = cases.poisoned_out(case)
    BACKEND.run(problem_of(case, operands), Operands(*operands), config, out)
    cases.check(case, out, cases.expected(case, *operands))


@needs_compiler
@pytest.mark.parametrize("config", SMALL, ids=str)
def test_right_on_the_host(config, cuda_folder, monkeypatch):
    """Every case that it takes and one of several tiles each way, on the machine of `cuda_emulator`; other dtypes and
    biases, for which g++ has another kernel to compile, with the first config alone."""
    counter = on_the_host(monkeypatch, folder=cuda_folder, programs=3)
    ran = 0
    for case in (*cases.CASES, *LONGER):
        if BACKEND.supports(problem_of(case, cases.make(case)), H200) is None:
            usual = case.dtype is torch.bfloat16 and not (case.bias and case not in LONGER)
            if usual or config is SMALL[0]:
                run(case, config)
                ran += 1
                assert counter == 0
    assert ran > 10


@needs_compiler
def test_results_with_rows_between_groups(cuda_folder, monkeypatch):
    """Where the groups of `out` do not follow one another: the rows between them stay."""
    on_the_host(monkeypatch, folder=cuda_folder, programs=3)
    operands = cases.make(LONGER[2])
    room = torch.full((3, 208, 264), 7.0, dtype=torch.bfloat16)
    BACKEND.run(problem_of(LONGER[2], operands), Operands(*operands), SMALL[0], room[:, :200])
    cases.check(LONGER[2], room[:, :200], cases.expected(LONGER[2], *operands))
    assert (room[:, 200:] == 7).all()


@needs_compiler
@pytest.mark.parametrize("m", [64, 200, 128, 72, 40])
@pytest.mark.parametrize("config", [SMALL[0], SMALL[1], SMALL[4], Config(128, 144, 2)], ids=str)
def test_adds_as_it_stores(config, m, cuda_folder, monkeypatch):
    """Twice over; rows that two tiles have are added once."""
    added(config, m, on_the_host(monkeypatch, folder=cuda_folder, programs=3))


@needs_compiler
def test_rows_that_are_added_twice_show(cuda_folder, monkeypatch):
    counter = on_the_host(monkeypatch, folder=cuda_folder, programs=3, fault=lambda s: s.replace("row >= skip", "true"))
    with pytest.raises(AssertionError):
        added(SMALL[0], 200, counter)


def added(config: Config, m: int, counter: torch.Tensor) -> None:
    case = replace(LONGER[2], m=m, out_dtype=torch.float32)
    operands = cases.make(case)
    buffer = torch.randn(3, m, 264, generator=torch.Generator().manual_seed(0))
    want = buffer + 2 * cases.expected(case, *operands).float()
    for _ in range(2):
        assert BACKEND.add(problem_of(case, operands), Operands(*operands), config, buffer) is buffer
    torch.testing.assert_close(buffer, want, rtol=1e-4, atol=2e-3)
    assert counter == 0


@needs_compiler
@pytest.mark.parametrize("ends", [(130, 130, 999), (130, 90, 330), (330, 200, 100)], ids=str)
def test_wrong_offsets_write_nothing_behind_the_result(ends, cuda_folder, monkeypatch):
    """What the rows hold then means nothing, but the next launch finds its counter."""
    counter = on_the_host(monkeypatch, folder=cuda_folder, programs=3)
    a, b, _offs, _bias = cases.make(LONGER[0])
    rows = a.shape[0]
    room = torch.full((rows + 128, 264), 7.0, dtype=torch.bfloat16)
    operands = Operands(a, b, torch.tensor(ends, dtype=torch.int32))
    problem = problem_of(LONGER[0], cases.make(LONGER[0]))
    BACKEND.run(problem, operands, SMALL[0], room[:rows])
    assert (room[rows:] == 7).all() and counter == 0


FAULTS: dict[str, tuple[Config, Case, Fault]] = {
    "a stage is read before it is full": (SMALL[0], LONGER[0], without("multiply_tile", "barrier_wait")),
    "a tile is never given back": (SMALL[4], LONGER[0], without("consume", "barrier_arrive")),
    "a group's last rows go to the tile's": (
        SMALL[0],
        LONGER[0],
        lambda s: s.replace("first_row(tile, part, at_once)", "tile.row + i * 64"),
    ),
    "consumers do not wait for their turn": (SMALL[2], LONGER[0], without("consume", "barrier_wait", 1)),
    "summands of the next group are loaded": (
        SMALL[0],
        LONGER[2],
        lambda s: s.replace("k, span.k_end);", "k, span.k_end + 40);"),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_on_the_host(name, cuda_folder, monkeypatch):
    config, case, fault = FAULTS[name]

    def prepare(patch, seed):
        on_the_host(patch, folder=cuda_folder, programs=2, seed=seed, fault=fault)

    shows(monkeypatch, prepare, lambda: run(case, config))
