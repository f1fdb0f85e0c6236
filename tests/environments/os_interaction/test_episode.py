"""Episodes of OS interaction: turns, what the agent reads, how they end, and the environment around them."""

import json
import logging

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.os_interaction.config import OSGenerateConfig, OSInteractionConfig
from agent_peft.environments.os_interaction.environment import OSInteraction
from agent_peft.environments.os_interaction.episode import OSEpisode, cut, demonstrate, observation
from agent_peft.environments.os_interaction.inspection import inspect
from agent_peft.environments.os_interaction.problems import (
    AnswerCheck,
    Checks,
    Exits,
    Matches,
    Script,
    ShellProblem,
)
from agent_peft.environments.os_interaction.protocol import (
    Command,
    Finish,
    write_act,
    write_json,
)
from agent_peft.environments.task_commands import validate_tasks
from agent_peft.environments.tool_calls import write_tool_call
from agent_peft.sandbox.base import CommandResult
from agent_peft.sandbox.build import missing
from agent_peft.types import AgentPeftError, InfrastructureError, Outcome, StopReason, Task

CONFIG = OSInteractionConfig(generate=OSGenerateConfig(num_tasks=1))
PROBLEM = ShellProblem(
    "Make /srv/a.",
    Exits(Script("[ -d /srv/a ] && [ -e /srv/ready ]")),
    initialization=(Script("touch /srv/ready"),),
    gold="mkdir /srv/a",
)


def entry(gold, evaluation, init="", skills=("mkdir",)):
    return {
        "instruction": "Do it.",
        "initialization_command_item": {"command_name": "bash", "script": init},
        "evaluation_info": {
            "evaluation_command_item": {"command_name": "bash", "script": evaluation},
            "ground_truth_command_item": {"command_name": "bash", "script": gold},
        },
        "skill_list": list(skills),
    }


ENTRIES = {
    "good": entry("mkdir /srv/a", "[ -d /srv/a ]"),
    "done": entry("mkdir /srv/b", "[ -d /srv ]"),
    "wrong": entry("echo oh no; mkdir /srv/a", "[ -d /srv/b ]", skills=["rm"]),
    "slow": entry("sleep 30; mkdir /srv/a", "[ -d /srv/a ]"),
    "count": {
        "description": "How many?",
        "create": {"init": "mkdir ~/box; touch ~/box/$RANDOM ~/box/$RANDOM"},
        "evaluation": {"check": [None, {"file": "check/integer-match.py"}], "example": "ls ~/box | wc -l"},
    },
    "image": {"description": "?", "create": {"image": "x"}, "evaluation": {"match": "1"}},
}


@pytest.fixture
def episode(sandboxed):
    episode = OSEpisode(
        PROBLEM,
        OSInteractionConfig(generate=OSGenerateConfig(num_tasks=1), max_turns=4, command_timeout=2),
        seed=0,
    )
    yield episode
    episode.close()


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def act(episode, command):
    return episode.step(write_act(Command(command)))


def test_the_opening_says_the_protocol_the_turns_and_the_task(episode):
    system, user = episode.start()
    assert "Act: bash" in system.content and "4 turns" in system.content and "answer(" not in system.content
    assert user.content == "Make /srv/a."


def test_a_task_is_solved(episode):
    episode.start()
    result = act(episode, "mkdir /srv/a && ls /srv")
    assert (result.observation, result.done, result.valid, result.outcome) == (
        "a\nready",
        False,
        True,
        Outcome.UNKNOWN,
    )
    result = episode.step("Act: finish")
    assert (result.done, result.outcome, result.stop_reason, result.valid) == (
        True,
        Outcome.CORRECT,
        StopReason.FINISHED,
        True,
    )
    with pytest.raises(RuntimeError):
        episode.step("Act: finish")


def test_finishing_at_once_is_incorrect(episode):
    episode.start()
    assert episode.step("Act: finish").outcome is Outcome.INCORRECT


def test_the_last_turn_is_for_finishing(episode):
    episode.start()
    for _ in range(3):
        assert not act(episode, "mkdir -p /srv/a").done
    result = act(episode, "mkdir -p /srv/a")
    assert (result.done, result.outcome, result.stop_reason, result.valid) == (
        True,
        Outcome.INCORRECT,
        StopReason.TURN_LIMIT,
        True,
    )


def test_a_finish_in_the_last_turn_counts(episode):
    episode.start()
    for _ in range(3):
        act(episode, "mkdir -p /srv/a")
    assert episode.step("Act: finish").outcome is Outcome.CORRECT


@pytest.mark.parametrize("reply", ["", "I would run ls.", "Act: bash", "Act: answer(3)"])
def test_a_malformed_reply_is_told_and_the_episode_goes_on(episode, reply):
    episode.start()
    result = episode.step(reply)
    assert (result.done, result.valid, result.outcome) == (False, False, Outcome.UNKNOWN)
    assert "Act: " in result.observation
    act(episode, "mkdir /srv/a")
    assert episode.step("Act: finish").outcome is Outcome.CORRECT


def test_a_malformed_reply_in_the_last_turn_ends_it(episode):
    episode.start()
    results = [episode.step("?") for _ in range(4)]
    assert [result.valid for result in results] == [False] * 4
    assert (results[-1].stop_reason, results[-1].outcome) == (StopReason.TURN_LIMIT, Outcome.INCORRECT)


def test_the_shell_stays(episode):
    episode.start()
    act(episode, "cd /srv; x=4; f() { echo f$x; }")
    assert act(episode, "pwd; f").observation == "/srv\nf4"


def test_what_went_wrong_is_told(episode):
    episode.start()
    assert act(episode, "ls /srv/none; exit 7").observation.endswith("[exit code 7]")
    result = act(episode, "echo begun; sleep 60")
    assert result.observation == "begun\n[stopped after 2 seconds]"
    assert not result.done


def test_an_ordered_machine_is_the_same_each_time(sandboxed):
    problem = ShellProblem(
        "?", PROBLEM.evaluation, initialization=(Script("echo $RANDOM > /srv/r"),), gold="true"
    )

    def seen(seed):
        episode = OSEpisode(problem, CONFIG, seed)
        episode.start()
        try:
            return act(episode, "cat /srv/r").observation, act(episode, "echo $RANDOM").observation
        finally:
            episode.close()

    assert seen(1) == seen(1)
    assert seen(1)[0] == seen(2)[0]  # the task is the same,
    assert seen(1)[1] != seen(2)[1]  # what the agent draws is not


def test_json_tool_calls(sandboxed):
    episode = OSEpisode(
        PROBLEM,
        OSInteractionConfig(generate=OSGenerateConfig(num_tasks=1), protocol="json_tool_calls"),
        seed=0,
    )
    system, _ = episode.start()
    assert "<tool_call>" in system.content and "Act:" not in system.content
    assert not episode.step("Act: finish").valid
    assert episode.step(write_tool_call("bash", command="mkdir /srv/a; echo $?")).observation == "0"
    assert episode.step(write_tool_call("finish")).outcome is Outcome.CORRECT
    episode.close()


def test_an_initialization_that_does_not_end_is_no_fault_of_the_agent(sandboxed):
    problem = ShellProblem("?", PROBLEM.evaluation, initialization=(Script("sleep 60"),), gold="true")
    episode = OSEpisode(
        problem, OSInteractionConfig(generate=OSGenerateConfig(num_tasks=1), script_timeout=0.3), seed=0
    )
    with pytest.raises(InfrastructureError, match="initialization"):
        episode.start()
    episode.close()


def test_nothing_is_opened_before_the_start_and_close_may_come_twice():
    episode = OSEpisode(PROBLEM, CONFIG, seed=0)
    with pytest.raises(RuntimeError, match="not started"):
        episode.step("Act: finish")
    episode.close()
    episode.close()
    with pytest.raises(RuntimeError):
        episode.start()


COUNT = ShellProblem("?", Checks((None, AnswerCheck.INTEGER), Script("echo 3")), gold="echo 3", answers=True)


@pytest.mark.parametrize(
    ("problem", "actions"),
    [
        (PROBLEM, [Command("mkdir /srv/a"), Finish()]),
        (COUNT, [Command("echo 3"), Finish("3")]),
        (ShellProblem("?", Matches("log"), answers=True), [Finish("log")]),
    ],
)
def test_demonstrations(sandboxed, problem, actions):
    assert demonstrate(problem, CONFIG) == tuple(map(write_act, actions))
    assert demonstrate(
        problem, OSInteractionConfig(generate=OSGenerateConfig(num_tasks=1), protocol="json_tool_calls")
    ) == tuple(map(write_json, actions))


@pytest.mark.parametrize("evaluation", [Matches(regex="x"), Exits(Script("true"))])
def test_what_nobody_knows_is_not_demonstrated(evaluation):
    assert demonstrate(ShellProblem("?", evaluation), CONFIG) is None


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        (CommandResult("a\nb\n", 0), "a\nb"),
        (CommandResult("", 0), "(no output)"),
        (CommandResult("\n\n", 0), "(no output)"),
        (CommandResult("oh\n", 2), "oh\n[exit code 2]"),
        (CommandResult("", 127), "[exit code 127]"),
        (CommandResult("oh", None, timed_out=True), "oh\n[stopped after 20 seconds]"),
        (CommandResult("", None), "[killed]"),
        (CommandResult("a\x1b[1mb\0\r\n\tc", 0), "a\ufffd[1mb\ufffd\n\tc"),
    ],
)
def test_observations(result, seen):
    assert observation(result, 100, 20) == seen


@pytest.mark.parametrize("length", [0, 99, 100, 101, 5_000, 1_000_000])
@pytest.mark.parametrize("code", [0, 1])
def test_observations_are_bounded_and_keep_both_ends(length, code):
    text = "a" * (length // 2) + "b" * (length - length // 2)
    seen = observation(CommandResult(text, code), 100, 20)
    assert len(seen) <= 100
    if length > 100:
        assert seen.startswith("aaa") and "bbb" in seen and "characters cut" in seen
        assert seen.endswith("[exit code 1]") == (code == 1)


def test_a_cut_says_how_much_is_missing():
    short = cut("x" * 1_000, 200)
    said = int(short.split("... ")[1].split()[0])
    assert short.count("x") + said == 1_000


def test_loading_replays_a_file_and_lists_what_cannot_be_used(sandboxed, task_file, caplog):
    config = OSInteractionConfig(tasks=task_file, command_timeout=1, sandbox="oci")
    with caplog.at_level(logging.WARNING):
        environment = OSInteraction(config)
    assert [task.id for task in environment.tasks] == ["good", "count"]
    causes = {rejection.id: rejection.cause for rejection in environment.rejected}
    assert causes == {
        "done": "doing nothing passes",
        "wrong": "the evaluation fails after the ground truth (oh no)",
        "slow": "the evaluation fails after the ground truth ([stopped after 1 seconds])",
        "image": "asks for the container image x",
    }
    assert "4 of 6 tasks cannot be used" in caplog.text


@pytest.mark.slow
def test_validation_counts_and_two_of_them_agree(sandboxed, tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({name: ENTRIES[name] for name in ("good", "done", "wrong", "image")}))
    found = validate_tasks("os_interaction", tasks=path)
    assert (found["tasks"], found["gold_correct"], found["nothing_correct"]) == (4, 2, 1)
    assert [rejection["id"] for rejection in found["rejected"]] == ["done", "wrong", "image"]
    assert found == validate_tasks("os_interaction", tasks=path, replay_threads=1)


def test_a_limit_takes_the_first_usable_tasks(sandboxed, task_file):
    environment = OSInteraction(OSInteractionConfig(tasks=task_file, limit=1, replay_threads=1))
    assert [task.id for task in environment.tasks] == ["good"]
    assert not environment.rejected


def test_without_replay_only_what_can_be_read_is_used(task_file):
    environment = OSInteraction(OSInteractionConfig(tasks=task_file, replay=False))
    assert [task.id for task in environment.tasks] == ["good", "done", "wrong", "slow", "count"]
    assert [rejection.id for rejection in environment.rejected] == ["image"]


def test_tasks_are_chosen_by_their_primary_skill(task_file):
    environment = OSInteraction(OSInteractionConfig(tasks=task_file, replay=False, skills=["rm"]))
    assert [task.id for task in environment.tasks] == ["wrong"]
    with pytest.raises(AgentPeftError, match="no task has one of the skills vi"):
        OSInteraction(OSInteractionConfig(tasks=task_file, replay=False, skills=["vi"]))


def test_no_usable_task_is_an_error(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"image": ENTRIES["image"]}))
    with pytest.raises(AgentPeftError, match=r"no task can be used \(image: asks for the container image x"):
        OSInteraction(OSInteractionConfig(tasks=path))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "set exactly one of tasks"),
        ({"tasks": "x", "generate": {"num_tasks": 1}}, "set exactly one of tasks"),
        ({"generate": {"num_tasks": 0}}, "greater than 0"),
        ({"generate": {"num_tasks": 1, "skills": ["mkdri"]}}, "did you mean 'mkdir'"),
        ({"generate": {"num_tasks": 1}, "sandbox": "jail"}, "oci"),
        ({"generate": {"num_tasks": 1}, "protocol": "xml"}, "json_tool_calls"),
        ({"generate": {"num_tasks": 1}, "limits": {"memory": 3}}, "limits.memory"),
        ({"generate": {"num_tasks": 1}, "max_turns": 1}, "greater than or equal to 2"),
    ],
)
def test_a_wrong_configuration_is_one_line(settings, told):
    with pytest.raises(AgentPeftError, match=told) as error:
        load_environment({"kind": "os_interaction", **settings})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("evaluation", "judged"),
    [
        ("/srv/check.sh; exit $?", True),
        ("cd /srv && ./check.sh && [ -e /srv/check.sh ]", True),
        ("/srv/check.sh && grep -q joe /etc/passwd", False),
        ('[ "$(/srv/check.sh)" = yes ]', False),
        ("[ -x /srv/check.sh ]", False),  # an empty program is what was asked for
    ],
)
def test_a_task_that_judges_itself_is_rejected(sandboxed, evaluation, judged):
    if missing("oci"):
        pytest.skip(missing("oci")[0])
    gold = (
        "useradd joe; printf '#!/bin/bash\\ngrep -q joe /etc/passwd && echo yes\\n' > /srv/check.sh; "
        "chmod 755 /srv/check.sh"
    )
    content = {
        "initialization_command_item": {"command_name": "bash", "script": ""},
        "skill_list": ["useradd"],
        "instruction": "Make a user joe, and write /srv/check.sh, which checks that.",
        "evaluation_info": {
            "evaluation_command_item": {"command_name": "bash", "script": evaluation},
            "ground_truth_command_item": {"command_name": "bash", "script": gold},
        },
    }
    config = OSInteractionConfig(generate=OSGenerateConfig(num_tasks=1), max_turns=3)
    found = inspect(Task("it", content=content), config)
    assert found.gold_is_correct and not found.nothing_is_correct
    told = "it judges itself: an empty program at /srv/check.sh passes"
    assert found.cause == (told if judged else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lifelong_agent_bench/os_interaction/entry_dict.json"])
def test_the_real_golds_hold_and_two_replays_agree(sandboxed, shared, name, tmp_path):
    path = shared / "data" / name
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    entries = dict(list(json.loads(path.read_text()).items())[:30])
    few = tmp_path / "few.json"
    few.write_text(json.dumps(entries))
    found = validate_tasks("os_interaction", tasks=few)
    assert found["nothing_correct"] == 0
    assert found["gold_correct"] >= 0.95 * found["tasks"]
    again = validate_tasks("os_interaction", tasks=few)
    assert {rejection["id"] for rejection in found["rejected"]} == {
        rejection["id"] for rejection in again["rejected"]
    }
