"""The names of ``import agent_peft as ap``: what they are, what they load, how they take mistakes."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import agent_peft as ap

SRC = Path(ap.__file__).parent
SMALL = {
    "kind": "scratch",
    "alphabet": "0123456789+*-= ^$",
    "architecture": {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64},
    "device": "cpu",
}


@pytest.fixture(scope="module")
def policy():
    return ap.load_policy(SMALL, seed=0)


@pytest.fixture
def tasks():
    return ap.load_environment("arithmetic", digits=1, num_tasks=4)


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- names ---------------------------------------------------------------------------------------------------


def test_all_is_sorted_and_every_name_has_a_docstring():
    assert ap.__all__ == sorted(ap.__all__) == dir(ap)
    silent = [
        name for name in ap.__all__ if name != "__version__" and not (getattr(ap, name).__doc__ or "").strip()
    ]
    assert not silent


def test_what_type_checkers_see_is_what_is_imported():
    tree = ast.parse((SRC / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert sorted(seen) == ap.__all__ and len(imports) == len(ap.__all__), "one name in each line"
    for name, home in seen.items():
        module, _, attribute = home.rpartition(".")
        there = importlib.import_module(home if module == "agent_peft" else module)
        assert getattr(ap, name) is (there if module == "agent_peft" else getattr(there, attribute))


def test_the_import_loads_nothing_else():
    heavy = run(
        "import sys, agent_peft; dir(agent_peft);"
        "print({'torch', 'transformers', 'peft', 'pydantic', 'typer', 'rich', 'yaml'} & set(sys.modules))"
    )
    assert heavy == "set()\n"
    assert (
        run("import sys, agent_peft as ap; ap.load_environment; ap.Task; print('torch' in sys.modules)")
        == "False\n"
    )


def test_the_import_takes_at_most_fifty_milliseconds():
    def milliseconds() -> float:
        command = [sys.executable, "-X", "importtime", "-c", "import agent_peft"]
        report = subprocess.run(command, capture_output=True, text=True).stderr
        return int(report.splitlines()[-1].split("|")[1]) / 1000

    assert min(milliseconds() for _ in range(5)) <= 50


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'agent_peft' has no attribute 'load_polcy'"):
        ap.load_polcy  # noqa: B018


# -- the script of the design --------------------------------------------------------------------------------


def script(model: object, kind: str, generate: dict | None, folder: Path, **stage: object) -> list[str]:
    """The loop as docs/python.md shows it, with small numbers."""
    keys = {"generate": generate} if generate else {"digits": 1, "num_tasks": 4}
    policy, tasks = ap.load_policy(model), ap.load_environment(kind, **keys)
    heldout = ap.load_environment(kind, **keys)
    lines = []
    for step in ap.Trainer(
        policy, tasks, ap.Stage(algorithm="rloo", optimizer={"learning_rate": 3e-4}, **stage)
    ):
        lines.append(f"{step.number} {step.metrics['success']}")
        assert step.trajectories[0].messages[-1].content is not None
    lines.append(ap.evaluate(policy, heldout, {"sampling": stage["sampling"], "num_tasks": 2}).summary)
    policy.save(str(folder / "adapter"))
    return lines


def test_the_ten_lines_train_a_model_from_random_weights(tmp_path):
    lines = script(SMALL, "arithmetic", None, tmp_path, steps=2, group_size=2, sampling={"max_new_tokens": 3})
    assert len(lines) == 3 and lines[0].startswith("0 ") and lines[2].startswith("success ")
    assert list((tmp_path / "adapter").iterdir())


@pytest.mark.slow
def test_the_ten_lines_train_an_adapter_of_a_language_model(smollm2, tmp_path):
    lines = script(
        "smollm2-135m",
        "db_bench",
        {"num_tasks": 4},
        tmp_path,
        steps=1,
        tasks_per_step=2,
        group_size=2,
        sampling={"max_new_tokens": 8, "max_tokens": 512},
    )
    assert len(lines) == 2 and lines[1].startswith("success ")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


# -- text ----------------------------------------------------------------------------------------------------


def test_generate_takes_texts_and_conversations_and_repeats(policy):
    three = {"max_new_tokens": 3}
    (one,) = ap.generate(policy, "1+2=", three)
    conversation = [ap.Message("user", "1+2=")]
    plain = [{"role": "user", "content": "1+2="}]
    assert ap.generate(policy, ["1+2=", "9+9="], three)[0] == one
    assert ap.generate(policy, [conversation, "9+9=", plain], three)[::2] == [one, one]
    assert ap.generate(policy, conversation, three) == ap.generate(policy, plain, three) == [one]
    assert ap.generate(policy, []) == []


def test_generate_is_greedy_unless_a_temperature_is_given_and_its_seed_decides(policy):
    assert ap.generate(policy, "1+2=", {"max_new_tokens": 3}, seed=1) == ap.generate(
        policy, "1+2=", {"max_new_tokens": 3}, seed=2
    )
    warm = {"max_new_tokens": 12, "temperature": 2.0}
    assert ap.generate(policy, ["1+2="] * 2, warm, seed=1) == ap.generate(policy, ["1+2="] * 2, warm, seed=1)
    replies = ap.generate(policy, ["1+2="] * 4, warm, seed=1)
    assert len(set(replies)) > 1, "each prompt draws on its own"
    assert replies != ap.generate(policy, ["1+2="] * 4, warm, seed=2)


def test_generate_uses_a_sampler_that_is_there(policy):
    sampler = ap.load_sampler(policy)
    assert ap.generate(sampler, "1+2=", {"max_new_tokens": 3}) == ap.generate(
        policy, "1+2=", {"max_new_tokens": 3}
    )


# -- mistakes ------------------------------------------------------------------------------------------------

STAGE = {"algorithm": "rloo", "steps": 1}
MISTAKES = [
    (lambda policy, tasks: ap.load_environment("db_bnch"), "db_bench"),
    (lambda policy, tasks: ap.load_environment("arithmetic", digit=1), "digits"),
    (lambda policy, tasks: ap.load_policy("no-such-model", lra=None), "lora"),
    (lambda policy, tasks: ap.generate(policy, 7), "7 is not a prompt"),
    (lambda policy, tasks: ap.generate(policy, [["1", 2]]), "2 is not a prompt"),
    (lambda policy, tasks: ap.generate(policy, [[]]), "at least one message"),
    (lambda policy, tasks: ap.generate(policy, [{"role": "human", "content": "1"}]), "human"),
    (lambda policy, tasks: ap.generate(policy, "1", {"max_new_token": 3}), "max_new_tokens"),
    (lambda policy, tasks: ap.generate(policy, "1+1=", {"max_tokens": 3}), "no room for a reply"),
    (
        lambda policy, tasks: ap.Stage(algoritm="rloo", steps=1),
        "Stage.algoritm: unknown key; did you mean 'al",
    ),
    (
        lambda policy, tasks: ap.TrainingConfig(model="m"),
        "TrainingConfig.model: unknown key; give one of model_name",
    ),
    (lambda policy, tasks: ap.TrainingConfig(model_name="m", lora_r=0), "TrainingConfig.lora_r: must be"),
    (lambda policy, tasks: ap.LLMConfig(), "LLMConfig.model: is missing"),
    (
        lambda policy, tasks: ap.create_rl_dataset(ap.create_rl_dataset("arithmetic"), max_samples=3),
        "max_samples: has no effect on a Dataset",
    ),
    (lambda policy, tasks: ap.Stage(algorithm="rlo", steps=1), "did you mean 'rloo'?"),
    (
        lambda policy, tasks: ap.Stage(algorithm="rloo", steps=1, optimizer={"learning_rat": 1}),
        "learning_rate",
    ),
    (lambda policy, tasks: ap.Stage(algorithm="rloo", steps=1, group_size=1), "group_size: 1 is too small"),
    (lambda policy, tasks: ap.Trainer(policy, tasks, {"algorithm": "rloo", "step": 1}), "Stage.step:"),
    (lambda policy, tasks: ap.Trainer(policy, type(tasks), STAGE), "is a class; give agent_peft.load_env"),
    (lambda policy, tasks: ap.evaluate(policy, type(tasks)), "is a class; give agent_peft.load_environment("),
    (
        lambda policy, tasks: ap.Trainer(policy, "arithmetic", STAGE),
        "'arithmetic' is a str; give agent_peft.load",
    ),
    (
        lambda policy, tasks: ap.evaluate(policy, {"kind": "gsm8k"}),
        "is a dict; give agent_peft.load_environment(",
    ),
    (lambda policy, tasks: ap.load_config("quickstrat"), "quickstart"),
    (lambda policy, tasks: ap.load_config("quickstart", sed=1), "seed"),
    (lambda policy, tasks: ap.evaluate(policy, tasks, {"sampling": {"temperatur": 0}}), "temperature"),
]


@pytest.mark.parametrize(("mistake", "says"), MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(policy, tasks, mistake, says):
    with pytest.raises(ap.AgentPeftError) as caught:
        mistake(policy, tasks)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_environment_without_keys_has_its_defaults():
    class Own(ap.Environment):
        tasks = ()

        def episode(self, task, seed):
            raise NotImplementedError

    assert Own().config == Own.config_class()


# -- a run ---------------------------------------------------------------------------------------------------


def test_a_configuration_trains_from_python_and_writes_the_metrics_of_the_page(tmp_path):
    config = ap.load_config(
        {
            "run_dir": str(tmp_path / "run"),
            "policy": SMALL,
            "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 4},
            "sampling": {"max_new_tokens": 3},
            "stages": [
                {"algorithm": "sft", "steps": 1},
                {"algorithm": "grpo", "steps": 1, "group_size": 2, "tasks_per_step": 2},
            ],
            "evaluation": None,
        }
    )
    ap.train(config)
    page = (SRC.parent.parent / "docs/metrics.md").read_text(encoding="utf-8")
    for file in ("metrics.jsonl", "timing.jsonl"):
        for line in (tmp_path / "run" / file).read_text().splitlines():
            assert not [
                name for name in json.loads(line).keys() - {"step", "stage"} if f"| `{name}` |" not in page
            ]
