"""The ``[tracking]`` table: experiment trackers that the trainer writes besides its own files.

Read by `jigsawrl.config`; `services.trainer.tracking` writes.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from jigsawrl.config_base import Table

TRACKERS = ("tensorboard", "wandb")
"""As ``--track`` names them; each is a key of the table."""

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""What each needs, as it is imported."""

WandbName = Annotated[str, Meta(pattern=r"^[^/\\#?%:]{1,128}$")]
"""What Weights & Biases takes as the name of a project or an entity."""


class WandbConfig(Table, frozen=True, kw_only=True):
    """Weights & Biases, offline: nothing is sent, and no account needed."""

    project: WandbName = "jigsawrl"
    entity: WandbName | None = None
    """User or team that it is uploaded to later; None = whoever uploads."""


class TrackingConfig(Table, frozen=True, kw_only=True):
    """Each tracker is written where it is asked for."""

    tensorboard: bool = False
    wandb: WandbConfig | None = None

    def chosen(self) -> tuple[str, ...]:
        """Of `TRACKERS`."""
        wanted = {"tensorboard": self.tensorboard, "wandb": self.wandb is not None}
        return tuple(name for name in TRACKERS if wanted[name])
