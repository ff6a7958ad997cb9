"""``jigsaw bench multiplex [--json]``: several pipelines at once against one after the other.

Whole runs of the system on this machine, with real training of fixed work: each pipeline of a scenario
trains the same versions under every policy, in sync mode, with lengths drawn from sequence seeds and
end tokens ignored; a run that trains another number of tokens is refused. The drawn lengths reach only
the engine. The clock starts when all processes are warm and stops at the last version of the last
pipeline. Policies alternate, so that a busy machine slows all alike; a ratio is the median over rounds
of the baseline's makespan over that of `jigsaw`.

Baselines get their best settings, found by a pilot run of each: `serial` one or two trainer ranks,
`unmanaged` pinned or unpinned tenants.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jigsawrl.config import PipelineConfig
from loadgen.bench import scenario
from loadgen.bench.output import Say
from loadgen.bench.whole_run import Measured, run

TWO_RANKS = "trainer.num_ranks=2"
ASYNC = (
    'mode.type="async"',
    "mode.max_staleness=1",
    'algorithm.correction.type="truncate"',
)
MAX_RUN_S = 90.0
"""Longest makespan that is worth a warning: a scenario should be quick to repeat."""
MAX_GAP_S = 0.05
MAX_ALONE = 0.05
"""One pipeline alone should take the same time under every policy, within this part."""
MAX_UNEQUAL = 0.1
NUM_DRAWN = 3
ABLATIONS = (
    "jigsaw-no-migration",
    "jigsaw-no-shares",
    "jigsaw-greedy",
    "jigsaw-no-prediction",
)


class Side(NamedTuple):
    """One way to run the pipelines."""

    policy: str
    changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.policy, *self.changes))


OURS = Side("jigsaw")
CANDIDATES = {
    "serial": (Side("serial"), Side("serial", (TWO_RANKS,))),
    "unmanaged": (Side("unmanaged"), Side("unmanaged-unpinned")),
    "rlix": (Side("rlix"),),
}
"""By baseline: the settings of which it gets the fastest."""


class Bench:
    """Runs sides of one scenario."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.say = say
        self._folder = folder
        self._num_runs = 0

    def run(self, pipelines: Sequence[PipelineConfig], side: Side) -> Measured:
        """One run."""
        self._num_runs += 1
        folder = self._folder / str(self._num_runs)
        paths = scenario.write(list(pipelines), folder)
        measured = run(paths, folder=folder, policy=side.policy, changes=side.changes)
        finish = ", ".join(f"{name} {s:.1f}" for name, s in measured.finish_s.items())
        self.say(
            f"  {side}: {measured.makespan_s:.1f} s ({finish});"
            f" devices idle {measured.idle_fraction:.0%}, all processes {measured.cpu_s:.0f} CPU s"
        )
        if measured.makespan_s > MAX_RUN_S:
            self.say(f"    longer than {MAX_RUN_S:.0f} s: this machine is slow or busy")
        return measured

    def best(self, pipelines: Sequence[PipelineConfig], baseline: str) -> Side:
        """The fastest settings of a baseline, by one run of each."""
        sides = CANDIDATES[baseline]
        if len(sides) == 1:
            return sides[0]
        self.say(f"settings of {baseline}:")
        return min(sides, key=lambda side: self.run(pipelines, side).makespan_s)

    def rounds(
        self, pipelines: Sequence[PipelineConfig], sides: Sequence[Side], num_rounds: int
    ) -> dict[Side, list[Measured]]:
        """Every side once a round, in turns of order."""
        found: dict[Side, list[Measured]] = {side: [] for side in sides}
        for number in range(num_rounds):
            self.say(f"round {number + 1} of {num_rounds}:")
            for side in sides if number % 2 == 0 else reversed(sides):
                found[side].append(self.run(pipelines, side))
        tokens = {m.num_trained_tokens for runs in found.values() for m in runs}
        if len(tokens) > 1 and not any(change in ASYNC for s in sides for change in s.changes):
            raise SystemExit(f"the sides did not do the same work: {sorted(tokens)} tokens")
        return found

    def alone(self, pipelines: Sequence[PipelineConfig], sides: Sequence[Side]) -> dict[str, float]:
        """Seconds of each pipeline by itself, the first side's; and whether others are as fast."""
        self.say("each pipeline alone:")
        times: dict[str, float] = {}
        for config in pipelines:
            measured = [self.run([config], side) for side in sides]
            runs = [one.makespan_s for one in measured]
            times[config.name] = runs[0]
            waits = measured[0].wait_fraction[config.name]
            self.say(f"  {config.name} waits for its environment for {waits:.0%} of its time")
            steps = [one.step_s[config.name] for one in measured]
            worst = max((_differ(steps[0], other) for other in steps[1:]), default=0.0)
            self.say(
                f"  {config.name} alone: its steps differ by {worst:.1%} between policies, median"
                f" (aim: {MAX_ALONE:.0%})"
            )
        unequal = max(times.values()) / min(times.values()) - 1
        self.say(f"  alone they differ by {unequal:.1%} (aim: {MAX_UNEQUAL:.0%})")
        return times


def _differ(steps_s: list[float], other_s: list[float]) -> float:
    """How much longer, or shorter, the same steps took in another run: the median over steps, since a
    single hiccup of the machine says nothing of the policy."""
    return abs(statistics.median(b / a for a, b in zip(steps_s, other_s, strict=True)) - 1)


def ratios(found: dict[Side, list[Measured]], baseline: Side, ours: Side) -> list[float]:
    """By round."""
    return [
        base.makespan_s / mine.makespan_s
        for base, mine in zip(found[baseline], found[ours], strict=True)
    ]


def main() -> None:
    options = _options()
    output = sys.stderr if options.json else sys.stdout
    say: Say = lambda text: print(text, file=output, flush=True)  # noqa: E731
    try:
        given = scenario.load(options.scenario)
        pipelines = _configs(given, options)
        drawn = [
            _configs(scenario.varied(given, seed=NUM_DRAWN * options.seed + number), options)
            for number in range(options.drawn)
        ]
    except ValueError as error:
        print(f"jigsaw bench multiplex: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    with tempfile.TemporaryDirectory(prefix="jigsaw-multiplex-") as folder:
        bench = Bench(Path(folder), say)
        if options.areal:
            result = against_areal(bench, pipelines, options.rounds)
        elif options.ablations:
            result = ablate(bench, pipelines, options.rounds)
        else:
            result = compare(bench, pipelines, drawn, options)
    print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jigsaw bench multiplex", description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="all but the last line to standard error"
    )
    parser.add_argument("--scenario", type=Path, default=scenario.MULTIPLEX, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths, drawn scenarios")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pipelines", type=int, default=2, help="how many of the scenario's")
    parser.add_argument(
        "--drawn", type=int, default=NUM_DRAWN, help="scenarios drawn from the seed, one round each"
    )
    parser.add_argument("--rlix", action="store_true", help="compare with the policy rlix, too")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--areal", action="store_true", help="both sides in mode async; against policy areal"
    )
    choice.add_argument(
        "--ablations", action="store_true", help="jigsaw without one part, each against jigsaw"
    )
    return parser.parse_args()


def _configs(given: scenario.Scenario, options: argparse.Namespace) -> list[PipelineConfig]:
    return scenario.configs(given, num_pipelines=options.pipelines, seed=options.seed)


def compare(
    bench: Bench,
    pipelines: Sequence[PipelineConfig],
    drawn: Sequence[Sequence[PipelineConfig]],
    options: argparse.Namespace,
) -> dict[str, object]:
    """Against every baseline."""
    baselines = ["serial", "unmanaged", *(["rlix"] if options.rlix else [])]
    best = {name: bench.best(pipelines, name) for name in baselines}
    alone_s = bench.alone(pipelines, [Side("serial"), Side("unmanaged"), OURS])
    found = bench.rounds(pipelines, [*best.values(), OURS], options.rounds)
    by_baseline = {name: ratios(found, best[name], OURS) for name in baselines}
    serial, ours = found[best["serial"]], found[OURS]
    idle = statistics.median(m.idle_fraction for m in serial)
    ratio = statistics.median(by_baseline["serial"])
    latency = {
        name: statistics.median(m.finish_s[name] for m in ours) / seconds
        for name, seconds in alone_s.items()
    }
    for name, pairs in by_baseline.items():
        bench.say(f"{best[name]} / jigsaw: {_spread(pairs)}")
    gap_s = max(m.gap_s for m in serial)
    bench.say(
        f"serial: idle {idle:.1%}; longest gap between pipelines {gap_s * 1e3:.0f} ms"
        f" (aim: {MAX_GAP_S * 1e3:.0f})"
    )
    most = 1.15 * len(pipelines) / ratio
    bench.say(f"latency over alone, at most {most:.2f} wanted: {_rounded(latency)}")
    _say_more(bench, pipelines, ours)
    return {
        "ratio": round(ratio, 3),
        **{f"ratio_{n}": round(statistics.median(by_baseline[n]), 3) for n in baselines[1:]},
        "bound": round(1 / (1 - idle), 3),
        "pairs": [round(pair, 3) for pair in by_baseline["serial"]],
        "latency_increase": _rounded(latency),
        "baseline": "serial",
        **({"drawn": draw(bench, drawn, best)} if drawn else {}),
    }


def _say_more(bench: Bench, pipelines: Sequence[PipelineConfig], ours: list[Measured]) -> None:
    """How often sequences moved, how well the graph predicted, where the rest is lost."""
    num_steps = sum(config.trainer.num_steps for config in pipelines)
    moves = statistics.median(sum(m.num_migrations.values()) for m in ours)
    errors = [m.prediction_error for m in ours if m.prediction_error is not None]
    gathered = statistics.median(sum(m.num_gathered.values()) for m in ours)
    bench.say(
        f"migrations per step: {moves / num_steps:.1f}; steps that few workers generated from the"
        f" begin, so that nothing had to move: {gathered:.0f} of {num_steps}"
    )
    bench.say(f"tokens generated twice: {sum(m.num_tokens_again for m in ours)}")
    if errors:
        bench.say(f"median error of predicted sub-stage work: {statistics.median(errors):.0%}")
    idle = statistics.median(m.idle_fraction for m in ours)
    bench.say(
        f"under jigsaw {idle:.1%} of the devices' time goes to no sub-stage that computes: waits, the"
        " first step before any history, the end of the longer pipeline, and what transfers, the bus"
        " and services take of the same cores"
    )


def draw(
    bench: Bench, scenarios: Sequence[Sequence[PipelineConfig]], best: dict[str, Side]
) -> list[dict[str, float]]:
    """Ratios of scenarios drawn from the seed, one round each."""
    rows = []
    for number, pipelines in enumerate(scenarios):
        bench.say(f"drawn scenario {number + 1} of {len(scenarios)}:")
        found = bench.rounds(pipelines, [best["serial"], OURS], 1)
        rows.append({"ratio": round(ratios(found, best["serial"], OURS)[0], 3)})
        bench.say(f"  {rows[-1]}")
    return rows


def ablate(bench: Bench, pipelines: Sequence[PipelineConfig], num_rounds: int) -> dict[str, object]:
    """What each part of the policy is worth: its makespan without over that with it."""
    sides = [Side(name) for name in ABLATIONS]
    found = bench.rounds(pipelines, [*sides, OURS], num_rounds)
    result: dict[str, object] = {}
    for side in sides:
        pairs = ratios(found, side, OURS)
        bench.say(f"{side} / jigsaw: {_spread(pairs)}")
        result[side.policy] = round(statistics.median(pairs), 3)
    return {"baseline": "jigsaw", "ratios": result}


def against_areal(
    bench: Bench, pipelines: Sequence[PipelineConfig], num_rounds: int
) -> dict[str, object]:
    """Both in mode async with staleness 1, by trained tokens per second. The split of `areal` is one
    rollout worker per device that does not train; of two devices there is one split only."""
    changes = (*ASYNC, "rollout.num_workers=1")
    areal, ours = Side("areal", changes), Side("jigsaw", changes)
    found = bench.rounds(pipelines, [areal, ours], num_rounds)
    pairs = [
        (mine.num_trained_tokens / mine.makespan_s) / (base.num_trained_tokens / base.makespan_s)
        for base, mine in zip(found[areal], found[ours], strict=True)
    ]
    bench.say(f"jigsaw / areal, trained tokens per second: {_spread(pairs)}")
    return {
        "ratio": round(statistics.median(pairs), 3),
        "pairs": [round(pair, 3) for pair in pairs],
        "baseline": "areal",
    }


def _spread(pairs: list[float]) -> str:
    return f"{statistics.median(pairs):.2f} ({', '.join(f'{pair:.2f}' for pair in pairs)})"


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


if __name__ == "__main__":
    main()
