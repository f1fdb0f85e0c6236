"""Every key of every command has its effect, or is refused in one line.

What a value does once it is in the configuration that a command works with, the tests of the part that reads
it show.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.main import get_command

from agent_peft import cli
from agent_peft.cli import run
from agent_peft.configuration.keys import sections, takes_value
from agent_peft.configuration.load import EFFECTIVE, read_config, refuse_ineffective
from agent_peft.configuration.run_config import resolved
from agent_peft.configuration.yaml12 import dump
from agent_peft.environments import task_commands
from agent_peft.environments.http import server
from agent_peft.runs import run as runs
from agent_peft.runs import targets
from agent_peft.runs.targets import load_target_config
from agent_peft.types import AgentPeftError

# -- the keys of a configuration -----------------------------------------------------------------------------

FOUND = {
    f"{section.name}.{key.name}".removeprefix("."): key.field
    for section in sections()
    for key in section.keys
    if takes_value(key.field.annotation)
}
# What keys have an effect on. On train and explain all of them have one; merge --evaluate is as evaluate.
EFFECT = {
    "evaluate": r"seed|threads|policy:\w+\.(model|device|dtype)|engine:\w+\.(?!schedule).*|evaluation"
    r"|evaluation\.(attempts|num_tasks|sampling\..*|environment:.*)",
    "merge": r"policy:\w+\.(model|device)",
    "serve": r"environment:.*|evaluation|evaluation\.environment:.*",
}
FIELDS = {key: {command for command, keys in EFFECT.items() if re.fullmatch(keys, key)} for key in FOUND}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where a user stands, with the files that the overrides below name."""
    for name in ("tasks.json", "tasks.jsonl", "others.jsonl"):
        (tmp_path / name).write_text("[]")
    (tmp_path / "own.py").write_text("def term(trajectory): return 0.0\ndef other(trajectory): return 0.0\n")
    (tmp_path / "adapter").mkdir()
    settings = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


POLICY_OF = {
    "scratch": {
        "kind": "scratch",
        "alphabet": "0123456789+*-= ",
        "architecture": {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 512},
        "lora": {"rank": 2},
    },
    "pretrained": {"kind": "pretrained", "model": "no-such-model"},
}
GENERATED = {"num_tasks": 3}
ENVIRONMENT_OF = {
    "arithmetic": {"kind": "arithmetic", "digits": 2, "num_tasks": 4},
    "questions": {"kind": "questions", "tasks": "tasks.jsonl"},
    "chat": {"kind": "chat", "tasks": "tasks.jsonl"},
    "preferences": {"kind": "preferences", "tasks": "tasks.jsonl"},
    "db_bench": {"kind": "db_bench", "generate": GENERATED},
    "gsm8k": {"kind": "gsm8k", "tasks": "tasks.jsonl", "examples": 1, "examples_from": "tasks.jsonl"},
    "gymnasium": {"kind": "gymnasium", "id": "Taxi-v3"},
    "reasoning_gym": {"kind": "reasoning_gym", "dataset": "leg_counting"},
    "os_interaction": {"kind": "os_interaction", "generate": GENERATED},
    "openenv": {"kind": "openenv", "url": "http://localhost:1", "num_tasks": 3},
    "remote": {"kind": "remote", "url": "http://localhost:1", "examples": 1},
}
ENGINE_OF = {
    "local": {"kind": "local"},
    "server": {"kind": "server", "urls": ["http://localhost:1"]},
    "vllm": {"kind": "vllm", "python": "no-such-python"},
}
TERM_OF = {
    "custom": {"kind": "own:term", "weight": 2.0},
    "length_penalty": {"kind": "length_penalty", "target_tokens": 5},
}
OTHER_KIND = {
    "policy:scratch": POLICY_OF["pretrained"],
    "policy:pretrained": POLICY_OF["scratch"],
    "engine:local": ENGINE_OF["server"],
    "engine:server": ENGINE_OF["local"],
    "engine:vllm": ENGINE_OF["server"],
    "environment": ENVIRONMENT_OF["openenv"],
    "environment:openenv": ENVIRONMENT_OF["arithmetic"],
    "stages.algorithm": {"kind": "reinforce"},
    "stages.algorithm:reinforce": {"kind": "rloo"},
    "stages.task_order": "sequential",
    "trackers": {"kind": "mlflow"},
    "trackers:mlflow": {"kind": "tensorboard"},
    "stages.rewards.terms": {"kind": "format", "weight": 0.5},
    "stages.rewards.terms:format": TERM_OF["length_penalty"],
}
# Where a type alone does not tell another value that is valid. ``{path}`` is there already; several overrides
# where one needs another.
NAMED: dict[str, str] = {
    "run_dir": "run_dir=elsewhere",
    "policy.device": "{path}=cpu",
    "policy.lora": "{path}=null",
    "policy.merge_adapter": "{path}=true policy.adapter=adapter",
    "policy.lora.target_modules": "{path}=[c_attn]",
    "policy.alphabet": "{path}='0123456789+*-=x '",
    "evaluation": "evaluation=null",
    "policy.architecture": "{path}.n_layer=2",
    "policy.template": "{path}.enable_thinking=false",
    "environment.operation": "{path}=multiplication",
    "environment.digits": "{path}=[1, 2]",
    "environment:os_interaction.skills": "{path}=[mkdir]",
    "environment:os_interaction.generate.skills": "{path}=[mkdir]",
    "environment:gsm8k.tasks": "{path}=others.jsonl",
    **{f"environment:{kind}.tasks": "{path}=others.jsonl" for kind in ("questions", "chat", "preferences")},
    **{f"environment:{kind}.split": "{path}='train[:5]'" for kind in ("questions", "chat", "preferences")},
    "environment:questions.skills": "{path}=topic",
    "environment:gymnasium.make": "{path}={{map_name: 8x8}}",
    "environment:gymnasium.actions": "{path}=[left, right]",
    "environment:gymnasium.score": "{path}=[-10, 10]",
    "environment:gymnasium.prompt": "{path}='So: {{observation}}'",
    "environment:reasoning_gym.dataset": "{path}=[gcd, lcm]",
    "environment:questions.grader": "{path}=number",
    "environment:questions.pattern": "{path}='(a)' {parent}.grader=regex",
    "environment:chat.prompt": "{path}=p {parent}.completion=c",
    "environment:chat.completion": "{path}=c {parent}.prompt=p",
    **{f"environment:{kind}.prompt": "{path}='So: {{question}}'" for kind in ("arithmetic", "questions")},
    "environment:db_bench.database": "{path}=mariadb",
    "environment:db_bench.prompt": "{path}='So: {{instruction}}'",
    "environment:os_interaction.prompt": "{path}='So: {{instruction}}'",
    "environment.tasks": "{path}=tasks.json {parent}.generate=null",
    "environment.generate": "{path}=null {parent}.tasks=tasks.json",
    "environment.skills": "{path}=[insert]",
    "environment:db_bench.split": "{path}='train[:50%]' {parent}.tasks=tasks.json {parent}.generate=null",
    "environment:db_bench.variations": "{path}=2 {parent}.tasks=tasks.json {parent}.generate=null",
    "environment:os_interaction.split": "{path}=train {parent}.tasks=tasks.json {parent}.generate=null",
    "environment.generate.skills": "{path}=[insert]",
    "environment:db_bench.generate.combined": "{path}=0.5 {parent}.skills=[insert]",
    "environment:gsm8k.split": "{path}=test {parent}.tasks=openai/gsm8k",
    "environment.examples_from": "{path}=others.jsonl",
    "environment.answer_format": "{path}='= {{answer}}'",
    "environment.url": "{path}=http://localhost:2",
    "environment.reset": "{path}={{level: 3}}",
    "engine.schedule": "{path}=tasks.json",
    "engine.urls": "{path}=['http://localhost:2']",
    "engine.arguments": "{path}=[--enforce-eager]",
    "engine.variables": "{path}={{CUDA_VISIBLE_DEVICES: '1'}}",
    "evaluation.at": "{path}=[start]",
    "evaluation.attempts": "{path}=2 evaluation.sampling.temperature=1",
    "evaluation.sampling.stop": "{path}=[x]",
    "sampling.max_tokens": "{path}=100",
    "stages.reference": "{path}=base stages.0.algorithm.kl_coef=0.1",
    "algorithm.turn_discount": "{path}=0.5",
    "stages.algorithm:distill.turn_discount": "{path}=0.5 {parent}.advantage_coef=1",
    "stages.teacher.model": "{path}=adapter stages.0.algorithm=distill",
    "stages.teacher.prompt": "{path}='{{solution}}' stages.0.algorithm=distill",
    "stages.algorithm:policy_gradient.baseline": "{path}=batch_normalized",
    "stages.algorithm:policy_gradient.surrogate": "{path}=ratio",
    "stages.algorithm:policy_gradient.weighting": "{path}=token_mean",
    "stages.algorithm:policy_gradient.baseline_momentum": "{path}=0.5 {parent}.advantage=plain_return "
    "{parent}.baseline=moving_average",
    "stages.algorithm:policy_gradient.constant_length": "{path}=9 {parent}.weighting=constant_length",
    "stages.optimizer.min_lr_ratio": "{path}=0.5 {parent}.schedule=linear",
    "stages.sampling.stop": "{path}=[x]",
    "stages.until": "{path}={{metric: reward, above: 0.5}}",
    "stages.until.above": "{path}=0.25",
    "stages.episodes_of": "{path}={{run: adapter}}",
    "stages.episodes_of.run": "{path}=adapter",
    "environment:preferences.completion": "{path}=reply {parent}.label=good",
    "stages.until.below": "{parent}.above=null {path}=0.5",
    "stages.until.metric": "{path}=success",
    "stages.until.patience": "{parent}.metric=evaluation.success {path}=3 evaluation.every=2",
    "checkpoint.keep_best": "{path}={{metric: loss, mode: min}}",
    "checkpoint.keep_best.metric": "{path}=reward",
    "stages.optimizer.betas": "{path}=[0.8, 0.9]",
    "stages.task_order": "{path}=sequential",
    "stages.task_order.skills": "{path}=[insert]",
}
# without outcomes: for supervised stages, and never measured (environments/test_chat)
UNGRADED = {"chat": "sft", "preferences": "kto"}  # kto takes rows with a label, too
SUPERVISED = ("sft", "dpo", "kto", "orpo", "simpo")


def settings_for(key: str) -> dict[str, Any]:
    """A configuration in which the key may stand."""
    section = key.rpartition(".")[0]
    kinds = dict(
        part.split(":")
        for part in section.replace("evaluation.environment", "evaluation_environment").split(".")
        if ":" in part
    )
    default = UNGRADED.get(kinds.get("environment", ""), "grpo")
    algorithm = {"kind": kinds.get("algorithm", default)} | (
        {"constant_length": 9} if "dr_grpo" in kinds.values() else {}
    )
    stage: dict[str, Any] = {"algorithm": algorithm, "steps": 5, "tasks_per_step": 4}
    if key.startswith("stages.episodes_of"):
        stage["algorithm"] = {"kind": "dpo"}
    if key.startswith("stages.episodes_of."):
        stage["episodes_of"] = {"run": "earlier"}
    if algorithm["kind"] == "maxrl":
        stage["rewards"] = {"incorrect": 0.0}
    if key == "stages.learn_from":
        stage["algorithm"] = {"kind": "sft"}
    if stage["algorithm"]["kind"] not in SUPERVISED:
        stage |= {"group_size": 2}
    checkpoint = {"keep_best": {"metric": "loss"}} if key.startswith("checkpoint.keep_best.") else {}
    if key.startswith("stages.until."):
        stage["until"] = {"metric": "reward", "above": 0.5}
    if key.startswith("stages.task_order."):
        stage["task_order"] = {"kind": "by_skill", "steps": 2}
    tracker = kinds.get("trackers", "tensorboard")
    if "terms" in kinds:
        stage["rewards"] = {"terms": [TERM_OF.get(kinds["terms"], {"kind": kinds["terms"]})]}
    return {
        "run_dir": "run",
        "policy": POLICY_OF[kinds.get("policy", "pretrained" if key == "seed" else "scratch")],
        "environment": ENVIRONMENT_OF[kinds.get("environment", "arithmetic")],
        "engine": ENGINE_OF[kinds.get("engine", "local")],
        "evaluation": {"environment": ENVIRONMENT_OF[kinds.get("evaluation_environment", "arithmetic")]},
        "checkpoint": checkpoint,
        "trackers": [{"kind": "own:Tracker" if tracker == "custom" else tracker}],
        "stages": [stage],
    }


def write(content: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(dump(content))
    return path


def another(value: Any, annotation: Any, name: str) -> Any:
    """Another value of the type."""
    parts = (annotation, *(inner for part in get_args(annotation) for inner in (part, *get_args(part))))
    if choices := [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool) or bool in parts:
        return not value
    if isinstance(value, int | float) or int in parts or float in parts:
        return 3 if value is None else value + 1 if isinstance(value, int) else value / 2 + 0.001
    assert str in parts or Path in parts, f"say in NAMED what another value of {name} is"
    return "adapter" if Path in parts else f"another-{name}"


def at(content: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(content, list):
            content = content[int(part)]
        else:
            content = content.get(part) if isinstance(content, dict) else None
    return content


def first_of(table: dict[str, Any], key: str) -> Any:
    """What a table has for a key, with the kinds that stand in it, or without, as a key of any section, of
    any section's last part.
    """
    plain = re.sub(r":\w+", "", key)
    forms = (
        key,
        key.removeprefix("evaluation."),
        plain,
        plain.removeprefix("evaluation."),
        ".".join(plain.split(".")[-2:]),
    )
    return next((table[form] for form in forms if form in table), None)


def overrides_of(key: str, content: dict[str, Any]) -> tuple[str, list[str]]:
    """The path of a key in ``content``, and overrides that give it another value."""
    section, _, name = key.rpartition(".")
    path = re.sub(r":\w+", "", key).replace("stages.", "stages.0.")
    parent = path.rpartition(".")[0]
    other = first_of(OTHER_KIND, section) if name == "kind" else None
    if ".terms:" in key or section.startswith("trackers:"):
        term = at(content, f"{parent}.0")
        other = other or {**term, name: another(term[name], FOUND[key].annotation, name)}
        return f"{parent}.0.{name}", [f"{parent}={json.dumps([other])}"]
    if other is not None:
        return path, [f"{parent}={json.dumps(other)}"]
    if (named := first_of(NAMED, key)) is not None:
        return path, [part.format(path=path, parent=parent) for part in _split(named)]
    return path, [f"{path}={json.dumps(another(at(content, path), FOUND[key].annotation, name))}"]


def _split(overrides: str) -> list[str]:
    """At the blanks before a key.

    >>> _split("a.b=[1, 2] c=3")
    ['a.b=[1, 2]', 'c=3']
    """
    return re.split(r" (?=[\w.{}]+=)", overrides)


CONFIGURED = [
    key for key in FIELDS if not key.startswith(tuple(f"evaluation.environment:{kind}." for kind in UNGRADED))
]


def test_an_environments_key_may_be_called_as_an_environment(folder):
    """The server's name of it, which is not a short form of a kind."""
    content = {**settings_for(""), "environment": ENVIRONMENT_OF["remote"]}
    config = read_config(write(content, folder / "c.yaml"), ["environment.environment=evaluation"])[0]
    assert config.environment.environment == "evaluation"


@pytest.mark.parametrize("section", dict.fromkeys(key.rpartition(".")[0] for key in FIELDS))
def test_keys_of_a_configuration(folder, section):
    """Each with another value, on the command line: a command works with that value, or refuses it and
    names the key.
    """
    for key in (key for key in CONFIGURED if key.rpartition(".")[0] == section):
        file = write(settings_for(key), folder / "run" / "config.yaml")
        before = resolved(read_config(file)[0])
        path, overrides = overrides_of(key, before)
        assert at(resolved(read_config(file, overrides, warn=False)[0]), path) != at(before, path), overrides
        if "evaluate" in FIELDS[key]:
            measured = load_target_config(Path("run"), None, overrides, None, None)
            if key != "evaluation":  # without it the tasks are those of training
                assert at(resolved(measured), path) != at(before, path), overrides
        for command in {"evaluate", "merge", "serve"} - FIELDS[key]:
            with pytest.raises(
                AgentPeftError, match=rf"^command line: [\w.]+ has no effect on {command}; "
            ) as told:
                refuse_ineffective(command, overrides, EFFECTIVE[command])
            assert str(told.value).split()[2].startswith(overrides[0].partition("=")[0])
        for command in {"merge", "serve"} & FIELDS[key]:
            refuse_ineffective(command, overrides[:1], EFFECTIVE[command])


# -- commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def reached(monkeypatch) -> dict[str, Any]:
    """What the workers of commands were called with, by the argument's name; there the command ends."""
    found: dict[str, Any] = {}

    def ending(module: Any, name: str) -> None:
        signature = inspect.signature(getattr(module, name))

        def take(*arguments: Any, **keywords: Any) -> None:
            bound = signature.bind(*arguments, **keywords)
            bound.apply_defaults()
            found.update(bound.arguments)
            raise AgentPeftError("reached")

        monkeypatch.setattr(module, name, take)

    for module, name in (
        (runs, "train"),
        (targets, "merge_run"),
        (targets, "evaluate_target"),
        (server, "serve"),
        (task_commands, "generate_tasks"),
        (task_commands, "validate_tasks"),
        (task_commands, "download_tasks"),
    ):
        ending(module, name)
    return found


# For each command: what must be given, and for each of its options an argument next to it. ``kept`` are what
# changes nothing that a worker is called with; the test of each is named.
COMMANDS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "train": (
        ["run/config.yaml"],
        {
            "overrides": ["seed=1"],
            "fresh": ["--fresh"],
            "change": ["--change"],
            "begin": ["--from", "other:12"],
            "journal": ["--from-journal", "other"],
        },
    ),
    "evaluate": (
        ["run"],
        {
            "overrides": ["engine.rows=8"],
            "checkpoint": ["--checkpoint", "step_000001"],
            "base": ["--base"],
            "tasks": ["--tasks", "tasks.json"],
            "attempts": ["--attempts", "2", "evaluation.sampling.temperature=1"],
        },
    ),
    "merge": (
        ["run", "--output", "merged"],
        {
            "overrides": ["policy.device=cpu"],
            "checkpoint": ["--checkpoint", "step_000001"],
            "output": ["--output", "other"],
        },
    ),
    "serve": (
        ["run/config.yaml"],
        {
            "overrides": ["environment.digits=1"],
            "host": ["--host", "::1"],
            "port": ["--port", "0"],
            "token": ["--token", "TOKEN_OF_MINE"],
            "max_episodes": ["--max-episodes", "2"],
            "idle_seconds": ["--idle-seconds", "2"],
        },
    ),
    "generate": (
        ["os_interaction", "num_tasks=3", "--output", "x.json"],
        {"keys": ["split=heldout"]},
    ),
    "validate": (["os_interaction"], {"keys": ["tasks=others.jsonl", "sandbox=docker"]}),
    "download": (["gsm8k"], {"output": ["--output", "there"]}),
}
# These change what is shown or done after the worker; each is looked at by its own test, here or in the
# file named.
SHOWN = {
    "evaluate": {"as_json", "target", "config", "output"},  # test_cli, below
    "merge": {"as_json", "both", "run"},  # test_cli
    # configuration/test_explain and test_planning, test_hostile_inputs
    "explain": {"as_json", "config", "everything", "keys", "on", "overrides", "trust"},
    "show": {"run", "step", "task", "attempt", "evaluation", "outcome", "sort", "worst", "as_json"},
    "train": {"config"},
    "sweep": {"config", "values", "jobs"},  # runs/test_sweep
    "launch": {"cluster", "on", "hosts", "part", "submit"},  # launch
    "compare": {"runs", "evaluation", "as_csv", "as_json"},  # runs/test_comparison
    "runs": {"folder", "as_json"},  # runs/test_overview
    "serve": {"config"},
    "generate": {"check", "output", "environment"},  # test_cli
    "validate": {"as_json", "environment"},  # test_cli
    "download": {"environment"},  # environments/test_gsm8k
    "report": {"runs", "output", "live", "port"},  # cli/test_show, reports/test_live
    "serve-policy": {  # agents/serving
        "targets",
        "host",
        "port",
        "token",
        "adapters",
        "rows",
        "max_tokens",
        "max_requests",
        "device",
        "dtype",
    },
    "chat": {  # agents/test_chat
        "target",
        "play",
        "task",
        "system",
        "temperature",
        "max_new_tokens",
        "seed",
        "device",
        "dtype",
    },
    "mcp": {"root"},  # agents/test_mcp
}


NO_OPTIONS = ("environments", "progress")  # arguments of workers that look otherwise in each call


def test_every_option_of_every_command_is_in_a_table():
    commands = get_command(cli.app).commands
    found = {name: {parameter.name for parameter in command.params} for name, command in commands.items()}
    assert found == {name: {*COMMANDS.get(name, ([], {}))[1], *SHOWN[name]} for name in SHOWN}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_a_command(folder, reached, capsys, monkeypatch, command):
    monkeypatch.setenv("TOKEN_OF_MINE", "x" * 40)
    write(settings_for("evaluation.environment:db_bench.tasks"), folder / "run" / "config.yaml")
    needed, options = COMMANDS[command]

    def called(*more: str) -> str:
        reached.clear()
        assert run([command, *needed, *more]) == 2
        assert capsys.readouterr().err == "agent-peft: reached\n"
        return str({name: value for name, value in reached.items() if name not in NO_OPTIONS})

    plain = called()
    for name, arguments in options.items():
        if (command, name) != ("serve", "overrides"):  # which loads its environments first; see below
            assert called(*arguments) != plain, name


def test_serve_serves_what_the_command_line_says(folder, reached, capsys):
    write(settings_for(""), folder / "run" / "config.yaml")
    assert (
        run(["serve", "run/config.yaml", "environment.num_tasks=2", "evaluation.environment.num_tasks=3"])
        == 2
    )
    assert [len(environment.tasks) for environment in reached["environments"].values()] == [2, 3]
    assert run(["serve", "run/config.yaml", "evaluation=null"]) == 2
    assert list(reached["environments"]) == ["train"]
    capsys.readouterr()
    assert run(["serve", "run/config.yaml", "optimizer.learning_rate=1"]) == 2
    assert (
        capsys.readouterr().err
        == "agent-peft: command line: optimizer.learning_rate has no effect on serve; leave it out\n"
    )


def test_explain_shows_what_the_command_line_says(folder, capsys):
    file = str(write(settings_for(""), folder / "c.yaml"))
    shown = []
    for overrides in ([], ["stages.0.optimizer.learning_rate=0.5"]):
        assert run(["explain", file, "--json", *overrides]) == 0
        shown.append(json.loads(capsys.readouterr().out)["values"])
    assert {key for key in shown[0] if shown[0][key] != shown[1][key]} == {"stages.0.optimizer.learning_rate"}
    assert shown[1]["stages.0.optimizer.learning_rate"] == {
        "value": 0.5,
        "from": "command line",
        "what it does": "learning rate after the warm-up; an update moves each weight by about this much; 0 "
        "makes no update, so that the policy only acts and is measured",
    }


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")), ids=lambda file: file.stem
)
def test_our_own_configurations_name_no_file_outside_the_folder_they_are_used_in(file):
    config = read_config(file, check_files=False)[0]
    models = [
        config,
        config.policy,
        config.environment,
        *([config.evaluation.environment] if config.evaluation else []),
    ]
    paths = [value for model in models for _, value in model if isinstance(value, Path)]
    assert config.run_dir in paths
    assert [path for path in paths if path.is_absolute() or ".." in path.parts] == []
