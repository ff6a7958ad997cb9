"""What must hold at every moment, whatever happens. Every test of the core ends with `check`."""

from __future__ import annotations

from jigsawrl.core import tally
from jigsawrl.core.group import GENERATING
from jigsawrl.core.shares import TOLERANCE
from jigsawrl.core.state import FATES, Pipeline, State
from jigsawrl.core.status import in_flight


def check(state: State) -> None:
    """Raise AssertionError, naming pipeline and ids, where an invariant is broken."""
    for pipeline in state.pipelines.values():
        _check_conservation(pipeline)
        _check_cuts(pipeline)
        _check_ownership(pipeline)
        _check_work(pipeline)
        _check_counts(pipeline)
        _check_gang(pipeline)
    _check_shares(state)
    _check_memory(state)
    _check_residents(state)


def _check_residents(state: State) -> None:
    """Who lives on a device is kept where pipelines start and end."""
    found: dict[str, list[str]] = {}
    for pipeline in state.pipelines.values():
        for tenant in pipeline.tenants.values() if pipeline.active else ():
            if tenant.node is not None and tenant.device is not None:
                found.setdefault(tenant.device, []).append(tenant.id)
    kept = {device: sorted(names) for device, names in state.residents.items() if names}
    assert kept == {device: sorted(names) for device, names in found.items()}, kept


def _check_shares(state: State) -> None:
    """No device is given away more than once."""
    totals: dict[str, float] = {}
    for pipeline in state.pipelines.values():
        for tenant in pipeline.tenants.values() if pipeline.active else ():
            if tenant.device is not None and tenant.share is not None:
                assert 0 <= tenant.share <= 1, f"{tenant.id}: share {tenant.share}"
                totals[tenant.device] = totals.get(tenant.device, 0.0) + tenant.share
    for device, total in totals.items():
        assert total <= 1 + TOLERANCE, f"{device}: shares sum to {total}"


def _check_memory(state: State) -> None:
    """What the scheduler placed on a device fits there."""
    used: dict[str, int] = {}
    for pipeline in state.pipelines.values():
        for tenant in pipeline.tenants.values() if pipeline.active else ():
            if tenant.device is not None and tenant.node is not None:
                num_bytes = pipeline.spec.memory.of(tenant.role)
                used[tenant.device] = used.get(tenant.device, 0) + num_bytes
    for node in state.nodes.values():
        for device in node.devices:
            assert used.get(device.id, 0) <= device.memory_bytes, f"{device.id} is too full: {used}"


def _check_conservation(pipeline: Pipeline) -> None:
    groups = [group.number for group in in_flight(pipeline)]
    size = pipeline.spec.group_size
    sequences = [g.number * size + s.index for g in in_flight(pipeline) for s in g.sequences]
    for fate in FATES:
        groups += pipeline.group_fates[fate].numbers()
        sequences += pipeline.sequence_fates[fate].numbers()
        assert len(pipeline.group_fates[fate]) == len(pipeline.group_fates[fate].numbers())
    name = pipeline.name
    assert sorted(groups) == list(range(pipeline.num_admitted)), f"{name}: groups {sorted(groups)}"
    admitted = list(range(pipeline.num_admitted * size))
    assert sorted(sequences) == admitted, f"{name}: sequences {sorted(sequences)}"


def _check_cuts(pipeline: Pipeline) -> None:
    numbers = [group.number for cut in pipeline.cuts for group in cut.groups]
    assert len(set(numbers)) == len(numbers), f"{pipeline.name}: in two cuts: {sorted(numbers)}"
    assert not set(numbers) & set(pipeline.groups), f"{pipeline.name}: cut and queued"
    versions = [cut.version for cut in pipeline.cuts]
    assert versions == sorted(set(versions)), f"{pipeline.name}: cuts {versions}"
    for cut in pipeline.cuts:
        smaller = _may_be_smaller(pipeline)
        assert len(cut.groups) == pipeline.spec.groups_per_batch or (smaller and cut.groups)
        order = [group.number for group in cut.groups]
        assert order == sorted(order), f"{pipeline.name}: cut {cut.version} out of order"
        for group in cut.groups:
            assert group.num_survivors >= pipeline.spec.min_group_size
            oldest = cut.version - pipeline.spec.sample_bound
            kept = (s for s in group.sequences if s.stage == "scored")
            assert all(oldest <= (s.min_version or 0) <= cut.version for s in kept)
    if pipeline.version is not None:
        steps = pipeline.version - pipeline.base_version
        trained = len(pipeline.group_fates["trained"]) - pipeline.num_trained_before
        whole = steps * pipeline.spec.groups_per_batch
        smaller = _may_be_smaller(pipeline) and steps <= trained < whole
        assert trained == whole or smaller, f"{pipeline.name}: {trained}"
    assert all(cut.trained for cut in pipeline.cuts[:-1]), f"{pipeline.name}: two open cuts"


def _may_be_smaller(pipeline: Pipeline) -> bool:
    rule = pipeline.spec.dynamic_sampling
    return rule is not None and rule.when_exhausted == "train_smaller"


def _check_ownership(pipeline: Pipeline) -> None:
    """A boot that ended owns nothing, what has an owner is being worked on, and what moves has one
    owner, the source, until it is handed over."""
    for group in pipeline.groups.values():
        owners = [group.owner, *(s.owner for s in group.sequences)]
        for owner in owners:
            if owner is not None:
                tenant = pipeline.tenants[owner.id]
                assert tenant.boot == owner.boot, f"{pipeline.name}: {owner} owns after its end"
        for sequence in group.sequences:
            name = f"{pipeline.name}: g{group.number}/s{sequence.index}"
            owned = sequence.stage in (*GENERATING, "scoring")
            assert owned == (sequence.owner is not None), name
            moves = sequence.target is not None
            assert not moves or sequence.stage in ("moving", "waiting"), f"{name} moved already"
            if sequence.owner is not None and sequence.stage in GENERATING:
                role = pipeline.tenants[sequence.owner.id].role
                assert role == "rollout", f"{name} is with a {role} worker"
                assert sequence.owner.id != sequence.target, f"{name} moves to where it is"
            if sequence.num_resumed:
                assert sequence.resume is not None or sequence.stage not in GENERATING, name


def _check_gang(pipeline: Pipeline) -> None:
    """The ranks of a trainer begin and end together."""
    gang = pipeline.gang
    assert len(gang) <= pipeline.spec.num_trainer_ranks, f"{pipeline.name}: too many ranks"
    assert len({rank.configured for rank in gang}) <= 1, f"{pipeline.name}: half a gang"
    assert pipeline.trainer_version is None or pipeline.gang_ready, f"{pipeline.name}: not ready"


def _check_counts(pipeline: Pipeline) -> None:
    """What is counted where it changes is what a full walk finds."""
    kept = pipeline.num_waiting, pipeline.num_generating
    assert kept == tally.counted(pipeline), f"{pipeline.name}: {kept}"


def _check_work(pipeline: Pipeline) -> None:
    """Nothing without an owner is forgotten."""
    for group in pipeline.groups.values():
        if group.prompt is None and group.owner is None:
            assert group.number in pipeline.to_make, f"{pipeline.name}/g{group.number}: unmade"
        for s in group.sequences:
            if group.prompt is not None and s.stage == "waiting":
                assert group.number in pipeline.to_place, f"{group.number}/s{s.index}: unplaced"
            if s.stage == "finished":
                assert (group.number, s.index) in pipeline.to_score, f"{group.number}: unscored"
