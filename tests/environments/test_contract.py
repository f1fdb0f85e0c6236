"""A mistake in a user's environment is one line that names the place and says what belongs there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent_peft.configuration.load import load_config
from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.environments.http.messages import StepResponse
from agent_peft.environments.task_commands import validate_tasks
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig, Sampler
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import Collection, Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError, Outcome, StopReason

WORLD = """\
from agent_peft.environments import Environment, EnvironmentConfig, Episode
from agent_peft.types import Message, Outcome, StepResult, StopReason, Task

class World(Environment):
    def __init__(self, config):
        self._tasks = [Task(f"t{i}") for i in range(3)]

    @property
    def tasks(self):
        return self._tasks

    def episode(self, task, seed):
        return Run()

class Run(Episode):
    def start(self):
        return [Message("user", "1+1=")]

    def step(self, action):
        return StepResult("", True, Outcome.CORRECT, StopReason.FINISHED)

    def close(self):
        pass
"""
INIT, TASKS, EPISODE, START, STEP = (
    'self._tasks = [Task(f"t{i}") for i in range(3)]',
    "return self._tasks",
    "return Run()",
    'return [Message("user", "1+1=")]',
    'return StepResult("", True, Outcome.CORRECT, StopReason.FINISHED)',
)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """world((line, written), ...): a module in which these lines are other ones; its kind."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = "own_" + re.sub(r"\W", "_", tmp_path.name)

    def write(*changes: tuple[str, str]) -> str:
        text = WORLD
        for line, written in changes:
            assert text.count(line) == 1
            text = text.replace(line, written)
        (tmp_path / f"{module}.py").write_text(text)
        return f"{module}:World"

    return write


@pytest.fixture
def engine(tiny_policy: Policy) -> Sampler:
    return load_sampler(tiny_policy, EngineConfig(rows=6))


def collect(engine: Sampler, environment: Environment, seed: int = 0) -> Collection:
    sampling = SamplingConfig(max_new_tokens=3, max_tokens=60)
    return Collector(environment, engine).collect(environment.tasks, 2, sampling, RewardConfig(), seed)


def test_the_world_is_well_as_it_is(world: Any, engine: Sampler) -> None:
    collection = collect(engine, load_environment({"kind": world()}))
    assert {t.outcome for group in collection.groups for t in group.trajectories} == {Outcome.CORRECT}


def test_the_example_of_the_page_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    example, test, shop = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len([line for line in example.splitlines() if line.strip()]) <= 40
    (tmp_path / "guessing_of_the_page.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(test.replace("guessing:", "guessing_of_the_page:"), {})
    (tmp_path / "shop_of_the_page.py").write_text(shop)
    for kind, tasks in (("guessing_of_the_page:Higher", 50), ("shop_of_the_page:Shop", 48)):
        counts = {"tasks": tasks, "gold_correct": tasks, "nothing_correct": 0}
        assert validate_tasks(kind) == {**counts, "rejected": [], "warnings": [], "violations": []}
    with pytest.raises(AgentPeftError, match="did you mean 'num_tasks'"):
        load_environment({"kind": "guessing_of_the_page:Higher", "num_task": 20})
    (configuration,) = re.findall(r"^```yaml\n(# guessing\.yaml\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("guessing.yaml").write_text(configuration.replace("guessing:", "guessing_of_the_page:"))
    train(load_config("guessing.yaml"))
    assert (tmp_path / "runs/guessing/checkpoints/step_000007").is_dir()


# -- when it is loaded ---------------------------------------------------------------------------------------

NO_TASKS = r"World\.tasks \(own_\w+\.py:8\) "
LOADING = {
    "keywords": (
        "def __init__(self, config):",
        "def __init__(self, num_tasks=3):\n        list(range(num_tasks))",
        r"World cannot be made: TypeError: 'NoKeys' object cannot be interpreted as an integer, "
        r"at own_\w+\.py:6; a class is called with one argument, its configuration: def __init__\(self, conf",
    ),
    "no argument": (
        "def __init__(self, config):",
        "def __init__(self):",
        r"World cannot be made: TypeError: .*; a class is called with",
    ),
    "abstract": (
        "def episode(self, task, seed):",
        "def other(self):",
        r"World cannot be made: TypeError: Can't instantiate abstract class",
    ),
    "raises": (INIT, "{}['nothing']", r"World cannot be made: KeyError: 'nothing', at own_\w+\.py:6; "),
    "no tasks": (
        INIT,
        "self._tasks = []",
        NO_TASKS + r"returned no tasks; give a list of agent_peft\.types\.T",
    ),
    "tasks are None": (INIT, "self._tasks = None", NO_TASKS + r"returned None; give a list"),
    "tasks are a text": (INIT, "self._tasks = 'abc'", NO_TASKS + r"returned 'abc'; give a list"),
    "a generator": (
        INIT,
        "self._tasks = (Task(str(i)) for i in range(3))",
        NO_TASKS + r"returned <generator",
    ),
    "tasks are dicts": (
        INIT,
        "self._tasks = [{'id': 'a'}]",
        NO_TASKS + r"returned \{'id': 'a'\}; give a list",
    ),
    "an id is a number": (INIT, "self._tasks = [Task(3)]", NO_TASKS + r"returned a Task whose id is 3; give"),
    "skills are a text": (
        INIT,
        "self._tasks = [Task('a', 'b')]",
        NO_TASKS + r"returned a Task whose skills is 'b'",
    ),
    "one id": (
        INIT,
        "self._tasks = [Task('first'), *[Task('x') for _ in range(36)]]",
        NO_TASKS + r"has 36 tasks whose id is 'x', which would count as one; give each task its own id",
    ),
    "tasks raise": (
        TASKS,
        "return self._nothing",
        NO_TASKS[:-1] + r": AttributeError: .*, at own_\w+\.py:10; give a list",
    ),
}


@pytest.mark.parametrize("mistake", LOADING)
def test_a_mistake_that_loading_shows(mistake: str, world: Any) -> None:
    line, written, message = LOADING[mistake]
    kind = world((line, written))
    with pytest.raises(AgentPeftError, match=message) as told:
        load_environment({"kind": kind})
    assert "\n" not in str(told.value)


def test_a_function_and_a_class_that_is_no_environment(world: Any) -> None:
    module = world().partition(":")[0]
    for name in ("Run", "Task", "__name__"):
        with pytest.raises(
            AgentPeftError, match=r"is not a subclass of agent_peft\.environments\.Environment; name one"
        ):
            load_environment({"kind": f"{module}:{name}"})


CONFIGURED = (
    "class World(Environment):",
    "class Settings(EnvironmentConfig):\n    num_tasks: int = 2\n    tasks: str = ''\n\n"
    "class World(Environment):\n    config_class = Settings",
)


def test_a_class_gets_its_configuration_and_unknown_keys_are_errors(world: Any) -> None:
    kind = world(
        CONFIGURED,
        ("def __init__(self, config):", "def __init__(self, config):\n        self.config = config"),
    )
    assert load_environment({"kind": kind, "num_tasks": 5}).config.num_tasks == 5
    with pytest.raises(
        AgentPeftError, match=r"environment\.num_task: unknown key; did you mean 'num_tasks'\?"
    ):
        load_environment({"kind": kind, "num_task": 5})
    with pytest.raises(AgentPeftError, match=r"environment\.num_tasks: must be a whole number"):
        load_environment({"kind": kind, "num_tasks": "many"})


def test_a_class_without_a_configuration_takes_no_keys(world: Any) -> None:
    kind = world()
    with pytest.raises(
        AgentPeftError, match=rf"^environment: {kind} takes no keys; set its config_class to a"
    ):
        load_environment(kind, num_tasks=5)


@pytest.mark.parametrize("written", ["None", "{'num_tasks': 2}", "dict", "Settings"])
def test_a_config_class_of_another_kind_is_one_line(world: Any, written: str) -> None:
    settings = "class Settings:\n    num_tasks: int = 2\n\n"
    kind = world(
        (CONFIGURED[0], f"{settings}class World(Environment):\n    config_class = {written}"),
        ("def __init__(self, config):", "def __init__(self, config):\n        self.config = config"),
    )
    with pytest.raises(AgentPeftError, match=rf"^environment: '{kind}': its config_class is .*leave it out"):
        load_environment(kind)


def test_an_environment_is_loaded_by_class_kind_mapping_or_configuration(world: Any) -> None:
    kind = world(
        CONFIGURED,
        ("def __init__(self, config):", "def __init__(self, config):\n        self.config = config"),
    )
    by_kind = load_environment(kind, num_tasks=5)
    world_class = type(by_kind)
    assert by_kind.config.kind == kind
    for environment in (
        load_environment(world_class, num_tasks=5),
        load_environment({"kind": kind}, num_tasks=5),
        load_environment(by_kind.config),
        load_environment({"kind": kind, "num_tasks": 4}, num_tasks=5),
        load_environment(load_environment(kind).config, num_tasks=5),
    ):
        assert type(environment) is world_class
        assert environment.config == by_kind.config
    with pytest.raises(AgentPeftError, match=r"^environment: names no kind; give one of arithmetic"):
        load_environment(world_class.config_class(num_tasks=5))
    with pytest.raises(AgentPeftError, match=r"is not a subclass of agent_peft\.environments\.Environment"):
        load_environment(int)  # type: ignore[arg-type]


# -- when an episode begins ----------------------------------------------------------------------------------

FILE = r"own_\w+\.py"
WHERE = r"^task 't0', seed \d+, at its start: "
BEGINNING = {
    name: (START, written, r"Run\.start \({file}:16\) returned " + message)
    for name, written, message in [
        ("nothing", "return None", r"None; give a list of agent_peft\.types\.Message\(role, content\)"),
        ("no message", "return []", r"\[\]; give a list"),
        ("a text", "return '1+1='", r"'1\+1='; give a list"),
        ("texts", "return ['1+1=']", r"'1\+1='; give a list"),
        ("dicts", "return [{'role': 'user', 'content': '1'}]", r"\{{'role': 'user', .*; give a list"),
        ("no content", "return [Message('user', None)]", "a Message whose content is None; give a list"),
        ("a role", "return [Message('human', '1+1=')]", "a Message whose role is 'human'; .*, user"),
    ]
}
BEGINNING["no episode"] = (
    EPISODE,
    "return None",
    r"World\.episode \({file}:12\) returned None; give an agent_peft",
)


@pytest.mark.parametrize("mistake", BEGINNING)
def test_a_mistake_at_the_beginning_of_an_episode(mistake: str, world: Any, engine: Sampler) -> None:
    line, written, message = BEGINNING[mistake]
    kind = world((line, written))
    with pytest.raises(AgentPeftError, match=WHERE + message.format(file=FILE)):
        collect(engine, load_environment({"kind": kind}))


@pytest.mark.parametrize("mistake", BEGINNING)
def test_a_mistake_at_the_beginning_comes_over_http_as_one_line(
    mistake: str, world: Any, serving: Any, engine: Sampler
) -> None:
    line, written, message = BEGINNING[mistake]
    host = serving({"train": load_environment({"kind": world((line, written))})})
    elsewhere = load_environment({"kind": "remote", "url": host.url})
    with pytest.raises(AgentPeftError, match=rf"^{host.url}: task 't0': {message.format(file=FILE)}"):
        collect(engine, elsewhere)
    elsewhere.close()


@pytest.mark.parametrize(("line", "number"), [(EPISODE, 13), (START, 17)])
def test_an_environment_that_begins_no_episode_stops_the_run(
    line: str, number: int, world: Any, engine: Sampler
) -> None:
    kind = world((line, "raise KeyError('x')"))
    message = (
        WHERE
        + rf"KeyError: 'x', at own_\w+\.py:{number}; every one of the first 6 episodes ended by a defect$"
    )
    with pytest.raises(AgentPeftError, match=message):
        collect(engine, load_environment({"kind": kind}))


# -- when the agent acts -------------------------------------------------------------------------------------

PLACE = r"Run\.step \(own_\w+\.py:19\) returned "
RESULT = PLACE + "a StepResult whose "
ACTING = {
    "raises": ("return int('one')", r"ValueError: invalid literal .* 'one', at own_\w+\.py:20"),
    "raises elsewhere": ("import json; json.loads('one')", r"JSONDecodeError: .*, at own_\w+\.py:20"),
    "nothing": ("return None", PLACE + r"None; give an agent_peft\.types\.StepResult"),
    "a text": ("return '2'", PLACE + r"'2'; give an agent_peft\.types\.StepResult"),
    "outcome True": (
        "return StepResult('', True, True, StopReason.FINISHED)",
        RESULT + r"outcome is True; give an",
    ),
    "outcome 0.5": (
        "return StepResult('', True, 0.5, StopReason.FINISHED)",
        RESULT + r"outcome is 0\.5; give .*; a grade from 0 to 1 is its score",
    ),
    "outcome won": (
        "return StepResult('', True, 'won', StopReason.FINISHED)",
        RESULT + "outcome is 'won'; give",
    ),
    "stop reason": (
        "return StepResult('', True, Outcome.CORRECT, True)",
        RESULT + "stop_reason is True; give",
    ),
    "no reason": ("return StepResult('', True)", r"ValueError: a step result carries .*, at own_\w+\.py:20"),
    "score": (
        "return StepResult('', True, Outcome.CORRECT, StopReason.FINISHED, score=2)",
        RESULT + "score is 2; give",
    ),
    "observation": ("return StepResult(None)", RESULT + "observation is None; give"),
}


@pytest.mark.parametrize("mistake", ACTING)
def test_a_mistake_at_an_action_stops_the_run_where_every_first_episode_meets_it(
    mistake: str, world: Any, engine: Sampler
) -> None:
    written, message = ACTING[mistake]
    kind = world((STEP, written))
    message = (
        rf"^task 't\d', seed \d+, turn 1: {message}.*; every one of the first 6 episodes ended by a defect$"
    )
    with pytest.raises(AgentPeftError, match=message):
        collect(engine, load_environment({"kind": kind}))


WELL = """\
    def close(self):
        pass

class Well(Run):
    def step(self, action):
        return StepResult("", True, Outcome.CORRECT, StopReason.FINISHED)
"""


@pytest.mark.parametrize("mistake", ACTING)
def test_where_other_episodes_are_well_it_is_told_once_and_ends_nothing(
    mistake: str, world: Any, engine: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    written, message = ACTING[mistake]
    kind = world(
        (STEP, written),
        (EPISODE, "return Run() if task.id == 't1' else Well()"),
        ("    def close(self):\n        pass\n", WELL),
    )
    collection = collect(engine, load_environment({"kind": kind}))
    assert collection.defects == 2
    reasons = [{t.stop_reason for t in group.trajectories} for group in collection.groups]
    assert reasons == [{StopReason.FINISHED}, {StopReason.DEFECT}, {StopReason.FINISHED}]
    told = [line for line in caplog.messages if ": a defect; " in line]
    assert len(told) == 1 and re.match(
        rf"task 't1', seed \d+, turn 1: {message}.*: a defect; every episode", told[0]
    )
    if "returned" in message:
        assert caplog.messages == told, "no traceback, since nothing was raised"


DEMONSTRATED = {
    "right": ("return ['2']", None),
    "none": ("return None", "it has no demonstration that could be replayed"),
    "a text": ("return '2'", r"its demonstration is '2'; give a list of texts, one for each turn"),
    "empty": ("return []", r"its demonstration is \[\]; give a list of texts"),
    "wrong": ("return ['3']", "its demonstration is graded incorrect"),
    "too short": ("return ['wait']", "its demonstration does not end the episode"),
    "raises": ("return {}['x']", r"KeyError: 'x', at own_\w+\.py:13"),
    "not answered": ("return ['nothing']", r"Run\.step \(own_\w+\.py:22\) returned None; give an agent_peft"),
}


@pytest.mark.parametrize("case", DEMONSTRATED)
def test_the_demonstrations_of_a_users_class_are_validated(case: str, world: Any) -> None:
    written, cause = DEMONSTRATED[case]
    kind = world(
        ("def episode(self", f"def demonstration(self, task):\n        {written}\n\n    def episode(self"),
        (
            STEP,
            "if action in ('wait', 'nothing'): return StepResult('') if action == 'wait' else None\n"
            "        return StepResult('', True, Outcome.CORRECT if action == '2' else Outcome.INCORRECT, StopReason.FINISHED)",  # noqa: E501
        ),
    )
    found = validate_tasks(kind)
    rejected = [entry["id"] for entry in found["rejected"]]
    if cause is None:
        counts = {"tasks": 3, "gold_correct": 3, "nothing_correct": 0}
        assert found == {**counts, "rejected": [], "warnings": [], "violations": []}
    else:
        assert (found["gold_correct"], rejected) == (0, ["t0", "t1", "t2"])
        assert re.match(cause, found["rejected"][0]["cause"])


def test_doing_nothing_must_not_pass_and_a_task_file_is_handed_over(world: Any) -> None:
    kind = world(CONFIGURED, (INIT, "self._tasks = [Task(config.tasks)]"))
    found = validate_tasks(kind, tasks="some.json")
    assert found["rejected"] == [
        {"id": "some.json", "cause": "it has no demonstration that could be replayed"}
    ]
    assert found["nothing_correct"] == 1
    assert found["violations"][0].startswith("task 'some.json': doing nothing passes")
    with pytest.raises(AgentPeftError, match=r"environment\.sandbox: unknown key"):
        validate_tasks(kind, tasks="some.json", sandbox="none")


def test_a_result_written_as_text_is_right(world: Any, engine: Sampler) -> None:
    kind = world((STEP, "return StepResult('', True, 'correct', 'finished')"))
    collection = collect(engine, load_environment({"kind": kind}))
    assert {(t.outcome, t.stop_reason) for g in collection.groups for t in g.trajectories} == {
        (Outcome.CORRECT, StopReason.FINISHED)
    }


def test_a_score_comes_with_the_trajectory_here_and_over_http(
    world: Any, engine: Sampler, serving: Any
) -> None:
    kind = world((STEP, "return StepResult('', True, 'incorrect', 'finished', score=0.25)"))
    local = load_environment(kind)
    remote = load_environment("remote", url=serving({"train": local}).url)
    for environment in (local, remote):
        groups = collect(engine, environment).groups
        assert {trajectory.score for group in groups for trajectory in group.trajectories} == {0.25}
    remote.close()


def test_a_score_of_each_turn_comes_with_it_here_and_over_http(
    world: Any, engine: Sampler, serving: Any
) -> None:
    kind = world((STEP, "return StepResult('1', score=0.25)"))
    local = load_environment(kind)
    remote = load_environment("remote", url=serving({"train": local}).url)
    for environment in (local, remote):
        for group in collect(engine, environment).groups:
            for trajectory in group.trajectories:
                assert {turn.score for turn in trajectory.turns} == {0.25}
                assert trajectory.score is None  # a limit ended it
    remote.close()


def test_the_answer_of_a_server_that_knows_no_scores_is_understood() -> None:
    facts = {"episode_id": "e", "index": 0, "outcome": "correct", "stop_reason": "finished", "valid": True}
    answer = {"observation": {"text": ""}, "reward": 1.0, "done": True, "metadata": facts}
    assert StepResponse.model_validate(answer).result().score is None
    assert StepResponse.model_validate({**answer, "metadata": {**facts, "score": 0.5}}).result().score == 0.5
    early = {**answer, "done": False, "metadata": {**facts, "stop_reason": None, "score": 0.5}}
    assert StepResponse.model_validate(early).result().score == 0.5
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        StepResponse.model_validate({**answer, "metadata": {**facts, "score": 1.5}})
