"""What a policy is: a pure function of the state that the scheduler asks in every decision pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import ClassVar

import msgspec

from jigsawrl.core.migration import Move
from jigsawrl.core.policies.placement import Place
from jigsawrl.core.shares import Wanted, equal
from jigsawrl.core.state import Pipeline, State


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A queued pipeline that shall start now."""

    pipeline: str
    places: tuple[Place, ...]


class Policy(ABC):
    """Plug-in of the scheduler, live and simulated alike. It keeps nothing: what it needs to remember
    is in the state, so that a replay decides alike. One that says no more than which pipelines start
    divides devices evenly and moves nothing."""

    name: ClassVar[str]
    every_tick: ClassVar[bool] = False
    """Asked on every tick, also about pipelines that nothing happened to."""
    keeps_terms: ClassVar[bool] = False
    """Heeds the weights and latency caps of pipelines; priorities, every policy heeds at the start."""

    pins: ClassVar[bool] = True
    """Tenants of a CPU slot run on its core only."""

    @abstractmethod
    def starts(self, state: State) -> list[Start]:
        """Pipelines to start now."""

    def turn(self, state: State, pipeline: Pipeline) -> str | None:
        """None where an active pipeline may place sequences; else what it waits for, for people."""
        return None

    def workers(self, state: State, pipeline: Pipeline) -> Collection[str] | None:
        """Rollout workers that shall generate what an active pipeline places now; None = all."""
        return None

    def awaits(self, state: State) -> Iterable[str]:
        """Pipelines that a decision on this tick shall look at, whatever happened to them."""
        if not self.every_tick:
            return ()
        return [pipeline.name for pipeline in state.pipelines.values() if pipeline.active]

    def shares(self, state: State) -> Wanted:
        """How devices are divided from now on: those in `undivided`, and others as it likes; only
        changes are commanded. Evenly: tenants that take turns lose nothing by that, as who works has
        what others leave."""
        return equal(state, devices=state.undivided)

    def longest_first(self, pipeline: Pipeline) -> bool:
        """Whether sequences that wait in an engine join by what is known of their groups' lengths, and
        not in order of admission."""
        return False

    def moves(self, state: State, pipeline: Pipeline) -> list[Move]:
        """Running sequences of an active pipeline that shall go to other rollout workers now."""
        return []
