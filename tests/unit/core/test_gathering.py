"""Generation on fewer workers: what it should cost, what it did, and when it is chosen."""

from __future__ import annotations

import msgspec
import pytest

from jigsawrl.contract import commands as c
from jigsawrl.core.gathering import Work, decode_cost_s, gathered
from jigsawrl.core.policies.gather import MAX_DEVICES
from jigsawrl.core.prediction import Outlook, predict
from jigsawrl.core.slowdown import CPU_SLOT, SlowdownTable
from jigsawrl.core.work_history import (
    Observation,
    WorkHistory,
    close,
    expect_generation,
    expected_of,
    observe,
)
from tests.unit.core.queries import issued, placed_on
from tests.unit.core.world import Faults, World, spec

TABLE = SlowdownTable(CPU_SLOT)
PER_ITERATION_S, PER_TOKEN_S = 0.003, 0.0001


def decode(num_iterations: float, num_tokens: float) -> Work:
    work_s = num_iterations * PER_ITERATION_S + num_tokens * PER_TOKEN_S
    return Work(work_s=work_s, num_iterations=num_iterations, num_tokens=num_tokens)


SPREAD = [
    {
        "prefill": Work(work_s=0.1),
        "bulk_decode": decode(100, 2500),
        "tail_decode": decode(400, 800),
    },
    {
        "prefill": Work(work_s=0.1),
        "bulk_decode": decode(100, 2500),
        "tail_decode": decode(300, 600),
    },
]


def test_the_cost_of_an_iteration_and_of_a_token_follow_from_bulk_and_tail() -> None:
    found = decode_cost_s(decode(200, 5000), decode(700, 1400))
    assert found == pytest.approx((PER_ITERATION_S, PER_TOKEN_S))


def test_without_two_batch_sizes_all_cost_is_of_iterations() -> None:
    assert decode_cost_s(Work(), decode(100, 100)) == pytest.approx((0.0031, 0.0))


def test_one_worker_does_less_than_two_together_and_more_than_each() -> None:
    one = gathered(SPREAD, num_workers=1)  # type: ignore[arg-type]
    decoded = one["bulk_decode"] + one["tail_decode"]
    assert decoded.num_iterations == 500, "the longest sequence is as long anywhere"
    assert decoded.num_tokens == pytest.approx(6400)
    assert decoded.work_s == pytest.approx(500 * PER_ITERATION_S + 6400 * PER_TOKEN_S)
    assert one["prefill"].work_s == pytest.approx(0.2)


def test_nothing_is_said_where_no_iterations_were_counted() -> None:
    assert gathered([{"bulk_decode": Work(work_s=1.0)}], num_workers=1) == {}
    assert gathered([], num_workers=1) == {}


def seen(history: WorkHistory, version: int, tenant: str, work: Work, kind: str) -> None:
    observation = Observation(
        pipeline="p",
        version=version,
        tenant=tenant,
        device=f"d{tenant[-1]}",
        kind=kind,  # type: ignore[arg-type]
        duration_s=work.work_s,
        num_iterations=int(work.num_iterations),
        num_tokens=int(work.num_tokens),
        share=1.0,
    )
    observe(history, observation, table=TABLE)


def spread_step(history: WorkHistory, version: int) -> None:
    for index, worker in enumerate(SPREAD):
        for kind, work in worker.items():
            seen(history, version, f"p.rollout{index}", work, kind)


def test_planned_steps_have_averages_of_their_own_that_begin_with_what_was_expected() -> None:
    history = WorkHistory()
    spread_step(history, 0)
    close(history, version=0)
    history.plans[1] = ["p.rollout1"]
    (expected,) = (
        n
        for n in predict(history, Outlook(pipeline="p", version=1))
        if n.id.endswith("v1/p.rollout1/tail_decode")
    )
    seen(history, 1, "p.rollout1", decode(150, 4000), "bulk_decode")
    seen(history, 1, "p.rollout1", decode(450, 900), "tail_decode")
    compared = {one.kind: one for one in close(history, version=1)}
    assert compared["tail_decode"].predicted_s == pytest.approx(expected.work_s)
    mean_s = (expected.work_s + decode(450, 900).work_s) / 2
    assert history.gathered[1]["tail_decode"].work_s == pytest.approx(mean_s)
    assert not history.tenants["p.rollout1"].costs["tail_decode"].open
    spread_step(history, 2)
    assert not any(
        one.kind == "prefill" and one.predicted_s != pytest.approx(0.1)
        for one in close(history, version=2)
    )


def test_a_long_step_makes_no_way_of_generating_look_dearer_than_another() -> None:
    history = WorkHistory()
    spread_step(history, 0)
    close(history, version=0)

    def ratio() -> float:
        one = sum(work.work_s for work in expected_of(history, num_workers=1).values())
        return one / sum(c.work_s or 0 for t in history.tenants.values() for c in t.costs.values())

    before = ratio()
    for version, plan in ((1, ["p.rollout0"]), (2, ["p.rollout0"]), (3, []), (4, [])):
        history.plans[version] = plan
        for index, worker in enumerate(SPREAD):
            usual = gathered(SPREAD, num_workers=1) if plan else worker  # type: ignore[arg-type]
            for kind, work in usual.items():
                if kind != "prefill" and (not plan or index == 0):
                    longer = decode(2 * work.num_iterations, 2 * work.num_tokens)
                    seen(history, version, f"p.rollout{index}", longer, kind)
        close(history, version=version)
        assert ratio() == pytest.approx(before, rel=0.1), version


def test_what_planned_steps_cost_beyond_their_lengths_is_learned() -> None:
    history = WorkHistory()
    spread_step(history, 0)
    close(history, version=0)
    before = {n: t.costs["tail_decode"].work_s for n, t in history.tenants.items()}
    for version in (1, 2, 3, 4):
        history.plans[version] = ["p.rollout0"]
        for kind, work in gathered(SPREAD, num_workers=1).items():  # type: ignore[arg-type]
            dear = msgspec.structs.replace(work, work_s=2 * work.work_s)
            seen(history, version, "p.rollout0", dear, kind)
        close(history, version=version)
    usual = gathered(SPREAD, num_workers=1)["tail_decode"]  # type: ignore[arg-type]
    found = expected_of(history, num_workers=1)["tail_decode"]
    assert found.work_s == pytest.approx(2 * usual.work_s, rel=0.1)
    assert {n: t.costs["tail_decode"].work_s for n, t in history.tenants.items()} == pytest.approx(
        before, rel=1e-2
    )


def test_workers_without_work_by_plan_are_not_forgotten() -> None:
    history = WorkHistory()
    spread_step(history, 0)
    close(history, version=0)
    for version in range(1, 10):
        history.plans[version] = ["p.rollout0"]
        seen(history, version, "p.rollout0", decode(450, 900), "tail_decode")
        close(history, version=version)
    assert list(history.tenants) == ["p.rollout0", "p.rollout1"]


def test_whoever_took_the_tail_of_a_planned_worker_is_predicted_with_what_is_left_of_it() -> None:
    history = WorkHistory()
    spread_step(history, 0)
    close(history, version=0)
    history.plans[1] = ["p.rollout0"]
    work = gathered(SPREAD, num_workers=1)  # type: ignore[arg-type]
    seen(history, 1, "p.rollout0", work["bulk_decode"], "bulk_decode")
    half = decode(work["tail_decode"].num_iterations / 2, work["tail_decode"].num_tokens / 2)
    seen(history, 1, "p.rollout0", half, "tail_decode")
    over = {(1, "p.rollout0", kind) for kind in work} | {
        (1, "p.rollout1", kind) for kind in work if kind != "tail_decode"
    }
    outlook = Outlook(
        pipeline="p", version=1, num_steps=1, ended=over, generating={"p.rollout1": 2}
    )
    (tail,) = predict(history, outlook)
    assert (tail.id, tail.device) == ("p/v1/p.rollout1/tail_decode", "d1")
    assert tail.work_s == pytest.approx(work["tail_decode"].work_s / 2, rel=0.01)
    elsewhere = msgspec.structs.replace(outlook, devices=frozenset({"d0"}))
    (wait,) = predict(history, elsewhere)
    assert wait.kind == "elsewhere"
    assert wait.work_s == pytest.approx(tail.work_s)


def test_only_planned_workers_are_predicted() -> None:
    history = WorkHistory()
    spread_step(history, 0)
    close(history, version=0)
    one = predict(history, Outlook(pipeline="p", version=1, workers=("p.rollout0",)))
    assert {node.device for node in one} == {"d0"}
    both = predict(history, Outlook(pipeline="p", version=1))
    assert {node.device for node in both} == {"d0", "d1"}


def test_what_happens_elsewhere_is_what_the_planned_workers_there_do() -> None:
    history = WorkHistory()
    spread_step(history, 0)
    close(history, version=0)
    for devices, num in (("d0", 0), ("d1", 1)):
        outlook = Outlook(
            pipeline="p",
            version=1,
            num_steps=1,
            workers=("p.rollout0",),
            devices=frozenset({devices}),
        )
        nodes = predict(history, outlook)
        assert {node.device for node in nodes} == ({None} if num else {"d0"})
        elsewhere = [node.work_s for node in nodes if node.kind == "elsewhere"]
        one = gathered(SPREAD, num_workers=1)  # type: ignore[arg-type]
        assert elsewhere == pytest.approx([sum(work.work_s for work in one.values())] * num)


def test_beside_another_pipeline_a_step_may_go_to_one_worker_alone_it_goes_to_all() -> None:
    pair = World(
        seed=3,
        faults=Faults(),
        pipelines=[spec(name, num_steps=10, evaluation=None) for name in ("a", "b")],
        policy="jigsaw",
    )
    pair.run()
    sizes = [len(workers) for name in ("a", "b") for workers in placed_on(pair, name)]
    assert 1 in sizes
    single = World(
        seed=3,
        faults=Faults(),
        pipelines=[spec("a", num_steps=10, evaluation=None)],
        policy="jigsaw",
    )
    single.run()
    assert all(len(workers) == 2 for workers in placed_on(single, "a"))


def test_before_any_history_pipelines_generate_on_devices_apart() -> None:
    for num_pipelines, num_apart in ((2, 2), (3, 2)):
        names = ["a", "b", "c"][:num_pipelines]
        world = World(
            seed=3,
            faults=Faults(),
            pipelines=[spec(name, num_steps=2, evaluation=None) for name in names],
            policy="jigsaw",
            companions={name: tuple(other for other in names if other != name) for name in names},
        )
        world.run()
        first = [placed_on(world, name)[0] for name in names]
        assert all(len(workers) == 1 for workers in first)
        devices = {order.tenant: order.device for order in issued(world, c.StartTenant)}
        assert len({devices[worker] for workers in first for worker in workers}) == num_apart


def test_what_all_workers_would_do_is_told_from_what_one_did() -> None:
    history = WorkHistory(plans={0: ["p.rollout0"]})
    for index in (0, 1):
        expect_generation(history, f"p.rollout{index}", device=f"d{index}")
    seen(history, 0, "p.rollout0", decode(100, 5000), "bulk_decode")
    seen(history, 0, "p.rollout0", decode(400, 1600), "tail_decode")
    close(history, version=0)
    nodes = predict(history, Outlook(pipeline="p", version=1, workers=()))
    work_s = {(node.device, node.kind): node.work_s for node in nodes if node.version == 1}
    spread = decode(100, 1700)  # as many tokens of the tail on each, and half of all
    for device in ("d0", "d1"):
        assert work_s[device, "bulk_decode"] == pytest.approx(spread.work_s)
        assert work_s[device, "tail_decode"] == pytest.approx(decode(400, 1600).work_s)


def test_steps_on_more_devices_than_are_judged_go_to_all_workers() -> None:
    num_workers = MAX_DEVICES + 1
    pipelines = [
        spec(
            name,
            num_steps=5,
            groups_per_batch=num_workers,
            num_rollout_workers=num_workers,
            evaluation=None,
        )
        for name in ("a", "b")
    ]
    world = World(
        seed=3,
        faults=Faults(),
        pipelines=pipelines,
        policy="jigsaw",
        memory_bytes=(1 << 30,) * num_workers,
    )
    world.run()
    assert {len(workers) for name in ("a", "b") for workers in placed_on(world, name)} == {
        num_workers
    }


def test_the_ablation_without_merging_uses_all_workers() -> None:
    world = World(
        seed=3,
        faults=Faults(),
        pipelines=[spec(name, num_steps=10, evaluation=None) for name in ("a", "b")],
        policy="jigsaw-no-migration",
    )
    world.run()
    assert all(len(workers) == 2 for name in ("a", "b") for workers in placed_on(world, name))


def test_a_planned_step_of_which_nothing_was_told_says_nothing() -> None:
    history = WorkHistory()
    spread_step(history, 0)
    close(history, version=0)
    before = predict(history, Outlook(pipeline="p", version=2, workers=("p.rollout0",)))
    history.plans[1] = ["p.rollout0"]
    close(history, version=1)
    after = predict(history, Outlook(pipeline="p", version=2, workers=("p.rollout0",)))
    assert before == after
    assert not history.gathered
