"""What a pipeline's recent steps cost, per tenant and kind, in full-speed seconds.

The policy folds sub-stage events in with `observe`, ends a step with `close`, and `prediction` reads
it. Plain structs of dicts and numbers, so that it is part of the scheduler's snapshot.

Source: JigsawRL (arXiv 2604.23838), prediction from the temporal consistency of neighbouring steps.
Deviation: an exponential moving average of the work per sub-stage instead of batch-size curves; what
was observed beside others is first brought to full speed by the slowdown table.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from jigsawrl.contract.message import Count, SubStageKind
from jigsawrl.core.gathering import DECODES, GENERATION, Work, gathered, relative_length
from jigsawrl.core.slowdown import Running, SlowdownTable

SMOOTHING = 0.5
"""Weight of the newest step. Half: three steps after a jump seven eighths of it are followed, while
one odd step counts no more than all before it."""

OCCASIONAL: frozenset[SubStageKind] = frozenset({"evaluation", "checkpoint"})
"""Kinds that skip steps: a step without them says nothing of their cost."""

LOGPROBS: tuple[SubStageKind, ...] = ("reference_logprobs", "proximal_logprobs")
GENERATES: frozenset[SubStageKind] = frozenset(GENERATION)
TRAINING: frozenset[SubStageKind] = frozenset({*LOGPROBS, "forward_backward", "optimizer"})

PARTS: dict[str, tuple[SubStageKind, ...]] = {
    "rollout": GENERATION,
    "gradients": (*LOGPROBS, "forward_backward"),
    "optimizer": ("optimizer",),
    "publish": ("weight_sync",),
    "load": ("weight_sync",),
}
"""What a tenant does between two barriers of a step."""

TOLD_LATE: frozenset[SubStageKind] = frozenset({"weight_sync", "checkpoint", "reward_wait"})
"""Kinds that are told with the version that they lead to, or in the step after theirs: what was heard
of them in a step says nothing of how much of it is left."""

_CORRECTION = (0.25, 4.0)
"""Bounds of observed over predicted progress: its first iterations say little about a sub-stage."""

_MAX_SILENT = 3
"""Steps after which a tenant without a sign of work no longer counts: it was placed away."""

_LAST_FRACTION = 0.02
"""Of the predicted work is left, at least, of what has not ended; 0 would promise the end at once."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One span of work, as a `SubStage` event tells it and the scheduler knows its neighbours."""

    pipeline: str
    version: Count
    """The step that the work is for. Asynchronous rollout workers tell their weights' version: the
    caller adds what those lag behind."""
    tenant: str
    device: str | None
    """Where the tenant lives; None for what uses no device."""
    kind: SubStageKind
    duration_s: float
    num_iterations: Count
    num_tokens: Count
    share: float
    """What was applied, 0 to 1."""
    beside: Running | None = None
    """What ran on the device meanwhile, and its share."""


class Sum(msgspec.Struct):
    """Of one version that is not closed yet."""

    work_s: float = 0.0
    num_iterations: float = 0.0
    num_tokens: float = 0.0


class Cost(msgspec.Struct):
    """Of one kind of one tenant."""

    work_s: float | None = None
    """Average full-speed seconds per step; None before the first closed step."""
    num_iterations: float = 0.0
    num_tokens: float = 0.0
    """Averages per step."""
    deviation_s: float = 0.0
    """Average difference of a step from `work_s` before it."""
    open: dict[int, Sum] = {}
    """By version."""


class TenantHistory(msgspec.Struct):
    """Of one worker id, whatever its boot."""

    device: str | None
    costs: dict[SubStageKind, Cost] = {}
    num_silent: int = 0
    """Steps closed since it was last observed."""


class WorkHistory(msgspec.Struct):
    """Of one pipeline."""

    tenants: dict[str, TenantHistory] = {}
    num_steps: int = 0
    """Steps closed."""
    plans: dict[int, list[str]] = {}
    """By version: the workers that generate its step; none = all, as where nothing was planned."""
    newest_plan: list[str] = []
    """That of the step that began last."""
    gathered: dict[int, dict[SubStageKind, Cost]] = {}
    """By the number of workers of such steps: what each of them did."""
    longest: dict[str, list[tuple[float, str]]] = {}
    """By part of a step: average seconds of each tenant that has some, the longest first."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A closed sub-stage against its prediction; full-speed seconds."""

    version: int
    tenant: str
    kind: SubStageKind
    predicted_s: float
    observed_s: float


def observe(history: WorkHistory, observation: Observation, *, table: SlowdownTable) -> None:
    """Add one span. One without a usable share or duration is left out: it has no full speed."""
    speed = table.speed(observation.kind, share=observation.share, beside=observation.beside)
    if speed <= 0 or not 0 <= observation.duration_s < float("inf"):
        return
    tenant = history.tenants.setdefault(observation.tenant, TenantHistory(observation.device))
    tenant.device = observation.device
    cost = tenant.costs.setdefault(observation.kind, Cost())
    total = cost.open.setdefault(observation.version, Sum())
    total.work_s += observation.duration_s * speed
    total.num_iterations += observation.num_iterations
    total.num_tokens += observation.num_tokens


def expect_generation(history: WorkHistory, tenant: str, *, device: str | None) -> None:
    """A rollout worker that may not generate for a while: what it would do is told from what others
    do."""
    costs = history.tenants.setdefault(tenant, TenantHistory(device)).costs
    if GENERATES.isdisjoint(costs):
        costs["tail_decode"] = Cost()


def close(history: WorkHistory, *, version: int) -> tuple[Comparison, ...]:
    """The step that started from `version` has ended: average what was observed of versions up to it.
    Returns how far predictions were off; nothing for what had none."""
    compared: list[Comparison] = []
    planned = [at for at, plan in sorted(history.plans.items()) if plan and at <= version]
    for at in planned:
        compared += _close_gathered(history, at)
    _follow_spread(history, version=version)
    for name, tenant in list(history.tenants.items()):
        closing = {v for cost in tenant.costs.values() for v in cost.open if v <= version}
        if closing:
            tenant.num_silent = 0
        elif not planned or tenant.costs.keys().isdisjoint(GENERATION):
            tenant.num_silent += 1  # else its work was counted for all, or it had none by plan
        if tenant.num_silent > _MAX_SILENT and not OCCASIONAL.issuperset(tenant.costs):
            del history.tenants[name]
        for at in sorted(closing):
            for kind, cost in tenant.costs.items():
                if kind in GENERATION and history.plans.get(at):
                    continue
                total = cost.open.pop(at, None)
                if total is None:
                    if kind in OCCASIONAL or cost.work_s is None:
                        continue
                    total = Sum()
                elif cost.work_s is not None:
                    compared.append(_comparison(at, name, kind, cost.work_s, total))
                _average(cost, total)
    history.plans = {at: plan for at, plan in history.plans.items() if at > version}
    history.num_steps += 1
    history.longest = {part: _longest(history, part) for part in PARTS}
    return tuple(compared)


def _longest(history: WorkHistory, part: str) -> list[tuple[float, str]]:
    found = []
    for name, tenant in history.tenants.items():
        trains = not TRAINING.isdisjoint(tenant.costs)
        if part in ("publish", "load") and trains != (part == "publish"):
            continue
        work_s = sum(tenant.costs[k].work_s or 0.0 for k in PARTS[part] if k in tenant.costs)
        if work_s > 0:
            found.append((work_s, name))
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))


def _close_gathered(history: WorkHistory, version: int) -> list[Comparison]:
    """The generation of a step that few workers shared. What they did is taken out of their own
    averages, which are of steps that all share."""
    plan = history.plans[version]
    expected = expected_of(history, num_workers=len(plan))
    compared: list[Comparison] = []
    done: dict[SubStageKind, list[Sum]] = {}
    for kind in GENERATION:
        for tenant in history.tenants.values():
            cost = tenant.costs.get(kind)
            total = None if cost is None else cost.open.pop(version, None)
            if total is not None:
                done.setdefault(kind, []).append(total)
    if "tail_decode" not in done and "bulk_decode" not in done:
        return []  # its workers died before they told: that says nothing of the cost
    costs = history.gathered.setdefault(len(plan), _costs(expected))
    means: dict[SubStageKind, Work] = {}
    for kind in GENERATION:
        totals = done.get(kind, [])
        if not totals and kind not in costs:
            continue
        # What moved to others in mid-step counts as well: it was this step's work.
        mean = mean_of(totals, num=len(plan))
        means[kind] = Work(
            work_s=mean.work_s, num_iterations=mean.num_iterations, num_tokens=mean.num_tokens
        )
        if kind in expected and totals:
            compared.append(_comparison(version, plan[0], kind, expected[kind].work_s, mean))
        _average(costs.setdefault(kind, Cost()), mean)
    others = [known for num, known in history.gathered.items() if num != len(plan)]
    spread = [tenant.costs for tenant in history.tenants.values()]
    _follow((*spread, *others), by=relative_length([expected], [means]))
    _spread(history, num_workers=len(plan))
    return compared


def _spread(history: WorkHistory, *, num_workers: int) -> None:
    """What workers would do that never generated beside all others: as it should be by what so few
    did."""
    workers = [t for t in history.tenants.values() if not GENERATES.isdisjoint(t.costs)]
    unknown = [t for t in workers if all(t.costs[k].work_s is None for k in GENERATES & {*t.costs})]
    few = [expected_of(history, num_workers=num_workers)] * num_workers
    for kind, work in gathered(few, num_workers=len(workers)).items() if unknown else ():
        for tenant in unknown:
            cost = tenant.costs.setdefault(kind, Cost())
            cost.work_s, cost.num_iterations = work.work_s, work.num_iterations
            cost.num_tokens = work.num_tokens


def _follow_spread(history: WorkHistory, *, version: int) -> None:
    """Steps that all workers shared tell how long sequences are now, whoever generates them."""
    open_at: dict[int, list[dict[SubStageKind, Work]]] = {}
    usual: list[dict[SubStageKind, Work]] = []
    for tenant in history.tenants.values() if history.gathered else ():
        decodes = {kind: tenant.costs[kind] for kind in DECODES if kind in tenant.costs}
        usual.append({kind: _work(cost) for kind, cost in decodes.items()})
        for kind, cost in decodes.items():
            for at, done in cost.open.items():
                if at <= version:
                    work = Work(
                        work_s=done.work_s,
                        num_iterations=done.num_iterations,
                        num_tokens=done.num_tokens,
                    )
                    open_at.setdefault(at, []).append({kind: work})
    for at in sorted(open_at):
        _follow(history.gathered.values(), by=relative_length(usual, open_at[at]))


def _follow(known: Iterable[dict[SubStageKind, Cost]], *, by: float) -> None:
    """Bring averages of steps that were generated in another way to the lengths of one: else a way
    that was left after a long step would look as dear for ever."""
    low, high = _CORRECTION
    factor = 1 + SMOOTHING * (min(high, max(low, by)) - 1)
    for costs in known:
        for kind in DECODES:
            cost = costs.get(kind)
            if cost is not None and cost.work_s is not None:
                cost.work_s *= factor
                cost.num_iterations *= factor
                cost.num_tokens *= factor
                cost.deviation_s *= factor


def mean_of(sums: Iterable[Sum], *, num: int) -> Sum:
    """Of `num` workers, some of which may have none."""
    mean = Sum()
    for one in sums:
        mean.work_s += one.work_s / num
        mean.num_iterations += one.num_iterations / num
        mean.num_tokens += one.num_tokens / num
    return mean


def _costs(expected: dict[SubStageKind, Work]) -> dict[SubStageKind, Cost]:
    """To begin averages with: one step alone says more of its lengths than of the way."""
    return {
        kind: Cost(
            work_s=work.work_s,
            num_iterations=work.num_iterations,
            num_tokens=work.num_tokens,
            deviation_s=work.deviation_s,
        )
        for kind, work in expected.items()
    }


def expected_of(history: WorkHistory, *, num_workers: int) -> dict[SubStageKind, Work]:
    """What each of so few workers does in a step that they share: as in earlier ones, else as it
    should be by what all do."""
    known = history.gathered.get(num_workers)
    if known is not None:
        return {kind: _work(cost) for kind, cost in known.items() if cost.work_s}
    spread = [
        {kind: _work(t.costs[kind]) for kind in GENERATION if kind in t.costs}
        for t in history.tenants.values()
    ]
    return gathered([worker for worker in spread if worker], num_workers=num_workers)


def _work(cost: Cost) -> Work:
    return Work(
        work_s=cost.work_s or 0.0,
        num_iterations=cost.num_iterations,
        num_tokens=cost.num_tokens,
        deviation_s=cost.deviation_s,
    )


def _comparison(
    version: int, tenant: str, kind: SubStageKind, predicted_s: float, total: Sum
) -> Comparison:
    return Comparison(
        version=version,
        tenant=tenant,
        kind=kind,
        predicted_s=predicted_s,
        observed_s=total.work_s,
    )


def reopen(history: WorkHistory, *, version: int) -> None:
    """A rollback to `version`: drop what was observed of steps that are not closed and run again."""
    history.plans = {at: plan for at, plan in history.plans.items() if at < version}
    for tenant in history.tenants.values():
        for cost in tenant.costs.values():
            cost.open = {at: total for at, total in cost.open.items() if at < version}


def left_s(work: Work, done: Sum | None) -> float:
    """Work left of a sub-stage that has not ended: the prediction, less what is done, with the rest
    scaled by how much more (or less) the done part took than predicted. Never less than predictions
    are off by: lengths have a long tail, and what has outlived its prediction goes on for some time."""
    predicted_s = work.work_s
    if done is None or predicted_s <= 0:
        return predicted_s
    least_s = max(_LAST_FRACTION * predicted_s, min(work.deviation_s, predicted_s))
    if not done.num_tokens or work.num_tokens <= 0:
        return max(predicted_s - done.work_s, least_s)
    fraction = min(1.0, done.num_tokens / work.num_tokens)
    expected_s = fraction * predicted_s
    low, high = _CORRECTION
    # Below the smallest number it is 0: nothing was expected of what is done.
    scale = min(high, max(low, done.work_s / expected_s)) if expected_s > 0 else high
    return max((1 - fraction) * predicted_s * scale, least_s)


def median_error(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Median of |predicted - observed| / observed over (predicted, observed) durations in seconds;
    None where nothing was observed."""
    errors = [abs(predicted - seen) / seen for predicted, seen in pairs if seen > 0]
    return median(errors) if errors else None


def _average(cost: Cost, total: Sum) -> None:
    weight = 1.0 if cost.work_s is None else SMOOTHING
    before_s = cost.work_s or 0.0
    if cost.work_s is not None:
        off_s = abs(total.work_s - before_s)
        cost.deviation_s += SMOOTHING * (off_s - cost.deviation_s)
    cost.work_s = before_s + weight * (total.work_s - before_s)
    cost.num_iterations += weight * (total.num_iterations - cost.num_iterations)
    cost.num_tokens += weight * (total.num_tokens - cost.num_tokens)
