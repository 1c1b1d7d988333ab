"""CPU tensors that say they lie on an H200, and launches that do nothing: the host's side of a call, and only that.

What is faked is what a call asks of its tensors, of the driver and of Triton's compiler; everything between the public
function and the driver is the real thing. No values come out.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from triton.runtime.driver import driver as triton_driver
from triton.runtime.jit import JITFunction

from expertile.device import Device
from expertile.ops import backend
from expertile.ops.grouped_mm import api
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import _gluon_launch, gluon_hopper, torch_grouped, triton_pointer, triton_tma
from expertile.ops.grouped_mm.choose import Choice, choose
from expertile.ops.grouped_mm.problem import Problem
from expertile.ops.launch import device as launch_device
from expertile.ops.launch import launch
from tests.support import fake_launcher
from tests.support.fake_driver import FakeDriver

BOX = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64]}
# The backends whose launch is faked; "auto" chooses among them.
OWN = (triton_pointer.BACKEND, triton_tma.BACKEND, gluon_hopper.BACKEND)
FAKED: tuple[Backend, ...] = (torch_grouped.BACKEND, *OWN)
# The caches that must not remember what was faked.
CACHES = (
    api._planned,
    launch._encode,
    launch._compiled,
    _gluon_launch._launch,
    triton_pointer._launch,
    triton_tma._launch,
)


def _choose(problem: Problem, device: Device) -> Choice:
    return choose(problem, device, FAKED, quiet=True)


@contextlib.contextmanager
def fake_cuda() -> Iterator[list[int]]:
    """Within the block every tensor looks like one of cuda:0; yields a list that grows by one for each launch."""
    h200, cuda0 = Device.by_name("h200"), torch.device("cuda", 0)
    launches: list[int] = []
    compiled = launch.Compiled(
        lambda programs, *_: launches.append(programs), 0, (BOX,) * 3, lambda device: 0, lambda: 0
    )
    fakes = (
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True)),
        mock.patch.object(torch.Tensor, "device", property(lambda self: cuda0)),
        mock.patch.object(torch.Tensor, "get_device", lambda self: 0),
        mock.patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext()),
        mock.patch.object(Device, "current", staticmethod(lambda torch_device=None: h200)),
        mock.patch.object(api, "_device", lambda kind, index: h200),
        mock.patch.object(backend, "device_of", lambda kind, index: h200),
        mock.patch.object(api, "choose", _choose),
        mock.patch.object(launch_device, "_sm_count", lambda device: h200.sm_count),
        mock.patch.object(torch_grouped, "_GROUPED_MM", lambda a, b, offs: a),
        mock.patch.object(launch, "prepare", lambda kernel, cluster: compiled),
        mock.patch.object(JITFunction, "run", lambda self, *args, **kwargs: None),
    )
    before = triton_driver._active
    fake = FakeDriver(90)
    fake.utils = fake_launcher.utils(lambda *args: None, [])  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for cache in CACHES:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        triton_driver.set_active(fake)
        stack.callback(lambda: setattr(triton_driver, "_active", before))
        for each in fakes:
            stack.enter_context(each)
        yield launches
