"""A configuration means what its file says, and every mistake in it is told in one line that helps."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from agent_peft.algorithms import ALGORITHMS
from agent_peft.configuration.explain import effective_values, explain
from agent_peft.configuration.load import Provenance, dump_config, load_for_evaluation, read_config
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.environments.arithmetic import ArithmeticConfig
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.sampling import LIMITS
from agent_peft.types import AgentPeftError

TOP = """\
run_dir: runs/a
policy: {kind: pretrained, model: smollm2-135m}
environment: {kind: arithmetic, num_tasks: 10}
"""
ONE = TOP + "algorithm: grpo\nsteps: 3\n"
TWO = f"""{TOP}steps: 3
optimizer: {{learning_rate: 1e-4, weight_decay: 0.1}}
stages:
  - sft
  - {{name: rl, algorithm: grpo, optimizer: {{learning_rate: 3e-5}}}}
"""
HELDOUT = "evaluation:\n  environment: {kind: arithmetic, num_tasks: 4, split: heldout}\n"


def facts(config):
    return explain(config, Provenance("", {})).facts


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides, **options):
        path = tmp_path / "x.yaml"
        path.write_text(text)
        return read_config(path, overrides, **options)

    return load


@pytest.fixture
def mistake(load, tmp_path):
    def mistake(text, *overrides):
        with pytest.raises(AgentPeftError) as raised:
            load(text, *overrides)
        told = str(raised.value).replace(f"{tmp_path}/", "")
        assert "\n" not in told
        return told

    return mistake


# -- what a file means ---------------------------------------------------------------------------------------


def test_the_top_is_the_only_stage(load):
    config, _ = load(ONE)
    (stage,) = config.stages
    assert (stage.name, stage.algorithm.kind, stage.steps) == ("grpo", "grpo", 3)
    assert (stage.group_size, stage.tasks_per_step, stage.episodes_per_step) == (8, 8, 64)
    assert isinstance(config.environment, ArithmeticConfig)
    assert isinstance(config.policy, PretrainedConfig)


def test_stages_override_the_top_key_by_key(load):
    config, _ = load(TWO)
    assert [
        (s.name, s.group_size, s.steps, s.optimizer.learning_rate, s.optimizer.weight_decay)
        for s in config.stages
    ] == [("sft", 1, 3, 1e-4, 0.1), ("rl", 8, 3, 3e-5, 0.1)]


def test_another_kind_replaces_the_mapping(load):
    text = (
        TOP
        + "steps: 3\nalgorithm: {kind: grpo, clip_low: 0.1}\nstages:\n"
        + "  - {algorithm: rloo}\n  - {algorithm: {clip_high: 0.3}}\n"
    )
    rloo, grpo = load(text)[0].stages
    assert rloo.algorithm == ALGORITHMS["rloo"]()
    assert grpo.algorithm == ALGORITHMS["grpo"](clip_low=0.1, clip_high=0.3)


def test_a_kind_said_again_overrides_nothing(load):
    text = (
        TOP
        + "steps: 3\nalgorithm: {kind: grpo, clip_low: 0.1}\nstages:\n"
        + "  - {algorithm: {kind: grpo, kl_coef: 0.5}}\n"
    )
    assert load(text)[0].stages[0].algorithm == ALGORITHMS["grpo"](clip_low=0.1, kl_coef=0.5)


def test_supervised_stages_pass_over_what_is_for_rollouts(load):
    sft, rl = load(TWO.replace("stages:", "group_size: 4\nstages:"))[0].stages
    assert (sft.group_size, rl.group_size) == (1, 4)


def test_evaluation_is_greedy_and_keeps_the_limits_of_training(load):
    text = ONE + "sampling: {temperature: 0.7, max_new_tokens: 32, max_tokens: 99, stop: [x]}\n" + HELDOUT
    for more, overrides, expected in (
        ("", [], (0.0, 32, 99, ("x",))),
        ("  sampling: {max_tokens: 500}\n", ["sampling.stop=[y]"], (0.0, 32, 500, ("y",))),
        ("  sampling: {temperature: 1}\n", [], (1.0, 32, 99, ("x",))),
    ):
        found = load(text + more, *overrides)[0].evaluation.sampling
        assert (found.temperature, found.max_new_tokens, found.max_tokens, found.stop) == expected


def test_evaluation_keeps_the_limits_of_the_stage_that_it_follows(load, tmp_path):
    stages = (
        "stages:\n  - {algorithm: sft, sampling: {max_new_tokens: 5}}\n"
        "  - {algorithm: grpo, sampling: {max_tokens: 88, stop: [b]}}\n"
    )
    config, provenance = load(
        TOP + HELDOUT + "  sampling: {temperature: 0.5}\nsteps: 2\nsampling: {max_new_tokens: 9}\n" + stages
    )

    def limits(config, steps):
        sampling = config.evaluation.following(config.stage_at(steps).sampling).sampling
        return (sampling.temperature, sampling.max_new_tokens, sampling.max_tokens, sampling.stop)

    assert [limits(config, steps) for steps in (0, 2, 3, 4)] == [
        (0.5, 5, 1024, ()),
        (0.5, 5, 1024, ()),
        *[(0.5, 9, 88, ("b",))] * 2,
    ]
    assert config.evaluation.sampling.max_tokens == 88, "of a run that is over, the last stage's"
    shown = {key: value for key, value in effective_values(config) if key.startswith("evaluation.sampling")}
    assert shown["evaluation.sampling.max_new_tokens"] is None, "a stage decides"
    assert provenance.of("evaluation.sampling.max_new_tokens") == "the stage that it follows"
    assert "max_new_tokens 5" in facts(config)["evaluation after sft"]
    assert "max_tokens 88" in facts(config)["evaluation after grpo"]
    dump_config(config, tmp_path / "again.yaml")
    again = read_config(tmp_path / "again.yaml")[0]
    assert again == config and [limits(again, steps) for steps in (0, 4)] == [
        limits(config, steps) for steps in (0, 4)
    ]


def test_where_all_stages_have_the_same_limits_the_evaluation_shows_them(load):
    config, _ = load(TWO + "sampling: {max_tokens: 77}\n" + HELDOUT)
    assert dict(effective_values(config))["evaluation.sampling.max_tokens"] == 77
    assert "evaluation after sft" not in facts(config)


def test_supervised_stages_pass_over_how_tokens_are_drawn(load, tmp_path):
    config, _ = load(
        TWO.replace("stages:", "sampling: {temperature: 0.7, top_p: 0.9, max_tokens: 77}\nstages:")
    )
    sft, rl = config.stages
    assert (sft.sampling.temperature, sft.sampling.top_p, sft.sampling.max_tokens) == (1.0, 1.0, 77)
    assert (rl.sampling.temperature, rl.sampling.top_p, rl.sampling.max_tokens) == (0.7, 0.9, 77)
    shown = {key for key, _ in effective_values(config) if key.startswith("stages.0.sampling")}
    assert shown == {f"stages.0.sampling.{key}" for key in LIMITS}
    dump_config(config, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml")[0] == config


def test_the_reference_is_passed_over_where_nothing_is_measured_to_it(load):
    text = TWO.replace("algorithm: grpo,", "algorithm: {kind: grpo, kl_coef: 0.1},").replace(
        "stages:", "reference: base\nstages:"
    )
    config, _ = load(text)
    assert config.stages[1].reference == "base"
    assert [key for key, _ in effective_values(config) if key.endswith(".reference")] == [
        "stages.1.reference"
    ]
    assert facts(config)["reference of rl"] == "the base model: the policy with its adapter off"
    assert (
        "a frozen copy of the adapter"
        in facts(load(text.replace("reference: base\n", ""))[0])["reference of rl"]
    )


def test_numbers_and_paths(load):
    config, _ = load(ONE + "optimizer: {learning_rate: 1e-5, max_grad_norm: .inf}\nseed: 0x10\n")
    assert config.stages[0].optimizer.learning_rate == 1e-5
    assert config.stages[0].optimizer.max_grad_norm == float("inf")
    assert config.seed == 16
    assert str(load(ONE)[0].run_dir) == "runs/a"  # relative to the current directory
    assert not str(load(ONE.replace("runs/a", "~/runs"))[0].run_dir).startswith("~")


def test_a_users_own_environment(load, tmp_path, monkeypatch):
    (tmp_path / "my_own_env.py").write_text(
        "from agent_peft.environments import EnvironmentConfig\n"
        "from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig\n"
        "class MineConfig(EnvironmentConfig):\n"
        "    amount: int\n"
        "class Mine(Arithmetic):\n"
        "    config_class = MineConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(ArithmeticConfig(num_tasks=config.amount))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config, provenance = load(ONE, "environment={kind: 'my_own_env:Mine', amount: 5}")
    assert type(config.environment).__name__ == "MineConfig"
    with pytest.raises(
        AgentPeftError, match=r"environment\.amonut: unknown key; did you mean 'environment\.amount'"
    ):
        load(ONE, "environment={kind: 'my_own_env:Mine', amount: 5, amonut: 6}")
    assert facts(config)["tasks"] == "5"
    assert provenance.of("environment.amount") == "command line"
    dump_config(config, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml")[0] == config
    del sys.modules["my_own_env"]


# -- overrides -----------------------------------------------------------------------------------------------


def test_an_override_of_a_default_wins_in_every_stage(load):
    config, _ = load(TWO, "optimizer.learning_rate=1e-3", "steps=7", "policy.lora.rank=8")
    assert [(s.steps, s.optimizer.learning_rate) for s in config.stages] == [(7, 1e-3), (7, 1e-3)]
    assert config.policy.lora.rank == 8


@pytest.mark.parametrize("order", [1, -1])
def test_an_override_of_a_stage_wins_over_one_of_all(load, order):
    config, _ = load(TWO, *["steps=7", "stages.1.steps=9", "stages.1.optimizer.warmup_steps=2"][::order])
    assert [s.steps for s in config.stages] == [7, 9]
    assert config.stages[1].optimizer.learning_rate == 3e-5


@pytest.mark.parametrize("order", [1, -1])
def test_an_overridden_kind_and_its_keys_in_any_order(load, order):
    text = TOP + "steps: 3\nalgorithm: {kind: grpo, clip_low: 0.1}\n"
    config, _ = load(text, *["algorithm=rloo", "algorithm.weighting=token_mean"][::order])
    assert config.stages[0].algorithm == ALGORITHMS["rloo"](weighting="token_mean")


def test_override_values_are_yaml(load):
    config, _ = load(
        ONE,
        "sampling.stop=[a, 'b c']",
        "policy.lora=null",
        "optimizer={betas: [0.8, 0.9]}",
        "run_dir=a=b",
        "stages.0.name=x",
    )
    assert config.stages[0].sampling.stop == ("a", "b c")
    assert config.policy.lora is None
    assert config.stages[0].optimizer.betas == (0.8, 0.9)
    assert str(config.run_dir) == "a=b"
    assert config.stages[0].name == "x"


def test_an_override_may_save_what_the_file_lacks(load):
    assert load(TOP + "algorithm: grpo\n", "steps=2")[0].stages[0].steps == 2


# -- mistakes ------------------------------------------------------------------------------------------------

MISTAKES = [  # and those of a whole command, in mistakes.yaml
    # unknown keys name the nearest valid one
    (ONE + "seeed: 1", (), "x.yaml:6: seeed: unknown key; did you mean 'seed'?"),
    (ONE + "optimizer: {learning_rat: 1}", (), "unknown key; did you mean 'optimizer.learning_rate'?"),
    (ONE + "learning_rate: 1", (), "learning_rate: unknown key; did you mean 'optimizer.learning_rate'?"),
    (ONE + "optimizer: {step: 3}", (), "x.yaml:6: optimizer.step: unknown key; did you mean 'steps'?"),
    (ONE + "optimizer: {zzz: 3}", (), "optimizer.zzz: unknown key; the keys here are betas, epsilon,"),
    (ONE, ("policy.lora.rnk=8",), "line: policy.lora.rnk: unknown key; did you mean 'policy.lora.rank'?"),
    (ONE, ("algorithm.clip_lo=0.1",), "algorithm.clip_lo: unknown key; did you mean 'algorithm.clip_low'?"),
    (ONE, ("environment.digts=3",), "environment.digts: unknown key; did you mean 'environment.digits'?"),
    (ONE, ("environment.tasks=x",), "environment.tasks: unknown key; did you mean 'environment.num_tasks'?"),
    (ONE, ("engine.row=3",), "command line: engine.row: unknown key; did you mean 'engine.rows'?"),
    (ONE + HELDOUT + "  attempt: 3", (), "attempt: unknown key; did you mean 'evaluation.attempts'?"),
    (TWO, ("stages.1.algorithm.clip_lo=1",), "unknown key; did you mean 'stages.1.algorithm.clip_low'?"),
    (TWO, ("algorithm.clip_low=0.1",), "command line: algorithm.clip_low (for stages.0): unknown key; the"),
    (TWO, ("stages.0.stepss=1",), "line: stages.0.stepss: unknown key; did you mean 'stages.0.steps'?"),
    # wrong types say what was given and what is expected
    (ONE + "group_size: eight", (), 'x.yaml:6: group_size: must be a whole number, got "eight"'),
    (ONE + "group_size: '8'", (), 'x.yaml:6: group_size: must be a whole number, got "8"'),
    (ONE + "group_size: 8.0", (), "x.yaml:6: group_size: must be a whole number, got 8.0"),
    (ONE + "group_size: true", (), "x.yaml:6: group_size: must be a whole number, got true"),
    (ONE + "group_size: null", (), "x.yaml:6: group_size: must be a whole number, got null"),
    (ONE + "group_size: 0", (), "x.yaml:6: group_size: must be greater than or equal to 1, got 0"),
    (ONE + "seed: 1_000", (), 'x.yaml:6: seed: must be a whole number, got "1_000"'),
    (ONE + "optimizer: fast", (), 'x.yaml:6: optimizer: must be a mapping, got "fast"'),
    (ONE + "optimizer: {learning_rate: fast}", (), "x.yaml:6: optimizer.learning_rate: must be a number,"),
    (ONE + "optimizer: {betas: [0.9]}", (), "x.yaml: optimizer.betas.1 is missing"),
    (ONE + "sampling:\n  stop: x", (), 'x.yaml:7: sampling.stop: must be a list, got "x"'),
    (ONE + "sampling:\n  stop: [a, '']", (), "x.yaml:7: sampling.stop.1: must be a text that is not empty"),
    (ONE + "sampling:\n  stop:\n    - a\n    - 1", (), "x.yaml:9: sampling.stop.1: must be a text, got 1"),
    (ONE + "rewards: {correct: .inf}", (), "x.yaml:6: rewards.correct: must be a finite number, got"),
    (ONE, ("policy.packing=yes",), 'command line: policy.packing: must be true or false, got "yes"'),
    (ONE, ("policy.lora.target_modules=3",), "command line: policy.lora.target_modules: must be"),
    (ONE, ("policy=null",), "command line: policy: must be a mapping, got null"),
    (ONE, ("environment.digits=12",), "command line: environment.digits: 12 is neither a number from 1 to 9"),
    (ONE, ("optimizer.betas.0=0.8",), 'command line: optimizer.betas: must be a list, got {"0": 0.8}'),
    (ONE, ("task_order=shufle",), "command line: task_order: 'shufle' is not an order; give shuffle,"),
    # kinds
    (ONE, ("algorithm=grop",), "command line: algorithm: there is no kind 'grop'; did you mean 'grpo'?"),
    (ONE, ("policy.kind=zzz",), "command line: policy.kind: there is no 'zzz'; give one of pretrained,"),
    (ONE, ("environment.kind=arithmetik",), "there is no kind 'arithmetik'; did you mean 'arithmetic'?"),
    (ONE, ("environment=no_module_of_ours:X",), "command line: environment: 'no_module_of_ours:X' cannot be"),
    (ONE + "evaluation: {environment: {num_tasks: 3}}", (), "x.yaml:6: evaluation.environment: names no"),
    (ONE.replace("kind: pretrained, ", ""), (), "x.yaml:2: policy: names no kind; give one of pretrained,"),
    # what is missing
    (ONE.replace("steps: 3\n", ""), (), "x.yaml: steps is missing (number of steps: trips through the main"),
    (TWO.replace("steps: 3\n", ""), (), "x.yaml: stages.0: steps is missing (number of steps: trips through"),
    (ONE, ("algorithm=dr_grpo",), "x.yaml: algorithm.constant_length is missing"),
    (ONE, ("evaluation.attempts=3",), "x.yaml: evaluation.environment is missing"),
    ("run_dir: r\n", (), "x.yaml: policy is missing (the model that acts and is trained) (and 2 more"),
    (ONE + "epochs: 2", (), "x.yaml:5: steps and epochs both set the length of the stage; give one of them"),
    (ONE, ("epochs=0",), "command line: epochs: must be greater than 0, got 0"),
    (ONE, ("epochs=.inf",), "command line: epochs: must be less than or equal to 1000000, got Infinity"),
    # several
    (TWO, ("seed=z", "stages.1.steps=x", "stages.0.steps=y"), "command line: seed: must be a whole number,"),
    # files
    (ONE, ("policy.adapter=nowhere",), "command line: policy.adapter: there is no file or folder 'nowhere'"),
    # no effect
    (ONE + "stages: [{steps: 1}, {steps: 2}]", (), "x.yaml:5: steps has no effect, because every stage sets"),
    (
        TOP
        + "steps: 3\noptimizer: {learning_rate: 1}\n"
        + "stages: [{algorithm: grpo, optimizer: {learning_rate: 0.5}}]",
        (),
        "x.yaml:5: optimizer.learning_rate has no effect, because every stage sets its own; remove it",
    ),
    (
        TOP + "steps: 3\nalgorithm: {kind: grpo, clip_low: 0.1}\nstages: [rloo, {algorithm: rloo, name: b}]",
        (),
        "x.yaml:5: algorithm.kind has no effect, because every stage sets its own; remove it",
    ),
    (TOP + "steps: 3\nalgorithm: sft\ngroup_size: 8", (), "x.yaml:6: group_size has no effect, because"),
    (TOP + "steps: 3\nstages: [{algorithm: sft, group_size: 2}]", (), "x.yaml:5: stages.0.group_size has no"),
    (TWO, ("stages.0.group_size=2",), "command line: stages.0.group_size has no effect, because stages.0"),
    (TOP + "steps: 3\nalgorithm: sft", ("group_size=2",), "command line: group_size has no effect, because"),
    (
        TOP + "steps: 3\nstages: [{algorithm: sft, sampling: {temperature: 0.5}}, rloo]",
        (),
        "x.yaml:5: stages.0.sampling.temperature has no effect, because stages.0 learns from demonstrations",
    ),
    (TOP + "steps: 3\nalgorithm: sft\nsampling: {top_p: 0.5}", (), "x.yaml:6: sampling.top_p has no effect,"),
    (TWO, ("stages.0.sampling.top_k=2",), "command line: stages.0.sampling.top_k has no effect, because"),
    (ONE + "reference: base", (), "x.yaml:6: reference has no effect, because every stage measures no KL"),
    (TWO, ("stages.1.reference=stage_start",), "command line: stages.1.reference has no effect, because"),
    (ONE, ("optimizer.min_lr_ratio=0.1",), "command line: optimizer: min_lr_ratio has no effect with"),
    (ONE + HELDOUT + "  attempts: 3", (), "x.yaml:8: evaluation: attempts: 3 has no effect at"),
    (ONE + HELDOUT + "  at: []", (), "evaluation: at: [] and every: 0 never evaluate"),
    (ONE + HELDOUT + "  at: [start, start]", (), "evaluation: at names the same moment twice"),
    # what cannot work
    (ONE, ("algorithm.minibatches=9",), "command line: algorithm.minibatches: 9 is more than"),
    (
        ONE,
        ("policy.lora=null", "algorithm.kl_coef=0.1", "reference=base"),
        "x.yaml: reference: base of stage 'grpo' is the policy with its adapter off; set policy.lora, or "
        "reference: stage_start",
    ),
    (ONE, ("algorithm.kl_coef=0.1", "sampling.top_p=0.9"), "command line: sampling.top_p cuts off tokens"),
    (ONE, ("algorithm.kl_coef=0.1", "sampling.top_k=5"), "command line: sampling.top_k cuts off tokens that"),
    (ONE + "until: {metric: sucess, above: 1}", (), "is not a metric of this stage; did you mean 'success'?"),
    (
        ONE + "until: {metric: KL, above: 1}",
        (),
        "until.metric: 'KL' is not a metric of this stage; give one of",
    ),
    (ONE + "until: {metric: evaluation.success, above: 1}", (), "until.metric of stage 'grpo': no"),
    # stages and overrides
    (ONE + "stages: []", (), "x.yaml: stages: expected a list of stages, got []"),
    (ONE + "stages: sft", (), 'x.yaml: stages: expected a list of stages, got "sft"'),
    (ONE + "stages: [3]", (), "x.yaml: stages.0: expected a mapping or an algorithm's name, got 3"),
    (TOP + "steps: 1\nstages: [grop]", (), "0.algorithm: there is no kind 'grop'; did you mean 'grpo'?"),
    (TWO, ("stages.2.steps=4",), "command line: stages.2 is out of range: the last stage is stages.1"),
    (ONE, ("stages.1.steps=4",), "command line: stages.1 is out of range: the last stage is stages.0"),
    (ONE, ("stages.-1.steps=4",), "command line: 'stages.-1.steps=4': name one stage and one of its keys"),
    (ONE, ("stages=[sft]",), "command line: 'stages=[sft]': name one stage and one of its keys"),
    (ONE, ("=3",), "'=3': an override is written key=value"),
    (ONE, ("a..b=3",), "'a..b=3': an override is written key=value"),
    (ONE, ("steps=[1",), "command line: steps: is not YAML"),
    (ONE, ("optimizer={learning_rate: 1}", "optimizer.learning_rate=2"), "set the same key; give one of"),
    (ONE, ("algorithm=rloo", "algorithm.kind=grpo"), "set the same key; give one of them"),
]


@pytest.mark.parametrize(("text", "overrides", "told"), MISTAKES, ids=[told[:60] for _, _, told in MISTAKES])
def test_mistakes(mistake, text, overrides, told):
    assert told in mistake(text, *overrides)


def test_files_are_not_asked_for_where_they_are_not_read(load):
    assert str(load(ONE, "policy.adapter=nowhere", check_files=False)[0].policy.adapter) == "nowhere"


def test_the_model_itself_refuses_what_the_file_may_not_say():
    with pytest.raises(ValueError, match="stages: \\[\\] trains nothing"):
        TrainConfig(
            run_dir="r",
            policy=PretrainedConfig(model="m"),
            environment=ArithmeticConfig(num_tasks=3),
            stages=(),
        )


# -- there and back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        ONE,
        TWO,
        ONE
        + HELDOUT
        + "  at: [stages]\n  every: 2\noptimizer: {max_grad_norm: .inf}\nrewards: {timeout: -0.3}\n",
    ],
)
def test_a_dumped_configuration_loads_equal(load, text, tmp_path):
    config, _ = load(text)
    dump_config(config, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml")[0] == config
    assert resolved(read_config(tmp_path / "again.yaml")[0]) == resolved(config)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rate=st.floats(1e-12, 1),
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\\\0"), min_size=1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3),
)
@example(rate=1.0, name="\x85", stop=["\u2028", "1e5", "yes", " "])
def test_any_number_and_any_text_survives(load, tmp_path, rate, name, stop):
    config, _ = load(ONE, f"optimizer.learning_rate={rate!r}")
    stage = config.stages[0].model_copy(
        update={"name": name, "sampling": config.stages[0].sampling.model_copy(update={"stop": tuple(stop)})}
    )
    config = config.model_copy(update={"stages": (stage,)})
    dump_config(config, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml")[0] == config


# -- explain -------------------------------------------------------------------------------------------------


def test_every_value_and_where_it_came_from(load, tmp_path):
    config, provenance = load(TWO, "stages.1.steps=9")
    values = dict(effective_values(config))
    source = tmp_path / "x.yaml"
    expected = {
        "stages.0.optimizer.learning_rate": (1e-4, f"{source}:5, for all stages"),
        "stages.1.optimizer.learning_rate": (3e-5, f"{source}:8"),
        "stages.0.algorithm.kind": ("sft", f"{source}:7"),
        "stages.1.steps": (9, "command line"),
        "stages.1.group_size": (8, "default"),
        "environment.num_tasks": (10, f"{source}:3"),
        "policy.lora.rank": (16, "default"),
    }
    assert {path: (values[path], provenance.of(path)) for path in expected} == expected
    assert "stages.0.group_size" not in values  # it has no effect there


def test_a_list_comes_from_where_it_was_written(load, tmp_path):
    _, provenance = load(ONE + "optimizer: {betas: [0.8, 0.9]}\n")
    assert provenance.of("stages.0.optimizer.betas") == f"{tmp_path / 'x.yaml'}:6"


def test_facts(load):
    found = facts(
        load(TWO + HELDOUT, "stages.1.algorithm.update_epochs=2", "stages.1.algorithm.minibatches=4")[0]
    )
    assert found["tasks"] == "10"
    assert (
        found["stage sft"]
        == "3 steps of 8 × 1 = 8 demonstrations (2.4 trips through the tasks), 3 optimizer updates"
    )
    assert (
        found["stage rl"]
        == "3 steps of 8 × 8 = 64 episodes (2.4 trips through the tasks), 24 optimizer updates"
    )
    assert found["optimizer updates"] == "27"
    assert found["loss of sft"].startswith("mean ")
    assert found["loss of rl"] == (
        "mean over trajectories of the tokens' mean of -min(ρ Â, clip(ρ, 0.8, 1.2) Â); Â = (R - mean of its "
        "group) / (std of its group + 1e-6) (Shao et al., 2024, https://arxiv.org/abs/2402.03300)"
    )
    assert found["evaluation"] == "4 tasks × 1 attempts"


def test_explain_shows_both(load):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(explain(*load(TWO)).whole)
    shown = capture.get()
    assert "optimizer.learning_rate" in shown
    assert "x.yaml:5, for all stages" in shown
    assert "demonstrations" in shown


# -- evaluation of a run -------------------------------------------------------------------------------------


def test_a_run_without_evaluation_is_evaluated_on_its_own_tasks(load, tmp_path):
    load(ONE)
    config = load_for_evaluation(
        tmp_path / "x.yaml", ["evaluation.sampling.temperature=1", "evaluation.environment.digits=1"], None, 4
    )
    assert config.evaluation.environment == ArithmeticConfig(num_tasks=10, digits=1)
    assert config.evaluation.attempts == 4


def test_a_run_without_evaluation_is_evaluated_within_its_own_limits(load, tmp_path):
    """Also from the file that a run leaves, which keeps them in its stages."""
    config = load(ONE + "sampling: {max_new_tokens: 3, max_tokens: 50, stop: ['=']}\n")[0]
    dump_config(config, tmp_path / "run.yaml")
    for name in ("x.yaml", "run.yaml"):
        found = load_for_evaluation(
            tmp_path / name, ["evaluation.sampling.max_tokens=40"], None, None
        ).evaluation.sampling
        assert (found.max_new_tokens, found.max_tokens, found.stop, found.temperature) == (
            3,
            40,
            ("=",),
            0.0,
        ), name


def test_a_file_of_ones_own_is_measured_as_a_whole(load, tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    environment = "{kind: db_bench, tasks: theirs.json, split: 'train[90%:]', limit: 3}"
    load(ONE + f"evaluation: {{environment: {environment}}}\n", check_files=False)
    config = load_for_evaluation(tmp_path / "x.yaml", [], tmp_path / "mine.json", None)
    assert (config.evaluation.environment.split, config.evaluation.environment.limit) == (None, 3)
    part = ["evaluation.environment.split=train[:5]"]
    config = load_for_evaluation(tmp_path / "x.yaml", part, tmp_path / "mine.json", None)
    assert config.evaluation.environment.split == "train[:5]"


def test_tasks_of_ones_own_take_the_place_of_generated_ones(load, tmp_path):
    load(ONE + "evaluation: {environment: {kind: db_bench, generate: {num_tasks: 3}, max_turns: 5}}\n")
    (tmp_path / "mine.json").write_text("{}")
    environment = load_for_evaluation(
        tmp_path / "x.yaml", [], tmp_path / "mine.json", None
    ).evaluation.environment
    assert (environment.tasks, environment.generate, environment.max_turns) == (
        tmp_path / "mine.json",
        None,
        5,
    )


def test_a_wrong_task_file_is_told(load, tmp_path):
    load(ONE + "evaluation: {environment: {kind: db_bench, generate: {num_tasks: 3}}}\n")
    with pytest.raises(
        AgentPeftError, match=r"evaluation\.environment\.tasks: there is no file or folder 'no\.json'"
    ):
        load_for_evaluation(tmp_path / "x.yaml", [], "no.json", None)


@pytest.mark.parametrize("file", ["gsm8k.yaml", "db_bench_real.yaml"])
def test_a_recipe_without_its_published_tasks_names_the_command_that_fetches_them(
    file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AgentPeftError, match=r"data/(\w+)/[\w.]+' \(agent-peft download \1 writes it"):
        read_config(Path(file.removesuffix(".yaml")))


@pytest.mark.parametrize(
    ("stage", "told"),
    [("", ""), (", stage: lr", "samples any as 'lr'; they are rl"), (", stage: rl", "")],
)
def test_episodes_of_this_run_need_an_earlier_stage_that_samples_them(stage, told, load, tmp_path):
    text = f"{TOP}steps: 3\nstages:\n  - {{name: rl, algorithm: grpo}}\n"
    text += f"  - {{algorithm: dpo, episodes_of: {{run: runs/a{stage}}}}}\n"
    if not told:
        load(text)  # there is one
    else:
        with pytest.raises(AgentPeftError, match=told):
            load(text)
    with pytest.raises(AgentPeftError, match=r"no earlier stage samples any.*; put one before it"):
        load(text.replace("algorithm: grpo", "algorithm: sft"))
