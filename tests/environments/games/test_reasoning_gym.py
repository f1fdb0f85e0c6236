"""Reasoning Gym's datasets: their problems, splits, scores and faults."""

import inspect
import os
import subprocess
import sys

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.games.reasoning_gym import FAULTS, RUNS
from agent_peft.types import AgentPeftError, Outcome

factory = pytest.importorskip("reasoning_gym.factory", reason="the extra reasoning-gym is not installed")


def load(dataset="leg_counting", **keys):
    return load_environment("reasoning_gym", dataset=dataset, **{"num_tasks": 6, **keys})


def answer(environment, task, reply):
    episode = environment.episode(task, 0)
    episode.start()
    return episode.step(reply)


def test_datasets_take_turns_and_their_parameters_count():
    tasks = load({"leg_counting": {"max_animals": 3}, "gcd": {}}, num_tasks=7).tasks
    assert [task.skills for task in tasks] == [("leg_counting",), ("gcd",)] * 3 + [("leg_counting",)]
    assert all(task.content["question"].count(",") == 3 for task in tasks[::2])  # three animals


def test_no_question_is_in_both_splits_whatever_the_seed():
    """One-digit sums are few, so that seeds share many of them."""
    few = {"basic_arithmetic": {"max_terms": 2, "max_digits": 1, "allow_parentheses": False}}
    questions = {
        split: {
            task.content["question"]
            for seed in range(3)
            for task in load(few, split=split, seed=seed, num_tasks=25).tasks
        }
        for split in ("train", "heldout")
    }
    assert len(questions["train"]) < 75  # they do share some
    assert not questions["train"] & questions["heldout"]


def test_neighbouring_seeds_share_no_problem():
    assert not {t.content["question"] for t in load(seed=1).tasks} & {
        t.content["question"] for t in load(seed=2).tasks
    }


def test_the_last_answer_is_graded_by_the_library():
    environment = load("number_format")
    task = environment.tasks[0]
    right = f"I think <answer>7</answer>, no: <answer>{task.content['answer']}</answer>"
    assert (result := answer(environment, task, right)).outcome is Outcome.CORRECT
    assert (result.score, result.valid) == (1.0, True)
    graded = load("chain_sum")  # a right number in a longer answer has a part of the score
    task = graded.tasks[0]
    number = task.content["answer"]
    result = answer(graded, task, f"<answer>{number} in all</answer>")
    assert result.outcome is Outcome.INCORRECT and result.score == len(number) / len(f"{number} in all")


def test_a_reply_without_the_tags_is_invalid_and_scores_nothing():
    environment = load("fraction_simplification")
    dataset = factory.create_dataset("fraction_simplification", seed=1)
    assert dataset.score_answer(None, dataset[0]) > 0  # as the library would have it
    result = answer(environment, environment.tasks[0], "I do not know.")
    assert (result.outcome, result.score, result.valid) == (Outcome.INCORRECT, 0.0, False)


def test_an_answer_on_which_the_scorer_fails_is_invalid(monkeypatch):
    environment = load()

    def fail(*arguments, **keywords):
        raise ZeroDivisionError

    monkeypatch.setattr(factory.DATASETS["leg_counting"][0], "score_answer", fail)
    result = answer(environment, environment.tasks[0], "<answer>3</answer>")
    assert (result.outcome, result.score, result.valid) == (Outcome.INCORRECT, 0.0, False)


def test_a_dataset_without_answers_has_no_demonstrations():
    environment = load("graph_color", num_tasks=2)
    assert [environment.demonstration(task) for task in environment.tasks] == [None, None]


def test_the_system_prompt_may_be_left_out():
    environment = load(system_prompt="")
    assert [message.role for message in environment.episode(environment.tasks[0], 0).start()] == ["user"]
    environment = load()
    system, _ = environment.episode(environment.tasks[0], 0).start()
    assert "<answer>" in system.content and "</answer>" in system.content


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset": "leg_count"}, "environment.dataset: no 'leg_count'; did you mean 'leg_counting'"),
        ({"dataset": {"leg_counting": {"animals": 3}}}, "leg_counting: TypeError: .*animals"),
        ({"dataset": {"leg_counting": {"max_animals": 1}}}, "leg_counting: AssertionError: max_animals"),
        ({"dataset": {"leg_counting": {"seed": 1}}}, "leg_counting: TypeError: .*seed"),
        ({"dataset": "tower_of_hanoi", "num_tasks": 500}, "num_tasks: tower_of_hanoi has only .* questions"),
        ({"dataset": "countdown"}, "countdown: its scorer runs .*; or set accept_faults: true"),
        ({"dataset": []}, "environment.dataset"),
        ({"size": 3}, "size: unknown key"),
    ],
)
def test_a_mistake_is_one_line(keys, message):
    with pytest.raises(AgentPeftError, match=message) as told:
        load(**keys)
    assert "\n" not in str(told.value)


def test_the_absent_library_is_one_line_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(AgentPeftError, match=r"pip install '\.\[reasoning-gym\]'"):
        load()


def test_a_dataset_with_a_fault_is_taken_on_request_and_not_for_strangers():
    environment = load("countdown", accept_faults=True, num_tasks=1)
    assert (
        answer(environment, *environment.tasks, environment.demonstration(environment.tasks[0])[0]).score == 1
    )
    assert not environment.sandboxed
    assert load().sandboxed


def test_every_scorer_that_runs_answers_is_known():
    running = {
        name
        for name, (dataset, _) in factory.DATASETS.items()
        if any(
            call in inspect.getsource(dataset.score_answer) for call in ("eval(answer", "parse_expr(answer")
        )
    }
    assert running == {name for name, fault in FAULTS.items() if fault == RUNS}


@pytest.mark.parametrize(
    ("dataset", "reply"), [("coin_flip", "0"), ("complex_arithmetic", "nan"), ("game_of_life_halting", "x")]
)
def test_these_scorers_do_take_wrong_answers(dataset, reply):
    """Take the fault off the list when the library has corrected it."""
    environment = load(dataset, accept_faults=True, num_tasks=8)
    scores = [answer(environment, task, f"<answer>{reply}</answer>").score for task in environment.tasks]
    assert max(scores) == 1.0


@pytest.mark.slow
def test_another_process_has_the_same_problems():
    """It has other hashes of texts."""
    datasets = ["leg_counting", "letter_counting", "spell_backward", "knights_knaves", "maze"]
    code = (
        "from agent_peft.environments import load_environment; print([t.content for t in "
        f"load_environment('reasoning_gym', dataset={datasets}, num_tasks=10).tasks])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str([task.content for task in load(datasets, num_tasks=10).tasks]), (
        done.stderr
    )


# arc_agi reads its file and leaves it open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("dataset", sorted(factory.DATASETS.keys() - {"composite"}))
def test_every_dataset_has_problems_and_right_demonstrations(dataset):
    environment = load(dataset, accept_faults=True, num_tasks=2)
    replies = [environment.demonstration(task) for task in environment.tasks]
    assert all(replies) or dataset in {
        "boxnet",
        "graph_color",
        "propositional_logic",
        "rubiks_cube",
        "rush_hour",
    }
