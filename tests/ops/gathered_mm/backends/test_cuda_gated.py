"""cuda_gated without a GPU: what it accepts, what it compiles to, and its numbers on the host. Its speed: tests/gpu."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backends import cuda_gated
from expertile.ops.gathered_mm.backends.cuda_gated import BACKEND, Config
from expertile.ops.gathered_mm.choose import choose
from expertile.ops.gathered_mm.problem import Product
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.launch import nvrtc
from tests.ops.gathered_mm.cases import CASES, GATED, Case, make, poisoned_outputs, run_case
from tests.support import aot
from tests.support.cuda_emulator import Fault, grouped_on_host, needs_compiler, shows, without

H100, H200, A100 = (Device.by_name(name) for name in ("h100 sxm", "h200", "a100"))
# Rings of few stages come round several times in a small case.
SMALL = (
    Config(num_stages=3),
    Config(64, 256, 3, store_slots=2, dynamic=False),
    Config(128, 64, 2, store_slots=4),
    Config(128, 160, 3, dynamic=False),
    Config(128, 256, 3, "split", store_slots=2),
)
LONGER = (
    Case("longer", GATED, (130, 0, 300), n=264, k=328, past=9),
    Case("interleaved", GATED, (130, 1, 70), n=200, k=136, interleaved=True, bias=True, activation="gpt_oss"),
    Case("bias", GATED, (130, 0, 70), n=200, k=72, bias=True, gathered="", save_pre=False),
)


@pytest.fixture
def with_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_takes_gated_products_of_weights_as_models_store_them(case, with_nvrtc):
    given = make(case)[0]
    aligned = not (given.k % 8 or given.intermediate % 8 or given.a_strides[0] % 8)
    taken = given.product is Product.GATED and given.dtype.itemsize == 2 and given.b_strides[1] == 1 and aligned
    assert (BACKEND.supports(given, H200) is None) == taken


def test_refusals(with_nvrtc, monkeypatch):
    problem = make(LONGER[0])[0]
    assert "9.0" in BACKEND.supports(problem, A100)
    assert "experts" in BACKEND.supports(replace(problem, groups=4096), H200)
    with pytest.raises(ValueError, match="block_n: expected a multiple of 32, half gate, half up, got 144"):
        BACKEND.run(*make(LONGER[0]), Config(block_n=144), (None, None))
    monkeypatch.setattr(nvrtc, "missing", lambda: "needs NVRTC")
    assert BACKEND.supports(problem, H200) == "needs NVRTC"


@pytest.mark.parametrize(
    ("rows", "n", "k", "names"),
    [
        (64, 5760, 2880, {}),
        (128, 5760, 2880, {H200, H100}),
        (512, 28672, 4096, {H200, H100}),
        (2048, 5760, 2880, {H200}),
        (256, 4096, 7168, {}),
        (256, 5760, 2048, {}),
    ],
)
def test_auto_takes_it_for_wide_results(rows, n, k, names, with_nvrtc):
    made = make(Case("wide", GATED, (1,) * 16, n=32, k=64))[0]
    sizes = {"groups": 32, "m": 32 * rows, "n": n, "k": k, "tokens": 8 * rows}
    problem = replace(made, device_type="cuda", a_strides=(k, 1), b_strides=(n * k, 1, k), **sizes)
    for device in (H200, H100):
        assert (choose(problem, device).backend is BACKEND) == (device in names)
        # 128 x 192 on an H100, and for many rows where 96 divides the columns of gate and 128 does not.
        wide = device is H100 or (rows >= 512 and n == 5760)
        assert BACKEND.configs(problem, device)[0].block_n == (192 if wide else 256)
    assert choose(problem, H200, batch_invariant=True).backend.name == "gluon_gather"


FORMS = {"halves": (0, 0, 1), "without-pre": (1, 0, 0), "interleaved": (3, 1, 1)}


@pytest.mark.compile
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", [Config(), Config(64, 256, 4, dynamic=False)], ids=str)
def test_compiles(config, form):
    """Hardly anything spills, and a step's products are queued without a wait between them."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    macros = dict(zip(("ACTIVATION", "INTERLEAVED", "SAVE_PRE"), FORMS[form], strict=True))
    bias, before = 2 if form == "interleaved" else 0, (cuda_gated._ACTIVATION,)
    source = config.source(torch.bfloat16, Layout.RAGGED_M, True, bias, gated=macros, before=before)
    code = aot.machine_code(nvrtc.compiled(source, "--ftz=true"))
    assert len(re.findall(r"\b(LDL|STL)\b", code)) <= 16 * (bias > 0)
    products = re.findall(r"HGMMA\.64x(\d+)x16[^\n]*", code)
    assert set(products) == {str(config.block_n)}
    # ptxas ends every product with gsb0 where it takes them for dependent ("wgmma serialized").
    assert 4 * len(re.findall(r"HGMMA[^\n]*gsb0", code)) <= len(products)
    assert "UTMALDG" in code and "UTMASTG.2D" in code
    assert "BRA.U.ANY" not in code  # a loop over lanes around an instruction of TMA


on_the_host = partial(grouped_on_host, module=cuda_gated)


@needs_compiler
@pytest.mark.parametrize("config", SMALL, ids=str)
def test_right_on_the_host(config, cuda_folder, monkeypatch):
    """With the first config every case that it takes, for each of which g++ has a kernel to compile."""
    counter = on_the_host(monkeypatch, folder=cuda_folder, programs=3)
    ran = 0
    for case in (*CASES, *LONGER) if config is SMALL[0] else LONGER[:2]:
        if BACKEND.supports(make(case)[0], H200) is None:
            run_case(BACKEND, case, config, "cpu")
            ran += 1
            assert counter == 0
    assert ran >= (8 if config is SMALL[0] else 2)


@needs_compiler
def test_same_act_with_and_without_pre(cuda_folder, monkeypatch):
    on_the_host(monkeypatch, folder=cuda_folder, programs=2)
    problem, operands = make(LONGER[0])
    kept, alone = poisoned_outputs(problem, operands), poisoned_outputs(problem, operands)
    BACKEND.run(problem, operands, SMALL[0], kept)
    BACKEND.run(replace(problem, save_pre=False), operands, SMALL[0], (alone[0], None))
    used = sum(LONGER[0].sizes)
    assert torch.equal(kept[0][:used], alone[0][:used])


FAULTS: dict[str, tuple[Config, Case, Fault]] = {
    "a stage is read before it is full": (SMALL[0], LONGER[0], without("multiply_tile", "barrier_wait")),
    "consumers do not wait for their turn": (SMALL[2], LONGER[0], without("consume", "barrier_wait", 1)),
    "up comes from the next tile's gate": (
        SMALL[0],
        LONGER[0],
        lambda s: s.replace("*in.b_wide_map, bar, k, tile.col / 2", "*in.b_map, bar, k, tile.col / 2 + BLOCK_N / 2"),
    ),
    "gate and up are stored one for the other": (
        SMALL[0],
        LONGER[1],
        lambda s: s.replace("InTurn{sum, up}", "InTurn{up, sum}"),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_on_the_host(name, cuda_folder, monkeypatch):
    config, case, fault = FAULTS[name]

    def prepare(patch, seed):
        on_the_host(patch, folder=cuda_folder, programs=2, seed=seed, fault=fault)

    shows(monkeypatch, prepare, lambda: run_case(BACKEND, replace(case, past=0), config, "cpu"))
