"""Ticks, by which alone time passes while nobody speaks."""

from jigsawrl.contract.events import NodeStarted, Tick
from jigsawrl.contract.spec import Device
from jigsawrl.core import invariants
from jigsawrl.core.scheduler import Scheduler
from services.scheduler.leader import IDLE_TICK_S, TICK_S
from tests.services.scheduler_steps import NODE


def test_a_dead_node_is_noticed_while_no_pipeline_lives() -> None:
    scheduler = Scheduler()
    device = Device("node", 0, "cpu", 1 << 33)
    started = NodeStarted(id="node", node=NODE, devices=(device,))
    scheduler.handle(started, timestamp_s=1000.0, sequence=1)
    late_s = 0.2  # a loaded machine
    period_s = IDLE_TICK_S + TICK_S + late_s
    for number in range(1, int(45 / period_s)):
        tick = Tick(id=f"t{number}")
        scheduler.handle(tick, timestamp_s=1000 + number * period_s, sequence=number + 1)
    assert not scheduler.state.nodes["node"].up
    invariants.check(scheduler.state)
