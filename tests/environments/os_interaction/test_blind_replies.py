"""What does not read the task is never right, and the solutions are."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.os_interaction.generator import SPLITS
from agent_peft.environments.os_interaction.problems import SKILLS
from agent_peft.environments.os_interaction.protocol import Command, Finish, write_act
from agent_peft.types import Outcome, StopReason
from tests.conftest import case

from .blind_replies import BLIND_REPLIES


def environment(num_tasks, seed, split, **more):
    options = {"max_turns": 3, "command_timeout": 20, "script_timeout": 20, **more}
    return load_environment(
        {
            "kind": "os_interaction",
            "generate": {"num_tasks": num_tasks, "seed": seed, "split": split},
            **options,
        }
    )


def correct(environment, reply, threads=4):
    """The tasks that are right after this command and a finish; each must come to an end of its own."""

    def play(task):
        episode = environment.episode(task, 0)
        try:
            episode.start()
            results = [episode.step(write_act(Command(reply(task))))]
            results += [] if results[-1].done else [episode.step(write_act(Finish()))]
            assert results[-1].stop_reason is StopReason.FINISHED
            return results[-1].outcome is Outcome.CORRECT
        finally:
            episode.close()

    with ThreadPoolExecutor(threads) as pool:
        return [
            task.id
            for task, right in zip(environment.tasks, pool.map(play, environment.tasks), strict=True)
            if right
        ]


def gold(task):
    return task.content["evaluation_info"]["ground_truth_command_item"]["script"]


def test_the_replies_are_distinct():
    assert (
        len({name for name, _ in BLIND_REPLIES})
        == len({command for _, command in BLIND_REPLIES})
        == len(BLIND_REPLIES)
        >= 30
    )


@pytest.mark.slow
def test_each_solution_is_right(sandboxed):
    tasks = environment(29, 5, "heldout")
    assert {skill for task in tasks.tasks for skill in task.skills} == set(SKILLS)
    assert len(correct(tasks, gold)) == 29


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(case(name, 29, fast=False) for name in dict(BLIND_REPLIES)),
        case("all may run all", 15, fast=True),
    ],
)
def test_a_blind_reply_is_right_of_no_task(name, number, sandboxed):
    assert correct(environment(number, 5, "heldout"), lambda task: dict(BLIND_REPLIES)[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_to_do_nothing_is_never_right_and_to_solve_always(split, sandboxed):
    tasks = environment(100, 9, split)
    assert correct(tasks, lambda task: ":") == []
    assert len(correct(tasks, gold)) == 100
