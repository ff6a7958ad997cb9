"""Programs of several versions of the code on one cluster, as in the middle of an upgrade."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from jigsawrl.bus.client import connect
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.cli.config_file import load_config
from jigsawrl.cli.pipeline_client import PipelineClient
from jigsawrl.cli.plain_view import PlainView
from jigsawrl.contract.message import SCHEMA_VERSION
from jigsawrl.contract.requests import Status
from tests.integration.live_run import QUICK
from tests.integration.test_isolation import programs, until

pytestmark = pytest.mark.slow

LIBRARY = Path(__file__).resolve().parents[2] / "shared"


def other_version(folder: Path, *, schema: int) -> Path:
    """The library as a version of that schema may be: its heartbeats have a field unknown to ours."""
    path = folder / f"schema{schema}"
    shutil.copytree(LIBRARY, path, ignore=shutil.ignore_patterns("__pycache__"))
    changes = {
        "__init__.py": ("__version__ = ", f'__version__ = "0.{schema}.9"  # '),
        "contract/message.py": ("SCHEMA_VERSION = ", f"SCHEMA_VERSION = {schema}  # "),
        "contract/events.py": ('    """As in `NodeStarted`."""', "    added_later: int = 7"),
    }
    for name, (old, new) in changes.items():
        text = (path / "jigsawrl" / name).read_text()
        assert text.count(old) == 1
        (path / "jigsawrl" / name).write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("scheduler", "near", "far", "remedy"),
    [(0, 1, 2, "upgrade the scheduler"), (1, 0, -1, "upgrade far")],
    ids=["nodes first", "scheduler first"],
)
async def test_a_pipeline_runs_on_neighbours_and_a_stranger_is_refused_by_name(
    own_server: EmbeddedServer, tmp_path: Path, scheduler: int, near: int, far: int, remedy: str
) -> None:
    (tmp_path / "pipeline.toml").write_text(QUICK)
    config = load_config(tmp_path / "pipeline.toml", overrides=["trainer.num_steps=2"])
    library = {
        n: other_version(tmp_path, schema=SCHEMA_VERSION + n) for n in (scheduler, near, far)
    }
    bus = await connect(own_server.url, name="test")
    async with AsyncExitStack() as last, programs(own_server.url, tmp_path) as start:
        last.push_async_callback(bus.close)

        async def node(name: str, version: int) -> None:
            folders = ["--state-dir", str(tmp_path / name), "--runs-folder", str(tmp_path)]
            await start("services.node", "--node", name, *folders, library=library[version])

        folder = ["--state-dir", str(tmp_path / "scheduler")]
        await start("services.scheduler", *folder, library=library[scheduler])
        client = PipelineClient(bus, [config], PlainView(lambda line: None), run_id="run")
        running = asyncio.create_task(client.run())
        await until(client, lambda status: bool(status.pipelines))
        await node("far", far)
        await until(client, lambda status: bool(status.nodes))
        await node("near", near)
        async with asyncio.timeout(120):
            [pipeline] = await running
    assert (pipeline.state, pipeline.version) == ("finished", 2), pipeline.failure
    status = client.status
    assert status is not None
    assert_told(status, schema=SCHEMA_VERSION + scheduler, near=SCHEMA_VERSION + near)
    stranger = next(node for node in status.nodes if node.node == "far")
    assert stranger.refused == (
        f"far speaks schema {SCHEMA_VERSION + far} and the scheduler {SCHEMA_VERSION + scheduler},"
        f" more than 1 apart: {remedy}, one schema at a time"
    )


def assert_told(status: Status, *, schema: int, near: int) -> None:
    """Who leads, who works, and that nothing they said was lost."""
    assert (status.schema, status.code_version) == (schema, f"0.{schema}.9")
    assert {node.node: node.state for node in status.nodes} == {"far": "refused", "near": "up"}
    workers = status.pipelines[0].workers
    assert {worker.code_version for worker in workers} == {f"0.{near}.9"}
    assert {(worker.device or "near/").partition("/")[0] for worker in workers} == {"near"}
    assert status.num_dead_letters == 0
