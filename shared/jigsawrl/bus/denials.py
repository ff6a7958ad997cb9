"""What the server does not let this process do, told to who tries it.

Used by `connection`. A server answers a publish or subscription that it denies with an error on the
connection, not with an answer: nats-py tells its error callback, and the caller waits until a time-out.
`Denials` finds who waits, and `GuardedClient` is nats-py's client with every request watched so, those
of its JetStream part included.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from jigsawrl.bus.base import PermissionDeniedError
from jigsawrl.bus.credentials import Credentials

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "(.*?)"')
"""nats-py hands the text on in small letters."""

NUM_REMEMBERED = 256


def is_denial(error: Exception) -> bool:
    """The server has said that we may not."""
    return _VIOLATION.search(str(error).lower()) is not None


class _Waiting:
    """One request on its way."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.scope = asyncio.timeout(None)
        self.denial: PermissionDeniedError | None = None


class Denials:
    """Of one connection."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._waiting: set[_Waiting] = set()
        self._known: dict[str, PermissionDeniedError] = {}
        """By subject in small letters."""
        self._inbox: PermissionDeniedError | None = None
        """Without it no answer ever comes."""

    def add(self, text: str) -> PermissionDeniedError | None:
        """What an error of the server says, if it is a denial that was not known, and that nobody waits
        for: who waits is told."""
        found = _VIOLATION.search(text.lower())
        if found is None:
            return None
        what, subject = found[1], found[2]
        waiting = [w for w in self._waiting if w.subject.lower() == subject]
        # The server says it in the case that the caller wrote; nats-py does not.
        named = waiting[0].subject if waiting else subject
        denial = self._denial(what, named)
        if what == "subscription" and subject.startswith("_inbox."):
            self._inbox = denial
            waiting = list(self._waiting)
        for one in waiting:
            if not one.scope.expired():
                one.denial = denial
                one.scope.reschedule(asyncio.get_running_loop().time())
        told = bool(waiting) or subject in self._known
        if len(self._known) >= NUM_REMEMBERED:
            self._known.clear()
        self._known[subject] = denial
        return None if told else denial

    def _denial(self, what: str, subject: str) -> PermissionDeniedError:
        does = "publish on" if what == "publish" else "subscribe to"
        if self._credentials is None:
            return PermissionDeniedError(
                f"the server does not let this process {does} {subject}: give it the credentials of"
                " its role with --credentials"
            )
        return PermissionDeniedError(
            f"{self._credentials} may not {does} {subject}: start this program with the credentials of"
            f" its own role, not {self._credentials.path}; if these are, write the server's"
            " configuration anew with jigsaw credentials"
        )

    def forget(self) -> None:
        """A new link, perhaps to a server with another configuration."""
        self._known.clear()
        self._inbox = None

    def forget_subject(self, subject: str) -> None:
        """It is tried again."""
        self._known.pop(subject.lower(), None)

    def check(self, subject: str) -> None:
        """Raise `PermissionDeniedError` where the server has denied it, or all answers."""
        denial = self._known.get(subject.lower()) or self._inbox
        if denial is not None:
            raise denial

    @contextlib.asynccontextmanager
    async def told(self, subject: str) -> AsyncIterator[None]:
        """Around a request: a denial ends it at once as `PermissionDeniedError`."""
        if self._inbox is not None:
            raise self._inbox
        waiting = _Waiting(subject)
        self._waiting.add(waiting)
        try:
            async with waiting.scope:
                yield
        except TimeoutError:
            if waiting.denial is not None:
                raise waiting.denial from None
            raise
        finally:
            self._waiting.discard(waiting)


class GuardedClient(Client):
    """nats-py's client whose requests end at once when they are denied."""

    def __init__(self, denials: Denials) -> None:
        super().__init__()
        self._denials = denials

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """As nats-py's."""
        async with self._denials.told(subject):
            return await super().request(
                subject, payload, timeout=timeout, old_style=old_style, headers=headers
            )
