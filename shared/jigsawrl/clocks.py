"""What is said of a machine whose wall clock is off, wherever a person looks: the scheduler's log,
`jigsaw status`, `jigsaw doctor`.

Nothing is decided by such clocks. Leases are counted in the time of the event stream, which the server
stamps; spans of work are timed by clocks of one process.
"""

from __future__ import annotations

MAX_SKEW_S = 2.0
"""Less does not confuse a reader of two logs, and a message may well be under way for a part of it."""


def skew_text(who: str, skew_s: float | None) -> str | None:
    """One line on a clock that is `skew_s` ahead of the server's; None where that is no matter."""
    if skew_s is None or abs(skew_s) <= MAX_SKEW_S:
        return None
    way = "ahead of" if skew_s > 0 else "behind"
    return (
        f"the clock of {who} is {abs(skew_s):.1f} s {way} the NATS server's: decisions don't depend on"
        " it, times in logs and traces do; let NTP set it"
    )
