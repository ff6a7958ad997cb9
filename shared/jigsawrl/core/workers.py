"""Boots of tenants: started, ready, exited; and what each start frees."""

from __future__ import annotations

from jigsawrl.contract.commands import Configure, LoadWeights
from jigsawrl.contract.events import WeightsLoaded, WorkerExited, WorkerReady, WorkerStarted
from jigsawrl.contract.message import Role, Worker
from jigsawrl.core import groups
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Pipeline, State, Tenant

NUM_PAST_BOOTS = 16
"""Boots remembered per tenant, so that a late message of one is not taken for a new start."""

SILENCE_S = 30.0
"""Three missed signs of life of a tenant."""

FROZEN_S = 60.0
"""Of silence, on a machine that is heard: the process is killed and started again. Twice what loses it
its work, as what comes back by itself keeps its model, and a start costs seconds of a device."""

START_S = 300.0
"""Of silence of a process that was started and never told of itself, on a machine that is heard: killed
and started again. Many times what a start takes where several load their libraries on one core."""

LOAD_LEASE_S = 30.0
"""A worker that has not loaded by then is told again, and the others no longer wait for it."""


def current(pipeline: Pipeline, worker: Worker, *, role: Role | None = None) -> Tenant | None:
    """The tenant, if `worker` is its living boot (and of that role)."""
    tenant = pipeline.tenants.get(worker.id)
    if tenant is None or tenant.boot != worker.boot or role not in (None, tenant.role):
        return None
    return tenant


def started(state: State, pipeline: Pipeline, event: WorkerStarted) -> None:
    """A boot is up: everything the older one owned is free. An unknown id joins as a member, except
    as a second trainer, which would train another history, or as a rank of several: these must be
    started again by their node when another one ends."""
    tenant = pipeline.tenants.get(event.worker.id)
    if tenant is None:
        foreign = event.worker.id.partition(".")[0] != pipeline.name
        several = pipeline.spec.num_trainer_ranks > 1
        if foreign or (event.role == "trainer" and (several or pipeline.trainer is not None)):
            state.num_ignored += 1
            return
        tenant = Tenant(id=event.worker.id, role=event.role, node=None, device=event.device)
        pipeline.tenants[tenant.id] = tenant
    known = event.worker.boot == tenant.boot or event.worker.boot in tenant.past_boots
    if known or (tenant.node is not None and event.node != tenant.node):  # it lives elsewhere now
        state.num_ignored += 1
        return
    end_boot(pipeline, tenant)
    tenant.boot = event.worker.boot
    tenant.code_version = event.code_version
    tenant.lost = False
    tenant.heard_s = state.clock.now_s


def exited(state: State, pipeline: Pipeline, event: WorkerExited) -> None:
    """A process ended. Its boot may never have been heard of: then it must not be believed later."""
    tenant = pipeline.tenants.get(event.worker.id)
    if tenant is None or event.worker.boot in tenant.past_boots:
        state.num_ignored += 1
    elif tenant.boot == event.worker.boot:
        end_boot(pipeline, tenant)
    else:
        _remember(tenant, event.worker.boot)


def end_boot(pipeline: Pipeline, tenant: Tenant) -> None:
    """Forget the living boot and take back what it owned. With a rank ends its gang."""
    if tenant.boot is None:
        return
    in_gang = tenant.role == "trainer" and tenant.configured
    _forget_boot(pipeline, tenant)
    if in_gang:
        for rank in pipeline.gang:
            # One that is not configured yet is of the next gang already.
            if rank.boot is not None and rank.configured:
                pipeline.restarts[rank.id] = rank.boot
                _forget_boot(pipeline, rank)


def _forget_boot(pipeline: Pipeline, tenant: Tenant) -> None:
    groups.free(pipeline, tenant.worker)
    evaluation = pipeline.evaluation
    if evaluation is not None and evaluation.sent_to == tenant.worker:
        evaluation.sent_to = None
    if tenant.role == "trainer":
        pipeline.trainer_version = None
    pipeline.drops.pop(tenant.id, None)
    _remember(tenant, tenant.worker.boot)
    tenant.boot = None
    tenant.configured = tenant.ready = False
    tenant.version = tenant.loading = None
    tenant.load_late = False


def lose(pipeline: Pipeline, tenant: Tenant) -> None:
    """Its node is silent. The boot may live on and be heard again; its work may not wait for that."""
    tenant.lost = True
    if tenant.boot is not None:
        groups.free(pipeline, tenant.worker)
        evaluation = pipeline.evaluation
        if evaluation is not None and evaluation.sent_to == tenant.worker:
            evaluation.sent_to = None


def heard(state: State, pipeline: Pipeline, worker: Worker) -> bool:
    """A boot lives, whatever its node says; False where it is none that should."""
    tenant = current(pipeline, worker)
    if tenant is None:
        state.num_ignored += 1
        return False
    tenant.heard_s = state.clock.now_s
    tenant.lost = False
    return True


def expire_silent(state: State, pipeline: Pipeline) -> None:
    """Tenants that give no sign of life though their node does (a frozen process, one that was started
    by hand and is gone): running sequences and evaluations have no lease of their own, and nobody else
    would ever end a process that neither works nor exits."""
    for tenant in pipeline.tenants.values():
        term_s = START_S if tenant.boot is None else FROZEN_S
        if _placed_on_living(state, tenant) and state.clock.expired(tenant.heard_s, term_s=term_s):
            pipeline.restarts[tenant.id] = tenant.boot
            end_boot(pipeline, tenant)
            tenant.heard_s = state.clock.now_s
            state.touch(pipeline)
        elif tenant.usable and state.clock.expired(tenant.heard_s, term_s=SILENCE_S):
            lose(pipeline, tenant)
            state.touch(pipeline)


def _placed_on_living(state: State, tenant: Tenant) -> bool:
    """Whether there is a node that can start it again."""
    node = state.nodes.get(tenant.node) if tenant.node is not None else None
    return node is not None and node.up and tenant.started_on == node.boot


def ready(state: State, pipeline: Pipeline, event: WorkerReady) -> bool:
    """A boot takes work; False where that is no news."""
    tenant = current(pipeline, event.worker, role=event.role)
    stale_gang = event.role == "trainer" and event.gang_epoch != pipeline.gang_epoch
    if tenant is None or tenant.ready or not tenant.configured or stale_gang:
        state.num_ignored += 1
        return False
    tenant.ready = True
    tenant.heard_s = state.clock.now_s
    return True


def loaded(state: State, pipeline: Pipeline, event: WeightsLoaded) -> None:
    """A rollout worker generates by another version from now on."""
    tenant = current(pipeline, event.worker, role="rollout")
    if tenant is None or (event.incarnation, event.version) < (
        tenant.incarnation,
        -1 if tenant.version is None else tenant.version,
    ):
        state.num_ignored += 1
        return
    tenant.incarnation, tenant.version = event.incarnation, event.version
    if tenant.loading is not None and tenant.loading <= (event.incarnation, event.version):
        tenant.loading = None
        tenant.load_late = False


def _remember(tenant: Tenant, boot: str) -> None:
    tenant.past_boots = [*tenant.past_boots[1 - NUM_PAST_BOOTS :], boot]


# --- Decisions -----------------------------------------------------------------------------------


def configure(pipeline: Pipeline, outbox: Outbox) -> None:
    """Give its configuration to every boot that has none: to the ranks of a trainer when all of them
    have come up, together, which is a new gang epoch."""
    gang = pipeline.gang
    complete = len(gang) == pipeline.spec.num_trainer_ranks and all(map(_unconfigured, gang))
    for tenant in pipeline.tenants.values():
        if not _unconfigured(tenant) or (tenant.role == "trainer" and not complete):
            continue
        rank = gang.index(tenant) if tenant.role == "trainer" else 0
        if tenant.role == "trainer" and rank == 0:
            pipeline.gang_epoch += 1
        outbox.add(
            Configure(
                **outbox.to(tenant.worker),
                config=pipeline.config,
                incarnation=pipeline.incarnation,
                gang_epoch=pipeline.gang_epoch,
                rank=rank,
                num_ranks=len(gang) if tenant.role == "trainer" else 1,
                tail_sequences=pipeline.tail_sequences,
            )
        )
        tenant.configured = True


def _unconfigured(tenant: Tenant) -> bool:
    return tenant.boot is not None and not tenant.configured and not tenant.lost


def load_weights(pipeline: Pipeline, now_s: float, outbox: Outbox) -> None:
    """Have every rollout worker load the newest version."""
    version = pipeline.version
    published = None if version is None else pipeline.published.get(version)
    if published is None or version is None or pipeline.stage != "running":
        return
    wanted = (pipeline.incarnation, version)
    for tenant in pipeline.usable("rollout"):
        if wanted in ((tenant.incarnation, tenant.version), tenant.loading):
            continue
        outbox.add(
            LoadWeights(
                **outbox.to(tenant.worker),
                incarnation=pipeline.incarnation,
                version=version,
                manifest=published.manifest,
            )
        )
        tenant.loading = wanted
        tenant.load_since_s = now_s


def expire_loads(state: State, pipeline: Pipeline) -> None:
    """Workers that did not load in time are told again."""
    for tenant in pipeline.tenants.values():
        if tenant.loading is not None and state.clock.expired(
            tenant.load_since_s, term_s=LOAD_LEASE_S
        ):
            newest = (pipeline.incarnation, pipeline.version)
            if tenant.loading == newest:
                pipeline.publish_due = True  # they may be gone from the channel: publish them again
            tenant.loading = None
            tenant.load_late = True
            state.touch(pipeline)
