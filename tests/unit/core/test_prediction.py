"""What steps cost, and the graph that is predicted from it."""

from functools import partial
from itertools import pairwise

import msgspec
import pytest

from jigsawrl.contract.message import SubStageKind
from jigsawrl.core.graph import DeviceBudget, Graph, Node
from jigsawrl.core.lookahead import Limits, look_ahead, play_deciding
from jigsawrl.core.play import Position
from jigsawrl.core.prediction import Outlook, predict
from jigsawrl.core.slowdown import Running
from jigsawrl.core.work_history import (
    Observation,
    WorkHistory,
    close,
    median_error,
    observe,
    reopen,
)
from tests.unit.core.graphs import CPU, position

STEP: dict[tuple[str, str | None], dict[SubStageKind, float]] = {
    ("p.rollout0", "d0"): {"prefill": 1, "bulk_decode": 6, "tail_decode": 3, "weight_sync": 0.2},
    ("p.rollout1", "d1"): {"prefill": 1, "bulk_decode": 5, "tail_decode": 5, "weight_sync": 0.2},
    ("p.reward0", None): {"reward_wait": 0.5},
    ("p.trainer0", "d0"): {"forward_backward": 4, "optimizer": 0.5, "weight_sync": 0.1},
    ("p.trainer1", "d1"): {"forward_backward": 4, "optimizer": 0.5},
}


def seen(
    version: int,
    kind: SubStageKind,
    duration_s: float,
    *,
    tenant: str = "p.rollout0",
    device: str | None = "d0",
    num_tokens: int = 100,
    share: float = 1.0,
    beside: Running | None = None,
) -> Observation:
    return Observation(
        pipeline="p",
        version=version,
        tenant=tenant,
        device=device,
        kind=kind,
        duration_s=duration_s,
        num_iterations=1,
        num_tokens=num_tokens,
        share=share,
        beside=beside,
    )


def step(history: WorkHistory, version: int, *, scale: float = 1.0) -> list[tuple[float, float]]:
    """One whole step as in `STEP`; (predicted, observed) of its sub-stages."""
    for (tenant, device), kinds in STEP.items():
        for kind, seconds in kinds.items():
            work_s = scale * seconds
            observe(history, seen(version, kind, work_s, tenant=tenant, device=device), table=CPU)
    return [(c.predicted_s, c.observed_s) for c in close(history, version=version)]


def ids(history: WorkHistory, outlook: Outlook) -> set[str]:
    return {node.id.removeprefix("p/") for node in predict(history, outlook)}


@pytest.fixture
def history() -> WorkHistory:
    """Three equal steps."""
    history = WorkHistory()
    for version in range(3):
        step(history, version)
    return history


def test_without_history_nothing_is_predicted() -> None:
    history = WorkHistory()
    observe(history, seen(0, "prefill", 1.0), table=CPU)
    assert predict(history, Outlook(pipeline="p", version=0)) == ()


def test_a_constant_history_predicts_exactly(history: WorkHistory) -> None:
    assert median_error(step(history, 3)) == 0
    work = {n.id: n.work_s for n in predict(history, Outlook(pipeline="p", version=4))}
    for (tenant, _), kinds in STEP.items():
        for kind, seconds in kinds.items():
            assert work[f"p/v4/{tenant}/{kind}"] == seconds
            assert work[f"p/v5/{tenant}/{kind}"] == seconds


def test_shares_and_neighbours_do_not_change_what_is_predicted(history: WorkHistory) -> None:
    slow = seen(3, "prefill", 2 / 0.97, share=0.5, beside=("optimizer", 0.5))
    observe(history, slow, table=CPU)
    (compared,) = (c for c in close(history, version=3) if c.kind == "prefill")
    assert compared.observed_s == pytest.approx(compared.predicted_s)


def test_a_jump_is_followed_within_three_steps(history: WorkHistory) -> None:
    errors = [median_error(step(history, 3 + i, scale=2)) for i in range(4)]
    assert errors == [0.5, 0.25, 0.125, 0.0625]


def test_a_drift_is_followed_within_three_steps(history: WorkHistory) -> None:
    errors = [median_error(step(history, 3 + i, scale=1 + 0.1 * i)) for i in range(6)]
    assert all(error is not None and error < 0.15 for error in errors[3:])


def test_a_step_of_another_boot_or_without_a_kind_counts(history: WorkHistory) -> None:
    observe(history, seen(3, "bulk_decode", 6), table=CPU)
    close(history, version=3)
    nodes = {n.id: n for n in predict(history, Outlook(pipeline="p", version=4))}
    assert nodes["p/v4/p.rollout0/tail_decode"].work_s == 1.5
    assert nodes["p/v4/p.rollout1/tail_decode"].work_s == 5


def test_a_tenant_that_was_placed_away_is_forgotten(history: WorkHistory) -> None:
    for version in range(3, 8):
        if version < 7:
            assert "v9/p.rollout1/prefill" in ids(history, Outlook(pipeline="p", version=9))
        observe(history, seen(version, "prefill", 1), table=CPU)
        close(history, version=version)
    assert set(history.tenants) == {"p.rollout0"}


def test_an_evaluation_may_be_long_ago(history: WorkHistory) -> None:
    observe(history, seen(3, "evaluation", 2, tenant="p.evaluation0"), table=CPU)
    for version in range(3, 12):
        step(history, version)
    assert "p.evaluation0" in history.tenants


def test_after_a_rollback_a_step_counts_once(history: WorkHistory) -> None:
    observe(history, seen(3, "prefill", 1), table=CPU)
    reopen(history, version=3)
    assert median_error(step(history, 3)) == 0


def test_nonsense_is_left_out(history: WorkHistory) -> None:
    for bad in (
        seen(3, "prefill", float("nan")),
        seen(3, "prefill", -1.0),
        seen(3, "prefill", 1.0, share=0.0),
    ):
        observe(history, bad, table=CPU)
    assert not close(history, version=3)


@pytest.mark.parametrize(
    ("work_s", "num_tokens", "left_s"),
    [
        (3.0, 50, 3.0),  # as predicted: half is left
        (6.0, 50, 6.0),  # twice as slow so far: so is the rest
        (1.5, 50, 1.5),
        (30.0, 25, 18.0),  # early numbers are noise: at most four times
        (3.0, 0, 3.0),  # no tokens counted: the prediction less what is done
        (9.0, 0, 0.12),  # over its time, and not ended: a little is left
        (6.0, 100, 0.12),
    ],
)
def test_what_is_left_follows_the_progress_so_far(
    history: WorkHistory, work_s: float, num_tokens: int, left_s: float
) -> None:
    observe(history, seen(3, "bulk_decode", work_s, num_tokens=num_tokens), table=CPU)
    nodes = {n.id: n for n in predict(history, Outlook(pipeline="p", version=3))}
    assert nodes["p/v3/p.rollout0/bulk_decode"].work_s == pytest.approx(left_s)
    assert nodes["p/v4/p.rollout0/bulk_decode"].work_s == 6


def test_what_is_told_with_the_next_version_is_left_in_full(history: WorkHistory) -> None:
    # Weights of version 3 were loaded, in the step before: those of version 4 are still to come.
    observe(history, seen(3, "weight_sync", 0.2), table=CPU)
    nodes = {n.id: n for n in predict(history, Outlook(pipeline="p", version=3))}
    for version in (3, 4):
        assert nodes[f"p/v{version}/p.rollout0/weight_sync"].work_s == pytest.approx(0.2)


def test_a_step_has_its_barriers_and_its_weights_lead_to_the_next(history: WorkHistory) -> None:
    nodes = predict(history, Outlook(pipeline="p", version=3))
    after = {n.id.removeprefix("p/"): {b.removeprefix("p/") for b in n.after} for n in nodes}
    assert after["v3/p.rollout0/tail_decode"] == {"v3/p.rollout0/bulk_decode"}
    tails = {"v3/p.rollout0/tail_decode", "v3/p.rollout1/tail_decode"}
    assert after["v3/p.reward0/reward_wait"] == tails
    assert after["v3/p.trainer1/forward_backward"] == {"v3/p.reward0/reward_wait"}
    gradients = {"v3/p.trainer0/forward_backward", "v3/p.trainer1/forward_backward"}
    assert after["v3/p.trainer1/optimizer"] == gradients
    published = {"v3/p.trainer0/weight_sync", "v3/p.trainer1/optimizer"}
    assert after["v3/p.rollout1/weight_sync"] >= published
    assert "v3/p.rollout1/weight_sync" in after["v4/p.rollout1/prefill"]
    devices = [DeviceBudget(id="d0"), DeviceBudget(id="d1")]
    critical = [n.kind for n in Graph(nodes, devices=devices).critical_path()]
    one = ["prefill", "bulk_decode", "tail_decode", "reward_wait", "forward_backward", "optimizer"]
    sync = ["weight_sync", "weight_sync"]
    assert critical == [*one, *sync, *one, *sync]


def test_what_has_ended_is_not_predicted_again(history: WorkHistory) -> None:
    done = {
        (3, tenant, kind)
        for (tenant, _), kinds in STEP.items()
        for kind in kinds
        if "rollout" in tenant and kind != "weight_sync"
    }
    outlook = Outlook(pipeline="p", version=3, num_steps=1, ended=frozenset(done))
    assert ids(history, outlook) == {
        f"v3/{tenant}/{kind}"
        for (tenant, _), kinds in STEP.items()
        for kind in kinds
        if (3, tenant, kind) not in done
    }


def test_with_staleness_the_next_rollout_waits_for_older_weights(history: WorkHistory) -> None:
    outlook = Outlook(pipeline="p", version=3, max_staleness=1)
    nodes = {n.id.removeprefix("p/"): n for n in predict(history, outlook)}
    assert nodes["v4/p.rollout1/prefill"].after == ("p/v3/p.rollout1/tail_decode",)
    assert "p/v3/p.rollout1/weight_sync" in nodes["v5/p.rollout1/prefill"].after
    assert "v5/p.rollout0/tail_decode" in nodes
    assert "v5/p.trainer0/optimizer" not in nodes


def test_the_last_version_ends_the_horizon(history: WorkHistory) -> None:
    outlook = Outlook(pipeline="p", version=3, max_staleness=2, last_version=4)
    assert {name.split("/")[0] for name in ids(history, outlook)} == {"v3"}


def test_an_evaluation_waits_for_its_version_and_nothing_for_it(history: WorkHistory) -> None:
    observe(history, seen(3, "evaluation", 2, tenant="p.evaluation0"), table=CPU)
    step(history, 3)
    step(history, 4)
    nodes = predict(history, Outlook(pipeline="p", version=5, evaluations=(5, 6, 9)))
    found = {n.version: n for n in nodes if n.kind == "evaluation"}
    assert set(found) == {5, 6}
    assert found[5].after == ()
    assert "p/v5/p.trainer0/weight_sync" in found[6].after
    assert found[6].work_s == 2
    assert not any(found[v].id in n.after for n in nodes for v in (6,))


def test_log_probs_and_tool_waits_have_their_places() -> None:
    history = WorkHistory()
    step(history, 0)
    for kind in ("reference_logprobs", "proximal_logprobs"):
        observe(history, seen(1, kind, 1, tenant="p.trainer0"), table=CPU)
    observe(history, seen(1, "tool_wait", 4), table=CPU)
    close(history, version=1)
    nodes = {n.id: n for n in predict(history, Outlook(pipeline="p", version=2))}
    chain = ("reference_logprobs", "proximal_logprobs", "forward_backward")
    for before, kind in pairwise(chain):
        assert f"p/v2/p.trainer0/{before}" in nodes[f"p/v2/p.trainer0/{kind}"].after
    wait = nodes["p/v2/p.rollout0/tool_wait"]
    assert wait.device is None
    assert wait.after == ("p/v2/p.rollout0/bulk_decode",)
    assert nodes["p/v2/p.rollout0/tail_decode"].after == (wait.id,)


def test_tails_can_move_between_the_pipelines_workers(history: WorkHistory) -> None:
    outlook = Outlook(
        pipeline="p", version=3, move_s=0.4, memory_bytes={"tail_decode": 7, "reward_wait": 7}
    )
    nodes = predict(history, outlook)
    tail = next(n for n in nodes if n.id == "p/v3/p.rollout0/tail_decode")
    assert (tail.movable_to, tail.move_s, tail.memory_bytes) == (("d1",), 0.4, 7)
    assert not any(n.movable_to for n in nodes if n.kind != "tail_decode")
    made = Graph(nodes, devices=[DeviceBudget(id="d0"), DeviceBudget(id="d1")])
    assert position(made, CPU).here[0]


def test_history_survives_a_snapshot(history: WorkHistory) -> None:
    observe(history, seen(3, "prefill", 0.5), table=CPU)
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(history), type=WorkHistory)
    assert restored == history


def test_the_error_is_the_median_of_relative_ones() -> None:
    assert median_error([]) is None
    assert median_error([(1.0, 0.0)]) is None
    assert median_error([(1.0, 1.0), (3.0, 2.0), (1.0, 4.0)]) == 0.5


def test_what_has_outlived_its_prediction_goes_on_for_as_long_as_predictions_are_off() -> None:
    history, steady = WorkHistory(), WorkHistory()
    for version in range(8):
        observe(history, seen(version, "tail_decode", 2 if version % 2 else 6), table=CPU)
        observe(steady, seen(version, "tail_decode", 4), table=CPU)
        for one in (history, steady):
            close(one, version=version)
    left = {}
    for name, one in (("unsteady", history), ("steady", steady)):
        observe(one, seen(8, "tail_decode", 6, num_tokens=150), table=CPU)
        (node,) = predict(one, Outlook(pipeline="p", version=8, num_steps=1))
        left[name] = node.work_s
    assert left["unsteady"] > 1.5
    assert left["steady"] < 0.1


def test_two_predicted_pipelines_fill_each_others_waits() -> None:
    nodes: list[Node] = []
    for name, wait_s in (("p", 4.0), ("q", 5.0)):
        history = WorkHistory()
        observe(history, seen(0, "tool_wait", wait_s), table=CPU)
        observe(history, seen(0, "tool_wait", wait_s, tenant="p.rollout1"), table=CPU)
        step(history, 0)
        nodes += predict(history, Outlook(pipeline=name, version=1, move_s=0.1))
    devices = [DeviceBudget(id="d0"), DeviceBudget(id="d1")]
    decide = partial(look_ahead, terms={}, limits=Limits())
    together, *alone = (
        play_deciding(
            Position(Graph(some, devices=devices), CPU, max_hold_s=60), decide=decide
        ).makespan_s
        for some in (nodes, *([n for n in nodes if n.pipeline == p] for p in "pq"))
    )
    assert sum(alone) / together > 1.3
