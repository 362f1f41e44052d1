"""Problems prepared side by side in processes that stay, and timed in turn: while one is timed, the others are stopped.

A process prepares a problem (planning, verification, both compilers), says that it is ready, and waits. Whoever is
timed has the card and the cores to itself, because the others get SIGSTOP until it is done. A problem that fails, hangs
or takes its process down is one answer among the others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from kernelbench_problem import Outline, Task

from postlude.check.records import Record

LOOK_S = 0.1
DRAIN_S = 0.15  # until what the others had queued on the card is done, checks in float64 among it
COMMAND = [sys.executable, str(Path(__file__).with_name("kernelbench.py")), "--worker"]
NO_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory")


@dataclass(frozen=True)
class Answer:
    """The rows of a problem, or why there are none."""

    task: Task
    rows: tuple[Record, ...] = ()
    reason: str = ""
    seconds: float = 0.0  # of its own: without waiting and without being stopped

    @property
    def lacked_memory(self) -> bool:
        return any(word in self.reason.lower() for word in NO_MEMORY)


class Worker:
    """A process for one problem after another."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self.process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,  # a group of its own, with the compilers that it starts
            env={**os.environ, **environment},
        )
        self.task: Task | None = None
        self.is_ready = False
        self.memory = 0
        self.spent, self.since = 0.0, 0.0

    def begin(self, task: Task, memory: int) -> None:
        self.task, self.memory, self.is_ready = task, memory, False
        self.spent, self.since = 0.0, time.monotonic()
        self.say(asdict(task))

    def say(self, message: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write((json.dumps(message) + "\n").encode())
            self.process.stdin.flush()

    def hear(self) -> dict[str, Any] | None:
        """Its next line; None where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def is_late(self, limit: float) -> bool:
        return not self.is_ready and self.spent + time.monotonic() - self.since > limit

    def stop(self) -> None:
        self.spent += time.monotonic() - self.since
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self.since = time.monotonic()

    def end(self) -> str:
        """Ends it with all that it started; the last line that it wrote."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self.log.seek(0)
        lines = [line for line in self.log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        self.log.close()
        return lines[-1].strip()[:200] if lines else ""

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Pool:
    """`jobs` workers; problems begin while their memory fits into `memory` bytes, the largest first."""

    def __init__(self, jobs: int, memory: int, limit: float, told: Callable[[Answer], None]) -> None:
        self.jobs, self.memory, self.limit, self.told = jobs, memory, limit, told
        # torch.compile compiles in the worker itself, so that its group is all there is to stop.
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} if jobs > 1 else {}
        self.environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **threads}
        self.workers = [Worker(self.environment) for _ in range(jobs)]  # they import while problems are looked at

    def run(self, tasks: Sequence[tuple[Task, Outline]]) -> None:
        left, alone = sorted(tasks, key=lambda one: -one[1].memory), list[tuple[Task, Outline]]()
        known = dict(tasks)
        try:
            while left or any(worker.task for worker in self.workers):
                self._begin(left)
                for answer in self._look():
                    if answer.lacked_memory and self.jobs > 1 and answer.task not in [task for task, _ in alone]:
                        alone.append((answer.task, known[answer.task]))
                    else:
                        self.told(answer)
            self.jobs = 1
            for one in alone:  # nobody else is there
                waiting = [one]
                while waiting or any(worker.task for worker in self.workers):
                    self._begin(waiting)
                    for answer in self._look():
                        self.told(answer)
        finally:
            for worker in self.workers:
                worker.end()

    def _begin(self, left: list[tuple[Task, Outline]]) -> None:
        """Whatever fits beside those that run; one that fits beside nobody runs alone."""
        while left:
            busy = [worker for worker in self.workers if worker.task]
            room = self.memory - sum(worker.memory for worker in busy)
            place = next((at for at, (_, one) in enumerate(left) if one.memory <= room or not busy), None)
            if len(busy) >= self.jobs or place is None:
                return
            task, outline = left.pop(place)
            self._idle().begin(task, outline.memory)

    def _idle(self) -> Worker:
        for worker in self.workers:
            if worker.task is None:
                return worker
        self.workers.append(Worker(self.environment))
        return self.workers[-1]

    def _look(self) -> list[Answer]:
        """What has been answered since; times one problem that is ready."""
        waiting = [worker for worker in self.workers if worker.task and not worker.is_ready]
        speaking, _, _ = select.select([worker.process.stdout for worker in waiting], [], [], LOOK_S if waiting else 0)
        answers = [self._heard(worker) for worker in waiting if worker.process.stdout in speaking]
        late = [worker for worker in waiting if worker.task and worker.is_late(self.limit)]
        answers += [self._given_up(worker, f"it took longer than {self.limit:g} s and was ended") for worker in late]
        ready = next((worker for worker in self.workers if worker.task and worker.is_ready), None)
        if ready is not None:
            answers.append(self._timed(ready))
        return [answer for answer in answers if answer is not None]

    def _heard(self, worker: Worker) -> Answer | None:
        said = worker.hear()
        if said is None:
            return self._given_up(worker, "its process ended")
        if "ready" in said:
            worker.spent += time.monotonic() - worker.since
            worker.is_ready = True
            return None
        return self._answered(worker, said)

    def _answered(self, worker: Worker, said: dict[str, Any]) -> Answer:
        assert worker.task is not None
        rows = tuple(Record(**row) for row in said.get("rows", ()))
        answer = Answer(worker.task, rows, said.get("error", ""), worker.spent)
        worker.task = None
        if said.get("is_over"):  # the card's context is of no more use
            self.workers.remove(worker)
            worker.end()
        return answer

    def _given_up(self, worker: Worker, reason: str) -> Answer:
        assert worker.task is not None
        self.workers.remove(worker)
        last = worker.end()
        return Answer(worker.task, (), f"{reason}; it said last: {last}" if last else reason, worker.spent)

    def _timed(self, worker: Worker) -> Answer:
        assert worker.process.stdout is not None
        with self._others_stopped(worker):
            worker.since = time.monotonic()
            worker.say("go")
            heard, _, _ = select.select([worker.process.stdout], [], [], self.limit)
            said = worker.hear() if heard else None
            worker.spent += time.monotonic() - worker.since
        if said is None:
            return self._given_up(worker, "its process ended" if heard else f"timing took longer than {self.limit:g} s")
        return self._answered(worker, said)

    @contextmanager
    def _others_stopped(self, worker: Worker) -> Iterator[None]:
        others = [one for one in self.workers if one is not worker and one.task and not one.is_ready]
        for one in others:
            one.stop()
        time.sleep(DRAIN_S if others else 0.0)
        try:
            yield
        finally:
            for one in others:
                one.go_on()
