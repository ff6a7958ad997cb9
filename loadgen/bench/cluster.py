"""A simulated cluster for benchmarks of the scheduler: nodes, devices and tenants without faults.

It drives a real `Scheduler` through steps whose events come as those of real workers do: ticks every
0.1 s, heartbeats every 2 s, finished sequences as one list per worker and turn, sub-stage events every
half a second, inventories every 10 s. Tenants that work on one device at once divide it by their
shares, so that what the policy decides changes what happens next. Stream time is simulated; a real
clock is read around `Scheduler.handle` only.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from jigsawrl.contract import commands, events, parts
from jigsawrl.contract.message import Role, SubStageKind, Worker
from jigsawrl.contract.spec import Device, PipelineSpec
from jigsawrl.core.scheduler import Scheduler
from loadgen.bench.answers import Answers, pipeline_of

TURN_S = 0.1
"""How often a tenant's work is moved on; real workers coalesce within 20 ms, so that here come fewer
events of more entries."""

REPORT_TURNS = 5
"""Sub-stage events come every half a second."""

PROGRESS_TURNS = 20

TOKENS_PER_S = 100.0
"""Of one sequence alone on a device."""

TAIL_SEQUENCES = 8
"""An iteration over so many costs no more than over one; beyond, 1/16 more each."""

LENGTH_TOKENS = (60.0, 0.8)
"""Median and sigma of the log-normal lengths: every twentieth is over 220."""

TRAIN_S = 1.5
"""Work of a trainer rank for one step, alone on its device."""

LEAST_SPEED = 0.05
"""Of a tenant that is held: an operating system starves nobody."""

Watch = Callable[[events.Event, float], None]
"""Called with every event and the seconds that handling it took."""


class Generating(msgspec.Struct):
    """One sequence on a worker."""

    held: parts.Held
    version: int
    num_left: float
    num_tokens: float = 0.0


class Tenant:
    """One process."""

    def __init__(self, order: commands.StartTenant) -> None:
        self.role: Role = order.role
        self.device = order.device or ""
        self.worker = Worker(id=order.tenant, boot="b")
        self.share = order.share
        self.sequences: dict[str, Generating] = {}
        self.cut: commands.BatchCut | None = None
        self.left_s = 0.0
        self.version = 0
        self.num_turns = 0
        self.turning = False
        self.spent: dict[SubStageKind, list[float]] = {}

    @property
    def busy(self) -> bool:
        """It wants its device."""
        return bool(self.sequences) or self.cut is not None

    def spend(self, kind: SubStageKind, duration_s: float, num_tokens: float) -> None:
        """Count what the next report tells."""
        total = self.spent.setdefault(kind, [0.0, 0.0])
        total[0] += duration_s
        total[1] += num_tokens


class Cluster:
    """Runs as long as it is asked to."""

    def __init__(
        self, *, num_nodes: int, devices_per_node: int, specs: list[PipelineSpec], policy: str
    ) -> None:
        self.scheduler = Scheduler()
        self.now_s = 0.0
        self.watch: Watch = lambda event, taken_s: None
        self.timer: Callable[[], float] = time.perf_counter
        self._random = Random(0)
        self._answers = Answers()
        self._sequence = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._tenants: dict[str, Tenant] = {}
        self._on: dict[str, list[Tenant]] = {}
        """By device."""
        self._training: dict[str, int] = {}
        """By pipeline: ranks that have not ended their step."""
        self._pace = {spec.name: self._random.uniform(0.6, 1.6) for spec in specs}
        self._say(events.LeaderElected(id="e", leader="s", code_version="1", policy=policy))
        for number in range(num_nodes):
            node = Worker(id=f"n{number}", boot="b")
            devices = tuple(Device(node.id, i, "cpu", 1 << 34) for i in range(devices_per_node))
            self._say(events.NodeStarted(id="n", node=node, devices=devices))
            beat = events.Heartbeat(id="h", node=node)
            self._every(2.0, partial(self._say, beat), first_s=2.0 * number / num_nodes)
        for spec in specs:
            self._say(
                events.PipelineSubmitted(
                    id=f"s:{spec.name}", pipeline=spec.name, spec=spec, config=b""
                )
            )
        self._every(0.1, lambda: self._say(events.Tick(id="t")), first_s=0.0)

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until something is so."""
        while not until():
            self.now_s, _, action = heapq.heappop(self._queue)
            action()

    # --- The stream ------------------------------------------------------------------------------

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), action))

    def _every(self, period_s: float, action: Callable[[], None], *, first_s: float) -> None:
        def again() -> None:
            action()
            self._later(period_s, again)

        self._later(first_s, again)

    def _say(self, event: events.Event) -> None:
        self._sequence += 1
        began_s = self.timer()
        issued = self.scheduler.handle(event, timestamp_s=self.now_s, sequence=self._sequence)
        self.watch(event, self.timer() - began_s)
        for command in issued:
            self._later(self._random.uniform(0.001, 0.01), self._obey(command))

    def _obey(self, command: commands.Command) -> Callable[[], None]:
        name = f"_on_{type(command).__name__.lower()}"
        method: Callable[[commands.Command], None] = getattr(self, name)
        return lambda: method(command)

    # --- Nodes -----------------------------------------------------------------------------------

    def _on_starttenant(self, command: commands.StartTenant) -> None:
        tenant = self._tenants[command.tenant] = Tenant(command)
        if command.device is not None:
            self._on.setdefault(command.device, []).append(tenant)
            shares = [(t.worker.id, t.share) for t in self._on[command.device]]
            self._say(self._answers.divided(command.worker, command.device, shares))
        self._say(self._answers.started(command, node=command.worker.id))
        self._every(10.0, lambda: self._live(tenant), first_s=self._random.uniform(0, 10))

    def _on_setshares(self, command: commands.SetShares) -> None:
        for name, share in command.shares:
            if name in self._tenants:
                self._tenants[name].share = share
        self._say(self._answers.divided(command.worker, command.device, command.shares))

    def _live(self, tenant: Tenant) -> None:
        held = tuple(one.held for one in tenant.sequences.values())
        pipeline = pipeline_of(tenant.worker)
        if tenant.role == "rollout":
            self._say(events.Inventory(id="i", pipeline=pipeline, worker=tenant.worker, held=held))
        else:
            self._say(events.WorkerAlive(id="w", pipeline=pipeline, worker=tenant.worker))

    # --- Tenants ---------------------------------------------------------------------------------

    def _on_configure(self, command: commands.Configure) -> None:
        role = self._tenants[command.worker.id].role
        self._later(0.2, lambda: self._say(self._answers.ready(command, role=role)))

    def _on_publishweights(self, command: commands.PublishWeights) -> None:
        if command.worker.id.endswith("trainer0"):
            self._say(self._answers.published(command, version=command.version))

    def _on_loadweights(self, command: commands.LoadWeights) -> None:
        def loaded() -> None:
            tenant = self._tenants[command.worker.id]
            tenant.version = command.version
            self._say(self._answers.loaded(command))
            spent: list[tuple[SubStageKind, float, int]] = [("weight_sync", 0.05, 0)]
            version = max(0, command.version - 1)
            self._say(self._answers.worked(tenant.worker, spent, version=version, now_s=self.now_s))

        self._later(0.05, loaded)

    def _on_makegroups(self, command: commands.MakeGroups) -> None:
        for event in self._answers.made(command, size=8):
            self._later(0.005, partial(self._say, event))

    def _on_scoresequences(self, command: commands.ScoreSequences) -> None:
        for event in self._answers.rewarded(command, size=64):
            self._later(0.02, partial(self._say, event))

    def _on_placesequences(self, command: commands.PlaceSequences) -> None:
        tenant = self._tenants[command.worker.id]
        median, sigma = LENGTH_TOKENS
        for placement in command.placements:
            length = median * self._random.lognormvariate(0.0, sigma)
            tenant.sequences[placement.sequence] = Generating(
                held=parts.Held(placement.sequence, placement.epoch),
                version=tenant.version,
                num_left=length * self._pace[pipeline_of(command.worker)],
            )
        tenant.spend("prefill", 0.01 * len(command.placements), len(command.placements))
        self._say(self._answers.accepted(command))
        self._turn_soon(tenant)

    def _on_drop(self, command: commands.Drop) -> None:
        for name, _ in command.sequences:
            self._tenants[command.worker.id].sequences.pop(name, None)

    def _on_migratesequences(self, command: commands.MigrateSequences) -> None:
        tenant = self._tenants[command.worker.id]
        handed, gone = [], []
        for name, epoch in command.sequences:
            one = tenant.sequences.pop(name, None)
            if one is None:
                gone.append(parts.Held(name, epoch))
            else:
                handed.append((one.held, int(one.num_tokens), one.version))
        self._say(self._answers.exported(tenant.worker, handed, gone))

    def _on_batchcut(self, command: commands.BatchCut) -> None:
        tenant = self._tenants[command.worker.id]
        pipeline = pipeline_of(command.worker)
        tenant.cut = command
        tenant.left_s = TRAIN_S * self._pace[pipeline]
        self._training[pipeline] = self._training.get(pipeline, 0) + 1
        self._turn_soon(tenant)

    # --- Work ------------------------------------------------------------------------------------

    def _turn_soon(self, tenant: Tenant) -> None:
        if not tenant.turning:
            tenant.turning = True
            self._later(TURN_S, lambda: self._turn(tenant))

    def _turn(self, tenant: Tenant) -> None:
        tenant.num_turns += 1
        asked = sum(other.share for other in self._on[tenant.device] if other.busy)
        done_s = TURN_S * max(LEAST_SPEED, tenant.share / asked if asked > 0 else 1.0)
        if tenant.role == "rollout":
            self._generate(tenant, done_s)
        elif tenant.cut is not None:
            self._train(tenant, tenant.cut, done_s)
        if not tenant.busy or tenant.num_turns % REPORT_TURNS == 0:
            self._report(tenant, tenant.version)
        tenant.turning = False
        if tenant.busy:
            self._turn_soon(tenant)

    def _report(self, tenant: Tenant, version: int) -> None:
        spent = [(kind, seconds, int(n)) for kind, (seconds, n) in tenant.spent.items()]
        tenant.spent = {}
        if spent:
            worked = self._answers.worked(tenant.worker, spent, version=version, now_s=self.now_s)
            self._say(worked)

    def _generate(self, tenant: Tenant, done_s: float) -> None:
        num = len(tenant.sequences)
        cost = 1.0 + max(0, num - TAIL_SEQUENCES) / 16
        num_tokens = done_s * TOKENS_PER_S / cost
        ended = []
        for name, one in list(tenant.sequences.items()):
            one.num_left -= num_tokens
            one.num_tokens += num_tokens
            if one.num_left <= 0:
                del tenant.sequences[name]
                ended.append((one.held, int(one.num_tokens) + 1, one.version))
        kind: SubStageKind = "bulk_decode" if num > TAIL_SEQUENCES else "tail_decode"
        tenant.spend(kind, TURN_S, num_tokens * num)
        if ended:
            self._say(self._answers.finished(tenant.worker, ended))
        if tenant.sequences and tenant.num_turns % PROGRESS_TURNS == 0:
            made = [(one.held, int(one.num_tokens)) for one in tenant.sequences.values()]
            self._say(self._answers.progressed(tenant.worker, made))

    def _train(self, tenant: Tenant, cut: commands.BatchCut, done_s: float) -> None:
        tenant.spend("forward_backward", TURN_S, 100)
        tenant.version = cut.version
        tenant.left_s -= done_s
        if tenant.left_s > 0:
            return
        tenant.cut = None
        tenant.spend("optimizer", 0.05, 0)
        tenant.spend("weight_sync", 0.05, 0)
        pipeline = pipeline_of(tenant.worker)
        self._training[pipeline] -= 1
        if not self._training[pipeline]:
            first = msgspec.structs.replace(
                cut, worker=Worker(id=f"{pipeline}.trainer0", boot=tenant.worker.boot)
            )
            published = self._answers.published(first, version=cut.version + 1)
            self._later(0.05, lambda: self._say(published))
            self._later(0.05, lambda: self._say(self._answers.checkpointed(first)))
