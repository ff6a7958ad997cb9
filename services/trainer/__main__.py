"""``python -m services.trainer --url URL --pipeline NAME --run-folder DIR``."""

from __future__ import annotations

from services.run import main, parser

if __name__ == "__main__":
    arguments = parser("trainer")
    arguments.add_argument(
        "--run-folder", required=True, help="where checkpoints, metrics and trajectories go"
    )
    arguments.add_argument(
        "--stop-timeout",
        type=float,
        default=3.0,
        metavar="SECONDS",
        help="for the last checkpoint after SIGTERM; default: 3",
    )
    parsed = arguments.parse_args()
    # After the arguments: torch takes seconds to import.
    from services.trainer.trainer import Trainer

    main(Trainer, parsed, role="trainer")
