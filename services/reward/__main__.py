"""``python -m services.reward --url URL --pipeline NAME``."""

from __future__ import annotations

from services.reward.reward import Reward
from services.run import main, parser

if __name__ == "__main__":
    main(Reward, parser("reward").parse_args(), role="reward")
