"""What the environment says between turns: once for each, whoever asks and however often."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from jigsawrl.config import SortDigitsConfig
from jigsawrl.contract.message import Array
from jigsawrl.contract.requests import TurnQuery
from jigsawrl.models.tokenizer import build_tokenizer, decode, encode
from jigsawrl.tasks.sort_digits import SortDigits
from services.environment.turns import NUM_KEPT, OBSERVE_AT_ONCE, Turns

TOKENIZER = build_tokenizer("+-0123456789=")


class CountingTask(SortDigits):
    """Counts what it was asked."""

    def __init__(self) -> None:
        super().__init__(SortDigitsConfig(num_turns=3, num_held_out=5), seed=0)
        self.asked: list[list[str]] = []

    def observe(self, fields: dict[str, str], responses: Sequence[str]) -> str | None:
        self.asked.append(list(responses))
        return super().observe(fields, responses)


@pytest.fixture
def task() -> CountingTask:
    return CountingTask()


def query(*texts: str, sequence: str = "g/s0", number: int = 0) -> TurnQuery:
    ids = [[*encode(TOKENIZER, text), TOKENIZER.eos_token_id] for text in texts]
    return TurnQuery(
        id=f"q{number}",
        sequence=sequence,
        problem={"answer": "1234"},
        turns=tuple(Array.of("int32", tokens) for tokens in ids),
    )


async def said(turns: Turns, asked: TurnQuery) -> str | None:
    answer = await turns.answer(asked)
    assert answer.cause == asked.id
    if answer.observation is None:
        return None
    return decode(TOKENIZER, answer.observation.tolist())


async def test_it_says_what_the_task_says_to_all_turns_so_far(task: CountingTask) -> None:
    turns = Turns(task, TOKENIZER, delay_s=0.0)
    assert await said(turns, query("1243")) == "++--="
    assert await said(turns, query("1243", "1324")) == "+--+="
    assert await said(turns, query("1234")) is None
    assert task.asked == [["1243"], ["1243", "1324"], ["1234"]]


async def test_a_repeat_joins_the_thinking_that_goes_on_and_finds_its_answer_later(
    task: CountingTask,
) -> None:
    turns = Turns(task, TOKENIZER, delay_s=0.2)
    first = asyncio.create_task(said(turns, query("1243", number=1)))
    second = asyncio.create_task(said(turns, query("1243", number=2)))
    await asyncio.sleep(0.05)
    first.cancel()  # it moved; the other one waits for the same answer
    assert await second == "++--="
    assert await said(turns, query("1243", number=3)) == "++--="
    assert task.asked == [["1243"]]


async def test_other_words_of_a_sequence_and_other_sequences_get_answers_of_their_own(
    task: CountingTask,
) -> None:
    turns = Turns(task, TOKENIZER, delay_s=0.0)
    assert await said(turns, query("1243")) == "++--="
    assert await said(turns, query("4321")) == "----=", "said again under newer weights"
    assert await said(turns, query("1243", sequence="g/s1")) == "++--="
    assert len(task.asked) == 3


async def test_what_is_kept_is_bounded_and_what_is_forgotten_is_said_again(
    task: CountingTask,
) -> None:
    turns = Turns(task, TOKENIZER, delay_s=0.0)
    for number in range(NUM_KEPT + 1):
        await turns.answer(query("1", sequence=f"g/s{number}"))
    assert await said(turns, query("1", sequence="g/s0")) == "+---="
    assert len(task.asked) == NUM_KEPT + 2


async def test_a_task_that_fails_or_says_nothing_at_all_is_told_with_its_reason(
    task: CountingTask,
) -> None:
    class Silent(CountingTask):
        def observe(self, fields: dict[str, str], responses: Sequence[str]) -> str | None:
            return ""

    with pytest.raises(ValueError, match="turn 1 of sequence g/s0: the task answers with an empty"):
        await Turns(Silent(), TOKENIZER, delay_s=0.0).answer(query("1"))
    broken = TurnQuery(id="q", sequence="g/s0", problem={}, turns=query("1").turns)
    with pytest.raises(ValueError, match="turn 1 of sequence g/s0: KeyError: 'answer'"):
        await Turns(task, TOKENIZER, delay_s=0.0).answer(broken)
    with pytest.raises(ValueError, match="asks for a turn before its first one"):
        await Turns(task, TOKENIZER, delay_s=0.0).answer(query())


async def test_turns_that_hang_fail_alone_and_other_turns_and_prompts_wait_for_none(
    task: CountingTask,
) -> None:
    go_on = threading.Event()

    class Hanging(CountingTask):
        def observe(self, fields: dict[str, str], responses: Sequence[str]) -> str | None:
            if responses[0] == "9":
                go_on.wait()
            return super().observe(fields, responses)

    hanging = Hanging()
    turns = Turns(hanging, TOKENIZER, delay_s=0.0, deadline_s=0.2)
    asked = [query("9", sequence=f"g/s{number}") for number in range(3 * OBSERVE_AT_ONCE)]
    try:
        results = await asyncio.gather(*map(turns.answer, asked), return_exceptions=True)
        assert [str(result) for result in results] == [
            f"turn 1 of sequence {one.sequence}: the task took over 0.2 s" for one in asked
        ]
        assert await said(turns, query("1243")) == "++--="
        assert await asyncio.to_thread(hanging.train, 0) == task.train(0)
    finally:
        go_on.set()
