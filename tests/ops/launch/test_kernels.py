"""Row kernels launched past Triton: the kernel that Triton would have compiled for the same arguments."""

from unittest import mock

import pytest
import torch
import triton

from expertile.ops.launch import kernels, launch
from expertile.ops.launch.device import Machine
from expertile.ops.quantize import launch as quantize
from expertile.ops.rows import norm, softmax
from tests.ops.launch.test_plan import fake_gpu

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]
H200 = Machine(132, False)


def _softmax() -> None:
    softmax.on_rows((torch.empty(5, 160),))


def _odd_softmax() -> None:
    softmax.on_rows((torch.empty(5, 161, dtype=torch.bfloat16)[:, 1:],))


def _norm() -> None:
    x = torch.empty(1, 256)
    norm.forward(x, None, torch.empty(256), None, 1e-5, True, True)


def _strips() -> None:
    x, offs = torch.empty(256, 128, dtype=torch.bfloat16), torch.tensor([100, 256], dtype=torch.int32)
    quantize.quantize_tokens(x, offs)


def _at_once() -> None:
    norm._sum_partials(torch.empty(1, 32, 100), torch.empty(100), None)


def nothing_known_any_more():
    for cache in (launch._compiled, softmax._launch, norm._launch):
        cache.cache_clear()
    kernels._READY.clear()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(softmax, "machine", lambda index: H200)
    monkeypatch.setattr(norm, "machine", lambda index: H200)
    nothing_known_any_more()
    yield
    nothing_known_any_more()


@pytest.mark.parametrize("call", [_softmax, _odd_softmax, _norm, _at_once, _strips])
def test_the_same_kernel_as_by_triton(call) -> None:
    with fake_gpu() as calls, mock.patch.object(launch, "prepare", lambda kernel, cluster: None):
        call()
    (ours, _, _, warmup), (by_triton, _, _, again) = calls
    assert warmup and not again and ours is by_triton


def _form(arguments):
    """Which of them are tuples, and which are None."""
    return tuple(_form(x) if isinstance(x, tuple) else x is None for x in arguments)


@pytest.mark.parametrize("call, is_planned", [(_norm, True), (_at_once, False), (_strips, False)])
def test_pointers_and_numbers_are_tuples_as_triton_takes_them(call, is_planned) -> None:
    """Of a kernel of `tensors` and `scalars`."""
    seen = []
    ready = launch.Compiled(lambda programs, stream, args: seen.append(args), 0, (), lambda device: 0, lambda: 90)
    with fake_gpu() as calls, mock.patch.object(launch, "prepare", lambda kernel, cluster: None):
        call()
    _, (_, _, by_triton, _) = calls
    nothing_known_any_more()
    with fake_gpu(), mock.patch.object(launch, "prepare", lambda kernel, cluster: ready):
        call()
    (given,) = seen
    assert len(by_triton) == 2 and isinstance(by_triton[0], tuple)
    assert _form(given[:2]) == _form(by_triton) and given[1] == by_triton[1]
    assert all(x is None for x in given[2:]) == is_planned


@pytest.mark.parametrize("call", [_softmax, _norm, _at_once, _strips])
def test_launched_with_all_of_its_parameters(call) -> None:
    seen = []
    ready = launch.Compiled(lambda programs, stream, args: seen.append(args), 0, (), lambda device: 0, lambda: 90)
    with fake_gpu() as calls, mock.patch.object(launch, "prepare", lambda kernel, cluster: ready):
        call()
        call()
    ((kernel, *_),) = calls
    assert [len(args) for args in seen] == [len(kernel.src.fn.arg_names)] * 2


def test_clusters_need_a_known_launcher() -> None:
    unknown = mock.patch.object(launch, "prepare", lambda kernel, cluster: None)
    with fake_gpu(), unknown, pytest.raises(RuntimeError, match="whose launcher is known to take clusters"):
        kernels.launch(kernels._mark, 1, (torch.empty(1),), (), (), num_warps=4, cluster=2)
