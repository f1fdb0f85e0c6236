"""What every environment must do, run over each of them."""

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from agent_peft.environments import ENVIRONMENTS, load_environment
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.testing import check_environment
from agent_peft.types import AgentPeftError, Outcome, StopReason

PROBLEMS = str(Path(__file__).parent / "own_problems.jsonl")
CONVERSATIONS = str(Path(__file__).parent / "own_conversations.jsonl")

WRONG_SQL_ANSWER = "Action: Answer\nFinal Answer: [('nothing of the kind', -1)]"
OS_SKILLS = ["mkdir", "gpasswd", "echo"]
GAMES = ["leg_counting", "maze", "knights_knaves"]
# for each kind, and a word for another of its databases: a configuration with a few tasks, the keys of one
# with other tasks, and a reply that answers wrongly and finishes
CASES = {
    "arithmetic": ({"num_tasks": 12, "seed": 3}, {"seed": 4}, "-1"),
    "db_bench": (
        {"generate": {"num_tasks": 16, "seed": 3}},
        {"generate": {"num_tasks": 16, "seed": 4}},
        WRONG_SQL_ANSWER,
    ),
    "db_bench mariadb": (
        {"generate": {"num_tasks": 4, "seed": 3}, "database": "mariadb"},
        {"generate": {"num_tasks": 4, "seed": 4}},
        WRONG_SQL_ANSWER,
    ),
    "os_interaction": (
        {"generate": {"num_tasks": 3, "seed": 3, "skills": OS_SKILLS}},
        {"generate": {"num_tasks": 3, "seed": 4, "skills": OS_SKILLS}},
        "Act: finish",
    ),
    "gsm8k": ({"tasks": PROBLEMS, "num_tasks": 5}, {"offset": 1}, "#### -1"),
    "questions": (
        {"tasks": PROBLEMS, "grader": "number", "split": "train[:3]"},
        {"split": "train[3:]"},
        "-1",
    ),
    "chat": ({"tasks": CONVERSATIONS}, {"split": "train[1:]"}, "nothing of the kind"),
    "preferences": ({"tasks": CONVERSATIONS}, {"split": "train[1:]"}, "nothing of the kind"),
    "reasoning_gym": ({"dataset": GAMES, "num_tasks": 6}, {"seed": 1}, "<answer>-1</answer>"),
}
# the outcome of a wrong reply, where it is not incorrect
UNGRADED = {"chat", "preferences"}
# a reply that takes longer than anybody waits, for those whose episodes have a clock, and what lets it
PATIENCE = {
    "db_bench": {"statement_seconds": 600.0, "statement_steps": 10**15},
    "os_interaction": {"command_timeout": 600.0},
}
ENDLESS = {
    "db_bench": "Action: Operation\n```sql\nWITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c\n```",  # noqa: E501
    "os_interaction": "Act: bash\n\n```bash\necho begun; sleep 600\n```",
}
# each of them over HTTP too; the environments of an OpenEnv server and of Gymnasium have no golds to replay
CASES |= {f"remote {kind}": case for kind, case in CASES.items() if kind != "db_bench mariadb"}


@pytest.fixture(scope="module")
def settings(serving_all_along):
    """settings(kind, which): a whole configuration; where it is remote, of an environment that is served."""

    @cache
    def written(kind, which=0):
        first, other, _ = CASES[kind]
        local = {"kind": kind.removeprefix("remote ").split()[0], **first, **(other if which else {})}
        if not kind.startswith("remote "):
            return local
        return {"kind": "remote", "url": serving_all_along({"train": load_environment(local)}).url}

    return written


@pytest.fixture
def load(settings):
    with ExitStack() as stack:

        def loaded(kind, which=0):
            environment = load_environment(settings(kind, which))
            stack.callback(environment.close)
            return environment

        yield loaded


def play(environment, task, replies):
    episode = environment.episode(task, seed=0)
    episode.start()
    results = [episode.step(reply) for reply in replies]
    episode.close()
    return results


def test_every_environment_is_covered():
    assert {kind.split()[0] for kind in CASES} == set(ENVIRONMENTS) - {"openenv", "gymnasium"}


@pytest.fixture(params=CASES)
def kind(request):
    if "os_interaction" in request.param:
        request.getfixturevalue("sandboxed")
    if "mariadb" in request.param:
        request.getfixturevalue("mariadb")
    if "reasoning_gym" in request.param:
        pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    return request.param


def test_demonstrations_are_correct(load, kind):
    environment = load(kind)
    for task in environment.tasks:
        results = play(environment, task, environment.demonstration(task))
        assert results[-1].outcome is Outcome.CORRECT, task.id
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert all(result.valid for result in results)


def test_wrong_replies_are_incorrect(load, kind):
    environment = load(kind)
    for task in environment.tasks:
        outcome = Outcome.UNKNOWN if kind.split()[-1] in UNGRADED else Outcome.INCORRECT
        turns = len(environment.demonstration(task)) if kind.endswith("chat") else 1
        assert play(environment, task, [CASES[kind][2]] * turns)[-1].outcome is outcome, task.id


def test_the_same_seed_gives_the_same_tasks_and_another_others(load, kind):
    assert load(kind).tasks == load(kind).tasks
    assert load(kind).tasks != load(kind, 1).tasks


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "remote os_interaction")) for kind in CASES],
    indirect=True,
)
def test_it_keeps_all_rules(settings, kind):
    keys = dict(settings(kind))
    if kind == "os_interaction":  # whose every episode starts machines
        keys["generate"] = {**keys["generate"], "num_tasks": 1}
    check_environment(keys.pop("kind"), **keys)


def test_a_step_after_the_end_raises(load, kind):
    environment = load(kind)
    task = environment.tasks[0]
    episode = environment.episode(task, seed=0)
    episode.start()
    for reply in environment.demonstration(task):
        episode.step(reply)
    with pytest.raises(RuntimeError):
        episode.step(CASES[kind][2])


def test_a_step_after_close_raises_and_close_is_idempotent(load, kind):
    environment = load(kind)
    episode = environment.episode(environment.tasks[0], seed=0)
    episode.start()
    episode.close()
    episode.close()
    with pytest.raises(RuntimeError):
        episode.step(CASES[kind][2])
    environment.close()
    environment.close()


def test_sql_as_an_action_is_answered_everywhere(load, kind):
    environment = load(kind)
    reply = "Action: Operation\n```sql\nDROP TABLE t\n```"
    assert play(environment, environment.tasks[0], [reply])[0].outcome is not Outcome.CORRECT


def test_every_clock_is_covered():
    assert set(ENDLESS) == {
        kind for kind, row in ENVIRONMENTS.items() if "episode_seconds" in row.config_class.model_fields
    }


@pytest.mark.parametrize("where", ["", "remote "])
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_clock_that_runs_out_stops_the_command_and_ends_the_episode(kind, where, serving, request):
    if kind == "os_interaction":
        request.getfixturevalue("sandboxed")
    environment = load_environment({"kind": kind, **CASES[kind][0], **PATIENCE[kind], "episode_seconds": 1.0})
    elsewhere = (
        load_environment({"kind": "remote", "url": serving({"train": environment}).url})
        if where
        else environment
    )
    task = elsewhere.tasks[0]
    assert play(elsewhere, task, elsewhere.demonstration(task))[-1].outcome is Outcome.CORRECT
    episode = elsewhere.episode(task, seed=0)
    episode.start()
    result = episode.step(ENDLESS[kind])
    assert result.done and (result.outcome, result.stop_reason) == (Outcome.INCORRECT, StopReason.TIMEOUT)
    assert result.valid
    with pytest.raises(RuntimeError):
        episode.step(CASES[kind][2])
    episode.close()
    elsewhere.close()


def test_a_configuration_object_loads_too(settings, kind):
    environment_class = ENVIRONMENTS[kind.split()[0]]
    config = environment_class.config_class.model_validate(settings(kind))
    assert isinstance(config, EnvironmentConfig)
    environment = load_environment(config)
    assert isinstance(environment, environment_class)
    environment.close()


def test_an_unknown_key_is_an_error(settings, kind):
    with pytest.raises(AgentPeftError, match="nonsense"):
        load_environment({**settings(kind), "nonsense": 1})


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(AgentPeftError, match="did you mean 'db_bench'"):
        load_environment({"kind": "dbbench"})


def test_a_class_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "own_world.py").write_text(
        "from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig\n"
        "class WorldConfig(ArithmeticConfig):\n"
        "    size: int = 2\n"
        "class World(Arithmetic):\n"
        "    config_class = WorldConfig\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = load_environment({"kind": "own_world:World", "size": 3, "digits": 1}).config
    assert (config.kind, config.size, config.digits) == ("own_world:World", 3, 1)
    check_environment("own_world:World", digits=1, num_tasks=3)
    for kind in ("own_world:Nothing", "no_such_world:World"):
        with pytest.raises(AgentPeftError, match=r"package\.module:Class"):
            load_environment({"kind": kind})


@pytest.mark.slow
def test_torch_stays_unloaded():
    modules = "agent_peft.environments, agent_peft.environments.task_commands, agent_peft.testing"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    path = os.pathsep.join(filter(None, sys.path))
    assert (
        subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}).returncode == 0
    )
