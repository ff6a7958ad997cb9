"""`Scorer` with its real child process."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jigsawrl.config import JsonlTaskConfig, SortDigitsConfig
from jigsawrl.tasks import Problem, Scored
from services.reward.scoring import Result, Sample, Scorer, result_of


@pytest.fixture
async def scorer() -> AsyncIterator[Scorer]:
    scorer = Scorer(SortDigitsConfig(num_held_out=5), seed=0, sample_deadline_s=1.0)
    yield scorer
    await scorer.close()


def answers(*responses: str) -> list[Sample]:
    return [Sample({"answer": "123"}, response) for response in responses]


async def test_results_come_in_the_order_of_the_samples(scorer: Scorer) -> None:
    results = await scorer.score(answers("123", "321", " 123 "))
    assert [r.scored and r.scored.reward for r in results] == [1.0, 0.0, 1.0]


async def test_a_sample_that_breaks_the_scorer_fails_alone_and_is_no_zero(scorer: Scorer) -> None:
    results = await scorer.score([*answers("123"), Sample({}, "no answer field"), *answers("1")])
    assert results[1].scored is None
    assert "KeyError" in results[1].error
    assert results[2].scored is not None


class Degenerate:
    """A task whose reward is what the answer says."""

    alphabet = ""
    num_held_out = 0

    def train(self, cursor: int) -> Problem:
        raise NotImplementedError

    def held_out(self, index: int) -> Problem:
        raise NotImplementedError

    def score(self, fields: dict[str, str], response: str) -> Scored:
        return Scored(reward=float(response), correct=False)


@pytest.mark.parametrize("reward", ["nan", "inf", "-inf"])
def test_a_reward_that_is_no_finite_number_is_no_reward(reward: str) -> None:
    result = result_of(Degenerate(), Sample({}, reward))
    assert result == Result(None, f"the reward is {reward}")
    assert result_of(Degenerate(), Sample({}, "0.5")).scored is not None


async def test_a_frozen_scorer_costs_one_sample_and_a_restart(scorer: Scorer) -> None:
    await scorer.score(answers("123"))
    assert scorer._child is not None
    os.kill(scorer._child.pid, signal.SIGSTOP)
    results = await scorer.score(answers("123", "123", "321"))
    assert "took over" in results[0].error
    assert [r.scored and r.scored.correct for r in results[1:]] == [True, False]


async def test_a_killed_scorer_costs_one_sample_and_a_restart(scorer: Scorer) -> None:
    await scorer.score(answers("123"))
    assert scorer._child is not None
    os.kill(scorer._child.pid, signal.SIGSTOP)
    os.kill(scorer._child.pid, signal.SIGKILL)
    results = await scorer.score(answers("123", "123"))
    assert results[1].scored is not None


async def test_a_numeric_answer_is_scored_in_the_child(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(f'{{"prompt": "{n}", "answer": {n}}}' for n in range(50)))
    scorer = Scorer(JsonlTaskConfig(path=str(path), reward="numeric"), seed=0)
    (result,) = await scorer.score([Sample({"answer": "1000"}, "it is 1,000")])
    assert result.scored is not None
    assert result.scored.correct
    await scorer.close()


async def test_past_the_deadline_of_all_samples_the_rest_fails_with_that_reason(
    scorer: Scorer,
) -> None:
    (scored,) = await scorer.score(answers("123"), deadline_s=30)
    assert scored.scored is not None
    results = await scorer.score(answers("123", "321"), deadline_s=0)
    assert [r.scored for r in results] == [None, None]
    assert all("not scored within 0 s" in r.error for r in results)
    assert (await scorer.score(answers("123")))[0].scored is not None
