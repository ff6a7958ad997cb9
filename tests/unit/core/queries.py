"""What tests ask of a simulated world."""

from typing import TypeVar

from jigsawrl.contract import commands as c
from jigsawrl.core.state import Pipeline
from tests.unit.core.world import World

T = TypeVar("T", bound=c.Command)


def pipeline_of(world: World, name: str = "p") -> Pipeline:
    return world.scheduler.state.pipelines[name]


def issued(world: World, kind: type[T]) -> list[T]:
    return [command for batch in world.issued for command in batch if isinstance(command, kind)]


def placed_on(world: World, pipeline: str) -> list[set[str]]:
    """Workers of each step's first placements, by step."""
    steps: dict[str, set[str]] = {}
    for command in issued(world, c.PlaceSequences):
        for placement in command.placements:
            name, group, _ = placement.sequence.split("/")
            if name == pipeline and placement.epoch == 1:
                steps.setdefault(group, set()).add(command.worker.id)
    size = world.scheduler.state.pipelines[pipeline].spec.groups_per_batch
    groups = list(steps.values())
    return [set().union(*groups[i : i + size]) for i in range(0, len(groups), size)]
