"""Which launches share a counter, and what is done where there is none."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from expertile.ops.launch import counter, nvrtc


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with seven counters, of which streams have three; its stream, whether that captures, and whether it has
    memory can be set."""
    now = SimpleNamespace(stream=7, capturing=False, memory=True, asked=0)

    def zeros(count):
        now.asked += 1
        if not now.memory:
            raise RuntimeError("cuMemAlloc: out of memory (2)")
        return torch.zeros(count, dtype=torch.int32)

    like = SimpleNamespace(is_cuda=True, device=torch.device("cpu"), get_device=lambda: 0)
    monkeypatch.setattr(nvrtc, "zeros", zeros)
    monkeypatch.setattr(nvrtc, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(counter, "current_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(counter, "_COUNT", 7)
    monkeypatch.setattr(counter, "_OF_STREAMS", 3)
    monkeypatch.setattr(counter, "_counters", {})
    counter._of_stream.cache_clear()
    now.ask = lambda: counter.tile_counter(True, like)
    yield now
    counter._of_stream.cache_clear()


def test_a_stream_has_one_and_every_captured_launch_its_own(gpu):
    places = []
    for stream in (7, 8, 7, 8):
        gpu.stream = stream
        places.append(gpu.ask().data_ptr())
    gpu.capturing = True
    captured = [gpu.ask().data_ptr() for _ in range(4)]
    assert places[:2] == places[2:] and len({*places, *captured}) == 6 and gpu.asked == 1


def test_where_none_is_left_it_is_a_new_one(gpu):
    kept = gpu.ask()
    gpu.capturing = True
    held = [gpu.ask() for _ in range(6)]  # four are left for graphs
    assert len({x.data_ptr() for x in (kept, *held)}) == 7 and not torch.cat(held).any()
    gpu.capturing = False
    assert gpu.ask().data_ptr() == kept.data_ptr()  # graphs take none of the streams'
    others = []
    for gpu.stream in (8, 9, 10, 10):
        others.append(gpu.ask())
    assert len({x.data_ptr() for x in others}) == 4 and gpu.asked == 1


def test_memory_is_not_asked_for_while_a_graph_is_captured(gpu):
    gpu.capturing = True
    assert gpu.ask() == 0 and gpu.asked == 0


def test_without_memory_each_launch_has_a_new_one(gpu):
    gpu.memory = False
    first, second = gpu.ask(), gpu.ask()
    assert first.data_ptr() != second.data_ptr() and gpu.asked == 1
    gpu.capturing = True
    assert gpu.ask() == 0


def test_a_stream_that_is_another_in_each_thread_shares_none(gpu):
    gpu.stream = 2  # cudaStreamPerThread
    first, second = gpu.ask(), gpu.ask()
    assert first.data_ptr() != second.data_ptr() and gpu.asked == 0


def test_static_schedules_and_cpus_need_none():
    x = torch.zeros(3)
    assert counter.tile_counter(False, x) is x
    assert counter.tile_counter(True, x).tolist() == [0]


def test_zeros_come_from_the_driver_in_the_mode_that_captures_allow(monkeypatch):
    called = []

    class Driver:
        def __getattr__(self, name):
            def call(*arguments):
                called.append(name)
                if name == "cuThreadExchangeStreamCaptureMode":
                    called.append(arguments[0]._obj.value)
                    arguments[0]._obj.value = 0  # the mode before
                return 2 if name == "cuMemAlloc_v2" and failing else 0

            return call

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: None)
    failing = False
    shape = nvrtc._Memory(64).__cuda_array_interface__
    assert (shape["shape"], shape["typestr"]) == ((64,), "<i4")
    assert called[:2] == ["cuThreadExchangeStreamCaptureMode", 2] and called[-1] == 0
    assert called[2:-2] == [
        "cuMemAlloc_v2",
        "cuStreamCreate",
        "cuMemsetD32Async",
        "cuStreamSynchronize",
        "cuStreamDestroy_v2",
    ]
    failing, before = True, len(called)
    with pytest.raises(RuntimeError, match="cuMemAlloc"):
        nvrtc._Memory(64)
    assert called[before:].count("cuThreadExchangeStreamCaptureMode") == 2 and called[-1] == 0
