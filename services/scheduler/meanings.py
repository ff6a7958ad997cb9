"""Which submission a request meant, so that its repeat changes no later one of the same name.

`Requests` asks; of one leader. Knows nothing of the bus.
"""

from __future__ import annotations

MAX_REQUESTS = 10_000
"""Far more than are made while a client still repeats one, and about a megabyte."""


class Meanings:
    """Of the newest requests: a leader stays for months."""

    def __init__(self, *, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._submissions: dict[str, str | None] = {}
        """Id of a request -> id of the submission that it meant, oldest first."""

    def __len__(self) -> int:
        return len(self._submissions)

    def is_meant(self, request: str, *, submission: str | None) -> bool:
        """Whether it means this submission; that of its first time, where this is a repeat."""
        meant = self._submissions.setdefault(request, submission)
        if len(self._submissions) > self._max_requests:
            del self._submissions[next(iter(self._submissions))]
        return meant == submission
