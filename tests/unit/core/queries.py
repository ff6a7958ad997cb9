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
