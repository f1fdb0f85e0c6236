"""What counts as done, and what the agent cannot do about it."""

import pytest

from agent_peft.environments.os_interaction.config import OSGenerateConfig, OSInteractionConfig
from agent_peft.environments.os_interaction.episode import OSEpisode
from agent_peft.environments.os_interaction.problems import (
    AnswerCheck,
    Checks,
    Exits,
    Matches,
    Script,
    ShellProblem,
)
from agent_peft.environments.os_interaction.protocol import Command, Finish, write_act
from agent_peft.types import Outcome


def outcome(problem, *commands, answer=None):
    episode = OSEpisode(
        problem,
        OSInteractionConfig(generate=OSGenerateConfig(num_tasks=1), max_turns=9, script_timeout=3),
        seed=0,
    )
    try:
        episode.start()
        for command in commands:
            assert not episode.step(write_act(Command(command))).done
        return episode.step(write_act(Finish(answer))).outcome
    finally:
        episode.close()


DONE = ShellProblem("Make /srv/a.", Exits(Script("[ -d /srv/a ] && exit 0 || exit 1")), gold="mkdir /srv/a")
COUNT = ShellProblem(
    "How many files are in ~/box?",
    Checks((None, AnswerCheck.INTEGER), Script("ls ~/box | wc -l")),
    initialization=(Script("mkdir ~/box && touch ~/box/a ~/box/b ~/box/c"),),
    gold="ls ~/box | wc -l",
    answers=True,
)
OWN = ShellProblem(
    "Say yes, and touch /srv/said.",
    Checks(
        (
            Script('[ -e /srv/said ] && echo "$1!"'),
            Script("import sys; sys.exit(sys.argv[1:3] != ['yes', 'yes!\\n'])", "python"),
        )
    ),
    answers=True,
)


def test_the_exit_code_decides(sandboxed):
    assert outcome(DONE, "mkdir /srv/a") is Outcome.CORRECT
    assert outcome(DONE, "touch /srv/a") is Outcome.INCORRECT
    assert outcome(DONE) is Outcome.INCORRECT


def test_an_example_tells_the_truth(sandboxed):
    assert outcome(COUNT, "ls ~/box", answer="3") is Outcome.CORRECT
    assert outcome(COUNT, answer="4") is Outcome.INCORRECT
    assert outcome(COUNT, answer=None) is Outcome.INCORRECT
    assert outcome(COUNT, answer="") is Outcome.INCORRECT


def test_the_truth_is_that_of_before_the_agent_acted(sandboxed):
    assert outcome(COUNT, "rm ~/box/*", answer="0") is Outcome.INCORRECT
    assert outcome(COUNT, "rm ~/box/*", answer="3") is Outcome.CORRECT


def test_an_example_that_fails_makes_no_truth(sandboxed):
    broken = ShellProblem(
        "?",
        Checks((None, AnswerCheck.INTEGER), Script("echo 3; exit 1")),
        gold="echo 3; exit 1",
        answers=True,
    )
    assert outcome(broken, answer="3") is Outcome.INCORRECT


def test_an_example_sees_what_was_started(sandboxed):
    started = ShellProblem(
        "What does /srv/now say?",
        Checks((None, AnswerCheck.STRING), Script("until [ -e /srv/now ]; do sleep 0.1; done; cat /srv/now")),
        start="(while sleep 0.05; do echo ready > /srv/next; mv /srv/next /srv/now; done) &",
        gold="cat /srv/now",
        answers=True,
    )
    assert outcome(started, answer="ready") is Outcome.CORRECT


def test_check_scripts_are_given_the_answer_and_what_was_said_before(sandboxed):
    assert outcome(OWN, "touch /srv/said", answer="yes") is Outcome.CORRECT
    assert outcome(OWN, "touch /srv/said", answer="no") is Outcome.INCORRECT
    assert outcome(OWN, answer="yes") is Outcome.INCORRECT


def test_an_answer_is_no_command(sandboxed):
    assert outcome(OWN, answer="$(touch /srv/said)yes'; touch /srv/said; '") is Outcome.INCORRECT


@pytest.mark.parametrize(
    "mischief",
    [
        "mkfifo /srv/a",  # a check that reads it would wait for ever
        "alias test=true; test() { true; }; exit() { builtin exit 0; }; export -f test exit",
        "echo 'exit 0' > ~/.bashrc; echo 'exit 0' > /tmp/env; export BASH_ENV=/tmp/env",
        "kill -9 -1",
        "while :; do mkdir -p /srv/a; rmdir /srv/a; done & disown; rmdir /srv/a 2>/dev/null; exec sleep 0",
    ],
)
def test_mischief_is_no_success_and_no_failure_of_ours(sandboxed, mischief):
    reads = ShellProblem("Fill /srv/a.", Exits(Script('[ "$(cat /srv/a)" = full ]')))
    assert outcome(reads, mischief) is Outcome.INCORRECT


def test_match_needs_no_more_than_the_answer(sandboxed):
    problem = ShellProblem("?", Matches("log"), answers=True)
    assert outcome(problem, answer="log") is Outcome.CORRECT
    assert outcome(problem) is Outcome.INCORRECT
