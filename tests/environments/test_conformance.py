"""What every environment must do, run over each of them."""

import json
import subprocess
import sys

import pytest

from agent_peft.environments import ENVIRONMENTS, load_environment
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.types import AgentPeftError, Outcome

# for each kind: a configuration with a few tasks, one with another seed, and a reply that answers wrongly and finishes
CASES = {
    "arithmetic": ({"num_tasks": 12, "seed": 3}, {"num_tasks": 12, "seed": 4}, "-1"),
    "db_bench": (
        {"generate": {"num_tasks": 16, "seed": 3}},
        {"generate": {"num_tasks": 16, "seed": 4}},
        "Action: Answer\nFinal Answer: [('nothing of the kind', -1)]",
    ),
}


def load(kind, which=0):
    return load_environment({"kind": kind, **CASES[kind][which]})


def play(environment, task, replies):
    episode = environment.episode(task, seed=0)
    episode.start()
    results = [episode.step(reply) for reply in replies]
    episode.close()
    return results


def test_every_environment_is_covered():
    assert set(CASES) == set(ENVIRONMENTS)


@pytest.fixture(params=CASES)
def kind(request):
    return request.param


def test_demonstrations_are_correct(kind):
    environment = load(kind)
    for task in environment.tasks:
        results = play(environment, task, environment.demonstration(task))
        assert results[-1].outcome is Outcome.CORRECT, task.id
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert all(result.valid for result in results)


def test_wrong_replies_are_incorrect(kind):
    environment = load(kind)
    for task in environment.tasks:
        assert play(environment, task, [CASES[kind][2]])[-1].outcome is Outcome.INCORRECT, task.id


def test_the_same_seed_gives_the_same_tasks_and_another_others(kind):
    assert load(kind).tasks == load(kind).tasks
    assert load(kind).tasks != load(kind, 1).tasks


def test_task_ids_are_distinct_and_tasks_can_be_written_as_json(kind):
    tasks = load(kind).tasks
    assert len({task.id for task in tasks}) == len(tasks)
    assert all(json.loads(json.dumps(task.content)) == task.content for task in tasks)


def test_the_same_replies_give_the_same_results(kind):
    environment = load(kind)
    for task in environment.tasks[:4]:
        replies = environment.demonstration(task)
        assert play(environment, task, replies) == play(environment, task, replies)


def test_openings_end_with_the_user(kind):
    environment = load(kind)
    episode = environment.episode(environment.tasks[0], seed=0)
    opening = episode.start()
    episode.close()
    assert opening[-1].role == "user"
    assert opening[-1].content.strip()


def test_a_step_after_the_end_raises(kind):
    environment = load(kind)
    task = environment.tasks[0]
    episode = environment.episode(task, seed=0)
    episode.start()
    for reply in environment.demonstration(task):
        episode.step(reply)
    with pytest.raises(RuntimeError):
        episode.step(CASES[kind][2])


def test_a_step_after_close_raises_and_close_is_idempotent(kind):
    environment = load(kind)
    episode = environment.episode(environment.tasks[0], seed=0)
    episode.start()
    episode.close()
    episode.close()
    with pytest.raises(RuntimeError):
        episode.step(CASES[kind][2])
    environment.close()
    environment.close()


@pytest.mark.parametrize("reply", ["", "\0", "\ud800", "Action: Operation\n```sql\nDROP TABLE t\n```", "9" * 5000, "x" * 100_000])
def test_whatever_is_written_ends_in_a_result(kind, reply):
    environment = load(kind)
    result = play(environment, environment.tasks[0], [reply])[0]
    assert result.outcome is not Outcome.CORRECT


def test_a_configuration_object_loads_too(kind):
    config_class, environment_class = ENVIRONMENTS[kind]
    config = config_class.model_validate(CASES[kind][0])
    assert isinstance(config, EnvironmentConfig)
    assert isinstance(load_environment(config), environment_class)


def test_an_unknown_key_is_an_error(kind):
    with pytest.raises(AgentPeftError, match="nonsense"):
        load_environment({"kind": kind, **CASES[kind][0], "nonsense": 1})


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(AgentPeftError, match="did you mean 'db_bench'"):
        load_environment({"kind": "dbbench"})


def test_a_class_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "own_world.py").write_text("class World:\n    def __init__(self, config):\n        self.config = config\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_environment({"kind": "own_world:World", "size": 3}).config == {"size": 3}
    for kind in ("own_world:Nothing", "no_such_world:World"):
        with pytest.raises(AgentPeftError, match=r"package\.module:Class"):
            load_environment({"kind": kind})


def test_torch_stays_unloaded():
    script = "import sys, agent_peft.environments, agent_peft.environments.validation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=_environment()).returncode == 0


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
