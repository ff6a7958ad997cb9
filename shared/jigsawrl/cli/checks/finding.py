"""What one check found."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line for people, and where something is wrong another that says what to do."""

    check: str
    state: Literal["ok", "warning", "failed"]
    found: str
    remedy: str | None = None


def ok(check: str, found: str) -> Finding:
    """As it should be."""
    return Finding(check=check, state="ok", found=found)


def warning(check: str, found: str, *, remedy: str) -> Finding:
    """It works, less well than it could."""
    return Finding(check=check, state="warning", found=found, remedy=remedy)


def failed(check: str, found: str, *, remedy: str) -> Finding:
    """Something will not work."""
    return Finding(check=check, state="failed", found=found, remedy=remedy)
