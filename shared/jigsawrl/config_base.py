"""What all config tables are made of. Imported by `config` and `config_algorithm`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1, le=2**53)]
"""At most what a `Count` of the contract holds: one more, and the scheduler could not read what it
published of the pipeline."""
NumProcesses = Annotated[int, Meta(ge=1, le=4096)]
"""Of one role. Each is a process on a device of its own where there are enough; a mistyped zero or two
would be a fork bomb where the memory of each was said to be small."""
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all config tables."""
