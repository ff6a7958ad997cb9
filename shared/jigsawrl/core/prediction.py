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

from collections.abc import Mapping

import msgspec

from jigsawrl.contract.message import SubStageKind
from jigsawrl.core.gathering import GENERATION, Work
from jigsawrl.core.graph import Node
from jigsawrl.core.slowdown import WAITS
from jigsawrl.core.work_history import WorkHistory, expected_of, left_s

_LOGPROBS: tuple[SubStageKind, ...] = ("reference_logprobs", "proximal_logprobs")

HORIZON_STEPS = 2
"""The step under way and the next: what is decided in one shows in the other."""

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
    ended: frozenset[SubStageId] = frozenset()
    """Sub-stages of the predicted steps that are over."""
    memory_bytes: Mapping[str, int] = {}
    """By kind: what a tenant needs on its device while it runs, beyond what stays there."""
    move_s: float | None = None
    """Full-speed seconds of prefill that moving a worker's tail costs; None = tails stay."""
    workers: tuple[str, ...] | None = None
    """Those that generate the steps that are not planned yet; None = as the newest plan says, else
    all."""


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
        self.nodes: list[Node] = []
        self.last: dict[str, tuple[str, ...]] = {}
        """By tenant: ids that its next node comes after, the order on a device."""
        self.made: dict[int, tuple[str, ...]] = {}
        """By version: the optimizer nodes that make it."""
        self.synced: dict[tuple[int, str], tuple[str, ...]] = {}
        """By version and tenant: the nodes that load it there."""
        self.rollouts = self._with(*GENERATION)
        self.gathered: dict[int, dict[SubStageKind, Work]] = {}
        """What each of so few workers does in a step."""
        self.trainers = self._with("forward_backward", "optimizer", *_LOGPROBS)
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
        rewards: tuple[str, ...] = ()
        for tenant in self._with("reward_wait"):
            rewards += self._add(version, tenant, "reward_wait", tails, in_order=False)
        return rewards or tails

    def add_training(self, version: int, rolled_out: tuple[str, ...]) -> None:
        """The step from `version` on all ranks, and the weights that it makes."""
        gradients: tuple[str, ...] = ()
        for tenant in self.trainers:
            after = rolled_out
            for kind in _LOGPROBS:
                after = self._add(version, tenant, kind, after)
            gradients += self._add(version, tenant, "forward_backward", after)
        made: tuple[str, ...] = ()
        for tenant in self.trainers:
            made += self._add(version, tenant, "optimizer", gradients)
        self.made[version + 1] = made
        published: tuple[str, ...] = ()
        for tenant in self.trainers:
            published += self._add(version, tenant, "weight_sync", made)
            self._add(version, tenant, "checkpoint", made)
        self.made[version + 1] = published
        for tenant in self._with("weight_sync"):
            if tenant not in self.trainers:
                # Out of the tenant's order: new weights land in the middle of later rollouts.
                self.synced[version + 1, tenant] = self._add(
                    version, tenant, "weight_sync", published, in_order=False
                )

    def add_evaluation(self, version: int) -> None:
        """Of `version`, where its weights will be there within the horizon."""
        if version > self.outlook.version and version not in self.made:
            return
        for tenant in self._with("evaluation"):
            self._add(version, tenant, "evaluation", self.made.get(version, ()))

    def _workers(self, version: int) -> list[str]:
        """That generate the step from `version`."""
        plans, plan = self.history.plans, self.outlook.workers
        if version in plans:
            plan = tuple(plans[version])
        elif plan is None and plans:
            plan = tuple(plans[max(plans)])
        return [name for name in self.rollouts if name in (plan or ())] or self.rollouts

    def _expected(self, version: int, tenant: str, kind: SubStageKind) -> Work | None:
        """What a step's sub-stage takes in all; None for what was never seen."""
        if kind in GENERATION and tenant in self.rollouts:
            num_workers = len(self._workers(version))
            if num_workers < len(self.rollouts):
                if num_workers not in self.gathered:
                    found = expected_of(self.history, num_workers=num_workers)
                    self.gathered[num_workers] = found
                return self.gathered[num_workers].get(kind)
        cost = self.history.tenants[tenant].costs.get(kind)
        if cost is None or cost.work_s is None:
            return None
        return Work(work_s=cost.work_s, num_tokens=cost.num_tokens)

    def _with(self, *kinds: SubStageKind) -> list[str]:
        return [
            name
            for name, tenant in sorted(self.history.tenants.items())
            if any(kind in tenant.costs for kind in kinds)
        ]

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
        cost = self.history.tenants[tenant].costs.get(kind)
        done = None if cost is None else cost.open.get(version)
        movable = kind == "tail_decode" and self.outlook.move_s is not None
        node = Node(
            id=f"{self.outlook.pipeline}/v{version}/{tenant}/{kind}",
            pipeline=self.outlook.pipeline,
            version=version,
            kind=kind,
            device=device,
            work_s=left_s(work, done),
            memory_bytes=0 if device is None else self.outlook.memory_bytes.get(kind, 0),
            after=tuple(dict.fromkeys(before)),
            movable_to=tuple(d for d in self.rollout_devices if d != device) if movable else (),
            move_s=(self.outlook.move_s or 0.0) if movable else 0.0,
        )
        self.nodes.append(node)
        if in_order:
            self.last[tenant] = (node.id,)
        return (node.id,)
