"""`jigsaw`: arguments in, exit status out. Each command's code is imported only when it is called.

Exit status: 0 done · 1 failed · 2 bad input, nothing was started · 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jigsawrl.cli import cluster_commands
from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, CommandError, ConfigError
from jigsawrl.cli.programs import require_programs, start_program

if TYPE_CHECKING:
    from jigsawrl.config import PipelineConfig
    from jigsawrl.contract.profile import DeviceProfile

BENCHMARKS = [
    "engine",
    "determinism",
    "modes",
    "migration",
    "multiplex",
    "scheduler",
    "service",
    "store",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors become one line on standard error."""
    arguments = _parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command](arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    except CommandError as error:
        print(f"jigsaw {arguments.command}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:  # before the run's own handlers, or between two steps of a check
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jigsaw", description="RL post-training of language models."
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train pipelines on this machine, everything embedded")
    _add_run_options(run)

    check = commands.add_parser("check", help="validate a pipeline file, print what it resolves to")
    _add_pipeline(check)
    check.add_argument("--json", action="store_true", help="print JSON instead of TOML")

    export = commands.add_parser("export", help="write a run's model as a Hugging Face checkpoint")
    export.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    export.add_argument("--pipeline", metavar="NAME", help="default: the only one")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="must not exist")
    export.add_argument("--version", type=int, help="default: the newest checkpoint")

    why = commands.add_parser("why", help="what each worker of a run does, and why")
    why.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    why.add_argument("pipeline", nargs="?", metavar="PIPELINE", help="default: all")

    graph = commands.add_parser("graph", help="the predicted next steps of a run's pipelines")
    graph.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    graph.add_argument("--html", type=Path, metavar="FILE", help="also as a picture")

    trace = commands.add_parser("trace", help="write a run as a picture that Perfetto opens")
    trace.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    trace.add_argument("--to", type=Path, metavar="FILE", help="default: RUN/trace.json")

    profile = commands.add_parser("profile", help="measure what sub-stages cost on this machine")
    profile.add_argument("pipeline", type=Path, metavar="PIPELINE.toml", help="whose model is run")
    profile.add_argument("--to", type=Path, required=True, metavar="FILE", help="a JSON file")

    bench = commands.add_parser("bench", help="measure a part of the system")
    bench.add_argument(
        "subject",
        choices=BENCHMARKS,
        help="engine: against transformers' generate; determinism: what bit equality costs; modes:"
        " async against sync on a long tail; migration: a move of live sequences against a prefill;"
        " multiplex: several pipelines at once against one after the other; scheduler: what"
        " decisions cost by size of the cluster; service: how long users of a daemon wait; store:"
        " what it costs that nothing stored is lost",
    )
    bench.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="of the benchmark: --json, and what its --help says",
    )
    cluster_commands.add_parsers(commands)
    return parser


def _add_run_options(run: argparse.ArgumentParser) -> None:
    _add_pipeline(run, nargs="*")
    run.add_argument(
        "--policy",
        metavar="NAME",
        help="who runs when and where; default: serial (docs/policies.md)",
    )
    run.add_argument(
        "--start-together",
        action="store_true",
        help="begin the work of all pipelines once the processes of all are ready",
    )
    run.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="what sub-stages cost on this machine, by `jigsaw profile`; default: built in",
    )
    cluster_commands.add_track(run)
    cluster_commands.add_metrics(run)
    run.add_argument("--runs-folder", type=Path, metavar="DIR", help="default: runs")
    run.add_argument("--name", help="the run's folder; default: pipeline's name and the time")
    run.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with a run that was stopped or killed"
    )


class _Version(argparse.Action):
    """Reads the installed version only when asked: importlib.metadata is slow."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"jigsaw {version('jigsawrl')}")
        parser.exit()


def _add_pipeline(parser: argparse.ArgumentParser, *, nargs: Literal["*"] | None = None) -> None:
    parser.add_argument("pipeline", type=Path, metavar="PIPELINE.toml", nargs=nargs)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key of every pipeline, as in trainer.num_steps=3; may be repeated",
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        return _resume(arguments)
    if not arguments.pipeline:
        raise CommandError("give a PIPELINE.toml, or --resume RUN", status=EXIT_BAD_INPUT)
    from jigsawrl.cli.config_file import load_config

    configs = [
        load_config(path, overrides=arguments.set, trackers=arguments.track)
        for path in arguments.pipeline
    ]
    require_programs("services")
    from jigsawrl.cli.metrics_addresses import metrics_addresses
    from jigsawrl.cli.run_command import run
    from jigsawrl.core.policies import DEFAULT_POLICY, POLICIES

    policy = arguments.policy or DEFAULT_POLICY
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise CommandError(f"--policy {policy}: choose one of {known}", status=EXIT_BAD_INPUT)
    _check_terms(configs, policy)
    return run(
        configs,
        policy=policy,
        start_together=arguments.start_together,
        profile=_profile_of(arguments.profile, configs),
        runs_folder=arguments.runs_folder or Path("runs"),
        name=arguments.name,
        metrics=metrics_addresses(arguments.metrics),
    )


def _profile_of(path: Path | None, configs: Sequence[PipelineConfig]) -> DeviceProfile | None:
    """Raises `CommandError` for a file that is none, or of other devices than the pipelines use."""
    if path is None:
        return None
    from jigsawrl.cli.embedded import device_kind
    from jigsawrl.profile_file import read_profile

    try:
        return read_profile(path, device_kind=device_kind(configs))
    except ValueError as error:
        raise CommandError(f"--profile {error}", status=EXIT_BAD_INPUT) from None


def _check_terms(configs: Sequence[PipelineConfig], policy: str) -> None:
    """Raise `CommandError` for promises that can't be kept together, or by nobody."""
    from jigsawrl.core.policies import POLICIES
    from jigsawrl.core.terms import contradiction

    specs = [config.spec() for config in configs]
    for place, spec in enumerate(specs):
        why = contradiction(
            spec, specs[:place], policy=policy, keeps_terms=POLICIES[policy].keeps_terms
        )
        if why is not None:
            raise CommandError(why, status=EXIT_BAD_INPUT)


def _resume(arguments: argparse.Namespace) -> int:
    given = {
        "PIPELINE.toml": arguments.pipeline,
        "--set": arguments.set,
        "--name": arguments.name,
        "--policy": arguments.policy,
        "--start-together": arguments.start_together,
        "--profile": arguments.profile,
        "--track": arguments.track,
        "--runs-folder": arguments.runs_folder,
    }
    for option, value in given.items():
        if value:
            raise CommandError(
                f"{option} has no effect with --resume: a run goes on with the configuration and"
                " the folder that it has",
                status=EXIT_BAD_INPUT,
            )
    require_programs("services")
    from jigsawrl.cli.metrics_addresses import metrics_addresses
    from jigsawrl.cli.run_command import resume

    return resume(arguments.resume, metrics=metrics_addresses(arguments.metrics))


def _check(arguments: argparse.Namespace) -> int:
    from jigsawrl.cli.config_file import load_config, to_json, to_toml

    config = load_config(arguments.pipeline, overrides=arguments.set)
    print(to_json(config) if arguments.json else to_toml(config).rstrip())
    return 0


def _export(arguments: argparse.Namespace) -> int:
    require_programs("services")
    from jigsawrl.cli.run_folder import pipeline_folder

    folder = pipeline_folder(arguments.run, arguments.pipeline)
    options = [] if arguments.version is None else ["--version", str(arguments.version)]
    return start_program(
        "services.trainer.export", str(folder), "--to", str(arguments.to), *options
    )


def _look_back(program: str, run: Path, *options: str) -> int:
    """Run a program on what a run's scheduler recorded."""
    require_programs("services")
    from jigsawrl.cli.run_folder import read_run

    read_run(run)
    return start_program(f"services.scheduler.{program}", str(run / "scheduler"), *options)


def _why(arguments: argparse.Namespace) -> int:
    options = [] if arguments.pipeline is None else [arguments.pipeline]
    return _look_back("why", arguments.run, *options)


def _graph(arguments: argparse.Namespace) -> int:
    options = [] if arguments.html is None else ["--html", str(arguments.html)]
    return _look_back("graph", arguments.run, *options)


def _trace(arguments: argparse.Namespace) -> int:
    target = arguments.to or arguments.run / "trace.json"
    status = _look_back("trace", arguments.run, "--to", str(target))
    if status == 0:
        print(f"wrote {target}: open it at https://ui.perfetto.dev")
    return status


def _profile(arguments: argparse.Namespace) -> int:
    require_programs("loadgen")
    return start_program("loadgen.profile", str(arguments.pipeline), "--to", str(arguments.to))


def _bench(arguments: argparse.Namespace) -> int:
    require_programs("loadgen")
    return start_program(f"loadgen.bench.{arguments.subject}", *arguments.options)


_COMMANDS = {
    "run": _run,
    "check": _check,
    "export": _export,
    "why": _why,
    "graph": _graph,
    "trace": _trace,
    "profile": _profile,
    "bench": _bench,
    **cluster_commands.COMMANDS,
}


if __name__ == "__main__":
    sys.exit(main())
