"""Stream time: the only clock the scheduler has. `Scheduler.handle` advances it by each message;
leases ask it whether they have expired. It knows no wall clock."""

from __future__ import annotations

import msgspec

MAX_STEP_S = 0.2
"""Most that one message may advance stream time: two ticks, so that a lost one does not matter."""

GAP_S = 1.0
"""A longer silence means that NATS or the leader was away, not that workers were slow."""


class StreamClock(msgspec.Struct):
    """Advances by the stored timestamps of messages, bounded per message."""

    now_s: float = 0.0
    last_timestamp_s: float | None = None
    leases_restarted_s: float = 0.0

    def advance(self, timestamp_s: float) -> float:
        """Take the timestamp of the next message; the stream time now."""
        if self.last_timestamp_s is not None:
            delta_s = timestamp_s - self.last_timestamp_s
            self.now_s += max(0.0, min(delta_s, MAX_STEP_S))
            if delta_s > GAP_S:
                self.leases_restarted_s = self.now_s
        self.last_timestamp_s = timestamp_s
        return self.now_s

    def expired(self, since_s: float, *, term_s: float) -> bool:
        """Whether a lease of `term_s` that began at `since_s` has run out."""
        return self.now_s - max(since_s, self.leases_restarted_s) >= term_s
