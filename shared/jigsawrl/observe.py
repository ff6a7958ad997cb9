"""Logging for all programs: structlog lines on standard error, one place to configure it."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(*, service: str) -> None:
    """Readable lines on standard error with time, level and the service's name.

    The library only calls `structlog.get_logger`; programs call this once."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(
                key_order=["timestamp", "level", "service", "event"], drop_missing=True
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)
