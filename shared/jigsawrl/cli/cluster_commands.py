"""The commands of a daemon and its clients: `up`, `down`, `node`, `submit`, `status`, `top`, `doctor`,
`logs`, `pause`, `resume`, `cancel`, `credentials`. Their arguments, and who carries each out.

Called by `main`; like there, a command's code is imported only when it is called.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jigsawrl.cli import listening
from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError

if TYPE_CHECKING:
    from jigsawrl.cli.cluster import Address
    from jigsawrl.cli.pipeline_client import View

NUM_LOG_LINES = 20


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Of all of them."""
    _add_machine_parsers(commands)
    _add_pipeline_parsers(commands)
    listening.add_parser(commands)


def _add_machine_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = commands.add_parser("up", help="a daemon on this machine, to which pipelines come and go")
    _add_folder(up)
    up.add_argument("--detach", "-d", action="store_true", help="in the background")
    up.add_argument("--policy", metavar="NAME", help="who runs when and where; default: jigsaw")
    up.add_argument("--profile", type=Path, metavar="FILE", help="by `jigsaw profile`")
    up.add_argument(
        "--devices",
        choices=["auto", "cpu", "none"],
        default="auto",
        help="of this machine; none: others join with jigsaw node",
    )
    listening.add_options(up)
    add_metrics(up)

    down = commands.add_parser("down", help="stop the daemon; the next one goes on with all it had")
    _add_folder(down)

    node = commands.add_parser(
        "node", help="this machine joins a cluster, until it is told to stop"
    )
    node.add_argument("--name", help="in the cluster; default: the host's")
    node.add_argument("--runs-folder", type=Path, metavar="DIR", help="of checkpoints, best shared")
    node.add_argument("--devices", metavar="LIST", help="cpu, or for example cuda:0,cuda:1")
    node.add_argument(
        "--notice", type=float, metavar="SECONDS", help="to hand over after SIGTERM; default: 20"
    )
    node.add_argument(
        "--metrics",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="for Prometheus: this node's and its tenants'; default: 127.0.0.1:9465",
    )
    _add_cluster(node)

    logs = commands.add_parser("logs", help="what processes on this machine wrote")
    logs.add_argument("name", nargs="?", metavar="NAME", help="a pipeline, worker or program")
    logs.add_argument("--lines", "-n", type=int, default=NUM_LOG_LINES, metavar="N")
    logs.add_argument("--follow", "-f", action="store_true")
    _add_folder(logs)


def _add_pipeline_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = commands.add_parser("submit", help="run pipelines on a cluster")
    submit.add_argument("pipeline", type=Path, metavar="PIPELINE.toml", nargs="+")
    submit.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    submit.add_argument("--start-together", action="store_true")
    submit.add_argument("--wait", action="store_true", help="watch them to their ends")
    submit.add_argument(
        "--exist-ok", action="store_true", help="what runs or has finished already is no error"
    )
    add_track(submit)
    _add_cluster(submit)

    status = commands.add_parser("status", help="what a cluster's pipelines do")
    status.add_argument("pipeline", nargs="?", metavar="PIPELINE", help="default: all, a line each")
    status.add_argument("--json", action="store_true")
    _add_cluster(status)

    _add_cluster(commands.add_parser("top", help="the same, live"))

    doctor = commands.add_parser("doctor", help="what is wrong on this machine or with a cluster")
    doctor.add_argument("--json", action="store_true")
    _add_cluster(doctor)

    for name, help in (
        ("pause", "begin nothing more of a pipeline; what runs ends"),
        ("resume", "let a paused pipeline go on"),
        ("cancel", "end a pipeline; its checkpoints stay"),
    ):
        change = commands.add_parser(name, help=help)
        change.add_argument("pipeline", metavar="PIPELINE")
        _add_cluster(change)


def add_track(parser: argparse.ArgumentParser) -> None:
    """To the commands that start pipelines."""
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        choices=["tensorboard", "wandb"],
        help="also write metrics for an experiment tracker (docs/tracking.md); may be repeated",
    )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """For a scheduler and a node that are started together."""
    parser.add_argument(
        "--metrics",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="for Prometheus: the scheduler's there, the node's at the next port;"
        " default: 127.0.0.1:9464",
    )


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="of the daemon; default: $JIGSAW_FOLDER, else ~/.local/state/jigsaw",
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--url", help="of the cluster's NATS server, instead of a local daemon's")
    parser.add_argument(
        "--credentials",
        type=Path,
        metavar="PATH",
        help="a client's file or its group's folder; default: $JIGSAW_CREDENTIALS with --url, else"
        " those of the daemon",
    )


def _folder(arguments: argparse.Namespace) -> Path:
    from jigsawrl.cli.daemon_folder import default_folder

    given: Path | None = arguments.folder
    return default_folder() if given is None else given


def _address(arguments: argparse.Namespace) -> Address:
    """Of the cluster that is named, else of the folder's daemon."""
    from jigsawrl.bus.server import is_loopback
    from jigsawrl.cli.cluster import Address
    from jigsawrl.cli.daemon_folder import find

    given = _chosen_address(arguments)
    if given is not None:
        return given
    daemon = find(_folder(arguments))
    elsewhere = daemon.host not in ("", socket.gethostname())
    if elsewhere and is_loopback(urlsplit(daemon.url).hostname or ""):
        raise CommandError(
            f"the daemon runs on {daemon.host} and takes no other machine's questions: ask there"
            " (under Slurm by srun --overlap --jobid JOB jigsaw ...)",
            status=EXIT_BAD_INPUT,
        )
    credentials: Path | None = arguments.credentials
    if credentials is None and daemon.credentials is not None:
        credentials = Path(daemon.credentials)
    return Address(daemon.url, credentials)


def _chosen_address(arguments: argparse.Namespace) -> Address | None:
    """None where the folder's daemon is meant: as an option, --folder goes before $JIGSAW_URL."""
    if arguments.folder is None:
        return _given_address(arguments)
    if arguments.url is not None:
        raise CommandError("give --url or --folder, not both", status=EXIT_BAD_INPUT)
    return None


def _given_address(arguments: argparse.Namespace) -> Address | None:
    from jigsawrl.cli.cluster import Address

    url: str | None = arguments.url or os.environ.get("JIGSAW_URL")
    if url is None:
        return None
    credentials: Path | None = arguments.credentials
    by_environment = os.environ.get("JIGSAW_CREDENTIALS")
    if credentials is None and by_environment:
        credentials = Path(by_environment)
    return Address(url, credentials)


def _up(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli.daemon import detach, up
    from jigsawrl.cli.metrics_addresses import metrics_addresses
    from jigsawrl.cli.programs import require_programs
    from jigsawrl.core.policies import POLICIES
    from jigsawrl.observe import log_format

    require_programs("services")
    policy = arguments.policy or "jigsaw"
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise CommandError(f"--policy {policy}: choose one of {known}", status=EXIT_BAD_INPUT)
    folder = _folder(arguments)
    listens = listening.of(arguments)
    try:
        log_format()
    except ValueError as error:
        raise CommandError(str(error), status=EXIT_BAD_INPUT) from None
    metrics = metrics_addresses(arguments.metrics)
    if not arguments.detach:
        return up(
            folder,
            policy=policy,
            profile=arguments.profile,
            devices=arguments.devices,
            listening=listens,
            metrics=metrics,
        )
    options = ["--policy", policy, "--devices", arguments.devices]
    if arguments.metrics is not None:
        options += ["--metrics", *filter(None, [arguments.metrics])]
    if arguments.profile is not None:
        options += ["--profile", str(arguments.profile.resolve())]
    options += listening.as_options(arguments)
    return detach(folder, *options)


def _down(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli.daemon import down

    return down(_folder(arguments))


def _node(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli.metrics_addresses import node_metrics_address
    from jigsawrl.cli.node_command import NOTICE_S, default_name, join

    name = arguments.name or default_name()
    folder = _folder(arguments)
    return join(
        _given_address(arguments) or _address(arguments),  # with --url the folder is the node's
        folder / "nodes" / name,
        name=name,
        runs_folder=arguments.runs_folder or folder / "runs",
        devices=arguments.devices,
        notice_s=NOTICE_S if arguments.notice is None else arguments.notice,
        metrics=node_metrics_address(arguments.metrics),
    )


def _submit(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli import cluster
    from jigsawrl.cli.config_file import load_config

    configs = [
        load_config(path, overrides=arguments.set, trackers=arguments.track)
        for path in arguments.pipeline
    ]
    names = [config.name for config in configs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CommandError(f"two pipelines are called {twice}", status=EXIT_BAD_INPUT)
    view = _view() if arguments.wait else None
    try:
        return cluster.ask(
            _address(arguments),
            lambda there: cluster.submit(
                there,
                configs,
                start_together=arguments.start_together,
                exist_ok=arguments.exist_ok,
                view=view,
            ),
        )
    finally:
        if view is not None:
            view.close()


def _status(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli import cluster

    return cluster.ask(
        _address(arguments),
        lambda there: cluster.show(there, arguments.pipeline, as_json=arguments.json),
    )


def _top(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli import cluster

    address, view = _address(arguments), _view()
    try:
        return cluster.ask(address, lambda there: cluster.top(there, view))
    except KeyboardInterrupt:
        return 0
    finally:
        view.close()


def _doctor(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli.doctor import doctor

    given = _chosen_address(arguments)
    return doctor(
        target=given or _folder(arguments),
        credentials=arguments.credentials,
        as_json=arguments.json,
    )


def _logs(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli.logs import show_logs

    try:
        return show_logs(
            _folder(arguments), arguments.name, num_lines=arguments.lines, follow=arguments.follow
        )
    except KeyboardInterrupt:
        return 0


def _change(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli import cluster
    from jigsawrl.contract.requests import Cancel, Pause, Resume

    kinds: dict[str, cluster.Change] = {"cancel": Cancel, "pause": Pause, "resume": Resume}
    kind = kinds[arguments.command]
    return cluster.ask(
        _address(arguments), lambda there: cluster.change(there, kind, arguments.pipeline)
    )


def _view() -> View:
    """For a terminal, or for a file."""
    from jigsawrl.cli.views import build_view

    return build_view()


COMMANDS = {
    "up": _up,
    "down": _down,
    "node": _node,
    "submit": _submit,
    "status": _status,
    "top": _top,
    "doctor": _doctor,
    "logs": _logs,
    "pause": _change,
    "resume": _change,
    "cancel": _change,
    "credentials": listening.make_credentials,
}
