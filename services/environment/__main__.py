"""``python -m services.environment --url URL --pipeline NAME``."""

from __future__ import annotations

from services.environment.environment import Environment
from services.run import main, parser

if __name__ == "__main__":
    main(Environment, parser("environment").parse_args(), role="environment")
