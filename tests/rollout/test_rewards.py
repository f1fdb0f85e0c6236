"""Facts are priced as configured, at the turn they belong to."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError
from rich.console import Console

from agent_peft.configuration.explain import effective_values, explain
from agent_peft.configuration.load import dump_config, read_config
from agent_peft.configuration.run_config import resolved
from agent_peft.rollout.rewards import TERMS, RewardConfig, price
from agent_peft.types import AgentPeftError, Message, Outcome, StopReason, Task, Trajectory, Turn

DB = RewardConfig(correct=1.0, incorrect=-0.1, timeout=-0.3)
OS = RewardConfig(correct=1.0, incorrect=-0.5, unknown=0.0, turn_limit=-0.7, token_limit=-0.9)


def trajectory(*valid, outcome=Outcome.INCORRECT, stop_reason=StopReason.FINISHED):
    turns = tuple(Turn((1,), (2,), (-0.5,), valid=v) for v in valid)
    return Trajectory(Task("t"), turns, outcome=outcome, stop_reason=stop_reason)


@pytest.mark.parametrize(
    ("config", "outcome", "stop_reason", "expected"),
    [
        (DB, Outcome.CORRECT, StopReason.FINISHED, 1.0),
        (DB, Outcome.INCORRECT, StopReason.FINISHED, -0.1),
        (DB, Outcome.UNKNOWN, StopReason.FINISHED, 0.0),
        (DB, Outcome.INCORRECT, StopReason.TIMEOUT, -0.3),
        (DB, Outcome.UNKNOWN, StopReason.TIMEOUT, -0.3),
        (DB, Outcome.CORRECT, StopReason.TIMEOUT, 1.0),  # correct is correct
        (DB, Outcome.INCORRECT, StopReason.TURN_LIMIT, -0.1),  # no price of its own
        (OS, Outcome.UNKNOWN, StopReason.TURN_LIMIT, -0.7),
        (OS, Outcome.INCORRECT, StopReason.TOKEN_LIMIT, -0.9),
        (RewardConfig(timeout=0.0), Outcome.INCORRECT, StopReason.TIMEOUT, 0.0),  # zero is a price, too
        (
            DB,
            Outcome.INCORRECT,
            StopReason.CRASHED,
            -0.3,
        ),  # no way out of a price that is lower than that of being wrong
        (OS, Outcome.INCORRECT, StopReason.DEFECT, -0.9),
        (RewardConfig(), Outcome.INCORRECT, StopReason.CRASHED, -0.1),
        (RewardConfig(incorrect=0.0, unknown=-0.2), Outcome.INCORRECT, StopReason.DEFECT, -0.2),
    ],
)
def test_the_end_is_priced(config, outcome, stop_reason, expected):
    assert price(trajectory(True, True, outcome=outcome, stop_reason=stop_reason), config).rewards == (
        0.0,
        expected,
    )


def test_a_score_is_worth_its_weight_at_the_last_turn_beside_the_outcome():
    half = replace(trajectory(True, False), score=0.5)
    assert price(half, RewardConfig()).rewards == price(trajectory(True, False), RewardConfig()).rewards
    config = RewardConfig(incorrect=-0.25, score=0.5, invalid_action=-1.0)
    assert price(half, config).rewards == (0.0, -1.0)  # -1 + -1/4 + 1/2 · 1/2
    assert price(replace(half, score=0.0), config).rewards == (0.0, -1.25)
    assert price(replace(half, score=None), config).rewards == (0.0, -1.25)
    won = replace(trajectory(True, outcome=Outcome.CORRECT), score=0.75)
    assert price(won, config).rewards == (1.375,)


@pytest.mark.parametrize(
    ("scores", "last", "expected"),
    [
        ((None, None), 0.5, (0.0, 0.0, 1.0)),
        ((0.25, 0.75), 1.0, (0.5, 1.0, 0.5)),
        ((0.5, None), 0.25, (1.0, 0.0, -0.5)),
        ((0.5, 0.75), None, (0.0, 0.0, 0.0)),  # it ended before it was graded
    ],
)
def test_a_turn_has_what_it_added_to_the_score(scores, last, expected):
    turns = (*(Turn((1,), (2,), (-0.5,), score=score) for score in scores), Turn((1,), (2,), (-0.5,)))
    episode = Trajectory(Task("t"), turns, outcome=Outcome.INCORRECT, score=last)
    priced = price(episode, RewardConfig(incorrect=0.0, score=2.0))
    assert priced.rewards == expected
    assert priced.reward == 2.0 * (last or 0.0)
    assert priced.reward_terms.get("score") == (None if last is None else 2.0 * last)


def test_invalid_actions_are_priced_at_their_turn_and_add_to_the_end():
    config = RewardConfig(invalid_action=-0.25, incorrect=-0.5)
    priced = price(trajectory(False, True, False), config)
    assert priced.rewards == (-0.25, 0.0, -0.75)
    assert priced.reward == -1.0


def test_cut_actions_are_priced_at_their_turn():
    """Next to what else the turn costs."""
    cut = replace(
        trajectory(True, False, True),
        turns=tuple(replace(t, cut=True) for t in trajectory(True, False, True).turns),
    )
    assert price(cut, RewardConfig(invalid_action=-0.25, cut_action=-0.5, incorrect=-0.1)).rewards == (
        -0.5,
        -0.75,
        -0.6,
    )
    assert price(cut, RewardConfig(incorrect=-0.1)).rewards == (0.0, 0.0, -0.1)


def test_nothing_but_the_rewards_changes():
    before = trajectory(True, outcome=Outcome.CORRECT)
    after = price(before, DB)
    assert (after.task, after.turns, after.outcome, after.stop_reason) == (
        before.task,
        before.turns,
        before.outcome,
        before.stop_reason,
    )
    assert before.rewards == ()


def test_each_term_says_what_it_gave():
    config = RewardConfig(
        incorrect=-0.25,
        invalid_action=-0.125,
        cut_action=-0.5,
        score=0.5,
        terms=(
            {"kind": "format", "weight": 0.5},
            {"kind": "format", "weight": 0.25},
            {"kind": "length_penalty", "target_tokens": 9},
        ),
    )
    episode = replace(trajectory(False, True, False, True), score=0.75)
    priced = price(episode, config)
    assert priced.reward_terms == {
        "outcome": -0.25,
        "invalid_action": -0.25,
        "cut_action": 0.0,
        "score": 0.375,
        "format": 0.375,
        "length_penalty": 0.0,
    }
    assert str(list(priced.reward_terms.values())).count("-0.0") == 0
    assert priced.reward == sum(priced.reward_terms.values())
    assert price(trajectory(True), DB).reward_terms == {"outcome": -0.1}, "what is not set is left out"


def test_an_infrastructure_failure_has_no_price():
    with pytest.raises(ValueError, match="infrastructure"):
        price(trajectory(True, stop_reason=StopReason.INFRASTRUCTURE), DB)


def test_someone_must_bear_the_price():
    with pytest.raises(ValueError, match="no turn"):
        price(trajectory(), DB)


@pytest.mark.parametrize("wrong", [{"corect": 1.0}, {"correct": float("inf")}, {"timeout": float("nan")}])
def test_a_wrong_price_list_is_refused(wrong):
    with pytest.raises(ValidationError):
        RewardConfig(**wrong)


# -- terms ---------------------------------------------------------------------------------------------------


def said(*texts, tokens=1, valid=True, outcome=Outcome.CORRECT):
    """An episode with one turn for each text, of so many action tokens each."""
    turns = tuple(Turn((1,), (2,) * tokens, (-0.5,) * tokens, valid=valid) for _ in texts)
    messages = [Message("system", "one\ntwo\nthree"), Message("user", "four\nfive")]
    for text in texts:
        messages += [Message("assistant", text), Message("user", "six\nseven")]
    return Trajectory(Task("t"), turns, tuple(messages), outcome)


def term(trajectory, **settings):
    """What one term adds, at which turn."""
    plain = price(trajectory, RewardConfig())
    with_it = price(trajectory, RewardConfig.model_validate({"terms": [settings]}))
    *earlier, last = (after - before for after, before in zip(with_it.rewards, plain.rewards, strict=True))
    assert not any(earlier)
    return pytest.approx(last, abs=1e-12)


def test_without_terms_nothing_changes():
    episode = said("a", "b", valid=False, outcome=Outcome.INCORRECT)
    assert price(episode, RewardConfig(invalid_action=-0.05, terms=())).rewards == (-0.05, -0.1 - 0.05)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 0.0), (10, 0.0), (11, -0.01), (15, -0.05), (20, -0.1), (21, -0.1), (500, -0.1)],
)
def test_the_length_penalty_begins_at_its_target_and_ends_at_its_weight(tokens, expected):
    assert term(said("x", tokens=tokens), kind="length_penalty", target_tokens=10) == expected


def test_length_is_that_of_all_actions():
    assert term(said("x", "y", "z", tokens=4), kind="length_penalty", target_tokens=10, weight=1.0) == -0.2


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (["48 / 2 = 24\n48 + 24 = 72\n#### 72"], 2),
        (["#### 72"], 0),
        ([""], 0),
        (["a\n\n \n\nb\n"], 1),  # blank lines are no steps
        (["a\na\n a \nb\na"], 2),  # nor are repeated ones
        (["a\nb", "c\nd"], 3),  # over all turns, but for the last line
        (["a\nb\nc\nd\ne\nf\ng"], 5),  # max_steps
    ],
)
def test_reasoning_steps(texts, steps):
    assert term(said(*texts), kind="reasoning_steps") == 0.1 * steps
    assert term(said(*texts), kind="reasoning_steps", weight=1.0, max_steps=3) == min(steps, 3)


@pytest.mark.parametrize(
    ("kind", "more"), [("length_penalty", {"target_tokens": 1}), ("reasoning_steps", {}), ("format", {})]
)
def test_when(kind, more):
    right, wrong, unknown = (said("a\nb", tokens=2, outcome=outcome) for outcome in Outcome)
    assert term(right, kind=kind, **more) != 0.0
    for other in (wrong, unknown):
        assert term(other, kind=kind, when="correct", **more) == 0.0
        assert term(other, kind=kind, when="always", **more) == term(right, kind=kind, **more).expected
    assert (TERMS[kind][0].model_fields["when"].default == "always") == (kind == "format")


def test_the_format_term_is_the_share_of_valid_turns():
    turns = said("a").turns + said("b", "c", "d", valid=False).turns
    episode = Trajectory(Task("t"), turns, outcome=Outcome.INCORRECT)
    assert term(episode, kind="format", weight=1.0) == 0.25
    assert term(said("a", outcome=Outcome.INCORRECT), kind="format") == 0.1


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a module of the user's own."""
    names = []

    def write(source):
        names.append(f"own_rewards_{tmp_path.name}_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(source)
        return names[-1]

    monkeypatch.syspath_prepend(tmp_path)
    return write


def test_a_function_of_the_users_own_reads_the_priced_trajectory(own):
    module = own(
        "def f(trajectory):\n    return trajectory.reward + len(trajectory.messages) + trajectory.num_action_tokens\n"  # noqa: E501
    )
    assert term(said("x", tokens=3), kind=f"{module}:f", weight=0.5) == 0.5 * (1.0 + 4 + 3)
    terms = [{"kind": "format", "weight": 10.0}, {"kind": f"{module}:f"}]  # prices, but no other terms
    assert price(said("x"), RewardConfig.model_validate({"terms": terms})).rewards == (
        1.0 + 10.0 + (1.0 + 4 + 1),
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return float('nan')", "returned nan, which is not a finite number; return a float"),
        ("return float('inf')", "returned inf, which is not a finite number"),
        ("return None", "returned None, which is not a finite number"),
        ("return -1e30", "returned -1e+30; beyond 1,000,000 small rewards are lost next to it in float32"),
        ("return 10 ** 400", "returned 10000000000000000000; beyond 1,000,000 small rewards are lost"),
        ("return '1.0'", "returned '1.0', which is not a finite number"),
        ("return [1.0]", "returned [1.0], which is not a finite number"),
        ("return 1j", "returned 1j, which is not a finite number"),
        ("return {}[\n'x']", "fails at {module}.py:2 (KeyError: 'x'); correct it"),
        ("raise SystemExit(0)", "fails at {module}.py:2 (SystemExit: 0); correct it"),
    ],
)
def test_what_is_no_number_is_told(own, body, told):
    module = own(f"def f(trajectory):\n    {body}\n")
    with pytest.raises(AgentPeftError) as raised:
        price(said("x"), RewardConfig.model_validate({"terms": [{"kind": f"{module}:f"}]}))
    assert str(raised.value).startswith(f"reward term '{module}:f', task 't': ")
    assert told.replace("{module}", module) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_any_real_number_will_do(own):
    module = own(
        "import numpy\nfrom fractions import Fraction\ndef a(t): return numpy.float32(0.5)\ndef b(t): return Fraction(1, 2)\n"  # noqa: E501
    )
    for name in ("a", "b"):
        assert term(said("x"), kind=f"{module}:{name}") == 0.5


# -- in a configuration --------------------------------------------------------------------------------------

TOP = """\
run_dir: r
policy: {kind: pretrained, model: smollm2-135m}
environment: {kind: arithmetic, num_tasks: 10}
steps: 1
"""


def written(tmp_path, terms, one_stage=True):
    algorithm = "algorithm: grpo\n" if one_stage else "stages: [sft, grpo]\n"
    (tmp_path / "x.yaml").write_text(f"{TOP}{algorithm}rewards:\n  terms: {json.dumps(terms)}\n")
    return tmp_path / "x.yaml"


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        (
            [{"kind": "format", "wieght": 1}],
            "x.yaml:7: rewards.terms.0.wieght: unknown key; did you mean 'rewards.terms.0.weight'?",
        ),
        (
            [{"kind": "format"}, {"kind": "length_penalty", "target_token": 9}],
            "x.yaml: rewards.terms.1.target_tokens is missing (action tokens of an episode that cost nothing) (and 1 more error)",  # noqa: E501
        ),
        (
            [{"kind": "length_penalty", "target_tokens": 9, "max_step": 3}],
            "x.yaml:7: rewards.terms.0.max_step: unknown key; the keys here are buffer_tokens, kind, target_tokens, weight, when",  # noqa: E501
        ),
        ([{"kind": "format", "target_tokens": 3}], "x.yaml:7: rewards.terms.0.target_tokens: unknown key; "),
        ([{"kind": "json:dumps", "max_steps": 3}], "x.yaml:7: rewards.terms.0.max_steps: unknown key; "),
        (
            [{"kind": "lenght_penalty"}],
            "rewards.terms.0.kind: there is no kind 'lenght_penalty'; did you mean 'length_penalty'?",
        ),
        (
            [{"kind": "zzz"}],
            "there is no kind 'zzz'; give one of length_penalty, reasoning_steps, format, or your own as package.module:function",  # noqa: E501
        ),
        (
            [{"weight": 1}],
            "rewards.terms.0.kind is missing (length_penalty, reasoning_steps, format, or a function of your own",  # noqa: E501
        ),
        ([{"kind": 3}], "x.yaml:7: rewards.terms.0.kind: must be a text, got 3"),
        (
            [{"kind": "no_such_module:f"}],
            "kind: 'no_such_module:f' cannot be imported (ModuleNotFoundError: No module named 'no_such_module'); write it as",  # noqa: E501
        ),
        ([{"kind": "json:nothing"}], "'json:nothing' cannot be imported (AttributeError: "),
        ([{"kind": "json:decoder"}], "'json:decoder' is not a function but <module"),
        (
            [{"kind": "format", "weight": -1}],
            "x.yaml:7: rewards.terms.0.weight: must be greater than or equal to 0, got -1",
        ),
        ([{"kind": "format", "weight": "1"}], 'x.yaml:7: rewards.terms.0.weight: must be a number, got "1"'),
        (
            [{"kind": "format", "when": "wrong"}],
            "rewards.terms.0.when: must be 'correct' or 'always', got \"wrong\"",
        ),
        (["format"], "x.yaml:7: rewards.terms.0: must be "),
        ({"kind": "format"}, "x.yaml:7: rewards.terms: must be a list"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, terms, told):
    with pytest.raises(AgentPeftError) as raised:
        read_config(written(tmp_path, terms))
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_module_that_fails_is_told(tmp_path, own):
    module = own("1 / 0\n")
    with pytest.raises(AgentPeftError, match=r"cannot be imported \(ZeroDivisionError: division by zero\)"):
        read_config(written(tmp_path, [{"kind": f"{module}:f"}]))


def test_a_function_that_takes_no_trajectory_is_told(tmp_path, own):
    module = own("def f():\n    return 1.0\n")
    with pytest.raises(
        AgentPeftError, match=rf"'{module}:f' cannot be called with a trajectory \(too many positional"
    ):
        read_config(written(tmp_path, [{"kind": f"{module}:f"}]))


def test_terms_are_shown_with_their_defaults_and_go_there_and_back(tmp_path, own):
    module = own("def f(trajectory):\n    return 1.0\n")
    terms = [{"kind": "length_penalty", "target_tokens": 64}, {"kind": f"{module}:f", "weight": -0.5}]
    config, provenance = read_config(written(tmp_path, terms, one_stage=False))
    full = [
        {
            "kind": "length_penalty",
            "weight": 0.1,
            "when": "correct",
            "target_tokens": 64,
            "buffer_tokens": None,
        },
        {"kind": f"{module}:f", "weight": -0.5, "when": "always"},
    ]
    assert dict(effective_values(config))["stages.1.rewards.terms"] == full
    assert provenance.of("stages.1.rewards.terms") == f"{tmp_path / 'x.yaml'}:7, for all stages"
    console = Console(width=200)
    with console.capture() as capture:
        console.print(explain(config, provenance).whole)
    assert "rewards.terms" in capture.get() and "length_penalty" in capture.get()
    dump_config(config, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml")[0] == config
    assert resolved(config)["stages"][1]["rewards"]["terms"] == full


def test_an_override_of_the_terms(tmp_path):
    path = written(tmp_path, [{"kind": "format"}])
    config, _ = read_config(path, ["rewards.terms=[{kind: reasoning_steps, max_steps: 2}]"])
    assert [(term.kind, term.weight) for term in config.stages[0].rewards.terms] == [("reasoning_steps", 0.1)]
    with pytest.raises(
        AgentPeftError,
        match=r"command line: rewards.terms.0.max_stepss: unknown key; did you mean 'rewards.terms.0.max_steps'",  # noqa: E501
    ):
        read_config(path, ["rewards.terms=[{kind: reasoning_steps, max_stepss: 2}]"])


def test_a_price_that_drowns_all_others_is_refused():
    assert RewardConfig(correct=1e6).correct == 1e6
    with pytest.raises(ValidationError, match="correct: 1e\\+30 is too large: beyond 1,000,000 "):
        RewardConfig(correct=1e30)
