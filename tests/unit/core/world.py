"""A world for the scheduler to drive: nodes and tenants that answer its commands, late, twice, in
another order or never, and that die. Discrete events in simulated time; one seed, one course."""

import heapq
import itertools
from collections.abc import Callable
from random import Random

import msgspec
from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract.message import Ref, Worker
from jigsawrl.contract.spec import Device, EvaluationSpec, PipelineSpec
from jigsawrl.core import invariants
from jigsawrl.core.policies.serial import Serial
from jigsawrl.core.scheduler import Scheduler


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities, of one event or of one piece of work."""

    lose: float = 0.0
    repeat: float = 0.0
    kill_per_s: float = 0.0
    fail_work: float = 0.0
    silence_per_s: float = 0.0
    node_restart_per_s: float = 0.0


LOSABLE = (
    e.GroupsMade,
    e.SequencesAccepted,
    e.SequencesFinished,
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


class Process:
    """One boot of one tenant."""

    def __init__(self, worker: Worker, order: c.StartTenant) -> None:
        self.worker = worker
        self.order = order
        self.alive = True
        self.weights = (0, -1)
        self.gang_epoch = 0
        self.incarnation = 0
        self.version = 0
        self.held: dict[str, int] = {}
        self.last_delivery_s = 0.0


class World:
    """Runs until all pipelines have ended, or too long."""

    def __init__(self, *, seed: int, faults: Faults, pipelines: list[PipelineSpec]) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.now_s = 1000.0
        self.scheduler = Scheduler(policy=Serial())
        self.log: list[tuple[e.Event, float, int]] = []
        self.issued: list[list[c.Command]] = []
        self.snapshots: dict[int, bytes] = {}
        self.cuts: list[c.BatchCut] = []
        self.processes: dict[str, Process] = {}
        self.checkpoints: dict[str, int] = {}
        self.checkpoint_every = 2
        self._orders: dict[str, c.StartTenant] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._data = itertools.count(1)
        self._node_boot = "n1"
        self._silent_until_s = 0.0
        self.faulty = True
        self.publish(e.LeaderElected(id="leader", leader="s", code_version="1"))
        for pipeline in pipelines:
            self.publish(
                e.PipelineSubmitted(
                    id=f"submit:{pipeline.name}",
                    pipeline=pipeline.name,
                    spec=pipeline,
                    config=b"config",
                )
            )
        self._start_node()
        self._every(0.1, self._tick)
        self._every(2.0, self._heartbeat)
        self._every(1.0, self._harm)
        self._every(10.0, self._inventories)

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

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._counter), action))

    def _every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self._later(period_s, again)

        self._later(period_s, again)

    def _chance(self, probability: float) -> bool:
        return self.faulty and self.random.random() < probability

    def say(self, process: Process, event: e.Event) -> None:
        """An event of a process, with the faults of the way."""
        if not process.alive or (isinstance(event, LOSABLE) and self._chance(self.faults.lose)):
            return
        self.publish(event)
        if self._chance(self.faults.repeat):
            self._later(self.random.uniform(0, 3), lambda: self.publish(event))

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
        if isinstance(command, c.StartTenant | c.StopTenant):
            if command.worker.boot == self._node_boot:
                self._later(0.05, lambda: self._node_command(command))
            return
        process = self.processes.get(command.worker.id)
        if process is None or process.worker != command.worker:
            return
        at_s = max(process.last_delivery_s, self.now_s + self.random.uniform(0.001, 0.05))
        process.last_delivery_s = at_s
        self._later(at_s - self.now_s, lambda: process.alive and self._handle(process, command))

    def _id(self, tag: str) -> str:
        return f"{tag}:{next(self._counter)}"

    def new_ref(self, stream: str = "DATA") -> Ref:
        return Ref(stream=stream, sequence=next(self._data))

    # --- Node ------------------------------------------------------------------------------------

    def _start_node(self) -> None:
        devices = tuple(Device("node", i, "cpu", 1 << 30) for i in range(2))
        node = Worker(id="node", boot=self._node_boot)
        self.publish(e.NodeStarted(id=self._id("node"), node=node, devices=devices))

    def _node_command(self, command: c.Command) -> None:
        if command.worker.boot != self._node_boot:
            return
        if isinstance(command, c.StartTenant):
            self._orders[command.tenant] = command
            self._spawn(command)
        elif isinstance(command, c.StopTenant):
            self._orders.pop(command.tenant, None)
            process = self.processes.pop(command.tenant, None)
            if process is not None:
                process.alive = False

    def _spawn(self, order: c.StartTenant) -> None:
        if self._orders.get(order.tenant) is not order:
            return
        worker = Worker(id=order.tenant, boot=f"b{next(self._counter)}")
        process = Process(worker, order)
        self.processes[order.tenant] = process
        self.say(
            process,
            e.WorkerStarted(
                id=self._id("started"),
                pipeline=order.pipeline,
                worker=worker,
                role=order.role,
                node="node",
                device=order.device,
            ),
        )

    def spawn_by_hand(self, order: c.StartTenant) -> None:
        """A tenant that the scheduler did not place."""
        self._orders[order.tenant] = order
        self._spawn(order)

    def silence(self, duration_s: float) -> None:
        """The node's heartbeats do not arrive for a while."""
        self._silent_until_s = self.now_s + duration_s

    def kill(self, process: Process) -> None:
        """A crash; the node sees it (perhaps after the next start) and restarts it."""
        process.alive = False
        order = process.order
        exited = e.WorkerExited(
            id=self._id("exited"),
            pipeline=order.pipeline,
            worker=process.worker,
            exit_code=-9,
            reason="killed",
        )
        self._later(self.random.uniform(0.0, 0.8), lambda: self.publish(exited))
        self._later(0.4, lambda: self._spawn(order))

    def _tick(self) -> None:
        self.publish(e.Tick(id=self._id("tick")))

    def _heartbeat(self) -> None:
        if self.now_s >= self._silent_until_s:
            node = Worker(id="node", boot=self._node_boot)
            self.publish(e.Heartbeat(id=self._id("heartbeat"), node=node))

    def _harm(self) -> None:
        for process in list(self.processes.values()):
            if process.alive and self._chance(self.faults.kill_per_s):
                self.kill(process)
        if self._chance(self.faults.silence_per_s):
            self.silence(20.0)
        if self._chance(self.faults.node_restart_per_s):
            for process in self.processes.values():
                process.alive = False
            self.processes, self._orders = {}, {}
            self._node_boot = f"n{next(self._counter)}"
            self._start_node()

    def _inventories(self) -> None:
        for process in list(self.processes.values()):
            if process.order.role == "rollout":
                held = tuple(e.Held(name, epoch) for name, epoch in process.held.items())
                self.say(
                    process,
                    e.Inventory(
                        id=self._id("inventory"),
                        pipeline=process.order.pipeline,
                        worker=process.worker,
                        held=held,
                    ),
                )

    # --- Tenants ---------------------------------------------------------------------------------

    def _handle(self, process: Process, command: c.Command) -> None:
        name = type(command).__name__.lower()
        getattr(self, f"_on_{name}")(process, command)

    def _head(self, process: Process, tag: str) -> dict[str, object]:
        return {
            "id": self._id(tag),
            "pipeline": process.order.pipeline,
            "worker": process.worker,
        }

    def _on_configure(self, process: Process, command: c.Configure) -> None:
        version = gang_epoch = None
        if process.order.role == "trainer":
            version = process.version = self.checkpoints.get(process.order.pipeline, 0)
            gang_epoch = process.gang_epoch = command.gang_epoch
        ready = e.WorkerReady(
            **self._head(process, "ready"),
            role=process.order.role,
            version=version,
            gang_epoch=gang_epoch,
        )
        self._later(0.2, lambda: self.say(process, ready))

    def _on_makegroups(self, process: Process, command: c.MakeGroups) -> None:
        made, failed = [], []
        for order in command.orders:
            if self._chance(self.faults.fail_work):
                failed.append(e.GroupFailure(group=order.group, epoch=order.epoch, reason="no"))
            else:
                made.append(
                    e.GroupMade(
                        group=order.group,
                        epoch=order.epoch,
                        ref=self.new_ref(),
                        num_prompt_tokens=3,
                    )
                )
        event = e.GroupsMade(**self._head(process, "made"), made=tuple(made), failed=tuple(failed))
        self._later(0.01, lambda: self.say(process, event))

    def _on_loadweights(self, process: Process, command: c.LoadWeights) -> None:
        def load() -> None:
            process.weights = (command.incarnation, command.version)
            event = e.WeightsLoaded(
                **self._head(process, "loaded"),
                incarnation=command.incarnation,
                version=command.version,
            )
            self.say(process, event)

        self._later(0.05, load)

    def _on_placesequences(self, process: Process, command: c.PlaceSequences) -> None:
        accepted = []
        for placement in command.placements:
            assert process.weights == (command.incarnation, placement.min_version)
            process.held[placement.sequence] = placement.epoch
            accepted.append(e.Held(placement.sequence, placement.epoch))
            name, epoch = placement.sequence, placement.epoch
            self._later(
                self.random.uniform(0.05, 2.0),
                lambda name=name, epoch=epoch: self._generate(process, name, epoch),
            )
        event = e.SequencesAccepted(**self._head(process, "accepted"), accepted=tuple(accepted))
        self.say(process, event)

    def _generate(self, process: Process, name: str, epoch: int) -> None:
        if process.held.get(name) != epoch or not process.alive:
            return
        del process.held[name]
        failed: tuple[e.SequenceFailure, ...] = ()
        finished: tuple[e.SequenceFinish, ...] = ()
        if self._chance(self.faults.fail_work):
            failed = (e.SequenceFailure(sequence=name, epoch=epoch, reason="no"),)
        else:
            finish = e.SequenceFinish(
                sequence=name,
                epoch=epoch,
                ref=self.new_ref(),
                finish_reason="stop",
                num_tokens=5,
                min_version=process.weights[1],
                max_version=process.weights[1],
            )
            finished = (finish,)
        self.say(
            process,
            e.SequencesFinished(
                **self._head(process, "finished"), finished=finished, failed=failed
            ),
        )

    def _on_drop(self, process: Process, command: c.Drop) -> None:
        for name, epoch in command.sequences:
            if process.held.get(name, epoch + 1) <= epoch:
                del process.held[name]

    def _on_scoresequences(self, process: Process, command: c.ScoreSequences) -> None:
        rewarded = tuple(
            e.SequenceReward(
                sequence=order.sequence,
                epoch=order.epoch,
                ref=self.new_ref(),
                reward=float("nan") if self._chance(self.faults.fail_work) else 1.0,
            )
            for order in command.orders
        )
        event = e.SequencesRewarded(**self._head(process, "rewarded"), rewarded=rewarded)
        self._later(0.02, lambda: self.say(process, event))

    def _on_publishweights(self, process: Process, command: c.PublishWeights) -> None:
        assert command.version == process.version
        self._announce(process, command.incarnation, 0)

    def _announce(self, process: Process, incarnation: int, num_tokens: int) -> None:
        event = e.VersionPublished(
            **self._head(process, "published"),
            gang_epoch=process.gang_epoch,
            incarnation=incarnation,
            version=process.version,
            manifest=self.new_ref("WEIGHTS"),
            num_bytes=1,
            num_trained_tokens=num_tokens,
            metrics={"loss": 1.0} if num_tokens else {},
        )
        self.say(process, event)

    def _on_batchcut(self, process: Process, command: c.BatchCut) -> None:
        assert command.version == process.version
        assert command.gang_epoch == process.gang_epoch
        self._later(0.5, lambda: process.alive and self._train(process, command))

    def _train(self, process: Process, command: c.BatchCut) -> None:
        process.version += 1
        pipeline = process.order.pipeline
        due = process.version % self.checkpoint_every == 0
        if due and not self._chance(0.3):
            self.checkpoints[pipeline] = process.version
        last = self.scheduler.state.pipelines[pipeline].spec.num_steps
        if process.version == last:
            self.checkpoints[pipeline] = process.version
        if self._chance(self.faults.kill_per_s * 10):
            self.kill(process)
            return
        self._announce(process, command.incarnation, 100)
        if self.checkpoints.get(pipeline) == process.version:
            self.say(
                process,
                e.CheckpointCommitted(
                    **self._head(process, "checkpoint"),
                    gang_epoch=process.gang_epoch,
                    incarnation=command.incarnation,
                    version=process.version,
                    path="x",
                ),
            )

    def _on_evaluate(self, process: Process, command: c.Evaluate) -> None:
        event = e.EvaluationFinished(
            **self._head(process, "evaluated"),
            incarnation=command.incarnation,
            version=command.version,
            num_problems=10,
            num_correct=5,
            mean_reward=0.5,
            mean_num_tokens=5.0,
            duration_s=1.0,
        )
        self._later(self.random.uniform(0.5, 6.0), lambda: self.say(process, event))
