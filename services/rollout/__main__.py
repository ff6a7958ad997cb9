"""``python -m services.rollout --url URL --pipeline NAME [--role rollout|evaluation]``."""

from __future__ import annotations

from services.run import main, parser

if __name__ == "__main__":
    arguments = parser("rollout")
    arguments.add_argument("--role", choices=("rollout", "evaluation"), default="rollout")
    parsed = arguments.parse_args()
    # After the arguments: torch takes seconds to import.
    if parsed.role == "rollout":
        from services.rollout.rollout import Rollout as Service
    else:
        from services.rollout.evaluation import Evaluation as Service  # type: ignore[assignment]
    main(Service, parsed, role=parsed.role)
