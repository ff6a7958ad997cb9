"""``python -m services.trainer --url URL --pipeline NAME --run-folder DIR``."""

from __future__ import annotations

from services.run import main, parser
from services.trainer.trainer import Trainer

if __name__ == "__main__":
    arguments = parser("trainer")
    arguments.add_argument("--run-folder", required=True, help="checkpoints, metrics, trajectories")
    main(Trainer, arguments.parse_args(), role="trainer")
