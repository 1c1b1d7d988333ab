"""Gates a user's candidate in a process of its own, so that a crash or a hang becomes a row and not a lost run.

An illegal memory access poisons a CUDA context for good, and a deadlocked kernel never returns; neither reaches the
process that measures. One child serves many workloads and is replaced when it dies. Requests go to its standard input
(pickled; None asks whether the candidate could be loaded), answers come back as JSON lines through a pipe of their own,
since candidates may print.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
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
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.problem import Problem

_REPEATS = 8  # calls after the gate, to bring out a crash that does not come at once


class UserCandidates:
    """The candidates of one run, each with a process that judges it. Use as a context manager.

    Entering waits until all are loaded: ValueError names the first that cannot be, before anything is measured.
    """

    def __init__(self, specs: Sequence[str], device: torch.device, timeout_s: float = 180.0) -> None:
        for spec in specs:
            parse_spec(spec)
        self.specs = {candidate_name(spec): spec for spec in specs}
        self._gates = {name: CandidateGate(spec, device, timeout_s) for name, spec in self.specs.items()}
        self._loaded: dict[str, Backend] = {}
        self._open = ExitStack()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.specs)

    def __enter__(self) -> UserCandidates:
        with ExitStack() as stack:
            for gate in self._gates.values():
                stack.enter_context(gate)
                gate.start()
            for gate in self._gates.values():
                gate.loaded()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def check(self, name: str, workload: GroupedWorkload, seed: int) -> Verdict:
        """The child's verdict; a candidate that passed is loaded into this process."""
        verdict = self._gates[name].check(workload, seed)
        if verdict.ok and name not in self._loaded:
            self._loaded[name] = load(self.specs[name])
        return verdict

    def loaded(self, name: str) -> Backend | None:
        """The backend of a candidate that has passed once."""
        return self._loaded.get(name)


class CandidateGate:
    """Judges one candidate on workload after workload, in a child process. Use as a context manager."""

    def __init__(self, spec: str, device: torch.device, timeout_s: float = 180.0) -> None:
        self.spec, self.device, self.timeout_s = spec, device, timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: int = -1
        self._buffer = b""
        self._log: IO[bytes] | None = None
        self._unloadable = ""

    def __enter__(self) -> CandidateGate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Begin to load the candidate; several gates may do so side by side."""
        self._start()
        self._send(None)

    def loaded(self) -> None:
        """Wait until the candidate is loaded (after `start`). ValueError that names it and says why it cannot be."""
        answer = self._receive()
        reason = answer if isinstance(answer, str) else answer.get("unloadable")
        if reason:
            self.close()
            why = str(reason).removeprefix("candidate: ")
            raise ValueError(f"candidate {candidate_name(self.spec)} cannot be loaded: {why}")

    def check(self, workload: GroupedWorkload, seed: int) -> Verdict:
        """The verdict on `workload`: the gate's, or a failed one (`checked` 0) that says how the candidate ended."""
        if self._unloadable:
            return _failed(self._unloadable)
        if self._child is None:
            self._start()
        try:
            self._send((workload, seed))
        except OSError:  # it died between two workloads
            return _failed(self._obituary())
        answer = self._receive()
        if isinstance(answer, str):
            return _failed(answer)
        if answer.get("unloadable"):
            self._unloadable = str(answer["unloadable"])
            self.close()
            return _failed(self._unloadable)
        rel, worst = (math.inf if answer[key] is None else answer[key] for key in ("rel_error", "max_error"))
        return Verdict(answer["ok"], rel, worst, answer["reason"], answer["checked"])

    def close(self) -> None:
        """End the child, whatever it is doing."""
        child, self._child = self._child, None
        if child is not None:
            _kill(child)
            os.close(self._answers)
        if self._log is not None:
            self._log.close()
            self._log = None
        self._buffer = b""

    def _start(self) -> None:
        read_end, write_end = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child; closed with it)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "expertile.lab.race.candidate_gate", str(write_end), self.spec, str(self.device)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write_end,),
            env=env,
            start_new_session=True,
        )
        os.close(write_end)
        self._answers = read_end

    def _send(self, request: Any) -> None:
        assert self._child is not None and self._child.stdin is not None
        body = pickle.dumps(request)
        self._child.stdin.write(struct.pack("<Q", len(body)) + body)
        self._child.stdin.flush()

    def _receive(self) -> dict[str, Any] | str:
        """The child's next answer, or why there is none."""
        deadline = time.monotonic() + self.timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                self.close()
                return f"hangs: no result after {self.timeout_s:g} s"
            ready, _, _ = select.select([self._answers], [], [], left)
            if not ready:
                continue
            data = os.read(self._answers, 1 << 16)
            if not data:
                return self._obituary()
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _obituary(self) -> str:
        assert self._child is not None
        try:
            code = self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        last = self._last_words()
        self.close()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return f"crashes: its process was ended by {name}"
        return f"crashes: its process exited with code {code}{f' ({last})' if last else ''}"

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]


def _failed(reason: str) -> Verdict:
    """No result to compare: nothing was checked."""
    return Verdict(False, math.inf, math.inf, reason, checked=0.0)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # with compilers it may have started
    child.wait()
    if child.stdin is not None:
        with suppress(OSError):
            child.stdin.close()


def serve(answers: IO[str], spec: str, device: torch.device) -> None:
    """The child's loop: one answer per request until standard input ends."""
    unloadable, backend = "", None
    try:
        backend = load(spec)
    except ValueError as error:
        unloadable = str(error)
    while header := sys.stdin.buffer.read(8):
        request = pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", header)[0]))
        if backend is None or request is None:
            answer: dict[str, Any] = {"unloadable": unloadable}
        else:
            workload, seed = request
            verdict = asdict(judge(backend, workload, device, seed))
            answer = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in verdict.items()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def judge(backend: Backend, workload: GroupedWorkload, device: torch.device, seed: int) -> Verdict:
    """Gate a candidate on two sets of random operands and call it a few times more. Exceptions become reasons."""
    try:
        verdict = Verdict(True, 0.0, 0.0)
        for attempt in range(2):
            verdict = _judge_once(backend, workload, device, seed + attempt)
            if not verdict.ok:
                break
            release(device)
        return verdict
    except Exception as error:
        return _failed(failure_of(error, device).reason)


def _judge_once(backend: Backend, workload: GroupedWorkload, device: torch.device, seed: int) -> Verdict:
    operands = make_operands(workload, device, seed)
    problem = Problem.from_tensors(operands.a, operands.b, operands.offs)
    sizes = workload.group_sizes
    config = backend.configs(problem, Device.current(device))[0]

    def run(out: torch.Tensor | None) -> Any:
        return backend.run(problem.with_sizes(sizes if out is not None else None), operands, config, out)

    def bind(w: Workload, inputs: Inputs) -> Call:
        own = torch.full(problem.out_shape, math.nan, dtype=problem.out_dtype, device=device)
        return lambda: (gather(run(None), problem, operands, own),)

    rival = Rival(backend.name, True, lambda w, d: None, bind, bind_out=lambda w, inputs: run)
    inputs = tuple(x for x in (operands.a, operands.b, operands.offs) if x is not None)
    reference = reference_for(problem, operands, sizes)
    verdict = judge_rival(rival, workload, inputs, reference, limits_of(problem, sizes))
    with torch.no_grad():
        for _ in range(_REPEATS):
            run(None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return verdict


def _main() -> None:
    descriptor, spec, device = sys.argv[1:]
    with os.fdopen(int(descriptor), "w") as answers:
        serve(answers, str(Path(spec)), torch.device(device))


if __name__ == "__main__":
    _main()
