"""What a policy is: a pure function of the state that the scheduler asks in every decision pass."""

from __future__ import annotations

from typing import Protocol

import msgspec

from jigsawrl.core.policies.placement import Place
from jigsawrl.core.shares import Wanted
from jigsawrl.core.state import State


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A queued pipeline that shall start now."""

    pipeline: str
    places: tuple[Place, ...]


class Policy(Protocol):
    """Plug-in of the scheduler, live and simulated alike. It keeps nothing: what it needs to remember
    is in the state, so that a replay decides alike."""

    name: str

    def starts(self, state: State) -> list[Start]:
        """Pipelines to start now."""

    def shares(self, state: State) -> Wanted:
        """How each device that has tenants is divided from now on; only changes are commanded."""
