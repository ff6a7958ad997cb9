"""What programs write on standard error, as real programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from jigsawrl.observe import json_line, last_words

CONFIGURE = """
import logging, threading
import structlog
from jigsawrl.observe import about, configure_logging
configure_logging(service="rollout", pipeline="p", worker="p.rollout0")
log = structlog.get_logger()
"""


def written(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURE + code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    return done.stderr.splitlines()


def entries(code: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written(code, JIGSAW_LOG="json")]


def test_text_is_the_default_and_names_the_service() -> None:
    (line,) = written('log.warning("fell back", device="n/cpu0", why="no room")')
    when, _, rest = line.partition(" warning ")
    assert rest == "rollout: fell back  device=n/cpu0 why='no room'"
    assert datetime.fromisoformat(when), "with a date: a daemon runs for days"
    assert "p.rollout0" not in line, "the name of the log file says it"


def test_json_is_an_object_a_line_with_the_ids_that_are_known() -> None:
    code = """
with about(command="7.0", version=3, sequence=None):
    log.info("loaded", num=2)
    thread = threading.Thread(target=lambda: log.info("elsewhere"))
    thread.start(); thread.join()
log.info("after")
"""
    inside, elsewhere, after = entries(code)
    written_s = datetime.fromisoformat(inside.pop("timestamp"))
    assert written_s.tzinfo == UTC
    ids = {"service": "rollout", "pipeline": "p", "worker": "p.rollout0"}
    assert inside == {
        **ids,
        **{"level": "info", "event": "loaded", "num": 2, "command": "7.0", "version": 3},
    }
    assert elsewhere.items() >= ids.items(), "a thread of its own has no context"
    assert "version" not in after


def test_the_bus_and_other_libraries_write_in_the_same_form() -> None:
    code = """
logging.getLogger("jigsawrl.bus").info("reconnected to %s", "nats://x")
logging.getLogger("other").info("not shown")
logging.getLogger("other").warning("shown")
"""
    bus, other = entries(code)
    assert (bus["event"], bus["level"], bus["worker"]) == (
        "reconnected to nats://x",
        "info",
        "p.rollout0",
    )
    assert other["event"] == "shown"
    assert written(code)[1].endswith(" warning rollout: shown")


def test_a_traceback_in_text_stands_below_its_line_and_ends_with_the_error() -> None:
    code = """
try:
    raise ValueError("no model")
except ValueError:
    log.exception("refused")
"""
    first, second, *_, last = written(code)
    assert first.endswith(" error rollout: refused")
    assert second.startswith("Traceback")
    assert last == "ValueError: no model"


def test_an_error_that_ends_the_program_is_one_line_of_json() -> None:
    (entry,) = entries('raise RuntimeError("no\\nmore")')
    assert (entry["level"], entry["event"]) == ("critical", "ended by an error")
    assert entry["exception"].startswith("Traceback")
    assert last_words(json.dumps(entry)) == "ended by an error: more"


def test_a_handled_message_gives_its_trace_to_the_line() -> None:
    code = """
from jigsawrl.tracing import Traces
traces = Traces()
with traces.handling("7.0", {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}):
    log.info("inside")
"""
    assert entries(code)[0]["trace_id"] == "a" * 32


def test_a_format_that_is_none_is_told_and_text_is_written() -> None:
    (line,) = written("", JIGSAW_LOG="jsn")
    assert "JIGSAW_LOG=jsn: choose text or json" in line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ValueError: no", "ValueError: no"),
        ('{"event": "refused", "reason": "no model"}', "refused: no model"),
        ('{"event": "stopped"}', "stopped"),
        ("[1, 2]", "[1, 2]"),
        ("2026-01-31 12:00:00.000001 error rollout: refused  reason=full", "refused  reason=full"),
        ("{broken", "{broken"),
    ],
)
def test_the_last_words_of_a_log_are_for_people(line: str, words: str) -> None:
    assert last_words(line) == words


def test_a_program_without_a_logger_writes_the_same_fields() -> None:
    entry = json.loads(json_line(service="daemon", event="up"))
    assert {"level": "info", "service": "daemon", "event": "up"}.items() <= entry.items()
    assert datetime.fromisoformat(entry["timestamp"]).tzinfo == UTC
