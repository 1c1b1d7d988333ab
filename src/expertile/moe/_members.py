"""The ranks of a process group: whether they agree on a configuration, and who is missing when a collective fails.

A collective does not say because of whom it failed. So a rank that sees it fail signs in the group's store, which needs
neither the broken connections nor the GPU, and the ranks that do not sign within a while are named."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_POLL_S = 0.01


def group_device(group: dist.ProcessGroup) -> torch.device:
    """The kind of device whose tensors the group's collectives take: CUDA where it can."""
    kinds = {device.type for device in group._device_types}
    return torch.device("cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu")


class Members:
    """This process among the ranks of `group`; messages name ranks by their number in the default group.

    A wait for other ranks ends in an error after 3/4 of `timeout` at most, and naming those that are missing takes
    1/8 of it at most: before the group's own timeout, which ends NCCL's processes without a word about the culprit.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None):
        self.group = group
        self.rank, self.world = group.rank(), group.size()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.name = str(self.ranks[self.rank])
        own = group._get_backend(group_device(group)).options._timeout
        self.timeout: timedelta = own if timeout is None else timeout
        self.patience = self.timeout * 0.75
        self.grace = min(self.timeout / 8, timedelta(seconds=10))
        self._store = group.get_group_store()
        # The n-th that every rank makes belong together; the store counts, so no state is needed here.
        n = self._store.add(f"expertile/made/{self.rank}", 1)
        self._prefix = f"expertile/{n}"

    def __deepcopy__(self, memo: Any) -> "Members":
        return self  # connections to other processes, not values

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Compare `settings` (what json can write) with all ranks'.

        Raises:
            ValueError: on every rank, naming each setting and rank that differs from the first rank.
            RuntimeError: naming the ranks that did not come within 3/4 of the timeout.
        """
        with self.named("comparing configurations"):
            mine = {key: str(value) for key, value in settings.items()}
            self._store.set(f"{self._prefix}/settings/{self.rank}", json.dumps(mine))
            missing = self._wait("settings", self.patience)
            theirs = [
                {} if r in missing else json.loads(self._store.get(f"{self._prefix}/settings/{r}"))
                for r in range(self.world)
            ]
            self._store.set(f"{self._prefix}/read/{self.rank}", "")
            if missing:
                raise _Missing(missing)
        # The store ends with the process that keeps it, which may end with the error below: not before all have read.
        with suppress(RuntimeError):
            self._wait("read", self.grace)
        wrong = [
            f"{key} is {other.get(key)} on rank {self.ranks[r]} and {theirs[0].get(key)} on rank {self.ranks[0]}"
            for r, other in enumerate(theirs)
            for key in sorted(other.keys() | theirs[0].keys())
            if other.get(key) != theirs[0].get(key)
        ]
        if wrong:
            raise ValueError("config: expected the same on every rank of the group, got: " + "; ".join(wrong))

    def _wait(self, topic: str, limit: timedelta) -> list[int]:
        """The ranks that have not signed under `topic` after `limit`."""
        end = time.monotonic() + limit.total_seconds()
        waiting = list(range(self.world))
        while True:
            waiting = [r for r in waiting if not self._store.check([f"{self._prefix}/{topic}/{r}"])]
            if not waiting or time.monotonic() > end:
                return waiting
            time.sleep(_POLL_S)

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Any error of a collective inside becomes a RuntimeError that names the ranks that no longer take part."""
        try:
            yield
        except _Missing as error:
            raise RuntimeError(self._message(what, error.ranks, "did not come")) from None
        except RuntimeError as error:  # torch's DistError and its kinds are RuntimeErrors
            raise RuntimeError(self._roll_call(what, error)) from error

    def _roll_call(self, what: str, error: RuntimeError) -> str:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        try:
            self._store.set(f"{self._prefix}/failed/{self.rank}", what)
            missing = self._wait("failed", self.grace)
        except RuntimeError:
            return (
                f"expert parallel, rank {self.name}: {what} failed, and the group's store does not answer: "
                f"the process that keeps it, usually rank 0, has ended ({first_line})"
            )
        if missing:
            return self._message(what, missing, "no longer answer", first_line)
        return f"expert parallel, rank {self.name}: {what} failed on every rank of the group ({first_line})"

    def _message(self, what: str, missing: list[int], verb: str, reason: str = "") -> str:
        names = ", ".join(str(self.ranks[r]) for r in missing)
        return f"expert parallel, rank {self.name}: {what} failed: of {self.world} ranks these {verb}: {names}" + (
            f" ({reason})" if reason else ""
        )

    def wait(self, work: dist.Work, on_gpu: bool) -> None:
        """Wait for a collective: on a GPU the current stream does, on a CPU this process, for 3/4 of the timeout."""
        if on_gpu:
            work.wait()
        elif not work.wait(self.patience):
            raise RuntimeError(f"no answer within {self.patience.total_seconds():g} s")

    def copy_to_host(self, x: torch.Tensor) -> Callable[[], list[Any]]:
        """x.tolist() when it is called. It waits for what the current stream was given so far, and so for the ranks
        that this waits for, no longer than 3/4 of the timeout; not for what the stream is given meanwhile."""
        if not x.is_cuda:
            return x.tolist
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        copy.copy_(x, non_blocking=True)
        event = self._recorded(x.device)

        def there() -> list[Any]:
            self._wait_for(event)
            return copy.tolist()

        return there

    def synchronize(self, device: torch.device) -> None:
        """Wait for what the device's current stream was given, which a dead rank would make last for ever."""
        self._wait_for(self._recorded(device))

    def _recorded(self, device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def _wait_for(self, event: torch.cuda.Event) -> None:
        end = time.monotonic() + self.patience.total_seconds()
        while not event.query():
            if time.monotonic() > end:
                raise RuntimeError(f"no answer within {self.patience.total_seconds():g} s")


class _Missing(Exception):
    def __init__(self, ranks: list[int]):
        super().__init__(ranks)
        self.ranks = ranks
