"""Gates a user's candidate in a process of its own: an illegal memory access poisons a CUDA context for good, and a
deadlocked kernel never returns. One child serves many workloads and is replaced when it dies. Requests and answers go
through a pipe of their own, since candidates may print."""

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import failure_of, release
from expertile.lab.race.candidate import candidate_name, gather, load, parse_spec
from expertile.lab.race.gate import judge as judge_rival
from expertile.lab.race.operands import make_operands
from expertile.lab.race.operator import Call, Inputs, Rival, Verdict, Workload
from expertile.lab.race.reference import limits_of, reference_for
from expertile.lab.race.workloads import GroupedWorkload
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.problem import Problem

_REPEATS = 8  # calls after the gate, to bring out a crash that does not come at once


class UserCandidates:
    """The candidates of one run by name, each with its gate. Entering waits until all are loaded: ValueError names the
    first that cannot be, before anything is measured."""

    def __init__(self, specs: Sequence[str], device: torch.device, timeout_s: float = 180.0) -> None:
        places = {candidate_name(spec): parse_spec(spec) for spec in specs}
        for spec in specs:
            name = candidate_name(spec)
            if parse_spec(spec) != places[name]:
                raise ValueError(f"candidates: expected a name of its own for each, got {name} of two folders")
        self.gates = {candidate_name(spec): CandidateGate(spec, device, timeout_s) for spec in specs}

    def __enter__(self) -> "UserCandidates":
        try:
            for gate in self.gates.values():
                gate.start()
            for gate in self.gates.values():
                gate.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for gate in self.gates.values():
            gate.close()


class CandidateGate:
    """Judges one candidate on workload after workload, in a child process. Use as a context manager. `backend`: the
    candidate in this process, once it has passed."""

    def __init__(self, spec: str, device: torch.device, timeout_s: float = 180.0) -> None:
        self.spec, self.device, self.timeout_s = spec, device, timeout_s
        self.backend: Backend | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._log: IO[bytes] | None = None
        self._unloadable = ""

    def __enter__(self) -> "CandidateGate":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to load the candidate; several gates may do so side by side."""
        self._start().send(None)

    def wait(self) -> None:
        """Wait until the candidate is loaded (after `start`). ValueError that names it and says why it cannot be."""
        try:
            reason = self._receive()
        except _Ended as end:
            reason = str(end)
        if reason:
            self.close()
            why = str(reason).removeprefix("candidate: ")
            raise ValueError(f"candidate {candidate_name(self.spec)} cannot be loaded: {why}")

    def check(self, workload: GroupedWorkload, seed: int) -> Verdict:
        """The verdict on `workload`: the gate's, or a failed one (`checked` 0) that says how the candidate ended."""
        if self._unloadable:
            return _failed(self._unloadable)
        try:
            (self._pipe or self._start()).send((workload, seed))
            answer = self._receive()
        except OSError:  # it died between two workloads
            return _failed(str(self._obituary()))
        except _Ended as end:
            return _failed(str(end))
        if isinstance(answer, Verdict):
            if answer.ok and self.backend is None:
                self.backend = load(self.spec)
            return answer
        self._unloadable = answer
        self.close()
        return _failed(answer)

    def close(self) -> None:
        """End the child, whatever it is doing."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # with compilers it may have started
            child.wait()
        for opened in (self._pipe, self._log):
            if opened is not None:
                opened.close()
        self._pipe = self._log = None

    def _start(self) -> Connection:
        self._pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child; closed with it)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        words = (str(theirs.fileno()), self.spec, str(self.device))
        self._child = subprocess.Popen(
            [sys.executable, "-m", "expertile.lab.race.candidate_gate", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs.fileno(),),
            env=env,
            start_new_session=True,
        )
        theirs.close()
        return self._pipe

    def _receive(self) -> Verdict | str:
        """The child's next answer: a verdict, or why the candidate could not be loaded ("": it was)."""
        assert self._pipe is not None
        if not self._pipe.poll(self.timeout_s):
            self.close()
            raise _Ended(f"hangs: no result after {self.timeout_s:g} s")
        try:
            return self._pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            raise self._obituary() from None

    def _obituary(self) -> "_Ended":
        assert self._child is not None
        try:
            code = self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        last = self._last_words()
        self.close()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return _Ended(f"crashes: its process was ended by {name}")
        return _Ended(f"crashes: its process exited with code {code}{f' ({last})' if last else ''}")

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]


def _failed(reason: str) -> Verdict:
    """No result to compare: nothing was checked."""
    return Verdict(False, math.inf, math.inf, reason, checked=0.0)


class _Ended(Exception):
    """How a child ended that gives no answer."""


def serve(pipe: Connection, spec: str, device: torch.device) -> None:
    """The child's loop: one answer per request until there are no more."""
    unloadable, backend = "", None
    try:
        backend = load(spec)
    except ValueError as error:
        unloadable = str(error)
    with suppress(EOFError):
        while True:
            request = pipe.recv()
            pipe.send(
                unloadable if backend is None or request is None else judge(backend, request[0], device, request[1])
            )


def judge(backend: Backend, workload: GroupedWorkload, device: torch.device, seed: int) -> Verdict:
    """Gate a candidate on two sets of random operands and call it a few times more. Exceptions become reasons."""
    try:
        verdict = _judge_once(backend, workload, device, seed)
        if verdict.ok:
            release(device)
            verdict = _judge_once(backend, workload, device, seed + 1)
        return verdict
    except Exception as error:
        return _failed(failure_of(error, device).reason)


def judge_again(backend: Backend, workload: GroupedWorkload, inputs: Inputs, seed: int) -> Verdict:
    """Judge a candidate that was timed on `inputs`, with new values in their memory. One that answers from what it
    kept of an earlier call, or computes in the gate alone, is wrong. Without room for the new values the gate's word
    stands."""
    device = inputs[0].device
    try:
        fresh = make_operands(workload, device, seed)
    except torch.OutOfMemoryError:
        return Verdict(True, 0.0, 0.0)
    try:
        for held, new in ((inputs[0], fresh.a), (inputs[1], fresh.b)):
            held.data.copy_(new)  # of `data`: no count of versions tells
        del fresh, new
        return _judge_on(backend, workload, Operands(*inputs))
    except Exception as error:
        return _failed(failure_of(error, device).reason)


def _judge_once(backend: Backend, workload: GroupedWorkload, device: torch.device, seed: int) -> Verdict:
    return _judge_on(backend, workload, make_operands(workload, device, seed))


def _judge_on(backend: Backend, workload: GroupedWorkload, operands: Operands) -> Verdict:
    device = operands.a.device
    problem = Problem.from_tensors(operands.a, operands.b, operands.offs)
    sizes = workload.group_sizes
    config = backend.configs(problem, Device.current(device))[0]

    def run(out: torch.Tensor | None) -> Any:
        return backend.run(problem.with_sizes(sizes if out is not None else None), operands, config, out)

    def bind(w: Workload, inputs: Inputs) -> Call:
        own = torch.full(problem.out_shape, math.nan, dtype=problem.out_dtype, device=device)
        return lambda: (gather(run(None), problem, operands, own),)

    rival = Rival(backend.name, bind, bind_out=lambda w, inputs: run)
    inputs = tuple(x for x in (operands.a, operands.b, operands.offs) if x is not None)
    reference = reference_for(problem, operands, sizes)
    verdict = judge_rival(rival, workload, inputs, reference, limits_of(problem, sizes))
    with torch.no_grad():
        for _ in range(_REPEATS):
            run(None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return verdict


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], torch.device(sys.argv[3]))
