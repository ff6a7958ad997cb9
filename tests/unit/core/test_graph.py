"""The Sub-Stage Graph: validation, ready set, critical path, lower bound."""

import pytest

from jigsawrl.core.graph import DeviceBudget, Graph, Node
from tests.unit.core.graphs import graph, node


def test_nodes_stand_in_the_order_of_their_dependencies() -> None:
    made = graph(node("a.2", "d0", 1, after=["a.1"]), node("a.1", "d0", 1), node("b.1", "d0", 1))
    assert [n.id for n in made.nodes] == ["a.1", "b.1", "a.2"]


def test_ready_is_what_waits_for_nothing() -> None:
    made = graph(node("a.1", "d0", 1), node("a.2", "d0", 1, after=["a.1"]), node("b.1", "d1", 1))
    assert [n.id for n in made.ready(())] == ["a.1", "b.1"]
    assert [n.id for n in made.ready({"a.1"})] == ["b.1", "a.2"]


def test_the_critical_path_is_the_longest_chain_of_work() -> None:
    made = graph(
        node("a.1", "d0", 2),
        node("a.2", None, 5, after=["a.1"]),
        node("a.3", "d1", 4, after=["a.1"]),
        node("a.4", "d1", 1, after=["a.2", "a.3"]),
        node("b.1", "d0", 7),
    )
    assert [n.id for n in made.critical_path()] == ["a.1", "a.2", "a.4"]
    assert made.critical_path_s() == 8
    assert made.device_work_s() == {"d0": 9, "d1": 5}
    assert made.lower_bound_s() == 9
    assert made.lower_bound_s(capacity=1.5) == 8


def test_tails_that_can_share_a_batch_bound_nothing_together() -> None:
    tails = [node(f"a.{i}", "d0", 4, kind="tail_decode") for i in range(3)]
    assert graph(*tails).lower_bound_s() == 4


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([node("a.1", "d0", 1), node("a.1", "d0", 1)], r"a\.1: the id is taken"),
        ([node("a.1", "d0", 1, after=["x"])], r"a\.1: comes after unknown node x"),
        ([node("a.1", "d0", 1, after=["a.1"])], "cycle"),
        ([node("a.1", "d0", 1, after=["a.2"]), node("a.2", "d0", 1, after=["a.1"])], "cycle"),
        ([node("a.1", "d9", 1)], "unknown device d9"),
        ([node("a.1", "d0", -1)], "not negative"),
        ([node("a.1", "d0", float("inf"))], "finite"),
        ([node("a.1", "d0", 1, memory_bytes=11)], "needs 11 bytes on d0, which has 10"),
        ([node("a.1", "d0", 1, movable_to=["d0"])], "only tail decode moves"),
        (
            [Node(id="a", pipeline="a", version=0, kind="prefill", device=None, work_s=1)],
            "have no device",
        ),
    ],
)
def test_a_graph_that_cannot_be_played_is_refused(nodes: list[Node], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        Graph(nodes, devices=[DeviceBudget(id="d0", memory_bytes=10)])
    assert "\n" not in str(error.value)
