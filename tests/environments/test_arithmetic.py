import pytest

from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.types import AgentPeftError, Message, Outcome, StopReason, Task


def arithmetic(**settings):
    return Arithmetic(ArithmeticConfig(**{"num_tasks": 50, **settings}))


def step(environment, task, action):
    episode = environment.episode(task, seed=0)
    episode.start()
    return episode.step(action)


@pytest.mark.parametrize(
    ("settings", "symbol", "answer"),
    [
        ({"operation": "addition"}, "+", "579"),
        ({"operation": "addition", "reversed": True}, "+", "975"),
        ({"operation": "multiplication"}, "*", "56088"),
        ({"operation": "multiplication", "reversed": True}, "*", "88065"),
    ],
)
def test_one_problem_by_hand(settings, symbol, answer):
    environment, task = arithmetic(**settings), Task(f"123{symbol}456", content={"a": 123, "b": 456})
    assert environment.episode(task, seed=0).start() == [Message("user", f"123{symbol}456=")]
    assert environment.demonstration(task) == [answer]
    result = step(environment, task, f" {answer}\n")
    assert (result.done, result.outcome, result.stop_reason, result.valid) == (True, Outcome.CORRECT, StopReason.FINISHED, True)


@pytest.mark.parametrize(
    ("action", "valid"), [("580", True), ("0579", True), ("", False), ("579.", False), ("５７９", False), ("5 79", False)]
)
def test_all_but_the_exact_answer_is_incorrect(action, valid):
    result = step(arithmetic(), Task("123+456", content={"a": 123, "b": 456}), action)
    assert (result.outcome, result.valid) == (Outcome.INCORRECT, valid)


@pytest.mark.parametrize("operation", ["addition", "multiplication"])
@pytest.mark.parametrize("digits", [1, 2, 3])
def test_operands_have_the_digits_asked_for_and_the_alphabet_is_enough(operation, digits):
    environment = arithmetic(operation=operation, digits=digits)
    for task in environment.tasks:
        assert len(str(task.content["a"])) == len(str(task.content["b"])) == digits
        question, answer = environment.episode(task, 0).start()[0].content, environment.demonstration(task)[0]
        assert set(question + answer) <= set(ALPHABET)
        assert step(environment, task, answer).outcome is Outcome.CORRECT


def test_the_same_configuration_gives_the_same_distinct_tasks_and_another_seed_others():
    first, again, other = (arithmetic(num_tasks=500, seed=seed).tasks for seed in (0, 0, 1))
    assert first == again != other
    assert len({task.id for task in first}) == 500
    assert arithmetic(num_tasks=20).tasks == first[:20]


def test_one_digit_splits_are_disjoint_complete_and_blind_to_the_order_of_operands():
    sides = {split: {t.id for t in arithmetic(digits=1, split=split, num_tasks=n).tasks} for split, n in (("train", 84), ("heldout", 16))}
    assert len(sides["train"] | sides["heldout"]) == 100
    for ids in sides.values():
        assert ids == {"+".join(reversed(problem.split("+"))) for problem in ids}


def test_no_seed_and_no_operation_trains_on_what_another_holds_out():
    heldout = {(t.content["a"], t.content["b"]) for t in arithmetic(digits=2, split="heldout", num_tasks=1630).tasks}
    trained = {(t.content["a"], t.content["b"]) for t in arithmetic(digits=2, operation="multiplication", num_tasks=6000, seed=3).tasks}
    assert not heldout & trained


def test_more_tasks_than_there_are_is_an_error_that_says_how_many():
    with pytest.raises(AgentPeftError, match="only 84 problems in its train split: set num_tasks to at most 84"):
        arithmetic(digits=1, num_tasks=85)


def test_an_episode_is_one_turn():
    environment = arithmetic()
    episode = environment.episode(environment.tasks[0], seed=0)
    episode.start()
    episode.step("1")
    with pytest.raises(RuntimeError, match="over"):
        episode.step("1")
    episode.close()
    episode.close()


def test_a_closed_episode_takes_no_action():
    environment = arithmetic()
    episode = environment.episode(environment.tasks[0], seed=0)
    episode.start()
    episode.close()
    with pytest.raises(RuntimeError, match="over"):
        episode.step("1")
