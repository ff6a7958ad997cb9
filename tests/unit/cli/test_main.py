"""The command line: exit statuses, and what it does not import."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jigsawrl.cli import listening
from jigsawrl.cli.cluster_commands import add_track
from jigsawrl.cli.config_file import load_config
from jigsawrl.cli.credentials import DAYS
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.main import main
from jigsawrl.cli.programs import require_programs
from jigsawrl.cli.run_folder import write_run
from jigsawrl.config_tracking import TRACKERS
from jigsawrl.contract.profile import DeviceProfile, SlowdownProfile
from jigsawrl.contract.streams import NEARLY_FULL
from tests.unit.cli.files import write_pipeline

HEAVY = ("torch", "transformers", "rich", "tomlkit", "nats", "msgspec", "asyncio")


def test_help_imports_nothing_heavy_and_answers_at_once() -> None:
    code = (
        "import sys; from jigsawrl.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    start_s = time.monotonic()
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines()[-1] == "[]"
    assert "PIPELINE" not in output.splitlines()[0]
    assert time.monotonic() - start_s < 2  # 0.1 s alone; the machine may be busy


def test_check_prints_the_resolved_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(write_pipeline(tmp_path)), "--set", "seed=5"]) == 0
    assert "seed = 5" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "run"])
def test_bad_input_is_one_line_and_status_2_and_nothing_is_started(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_pipeline(tmp_path)
    arguments = [command, str(path), "--set", "trainer.num_stepz=3"]
    if command == "run":
        arguments += ["--runs-folder", str(tmp_path / "runs")]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"{path}: trainer.num_stepz: unknown key; did you mean trainer.num_steps?\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give a PIPELINE.toml, or --resume RUN"),
        (["--resume", "{folder}"], "is no run folder: it holds no run.json"),
        (["p.toml", "--resume", "{folder}"], "PIPELINE.toml has no effect with --resume"),
        (["--resume", "{folder}", "--set", "seed=1"], "--set has no effect with --resume"),
        (["--resume", "{folder}", "--name", "x"], "--name has no effect with --resume"),
        (["--resume", "{folder}", "--track", "wandb"], "--track has no effect with --resume"),
        (["--resume", "{folder}", "--policy", "best"], "--policy has no effect with --resume"),
    ],
)
def test_a_run_has_a_pipeline_or_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["run", *(part.format(folder=tmp_path) for part in arguments)]) == 2
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_promises_that_can_not_be_kept_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_pipeline(tmp_path)
    folder = ["--runs-folder", str(tmp_path / "runs")]
    assert main(["run", str(path), *folder, "--set", "scheduling.max_slowdown=1.5"]) == 2
    assert capsys.readouterr().err == (
        "jigsaw run: scheduling.max_slowdown of pipeline tiny has no effect with --policy serial:"
        " remove it, or use --policy jigsaw\n"
    )
    other = tmp_path / "other.toml"
    promises = "[scheduling]\npriority = 1\n"
    other.write_text(path.read_text().replace("tiny", "high") + promises)
    path.write_text(path.read_text() + promises.replace("priority = 1", "max_slowdown = 2"))
    assert main(["run", str(path), str(other), *folder, "--policy", "jigsaw"]) == 2
    assert "can't be kept next to pipeline high" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_profile_of_other_devices_or_beside_resume_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(
        '{"slowdown": {"device_kind": "NVIDIA H1", "source": "made up"}, "tail_sequences": 8}'
    )
    run = ["run", str(write_pipeline(tmp_path)), "--runs-folder", str(tmp_path / "runs")]
    assert main([*run, "--profile", str(profile)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"jigsaw run: --profile {profile}: slowdown profile: measured on")
    assert told.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert main(["run", "--resume", str(tmp_path), "--profile", str(profile)]) == 2
    assert "--profile has no effect with --resume" in capsys.readouterr().err


def test_a_run_is_not_resumed_with_a_profile_of_other_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(write_pipeline(tmp_path), overrides=["device=cpu"])
    slowdown = SlowdownProfile(device_kind="NVIDIA H1", source="made up")
    profile = DeviceProfile(slowdown=slowdown, tail_sequences=8)
    write_run(tmp_path, [config], policy="serial", start_together=False, profile=profile)
    assert main(["run", "--resume", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"jigsaw run: {tmp_path}/profile.json: slowdown profile: measured on")
    assert told.count("\n") == 1
    assert not (tmp_path / "nats").exists()


def test_export_of_what_is_no_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        f"jigsaw export: {tmp_path} is no run folder: it holds no run.json\n"
    )


def test_a_bare_library_says_where_the_system_runs() -> None:
    with pytest.raises(CommandError, match="from a checkout"):
        require_programs("services_that_are_not_there")


EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").rglob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_valid_pipeline(path: Path) -> None:
    assert main(["check", str(path)]) == 0


def test_trackers_and_days_are_written_out_as_they_are_where_they_belong() -> None:
    parser = argparse.ArgumentParser()
    add_track(parser)
    (track,) = (action for action in parser._actions if action.dest == "track")
    assert tuple(track.choices or ()) == TRACKERS
    commands = argparse.ArgumentParser().add_subparsers()
    listening.add_parser(commands)
    assert f"default: {DAYS}" in commands.choices["credentials"].format_help()


def test_status_and_doctor_and_the_alert_call_a_stream_nearly_full_alike() -> None:
    alerts = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"
    assert f"jigsaw_stream_limit_bytes > {NEARLY_FULL}" in alerts.read_text()
