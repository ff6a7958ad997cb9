"""The simulated world with devices that are really divided: work takes what its share lets it.

A share is a weight of a work-conserving division, as the `cpu` actuator applies it. What one tenant
does at once (the sequences of a rollout worker) is one batch, whose iterations cost the same whatever
its size. Tenants tell what they did as those of a CPU slot do: iterations that have ended, their tokens
and the time on the core. Nodes and ways are kind.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import SubStageKind
from jigsawrl.contract.spec import PipelineSpec
from tests.unit.core.rollouts import TOKEN_S
from tests.unit.core.tenants import Process, Tenants
from tests.unit.core.world import Faults, World

QUANTUM_S = 0.02
TELL_S = 0.5
"""How often tenants tell what they did."""

TRAINED_TOKENS = 20
"""Of one iteration of a trainer, which takes as long as one of decoding."""


class Job(msgspec.Struct):
    """What keeps a process busy."""

    process: Process
    left_s: float
    action: Callable[[], None]
    wanted: Callable[[], bool]


class Done(msgspec.Struct):
    """Of one kind by one process, not told yet."""

    started_s: float
    work_s: float = 0.0
    num_tokens: float = 0.0


class DividedTenants(Tenants):
    """Tell what they did as it goes on, not at its end."""

    def _worked(
        self, process: Process, *kinds: SubStageKind, version: int, num_tokens: int
    ) -> None:
        return


class DividedWorld(World):
    """Runs pipelines on two devices, or more."""

    def __init__(
        self, pipelines: list[PipelineSpec], *, policy: str, seed: int = 0, num_devices: int = 2
    ) -> None:
        self._jobs: list[Job] = []
        self._done: dict[tuple[Process, SubStageKind, int], Done] = {}
        self._worked_s: dict[Process, float] = {}
        super().__init__(
            seed=seed,
            faults=Faults(),
            pipelines=pipelines,
            policy=policy,
            memory_bytes=(1 << 30,) * num_devices,
        )
        self.every(QUANTUM_S, self._pass_time)
        self.every(TELL_S, self._tell)

    def build_tenants(self) -> Tenants:
        return DividedTenants(self)

    def work(
        self, process: Process, work_s: float, then: Callable[[], None], wanted: Callable[[], bool]
    ) -> None:
        self._jobs.append(Job(process, work_s, then, wanted))

    def worked_s(self, process: Process) -> float:
        return self._worked_s.get(process, 0.0)

    def _pass_time(self) -> None:
        self._jobs = [job for job in self._jobs if job.wanted()]
        busy = {job.process.worker.id: job.process for job in self._jobs}
        work_s = {name: QUANTUM_S * self._rate(p, busy) for name, p in busy.items()}
        for name, process in busy.items():
            self._worked_s[process] = self.worked_s(process) + work_s[name]
            started = Done(self.now_s - QUANTUM_S)
            done = self._done.setdefault((process, *self._doing(process)), started)
            done.work_s += work_s[name]
            num_tokens = len(process.parts) if process.order.role == "rollout" else TRAINED_TOKENS
            done.num_tokens += num_tokens * work_s[name] / TOKEN_S
        for job in list(self._jobs):
            job.left_s -= work_s[job.process.worker.id]
            if job.left_s <= 1e-9:
                self._jobs.remove(job)
                job.action()

    def _rate(self, process: Process, busy: dict[str, Process]) -> float:
        device = process.order.device
        shares = self.machines.shares.get(device or "", {})
        total = sum(shares.get(n, 0.0) for n, p in busy.items() if p.order.device == device)
        mine = shares.get(process.worker.id, 0.0)
        return mine / total if total > 0 else 1.0

    def _doing(self, process: Process) -> tuple[SubStageKind, int]:
        if process.order.role == "trainer":
            return "forward_backward", process.version
        return "tail_decode" if len(process.parts) <= 8 else "bulk_decode", process.weights[1]

    def _tell(self) -> None:
        for (process, kind, version), done in list(self._done.items()):
            num_iterations = int(done.work_s / TOKEN_S + 1e-6)
            if not num_iterations:
                continue
            # What an iteration that goes on has cost so far is told with it.
            told = min(1.0, num_iterations * TOKEN_S / done.work_s)
            span = parts.SubStage(
                kind=kind,
                version=max(version, 0),
                started_s=done.started_s,
                ended_s=self.now_s,
                duration_s=self.now_s - done.started_s,
                num_iterations=num_iterations,
                num_tokens=round(told * done.num_tokens),
                cpu_s=told * done.work_s,
            )
            done.started_s = self.now_s
            done.work_s -= told * done.work_s
            done.num_tokens -= told * done.num_tokens
            ended = e.SubStagesEnded(
                id=self.new_id("spans"),
                pipeline=process.order.pipeline,
                worker=process.worker,
                spans=(span,),
            )
            self.say(process, ended)


def times_s(pipelines: list[PipelineSpec], *, policy: str, seed: int = 0) -> dict[str, float]:
    """Stream time of each pipeline from its first version to its end."""
    world = DividedWorld(pipelines, policy=policy, seed=seed)
    world.run(limit_s=4000)
    states = world.scheduler.state.pipelines
    assert [p.stage for p in states.values()] == ["finished"] * len(states)
    return {name: p.running_s for name, p in states.items()}
