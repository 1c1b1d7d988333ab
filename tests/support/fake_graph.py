"""CUDA graphs on a CPU: a capture notes whose memory it uses, and a replay fails if some of that was freed since.

A graph holds addresses. What is allocated during a capture belongs to the graph's own pool and stays; all else must be
kept by others, or a replay reads and writes what has become somebody else's. Nothing is computed anew by a replay.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph. outside: the storages that a capture used and did not make, and the first
    operator that took each."""

    def __init__(self) -> None:
        self.outside: list[tuple[StorageWeakRef, str]] = []
        self.replays = 0

    def replay(self) -> None:
        freed = [user for storage, user in self.outside if storage.expired()]
        if freed:
            raise RuntimeError(f"a graph uses memory that was freed: operands of {', '.join(freed)}")
        self.replays += 1


class _Capture(TorchDispatchMode):
    def __init__(self, graph: FakeGraph):
        super().__init__()
        self.graph = graph
        # A weak reference keeps a storage's number from being given to another one.
        self.seen: dict[int, StorageWeakRef] = {}

    def _new(self, values: Any) -> list[StorageWeakRef]:
        found = []
        for x in tree_leaves(values):
            if isinstance(x, torch.Tensor):
                storage = StorageWeakRef(x.untyped_storage())
                if self.seen.setdefault(storage.cdata, storage) is storage:
                    found.append(storage)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.graph.outside += [(storage, str(func)) for storage in self._new((args, kwargs))]
        out = func(*args, **(kwargs or {}))
        self._new(out)
        return out


@contextlib.contextmanager
def _capture(graph: FakeGraph, **options: Any) -> Iterator[None]:
    with _Capture(graph):
        yield


@contextlib.contextmanager
def fake_graphs() -> Iterator[None]:
    """Within the block torch.cuda.graph captures into `FakeGraph`s."""
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", FakeGraph),
        mock.patch.object(torch.cuda, "graph", _capture),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
    ):
        yield
