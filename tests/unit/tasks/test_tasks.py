"""Tasks: determinism, held-out sets, scorers, bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.config import JsonlTaskConfig, ReasoningGymConfig, SortDigitsConfig
from jigsawrl.config_task import TaskTurns, turns_of
from jigsawrl.tasks import Task, build_task
from jigsawrl.tasks.rewards import exact, numeric


def check(task: Task, *, num_train: int) -> None:
    held_out = [task.held_out(index) for index in range(task.num_held_out)]
    prompts = {problem.prompt for problem in held_out}
    assert len(prompts) == task.num_held_out
    for cursor in range(num_train):
        problem = task.train(cursor)
        assert problem == task.train(cursor)
        assert problem.prompt not in prompts
        assert task.score(problem.fields, problem.fields["answer"]).correct
        assert set(problem.prompt + problem.fields["answer"]) <= set(task.alphabet)
        assert not task.score(problem.fields, "").correct


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), num_held_out=st.integers(1, 60))
def test_sort_digits_never_trains_on_a_held_out_prompt(seed: int, num_held_out: int) -> None:
    # Two digits leave only 110 prompts: collisions are sure.
    config = SortDigitsConfig(min_digits=1, max_digits=2, num_held_out=min(num_held_out, 55))
    check(build_task(config, seed=seed), num_train=200)


def test_sort_digits_refuses_a_held_out_set_that_leaves_nothing_to_train_on() -> None:
    with pytest.raises(ValueError, match="num_held_out"):
        build_task(SortDigitsConfig(min_digits=1, max_digits=1, num_held_out=9), seed=0)


def test_sort_digits_marks_a_wrong_answer_position_by_position_and_ends_with_a_right_one() -> None:
    task = build_task(SortDigitsConfig(num_turns=3), seed=0)
    fields = {"answer": "1234"}
    assert task.observe(fields, ["1324"]) == "+--+="
    assert task.observe(fields, ["1324", " 12 "]) == "++--=", "what is missing is wrong"
    assert task.observe(fields, ["123499"]) == "++++=", "right but too long"
    assert task.observe(fields, [""]) == "----="
    assert task.observe(fields, ["1234"]) is None
    assert task.observe(fields, ["4321", "4321", "4321"]) is None, "three turns are all"
    assert set("+-") <= set(task.alphabet)


def test_what_sort_digits_says_fits_what_is_reserved_for_it() -> None:
    config = SortDigitsConfig(num_turns=2)
    task = build_task(config, seed=0)
    for cursor in range(100):
        said = task.observe(task.train(cursor).fields, ["+-0123456789="])
        assert said is not None
        assert set(said) <= set(task.alphabet)
        assert len(said) <= turns_of(config).max_observation_tokens


def test_the_alphabet_of_one_turn_has_no_marks() -> None:
    assert build_task(SortDigitsConfig(), seed=0).alphabet == "0123456789="


def test_the_environment_of_a_task_with_one_turn_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(n), "answer": 1}) for n in range(50)))
    for config in (
        JsonlTaskConfig(path=str(path), reward="exact"),
        ReasoningGymConfig(family="chain_sum", num_held_out=5),
        SortDigitsConfig(),
    ):
        assert build_task(config, seed=0).observe({"answer": "1"}, ["2"]) is None
        assert turns_of(config) == TaskTurns()


@pytest.mark.parametrize("family", ["basic_arithmetic", "chain_sum", "number_sorting"])
def test_reasoning_gym_families_never_train_on_a_held_out_prompt(family: str) -> None:
    config = ReasoningGymConfig(family=family, num_held_out=30)  # type: ignore[arg-type]
    check(build_task(config, seed=3), num_train=200)


def test_reasoning_gym_seeds_share_no_stretch_of_problems() -> None:
    config = ReasoningGymConfig(family="chain_sum", num_held_out=30)
    tasks = [build_task(config, seed=seed) for seed in range(3)]
    prompts = [{task.train(cursor).prompt for cursor in range(100)} for task in tasks]
    prompts += [{task.held_out(index).prompt for index in range(30)} for task in tasks]
    assert len(set().union(*prompts)) > 380  # of 390


def test_reasoning_gym_options_that_the_family_refuses_are_named() -> None:
    config = ReasoningGymConfig(family="chain_sum", options={"min_tems": 2})
    with pytest.raises(ValueError, match=r"chain_sum refuses them.*min_tems"):
        build_task(config, seed=0)


def rows(path: Path, *lines: object) -> JsonlTaskConfig:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return JsonlTaskConfig(path=str(path), reward="numeric", held_out_fraction=0.3)


def test_jsonl_goes_through_all_lines_each_epoch_in_another_order(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n}+1=", "answer": n + 1, "level": 1} for n in range(40)]
    task = build_task(rows(tmp_path / "t.jsonl", *lines, *lines[:5]), seed=0)
    check(task, num_train=100)
    num_train = len({task.train(cursor).prompt for cursor in range(200)})
    assert num_train + task.num_held_out == 40


def test_a_line_separator_inside_a_json_text_is_no_end_of_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a\u2028b", "answer": 1}\n{bad', encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.jsonl:2: not JSON"):
        build_task(JsonlTaskConfig(path=str(path), reward="exact"), seed=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"t\.jsonl:2: not JSON"),
        ("[1]", r"t\.jsonl:2: must be an object"),
        ('{"prompt": "a"}', r"t\.jsonl:2: 'answer' is missing"),
        ('{"prompt": "", "answer": 1}', r"t\.jsonl:2: 'prompt' must be a text"),
        ('{"prompt": "a", "answer": [1]}', r"t\.jsonl:2: 'answer' must be"),
        ('{"prompt": "a", "answer": "b"}', r"t\.jsonl:2: the answer 'b' holds no number"),
    ],
)
def test_a_malformed_line_is_named_by_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_task(rows(tmp_path / "t.jsonl", {"prompt": "a", "answer": 1}, line), seed=0)


@pytest.mark.parametrize(
    ("answer", "response", "correct"),
    [
        ("1234", "so it is 1,234.", True),
        ("-0.5", "x = -.5", True),
        ("2e3", "2000", True),
        ("7", "7 or rather 8", False),
        ("7", "seven", False),
    ],
)
def test_numeric_compares_the_last_number(answer: str, response: str, correct: bool) -> None:
    assert numeric(answer, response).correct is correct


def test_exact_ignores_white_space_at_the_ends_only() -> None:
    assert exact("a b", " a b\n").correct
    assert not exact("a b", "a  b").correct
