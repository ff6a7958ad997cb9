"""Logging for all programs: structlog lines on standard error, one place to configure it.

Text for people, or one JSON object a line (``JIGSAW_LOG=json``) for what collects logs. The library and
the services only call `structlog.get_logger`, the bus `logging.getLogger`: both come out alike. Ids
that hold for a while (the command that is carried out, its version) are bound by `about`, those of the
whole process are given to `configure_logging`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

import structlog

from jigsawrl.tracing import current_trace_id

VARIABLE = "JIGSAW_LOG"

Format = Literal["text", "json"]

Entry = MutableMapping[str, Any]

_TEXT_HEAD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ [a-z]+ [\w-]+: ")
"""Of what `_text_line` writes."""


def log_format() -> Format:
    """What the environment asks for; raises ValueError where it asks for neither."""
    wanted = os.environ.get(VARIABLE) or "text"
    if wanted == "json":
        return "json"
    if wanted == "text":
        return "text"
    raise ValueError(f"{VARIABLE}={wanted}: choose text or json")


def configure_logging(*, service: str, **ids: str) -> None:
    """Lines on standard error with time, level and the service's name; in JSON with the `ids` of this
    process, too, which in text the name of the log file tells.

    Programs call this once; those that are given a format that is none say so and write text."""
    try:
        wanted, problem = log_format(), None
    except ValueError as error:
        wanted, problem = "text", str(error)
    processors = _json_processors(service, ids) if wanted == "json" else _text_processors(service)
    renderer: Any = (
        structlog.processors.JSONRenderer(default=str) if wanted == "json" else _text_line
    )
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    _take_over_standard_logging(processors, renderer)
    if wanted == "json":
        sys.excepthook = _log_uncaught
    if problem is not None:
        structlog.get_logger().warning("writes text", reason=problem)


def _text_line(logger: Any, method: str, entry: Entry) -> str:
    """``2026-01-31 12:00:00.000000 warning rollout: fell back  device=n/cpu0``, a traceback below."""
    trace = entry.pop("exception", None)
    when, level, service, event = (
        entry.pop(key, "-") for key in ("timestamp", "level", "service", "event")
    )
    details = " ".join(f"{name}={_text_value(value)}" for name, value in entry.items())
    line = f"{when} {level} {service}: {event}" + (f"  {details}" if details else "")
    return line if trace is None else f"{line}\n{trace}"


def _text_value(value: Any) -> str:
    """Quoted where its end would not be seen."""
    is_word = isinstance(value, str) and value and not set(value) & set(" =\"'\n")
    return str(value) if is_word else repr(value)


def about(**ids: Any) -> AbstractContextManager[None]:
    """Bind ids to every line of a block and of the tasks that it starts; those that are None are left
    out."""
    return structlog.contextvars.bound_contextvars(
        **{name: value for name, value in ids.items() if value is not None}
    )


def last_words(line: str) -> str:
    """What a line of a log says, for people: without braces, or when and by whom it was written."""
    try:
        entry = json.loads(line)
    except ValueError:
        return _TEXT_HEAD.sub("", line)
    if not isinstance(entry, dict) or "event" not in entry:
        return line
    known = (entry.get(key) for key in ("reason", "error", "exception"))
    details = [str(detail).strip().splitlines()[-1] for detail in known if detail]
    return ": ".join([str(entry["event"]), *details])


def json_line(**fields: Any) -> str:
    """A line as the programs' logs have it, for a program without structlog's configuration."""
    entry: Entry = {"level": "info", **fields}
    entry = structlog.processors.TimeStamper(fmt="iso", utc=True)(None, "info", entry)
    return json.dumps(entry, default=str)


def _text_processors(service: str) -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        _constants({"service": service}),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S.%f", utc=False),
        structlog.processors.format_exc_info,
    ]


def _json_processors(service: str, ids: dict[str, str]) -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        _constants({"service": service, **ids}),
        _add_trace,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]


def _constants(fields: dict[str, str]) -> Any:
    """Of the process, not of a context: threads of its own have none."""

    def add(logger: Any, method: str, entry: Entry) -> Entry:
        for name, value in fields.items():
            entry.setdefault(name, value)
        return entry

    return add


def _add_trace(logger: Any, method: str, entry: Entry) -> Entry:
    trace_id = current_trace_id()
    if trace_id is not None:
        entry.setdefault("trace_id", trace_id)
    return entry


def _take_over_standard_logging(processors: list[Any], renderer: Any) -> None:
    """What uses Python's logging (the bus, other libraries) comes out in the same form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=processors,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("jigsawrl").setLevel(logging.INFO)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    structlog.get_logger().critical("ended by an error", exc_info=(kind, error, trace))
