"""The evaluation worker: greedy answers of one version to the whole held-out set, in a process of its
own that holds that version until it is done. Problems and scores come from the pipeline's environment
and reward services on request, so its queue and seeds never touch training's."""

from __future__ import annotations

import asyncio
import time

import structlog

from jigsawrl.bus.base import BusError
from jigsawrl.config import PipelineConfig
from jigsawrl.config_task import TaskTurns
from jigsawrl.contract.commands import Command, Configure, Evaluate
from jigsawrl.contract.events import EvaluationFailed, EvaluationFinished, SubStagesEnded
from jigsawrl.contract.message import Array, Role
from jigsawrl.contract.parts import SubStage
from jigsawrl.contract.requests import Answer, HeldOutQuery, Problem, Score, ScoreQuery
from jigsawrl.models.weights import unpack
from jigsawrl.turns import turn_spans
from services.rollout.build import build_engine
from services.rollout.engine.base import Engine, Generated, SequenceStart
from services.rollout.turns import TurnError, ask, next_turn
from services.run import Context

log = structlog.get_logger()

PAGE_SIZE = 100
"""Problems or answers of one request: far below the message limit at any prompt length we run."""
REQUEST_TIMEOUT_S = 60.0
REPORT_PERIOD_S = 1.0
ASKED_AT_ONCE = 256
"""Turns that the environment is asked about together."""


class Evaluation:
    """Tenant of role ``evaluation``."""

    role: Role = "evaluation"
    concurrency = 1

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine: Engine | None = None
        self._turns = TaskTurns()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._problems: list[Problem] | None = None
        """The held-out set, the same for every version."""

    async def configure(self, config: PipelineConfig, command: Configure) -> None:
        """Build the engine; weights come with each version."""
        self._turns = config.turns()
        self._engine = await asyncio.to_thread(
            build_engine,
            config,
            device=self._context.device,
            greedy=True,
            tail_sequences=command.tail_sequences,
        )

    async def handle(self, command: Command) -> None:
        """Evaluate one version."""
        if not isinstance(command, Evaluate):
            log.warning("ignored a command that is not for evaluations", command=command.id)
            return
        try:
            await self._evaluate(command)
        except (BusError, ValueError) as error:
            await self._context.bus.publish_event(
                EvaluationFailed(
                    id=self._context.new_id(EvaluationFailed.tag()),
                    cause=command.id,
                    pipeline=self._context.pipeline,
                    worker=self._context.worker,
                    incarnation=command.incarnation,
                    version=command.version,
                    reason=str(error),
                )
            )

    async def run(self) -> None:
        """Nothing beside commands."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is held."""

    async def _evaluate(self, command: Evaluate) -> None:
        started_s, begun = time.time(), time.perf_counter()
        manifest, payload = await self._context.bus.fetch_weights(command.manifest)
        if self._problems is None:
            self._problems = await self._held_out()
        problems, engine = self._problems, self._engine
        assert engine is not None
        await asyncio.to_thread(
            lambda: engine.load_weights(
                unpack(manifest, payload),
                model_config=manifest.model_config,
                version=command.version,
                keep_kv=False,
            )
        )
        answers = await self._generate(engine, problems, command.version)
        scores = await self._score(problems, answers)
        duration_s = time.perf_counter() - begun
        num_tokens = sum(len(answer.own_versions) for answer in answers)
        await self._tell(
            command,
            scores,
            SubStage(
                kind="evaluation",
                version=command.version,
                started_s=started_s,
                ended_s=started_s + duration_s,
                duration_s=duration_s,
                num_iterations=1,
                num_tokens=num_tokens,
            ),
        )

    async def _held_out(self) -> list[Problem]:
        problems: list[Problem] = []
        total = 1
        while len(problems) < total:
            query = HeldOutQuery(
                id=self._context.new_id(HeldOutQuery.tag()), start=len(problems), count=PAGE_SIZE
            )
            page = await self._context.bus.request(
                f"{self._context.pipeline}.environment", query, timeout_s=REQUEST_TIMEOUT_S
            )
            if not page.problems:
                raise ValueError(f"the environment gave {len(problems)} of {total} problems")
            problems += page.problems
            total = page.total
        return problems

    async def _generate(
        self, engine: Engine, problems: list[Problem], version: int
    ) -> list[Generated]:
        """One answer a problem, in order; an empty one where the prompt doesn't fit the model, or the
        environment fails."""
        answers = {str(i): _nothing(str(i)) for i in range(len(problems))}
        starts = [
            SequenceStart(key=str(i), group=str(i), seed=0, prompt=tuple(p.prompt_tokens.tolist()))
            for i, p in enumerate(problems)
        ]
        engine.drop(engine.held())  # of an evaluation that failed half way
        for turn in range(1, self._turns.num_turns + 1):
            fitting = [start for start in starts if engine.check(start) is None]
            engine.add(fitting)
            title = f"evaluating version {version}"
            title += f", turn {turn}" if self._turns.num_turns > 1 else ""
            await self._run(engine, answers, title=title, num_total=len(fitting))
            if turn < self._turns.num_turns:
                asked = (self._next(start, problems, answers, version) for start in fitting)
                starts = [start for start in await asyncio.gather(*asked) if start is not None]
        return list(answers.values())

    async def _run(
        self, engine: Engine, answers: dict[str, Generated], *, title: str, num_total: int
    ) -> None:
        """Let the engine generate all that it holds."""

        def generate_for(seconds: float) -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end and (engine.num_running or engine.num_waiting):
                for generated in engine.step().finished:
                    answers[generated.key] = generated

        while engine.num_running or engine.num_waiting:
            await asyncio.to_thread(generate_for, REPORT_PERIOD_S)
            left = engine.num_running + engine.num_waiting
            self._context.report(title, num_done=num_total - left, num_total=num_total)

    async def _next(
        self,
        start: SequenceStart,
        problems: list[Problem],
        answers: dict[str, Generated],
        version: int,
    ) -> SequenceStart | None:
        """The next turn of a sequence, None where it has none."""
        key = start.key
        try:
            async with self._asking:
                observation = await ask(
                    self._context,
                    f"evaluation/v{version}/{key}",
                    problem=problems[int(key)].problem,
                    generated=answers[key],
                    delay_s=self._turns.delay_s,
                )
        except TurnError as error:
            log.warning("an answer counts as wrong", problem=key, reason=str(error))
            answers[key] = _nothing(key)
            return None
        return None if observation is None else next_turn(start, answers[key], observation)

    async def _score(self, problems: list[Problem], answers: list[Generated]) -> list[Score | None]:
        scores: list[Score | None] = []
        for begin in range(0, len(problems), PAGE_SIZE):
            page = slice(begin, begin + PAGE_SIZE)
            query = ScoreQuery(
                id=self._context.new_id(ScoreQuery.tag()),
                answers=tuple(
                    Answer(problem=problem.problem, tokens=Array.of("int32", last_turn(answer)))
                    for problem, answer in zip(problems[page], answers[page], strict=True)
                ),
            )
            reply = await self._context.bus.request(
                f"{self._context.pipeline}.reward", query, timeout_s=REQUEST_TIMEOUT_S
            )
            scores += reply.scores
        return scores

    async def _tell(self, command: Evaluate, scores: list[Score | None], span: SubStage) -> None:
        context = self._context
        if None in scores:
            log.warning("answers that could not be scored count as wrong", num=scores.count(None))
        await context.bus.publish_event(
            SubStagesEnded(
                id=context.new_id(SubStagesEnded.tag()),
                pipeline=context.pipeline,
                worker=context.worker,
                spans=(span,),
            )
        )
        await context.bus.publish_event(
            EvaluationFinished(
                id=context.new_id(EvaluationFinished.tag()),
                cause=command.id,
                pipeline=context.pipeline,
                worker=context.worker,
                incarnation=command.incarnation,
                version=command.version,
                num_problems=len(scores),
                num_correct=sum(score is not None and score.correct for score in scores),
                mean_reward=sum(s.reward for s in scores if s is not None) / len(scores),
                mean_num_tokens=span.num_tokens / len(scores),
                duration_s=span.duration_s,
            )
        )


def last_turn(generated: Generated) -> list[int]:
    """The tokens that are scored; none where there is no turn."""
    spans = turn_spans(generated.versions)
    return generated.tokens[spans[-1][0] : spans[-1][1]] if spans else []


def _nothing(key: str) -> Generated:
    return Generated(key=key, tokens=[], logprobs=[], versions=[], finish_reason=None)
