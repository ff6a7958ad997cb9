"""The simulated world with devices that are really divided: work takes what its share lets it.

A share is a weight of a work-conserving division, as the `cpu` actuator applies it. What one tenant
does at once (the sequences of a rollout worker) is one batch. Nodes and ways are kind.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import SubStageKind
from jigsawrl.contract.spec import PipelineSpec
from tests.unit.core.tenants import Process, Tenants
from tests.unit.core.world import Faults, World

QUANTUM_S = 0.02
TELL_S = 0.5
"""How often tenants tell what they did."""


class Job(msgspec.Struct):
    """What keeps a process busy."""

    process: Process
    left_s: float
    action: Callable[[], None]


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
        self._busy_s: dict[tuple[str, SubStageKind, int], tuple[Process, float]] = {}
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

    def work(self, process: Process, work_s: float, action: Callable[[], None]) -> None:
        self._jobs.append(Job(process, work_s, action))

    def _pass_time(self) -> None:
        busy = {job.process.worker.id: job.process for job in self._jobs}
        rates = {name: self._rate(process, busy) for name, process in busy.items()}
        for name, process in busy.items():
            key = (name, *self._doing(process))
            self._busy_s[key] = (process, self._busy_s.get(key, (process, 0.0))[1] + QUANTUM_S)
        for job in list(self._jobs):
            job.left_s -= QUANTUM_S * rates[job.process.worker.id]
            if job.left_s <= 1e-9:
                self._jobs.remove(job)
                job.action()

    def _rate(self, process: Process, busy: dict[str, Process]) -> float:
        device = process.order.device
        shares = self._shares.get(device or "", {})
        total = sum(shares.get(n, 0.0) for n, p in busy.items() if p.order.device == device)
        mine = shares.get(process.worker.id, 0.0)
        return mine / total if total > 0 else 1.0

    def _doing(self, process: Process) -> tuple[SubStageKind, int]:
        if process.order.role == "trainer":
            return "forward_backward", process.version
        return "tail_decode" if len(process.parts) <= 8 else "bulk_decode", process.weights[1]

    def _tell(self) -> None:
        told, self._busy_s = self._busy_s, {}
        for (_, kind, version), (process, seconds) in told.items():
            span = parts.SubStage(
                kind=kind,
                version=max(version, 0),
                started_s=self.now_s - seconds,
                ended_s=self.now_s,
                duration_s=seconds,
                num_iterations=1,
                num_tokens=10,
            )
            head = {
                "id": self.new_id("spans"),
                "pipeline": process.order.pipeline,
                "worker": process.worker,
            }
            self.say(process, e.SubStagesEnded(**head, spans=(span,)))


def times_s(pipelines: list[PipelineSpec], *, policy: str, seed: int = 0) -> dict[str, float]:
    """Stream time of each pipeline from its first version to its end."""
    world = DividedWorld(pipelines, policy=policy, seed=seed)
    world.run(limit_s=4000)
    states = world.scheduler.state.pipelines
    assert [p.stage for p in states.values()] == ["finished"] * len(states)
    return {name: p.running_s for name, p in states.items()}
