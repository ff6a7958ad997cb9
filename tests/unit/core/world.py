"""A world for the scheduler to drive: nodes and tenants that answer its commands, late, twice, in
another order or never, and that die. Discrete events in simulated time; one seed, one course."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

import msgspec

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import Ledger, Ref
from jigsawrl.contract.profile import DeviceProfile
from jigsawrl.contract.spec import EvaluationSpec, PipelineSpec
from jigsawrl.core import invariants
from jigsawrl.core.policies import DEFAULT_POLICY, POLICIES
from jigsawrl.core.policies.base import Policy
from jigsawrl.core.scheduler import Scheduler
from tests.unit.core.machines import Machines
from tests.unit.core.rollouts import Made
from tests.unit.core.tenants import Process, Tenants


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities, of one event or of one piece of work."""

    lose: float = 0.0
    repeat: float = 0.0
    kill_per_s: float = 0.0
    fail_work: float = 0.0
    silence_per_s: float = 0.0
    node_restart_per_s: float = 0.0
    node_loss_per_s: float = 0.0
    """A machine vanishes for a while."""
    node_leave_per_s: float = 0.0
    """A machine leaves with notice, and comes back later."""
    isolate_per_s: float = 0.0
    """A rollout worker is cut off for a while; what it says arrives later."""
    uniform_rewards: float = 0.0
    """Of one group: all its rewards are equal."""


LOSABLE = (
    e.GroupsMade,
    e.SequencesAccepted,
    e.SequencesFinished,
    e.SequencesExported,
    e.SequencesProgressed,
    e.SequencesRewarded,
    e.WeightsLoaded,
)
"""What a lease or an inventory heals. The other events are not lost while their sender lives."""


def spec(name: str = "p", **changes: object) -> PipelineSpec:
    """A small pipeline."""
    base = PipelineSpec(
        name=name,
        mode="sync",
        seed=1,
        num_steps=3,
        groups_per_batch=3,
        group_size=3,
        min_group_size=2,
        num_rollout_workers=2,
        evaluation=EvaluationSpec(every=2),
    )
    return msgspec.structs.replace(base, **changes)


def asynchronous(max_staleness: int, **changes: object) -> PipelineSpec:
    """A small pipeline in mode async, as its config would give it."""
    fields: dict[str, object] = {
        "mode": "async",
        "max_staleness": max_staleness,
        "sample_bound": max_staleness,
        "pipeline_depth": max_staleness + 1,
    }
    return spec(**(fields | changes))


KIND = Faults()


class World:
    """Runs until all pipelines have ended, or too long."""

    def __init__(
        self,
        *,
        seed: int,
        faults: Faults,
        pipelines: list[PipelineSpec],
        policy: str | Policy = DEFAULT_POLICY,
        companions: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        memory_bytes: tuple[int, ...] = (1 << 30, 1 << 30),
        machines: Mapping[str, tuple[int, ...]] | None = None,
        profile: DeviceProfile | None = None,
    ) -> None:
        """`memory_bytes` of each device of the one machine, or of each of the `machines`; `profile` of
        all."""
        self.random = Random(seed)
        self.faults = faults
        self.now_s = 1000.0
        self.policies = dict(POLICIES)
        if not isinstance(policy, str):
            self.policies[policy.name] = policy
            policy = policy.name
        self.scheduler = Scheduler(policies=self.policies)
        self.log: list[tuple[e.Event, float, int]] = []
        self.issued: list[list[c.Command]] = []
        self.snapshots: dict[int, bytes] = {}
        self.cuts: list[c.BatchCut] = []
        self.processes: dict[str, Process] = {}
        self.checkpoints: dict[str, int] = {}
        self.ledgers: dict[tuple[str, int], Ledger] = {}
        """By (pipeline, version): what a checkpoint of that version holds."""
        self.channels: dict[str, dict[Ref, tuple[int, int]]] = {}
        """Per pipeline what lies on its weight channel: manifest -> (incarnation, version)."""
        self.records: dict[Ref, Made] = {}
        """Stored sequences, whole and partial."""
        self.num_made: Counter[str] = Counter()
        """Tokens made of each sequence, by all owners that told of them."""
        self.checkpoint_every = 2
        self.machines = Machines(self, machines or {"node": memory_bytes})
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._data = itertools.count(1)
        self.faulty = True
        self._companions = companions
        self._tenants = self.build_tenants()
        self._open(
            pipelines,
            e.LeaderElected(
                id="leader", leader="s", code_version="1", policy=policy, profile=profile
            ),
        )
        for name in self.machines.by_name:
            self.machines.start(name)
        self.every(0.1, self._tick)
        self.every(2.0, self.machines.beat)
        self.every(1.0, self._harm)
        self.every(1.0, self._progress)
        self.every(10.0, self._inventories)

    def _open(self, pipelines: list[PipelineSpec], elected: e.LeaderElected) -> None:
        self.publish(elected)
        for pipeline in pipelines:
            self.publish(
                e.PipelineSubmitted(
                    id=f"submit:{pipeline.name}",
                    pipeline=pipeline.name,
                    spec=pipeline,
                    config=b"config",
                    companions=self._companions.get(pipeline.name, ()),
                )
            )

    def run(self, *, limit_s: float = 900.0) -> None:
        """To the end; after half the limit the world is kind, so that everything must end."""
        pipelines = self.scheduler.state.pipelines
        self.run_until(lambda: not any(p.live for p in pipelines.values()), limit_s=limit_s)
        self._tick()

    def run_until(self, condition: Callable[[], bool], *, limit_s: float = 900.0) -> None:
        """Until something is so."""
        start_s = self.now_s
        while not condition():
            self.now_s, _, action = heapq.heappop(self._queue)
            if self.now_s - start_s > limit_s / 2:
                self.faulty = False
            assert self.now_s - start_s < limit_s, "it does not come to this"
            action()

    # --- The stream ------------------------------------------------------------------------------

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._counter), action))

    def build_tenants(self) -> Tenants:
        """Who answers."""
        return Tenants(self)

    def work(
        self, process: Process, work_s: float, then: Callable[[], None], wanted: Callable[[], bool]
    ) -> None:
        """What keeps a process busy while it is `wanted`: here as if it had its device alone."""
        self.later(work_s, then)

    def worked_s(self, process: Process) -> float:
        """A clock of what a process does; only differences mean something, while it is busy."""
        return self.now_s

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.later(period_s, again)

        self.later(period_s, again)

    def chance(self, probability: float) -> bool:
        return self.faulty and self.random.random() < probability

    def say(self, process: Process, event: e.Event) -> None:
        """An event of a process, with the faults of the way."""
        if not process.alive or process.frozen:
            return
        if isinstance(event, LOSABLE) and self.chance(self.faults.lose):
            return
        if self.now_s < process.isolated_until_s:
            wait_s = process.isolated_until_s - self.now_s
            self.later(wait_s, lambda: process.alive and self.publish(event))
            return
        self.publish(event)
        if self.chance(self.faults.repeat):
            self.later(self.random.uniform(0, 3), lambda: self.publish(event))

    def publish(self, event: e.Event) -> None:
        sequence = len(self.log) + 1
        self.log.append((event, self.now_s, sequence))
        if sequence % 100 == 0:
            self.snapshots[sequence - 1] = self.scheduler.snapshot()
        issued = self.scheduler.handle(event, timestamp_s=self.now_s, sequence=sequence)
        invariants.check(self.scheduler.state)
        self.issued.append(issued)
        for command in issued:
            self._deliver(command)

    def _deliver(self, command: c.Command) -> None:
        if isinstance(command, c.BatchCut):
            self.cuts.append(command)
        if self.machines.deliver(command):
            return
        process = self.processes.get(command.worker.id)
        if process is None or process.worker != command.worker:
            return
        at_s = self.now_s + self.random.uniform(0.001, 0.05)
        at_s = max(process.last_delivery_s, process.isolated_until_s, at_s)
        process.last_delivery_s = at_s
        self.later(
            at_s - self.now_s, lambda: process.alive and self._tenants.handle(process, command)
        )

    def new_id(self, tag: str) -> str:
        return f"{tag}:{next(self._counter)}"

    def new_ref(self, stream: str = "DATA") -> Ref:
        return Ref(stream=stream, sequence=next(self._data))

    # --- Machines --------------------------------------------------------------------------------

    def spawn_by_hand(self, order: c.StartTenant) -> None:
        """A tenant that the scheduler did not place."""
        self.machines.by_name[order.worker.id].orders[order.tenant] = order
        self.machines.spawn(order)

    def silence(self, duration_s: float, machine: str = "node") -> None:
        """The node's heartbeats do not arrive for a while."""
        self.machines.by_name[machine].silent_until_s = self.now_s + duration_s

    def kill(self, process: Process) -> None:
        """A crash, after which its node starts it again."""
        self.machines.kill(process)

    def _tick(self) -> None:
        self.publish(e.Tick(id=self.new_id("tick")))

    def _harm(self) -> None:
        for process in list(self.processes.values()):
            if process.alive and self.chance(self.faults.kill_per_s):
                self.kill(process)
            is_rollout = process.order.role == "rollout"
            if process.alive and is_rollout and self.chance(self.faults.isolate_per_s):
                process.isolated_until_s = self.now_s + self.random.uniform(1.0, 45.0)
        self.machines.harm()

    def _progress(self) -> None:
        for process in list(self.processes.values()):
            if process.alive:
                self._tenants.tell_progress(process)

    def _inventories(self) -> None:
        for process in list(self.processes.values()):
            head = {"pipeline": process.order.pipeline, "worker": process.worker}
            if process.order.role != "rollout":
                self.say(process, e.WorkerAlive(id=self.new_id("alive"), **head))
                continue
            held = tuple(parts.Held(name, epoch) for name, epoch in process.held.items())
            self.say(process, e.Inventory(id=self.new_id("inventory"), held=held, **head))
