"""Builds the Sub-Stage Graph's nodes of a pipeline's next steps from its recent history.

The policy calls `predict` per pipeline in every decision and joins the nodes of those that share
devices into a `Graph`. The shape of a step:

    rollout worker   prefill -> bulk decode -> tool wait -> tail decode
    then             reward wait, after the tails of all workers (barrier)
    trainer rank     reference log-probs -> proximal log-probs -> forward-backward
    then             optimizer, after the forward-backward of all ranks
    then             weight sync of ranks, then of rollout workers; checkpoint
    evaluation       of its version, on its own tenant; nothing waits for it

Step v's rollout starts once version v - eta is there (staleness edge; sync is eta = 0), and on each
tenant steps go in order. Kinds without history are left out, so a pipeline without a reference model
has no such node.

Source: JigsawRL (arXiv 2604.23838), Sub-Stage Graph. Deviations: bulk decode of a multi-turn task is
one node before one tool wait, whatever the number of turns; a moved tail's prefill is a fixed cost.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from jigsawrl.contract.message import SubStageKind
from jigsawrl.core.gathering import GENERATION, Work
from jigsawrl.core.graph import Node
from jigsawrl.core.slowdown import WAITS, NodeKind
from jigsawrl.core.work_history import (
    LOGPROBS,
    PARTS,
    TOLD_LATE,
    TRAINING,
    Sum,
    WorkHistory,
    expected_of,
    left_s,
    mean_of,
)

_FEW = 4
"""Nodes that others come after one by one; more of them meet in a barrier, so that edges stay few."""

_FAR = "elsewhere"

_MAX_ASKED = 4
"""Tenants elsewhere whose progress is looked at: one of those that take longest is the last, nearly
always."""

SubStageId = tuple[int, str, SubStageKind]
"""Version, tenant, kind."""


HORIZON_STEPS = 2
"""A step and the next: what is done now delays or frees devices for that one."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be predicted of one pipeline."""

    pipeline: str
    version: int
    """The newest version; the step under way turns it into the next."""
    num_steps: int = HORIZON_STEPS
    """Steps ahead, the one under way included."""
    max_staleness: int = 0
    """eta: that many further rollouts may run meanwhile, and are predicted too."""
    last_version: int | None = None
    """At which the pipeline ends; None = beyond the horizon."""
    evaluations: tuple[int, ...] = ()
    """Versions that are to be evaluated or under evaluation."""
    ended: Container[SubStageId] = frozenset()
    """Sub-stages of the predicted steps that are over."""
    memory_bytes: Mapping[str, int] = {}
    """By kind: what a tenant needs on its device while it runs, beyond what stays there."""
    move_s: float | None = None
    """Full-speed seconds of prefill that moving a worker's tail costs; None = tails stay."""
    workers: tuple[str, ...] | None = None
    """Those that generate the steps that are not planned yet; None = as the newest plan says, else
    all."""
    generating: Container[str] = frozenset()
    """Workers that hold sequences of the step under way now: those of its plan, and whoever a tail of
    theirs was moved to."""
    devices: frozenset[str] | None = None
    """Devices whose nodes are wanted; None = all. What happens on others is one wait for each part of
    a step, as long as the longest of their tenants would take alone at full speed."""


def predict(history: WorkHistory, outlook: Outlook) -> tuple[Node, ...]:
    """Nodes of the next steps that have not ended. Nothing before the first closed step: give equal
    shares then, and hold nothing."""
    if not history.num_steps:
        return ()
    steps = _Steps(history, outlook)
    end = outlook.version + outlook.num_steps
    rollouts_end = end + outlook.max_staleness
    if outlook.last_version is not None:
        end = min(end, outlook.last_version)
        rollouts_end = min(rollouts_end, outlook.last_version)
    for version in range(outlook.version, rollouts_end):
        rolled_out = steps.add_rollout(version)
        if version < end:
            steps.add_training(version, rolled_out)
    for version in sorted(outlook.evaluations):
        steps.add_evaluation(version)
    return tuple(steps.nodes)


class _Steps:
    """The nodes so far, and what later ones come after."""

    def __init__(self, history: WorkHistory, outlook: Outlook) -> None:
        self.history, self.outlook = history, outlook
        self.kinds = sorted(
            (name, frozenset(tenant.costs))
            for name, tenant in history.tenants.items()
            if self._here(tenant.device)
        )
        """Of each tenant here what it does."""
        self.nodes: list[Node] = []
        self.last: dict[str, tuple[str, ...]] = {}
        """By tenant: ids that its next node comes after, the order on a device."""
        self.made: dict[int, tuple[str, ...]] = {}
        """By version: the optimizer nodes that make it."""
        self.synced: dict[tuple[int, str], tuple[str, ...]] = {}
        """By version and tenant: the nodes that load it there."""
        self.rollouts = self._with(*GENERATION)
        self.trainers = self._with(*TRAINING)
        self.plans: dict[int, frozenset[str] | None] = {}
        """By version, here and elsewhere."""
        self.gathered: dict[int, dict[SubStageKind, Work]] = {}
        """What each of so few workers does in a step."""
        devices = (self.history.tenants[tenant].device for tenant in self.rollouts)
        self.rollout_devices = tuple(dict.fromkeys(d for d in devices if d is not None))

    def add_rollout(self, version: int) -> tuple[str, ...]:
        """Generation and rewards for the step from `version`; what training comes after."""
        base = version - self.outlook.max_staleness
        tails: tuple[str, ...] = ()
        for tenant in self._workers(version):
            after = self.synced.get((base, tenant), self.made.get(base, ()))
            for kind in GENERATION:
                after = self._add(version, tenant, kind, after)
            tails += after
        far = self.synced.get((base, _FAR), self.made.get(base, ()))
        tails += self._elsewhere(version, "rollout", far)
        rewards: tuple[str, ...] = ()
        for tenant in self._with("reward_wait"):
            rewards += self._add(version, tenant, "reward_wait", tails, in_order=False)
        return self._all(version, "rolled_out", rewards or tails)

    def add_training(self, version: int, rolled_out: tuple[str, ...]) -> None:
        """The step from `version` on all ranks, and the weights that it makes."""
        gradients: tuple[str, ...] = ()
        for tenant in self.trainers:
            after = rolled_out
            for kind in LOGPROBS:
                after = self._add(version, tenant, kind, after)
            gradients += self._add(version, tenant, "forward_backward", after)
        gradients += self._elsewhere(version, "gradients", rolled_out)
        gradients = self._all(version, "gradients", gradients)
        made: tuple[str, ...] = ()
        for tenant in self.trainers:
            made += self._add(version, tenant, "optimizer", gradients)
        made += self._elsewhere(version, "optimizer", gradients)
        made = self._all(version, "made", made)
        published: tuple[str, ...] = ()
        for tenant in self.trainers:
            published += self._add(version, tenant, "weight_sync", made)
            self._add(version, tenant, "checkpoint", made)
        published += self._elsewhere(version, "publish", made)
        published = self._all(version, "published", published)
        self.made[version + 1] = published
        for tenant in self._with("weight_sync"):
            if tenant not in self.trainers:
                # Out of the tenant's order: new weights land in the middle of later rollouts.
                self.synced[version + 1, tenant] = self._add(
                    version, tenant, "weight_sync", published, in_order=False
                )
        loaded = self._elsewhere(version, "load", published)
        self.synced[version + 1, _FAR] = loaded or published

    def add_evaluation(self, version: int) -> None:
        """Of `version`, where its weights will be there within the horizon."""
        if version > self.outlook.version and version not in self.made:
            return
        for tenant in self._with("evaluation"):
            self._add(version, tenant, "evaluation", self.made.get(version, ()))

    def _plan(self, version: int) -> frozenset[str] | None:
        """Workers that alone generate the step from `version`; None where all do."""
        if version not in self.plans:
            self.plans[version] = self._find_plan(version)
        return self.plans[version]

    def _find_plan(self, version: int) -> frozenset[str] | None:
        plans, plan = self.history.plans, self.outlook.workers
        if version in plans:
            plan = tuple(plans[version])
        elif plan is None and plans:
            plan = tuple(plans[max(plans)])
        if not plan:
            return None
        tenants = self.history.tenants
        able = [name for name in tenants if any(kind in tenants[name].costs for kind in GENERATION)]
        chosen = frozenset(plan).intersection(able)
        return chosen if 0 < len(chosen) < len(able) else None

    def _workers(self, version: int) -> list[str]:
        """Those here that generate the step from `version`."""
        return [name for name in self.rollouts if self._takes_part(version, name)]

    def _takes_part(self, version: int, tenant: str) -> bool:
        plan = self._plan(version)
        if plan is None or tenant in plan:
            return True
        return version == self.outlook.version and tenant in self.outlook.generating

    def _expected(self, version: int, tenant: str, kind: SubStageKind) -> Work | None:
        """What a step's sub-stage takes in all; None for what was never seen."""
        plan = self._plan(version) if kind in GENERATION else None
        if plan is not None:
            if len(plan) not in self.gathered:
                self.gathered[len(plan)] = expected_of(self.history, num_workers=len(plan))
            return self.gathered[len(plan)].get(kind)
        cost = self.history.tenants[tenant].costs.get(kind)
        if cost is None or cost.work_s is None:
            return None
        return Work(work_s=cost.work_s, num_tokens=cost.num_tokens, deviation_s=cost.deviation_s)

    def _done(self, version: int, tenant: str, kind: SubStageKind) -> Sum | None:
        """What is done of a step's sub-stage; unknown of what is told after its step."""
        if kind in TOLD_LATE:
            return None
        plan = self._plan(version) if kind in GENERATION else None
        if plan is None or tenant in plan:
            cost = self.history.tenants[tenant].costs.get(kind)
            return None if cost is None else cost.open.get(version)
        # It goes on with what one of the planned workers has begun.
        costs = (one.costs.get(kind) for one in self.history.tenants.values())
        done = [cost.open[version] for cost in costs if cost is not None and version in cost.open]
        return mean_of(done, num=len(plan))

    def _here(self, device: str | None) -> bool:
        """What lives on no device is always looked at."""
        chosen = self.outlook.devices
        return chosen is None or device is None or device in chosen

    def _with(self, *kinds: SubStageKind) -> list[str]:
        wanted = frozenset(kinds)
        return [name for name, kinds_here in self.kinds if not wanted.isdisjoint(kinds_here)]

    def _all(self, version: int, what: str, after: tuple[str, ...]) -> tuple[str, ...]:
        """One node to come after instead of many, where they are many."""
        after = tuple(dict.fromkeys(after))
        if len(after) <= _FEW:
            return after
        return self._wait("barrier", f"{version}/all/{what}", version, 0.0, after)

    def _elsewhere(self, version: int, part: str, after: tuple[str, ...]) -> tuple[str, ...]:
        """What tenants on other devices do in this part of a step, as one wait."""
        if self.outlook.devices is None:
            return ()
        work_s = self._far_s(version, part)
        if work_s is None:
            return ()
        if not work_s:
            return after
        if part != "load":  # new weights land in the middle of later rollouts
            after = tuple(dict.fromkeys((*after, *self.last.get(part, ()))))
        made = self._wait("elsewhere", f"{version}/{_FAR}/{part}", version, work_s, after)
        self.last[part] = made
        return made

    def _far_s(self, version: int, part: str) -> float | None:
        """Seconds left; None where nobody elsewhere has a part in it. Of a step under way those are
        asked that take longest on average."""
        tenants, longest_s, num_asked = self.history.tenants, 0.0, 0
        plan = self._plan(version) if part == "rollout" else None
        for average_s, name in self.history.longest.get(part, ()):
            tenant = tenants.get(name)
            if tenant is None or self._here(tenant.device):
                continue
            if part == "rollout" and not self._takes_part(version, name):
                continue
            if version > self.outlook.version + self.outlook.max_staleness and plan is None:
                return average_s
            num_asked += 1
            longest_s = max(longest_s, self._left_s(version, name, PARTS[part]))
            if num_asked == _MAX_ASKED:
                break
        return longest_s if num_asked else None

    def _left_s(self, version: int, name: str, kinds: tuple[SubStageKind, ...]) -> float:
        costs, ended, total_s = self.history.tenants[name].costs, self.outlook.ended, 0.0
        by_plan = kinds is GENERATION and self._plan(version) is not None
        for kind in kinds:
            done = self._done(version, name, kind)
            if not by_plan and done is None:  # as nearly always
                cost = costs.get(kind)
                work_s = None if cost is None else cost.work_s
                if work_s and (version, name, kind) not in ended:
                    total_s += work_s
                continue
            work = self._expected(version, name, kind)
            if work is not None and (version, name, kind) not in ended:
                total_s += left_s(work, done)
        return total_s

    def _wait(
        self, kind: NodeKind, name: str, version: int, work_s: float, after: tuple[str, ...]
    ) -> tuple[str, ...]:
        node = Node(
            id=f"{self.outlook.pipeline}/v{name}",
            pipeline=self.outlook.pipeline,
            version=version,
            kind=kind,
            device=None,
            work_s=work_s,
            after=after,
        )
        self.nodes.append(node)
        return (node.id,)

    def _add(
        self,
        version: int,
        tenant: str,
        kind: SubStageKind,
        after: tuple[str, ...],
        *,
        in_order: bool = True,
    ) -> tuple[str, ...]:
        """One node, unless it is over or was never seen; what its followers come after."""
        work = self._expected(version, tenant, kind)
        if work is None:
            return after
        if (version, tenant, kind) in self.outlook.ended:
            return after
        device = None if kind in WAITS else self.history.tenants[tenant].device
        if device is None and kind not in WAITS:
            return after
        before = (*after, *self.last.get(tenant, ())) if in_order else after
        movable = kind == "tail_decode" and self.outlook.move_s is not None
        node = Node(
            id=f"{self.outlook.pipeline}/v{version}/{tenant}/{kind}",
            pipeline=self.outlook.pipeline,
            version=version,
            kind=kind,
            device=device,
            work_s=left_s(work, self._done(version, tenant, kind)),
            memory_bytes=0 if device is None else self.outlook.memory_bytes.get(kind, 0),
            after=tuple(dict.fromkeys(before)),
            movable_to=tuple(d for d in self.rollout_devices if d != device) if movable else (),
            move_s=(self.outlook.move_s or 0.0) if movable else 0.0,
        )
        self.nodes.append(node)
        if in_order:
            self.last[tenant] = (node.id,)
        return (node.id,)
