"""``python -m services.rollout --url URL --pipeline NAME [--role rollout|evaluation]``."""

from __future__ import annotations

from services.rollout.evaluation import Evaluation
from services.rollout.rollout import Rollout
from services.run import main, parser

if __name__ == "__main__":
    arguments = parser("rollout")
    arguments.add_argument("--role", choices=("rollout", "evaluation"), default="rollout")
    parsed = arguments.parse_args()
    main(Rollout if parsed.role == "rollout" else Evaluation, parsed, role=parsed.role)
