"""What counts as done, and what the agent cannot do about it."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_peft.environments.os_interaction.config import OSGenerateConfig, OSInteractionConfig
from agent_peft.environments.os_interaction.episode import OSEpisode
from agent_peft.environments.os_interaction.grader import matches, matches_truth
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


# -- Which answers are taken for the truth


@pytest.mark.parametrize(
    ("how", "answer", "truth", "same"),
    [
        (AnswerCheck.INTEGER, "12", "12\n", True),
        (AnswerCheck.INTEGER, " 12. ", "12", True),
        (AnswerCheck.INTEGER, "`12`", "12", True),
        (AnswerCheck.INTEGER, "1,234", "1234", True),
        (AnswerCheck.INTEGER, "012", "12", True),
        (AnswerCheck.INTEGER, "-1", "1", False),
        (AnswerCheck.INTEGER, "12.5", "12", False),
        (AnswerCheck.INTEGER, "1,2", "12", False),
        (AnswerCheck.INTEGER, "12 files", "12", False),
        (AnswerCheck.INTEGER, "", "", False),
        (AnswerCheck.INTEGER, "no such file", "no such file", False),
        (AnswerCheck.INTEGER, "²", "2", False),
        (AnswerCheck.INTEGER, "9" * 3_000, "9" * 3_000, False),
        (AnswerCheck.STRING, "a\r\nb ", " a\nb", True),
        (AnswerCheck.STRING, "A", "a", False),
        (AnswerCheck.STRING, "", "\n", True),
        (AnswerCheck.SIZE, "4096", "4.0K\n", True),
        (AnswerCheck.SIZE, "4 KB", "4096", True),
        (AnswerCheck.SIZE, "1.5M", "1536K", True),
        (AnswerCheck.SIZE, "12 bytes", "12B", True),
        (AnswerCheck.SIZE, "1GiB", "1g", True),
        (AnswerCheck.SIZE, "4K", "4M", False),
        (AnswerCheck.SIZE, "4.1K", "4K", False),
        (AnswerCheck.SIZE, "four", "four", False),
        (AnswerCheck.SIZE, "", "", False),
        (AnswerCheck.ANSWER_IN_TRUTH, "b", "a b c", True),
        (AnswerCheck.ANSWER_IN_TRUTH, "d", "a b c", False),
        (AnswerCheck.ANSWER_IN_TRUTH, "", "a b c", False),
        (AnswerCheck.TRUTH_IN_ANSWER, "it is b, then", "b\n", True),
        (AnswerCheck.TRUTH_IN_ANSWER, "it is b", "", False),
    ],
)
def test_comparisons(how, answer, truth, same):
    assert matches_truth(how, answer, truth) is same


@pytest.mark.parametrize(
    ("wanted", "answer", "same"),
    [
        (Matches("log"), " log\n", True),
        (Matches("log"), "logs", False),
        (Matches(" log", strip=False), " log", True),
        (Matches(" log", strip=False), "log", False),
        (Matches(regex="^[0-9]+$"), " 12 ", True),
        (Matches(regex="^[0-9]+$", strip=False), " 12 ", False),
        (Matches(regex="b"), "abc", True),
        (Matches(""), "x", False),
    ],
)
def test_matches(wanted, answer, same):
    assert matches(wanted, answer) is same


@pytest.mark.parametrize(
    ("how", "answer", "truth", "same"),
    [
        (
            AnswerCheck.TRUTH_IN_ANSWER,
            " ".join(map(str, range(871))),
            "347",
            False,
        ),  # a list of all there could be
        (AnswerCheck.TRUTH_IN_ANSWER, "1, 2, 3, 4 or 5", "3", False),
        (AnswerCheck.TRUTH_IN_ANSWER, "/etc /srv /opt /usr", "/srv", False),
        (
            AnswerCheck.TRUTH_IN_ANSWER,
            "red, green, blue, white, black, brown, grey, pink, orange, yellow",
            "blue",
            False,
        ),
        (AnswerCheck.TRUTH_IN_ANSWER, "1" * 500 + "347" + "1" * 500, "347", False),
        (AnswerCheck.TRUTH_IN_ANSWER, "13470", "347", False),  # no word of its own
        (AnswerCheck.TRUTH_IN_ANSWER, "0123456789", "5", False),
        (AnswerCheck.TRUTH_IN_ANSWER, "There are 347 files.", "347\n", True),
        (AnswerCheck.TRUTH_IN_ANSWER, "347", "347", True),
        (AnswerCheck.TRUTH_IN_ANSWER, "It is **/srv/notes.txt**.", "/srv/notes.txt", True),
        (AnswerCheck.TRUTH_IN_ANSWER, "The files are a.txt and b.txt.", "a.txt and b.txt", True),
        (AnswerCheck.TRUTH_IN_ANSWER, "...", "...", False),
        (AnswerCheck.ANSWER_IN_TRUTH, "/", "/srv/kestrel/notes.txt", False),
        (AnswerCheck.ANSWER_IN_TRUTH, "e", "one of these", False),
        (AnswerCheck.ANSWER_IN_TRUTH, " ", "one of these", False),
        (AnswerCheck.ANSWER_IN_TRUTH, "-", "a - b", False),
        (AnswerCheck.ANSWER_IN_TRUTH, "kestrel/notes.txt", "/srv/kestrel/notes.txt", True),  # the most of it
        (AnswerCheck.ANSWER_IN_TRUTH, "two words", "of these two words", True),
        (AnswerCheck.ANSWER_IN_TRUTH, "b.txt", "a.txt\nb.txt\nc.txt\nd.txt\n", True),
        (AnswerCheck.INTEGER, "٣٤٧", "347", False),
        (AnswerCheck.INTEGER, "1_000", "1000", False),
    ],
)
def test_an_answer_that_guesses_or_says_nothing_is_none(how, answer, truth, same):
    assert matches_truth(how, answer, truth) is same


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(AnswerCheck),
    st.text() | st.text("0123456789,. KMGkb+-'`\r\n/", max_size=60),
    st.text(max_size=60),
)
def test_no_answer_raises(how, answer, truth):
    matches_truth(how, answer, truth)
    matches_truth(how, truth, answer)
    matches_truth(how, answer, answer)
    matches(Matches(answer=truth), answer)


@pytest.mark.parametrize("how", AnswerCheck)
@pytest.mark.parametrize("piece", ["1", ",111", " ", "1 ", "a ", "\r", "`", "1.", "k", "/"])
def test_comparing_takes_linear_time(how, piece):
    def seconds(length):
        answer = piece * (length // len(piece))
        begun = time.process_time()
        matches_truth(how, answer, "1 a")
        matches_truth(how, "1 a", answer)
        return time.process_time() - begun

    assert seconds(800_000) < 24 * seconds(100_000) + 0.1  # 8 times as much if linear, 64 times if quadratic


def test_an_expression_that_takes_for_ever_does_not_match():
    assert matches(Matches(regex="^(a+)+$"), "a" * 30)
    assert not matches(Matches(regex="^(a+)+$"), "a" * 3_000 + "!")
