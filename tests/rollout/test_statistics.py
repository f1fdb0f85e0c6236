"""Statistics against published numbers, hand computation and brute force."""

import io
import itertools
import json
import math
import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_peft.rollout.intervals import (
    mean_over_tasks,
    pass_at_k,
    rate_of,
    sign_flip_p,
    t95,
    wilson_interval,
)
from agent_peft.rollout.report_tables import table, tables
from agent_peft.rollout.statistics import EvaluationReport, paired_test, summarize
from agent_peft.types import AgentPeftError, Group, Outcome, StopReason, Task, Trajectory, Turn


def attempt(task, correct, *, turns=1, invalid=0, stop_reason=StopReason.FINISHED, tokens=1):
    outcome = Outcome.CORRECT if correct else Outcome.INCORRECT
    made = tuple(Turn((1,), (2,) * tokens, (-0.5,) * tokens, valid=i >= invalid) for i in range(turns))
    return Trajectory(task, made, outcome=outcome, stop_reason=stop_reason)


def report(results, skills=()):
    """A report of tasks "0", "1", … with these outcomes (one bool, or several, per task)."""
    groups = []
    for number, found in enumerate(results):
        task = Task(str(number), skills)
        groups.append(
            Group(
                task,
                [attempt(task, correct) for correct in (found if isinstance(found, tuple) else (found,))],
            )
        )
    return summarize(groups)


@pytest.mark.parametrize(  # R: prop.test(x, n, correct = FALSE)$conf.int
    ("x", "n", "low", "high"),
    [
        (8, 10, 0.4901625, 0.9433178),
        (1, 10, 0.01787621, 0.4041500),
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (50, 100, 0.4038315, 0.5961685),
    ],
)
def test_wilson_as_in_r(x, n, low, high):
    assert wilson_interval(x / n, n) == pytest.approx((low, high), abs=1e-6)


@given(st.integers(1, 300), st.data())
def test_wilson_solves_its_own_equation(n, data):
    """Its bounds are the p whose standard error, as p itself has it, puts the observation 1.96 of them
    away.
    """
    x = data.draw(st.integers(0, n))
    low, high = wilson_interval(x / n, n)
    assert 0 <= low <= x / n <= high <= 1
    for bound in (low, high):
        if 1e-9 < bound < 1 - 1e-9:
            assert abs(x / n - bound) == pytest.approx(
                1.959964 * math.sqrt(bound * (1 - bound) / n), rel=1e-5
            )


def test_attempts_that_always_agree_tell_no_more_than_one():
    once = rate_of([(1, 1)] * 7 + [(0, 1)] * 5)
    thrice = rate_of([(3, 3)] * 7 + [(0, 3)] * 5)
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high))
    assert thrice.tasks == 12


def test_attempts_that_never_agree_count_each():
    assert rate_of([(1, 2)] * 10).low == pytest.approx(wilson_interval(0.5, 20)[0])


def test_a_mixed_case_by_hand():
    # rates 1, 0.5, 0, 0.5: p = 0.5, Σ(pᵢ - p)² = 0.5, effective = 0.25 · 16 / 0.5 = 8 = the number of
    # attempts at the most
    found = rate_of([(2, 2), (1, 2), (0, 2), (1, 2)])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, *wilson_interval(0.5, 8)))
    # rates 1, 1, 0.5, 0: p = 0.625, Σ = 0.6875, effective = 0.234375 · 16 / 0.6875 = 5.4545…
    found = rate_of([(2, 2), (2, 2), (1, 2), (0, 2)])
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.625, 60 / 11))


def test_the_clustered_interval_holds_the_truth_as_often_as_it_says():
    """Tasks of very different difficulty, 4 attempts each; an interval that took attempts for independent
    would hold it far less often.
    """
    random, held, naive, runs = Random(0), 0, 0, 600
    for _ in range(runs):
        scores = [
            (sum(random.random() < p for _ in range(4)), 4)
            for p in (random.betavariate(0.5, 0.5) for _ in range(60))
        ]
        found = rate_of(scores)
        held += found.low <= 0.5 <= found.high
        low, high = wilson_interval(found.value, 240)
        naive += low <= 0.5 <= high
    assert 0.93 <= held / runs <= 0.98
    assert naive / runs < 0.85


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(outcomes, k):
    if k > len(outcomes):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k([(sum(outcomes), len(outcomes))], k)
    else:
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k([(sum(outcomes), len(outcomes))], k) == pytest.approx(
            sum(map(any, subsets)) / len(subsets)
        )


@given(st.lists(st.integers(-4, 4), max_size=9))
def test_sign_flips_against_brute_force(differences):
    sums = [
        sum(sign * d for sign, d in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    expected = sum(abs(total) >= abs(sum(differences)) for total in sums) / len(sums)
    assert sign_flip_p(differences) == pytest.approx(expected)


def paired(gained, lost, both, neither):
    before = [False] * gained + [True] * lost + [True] * both + [False] * neither
    after = [True] * gained + [False] * lost + [True] * both + [False] * neither
    return paired_test(report(before), report(after))


@pytest.mark.parametrize(("gained", "lost"), [(10, 2), (5, 5), (1, 0), (0, 7), (0, 0), (30, 14)])
def test_one_attempt_each_is_mcnemars_exact_test(gained, lost):
    n = gained + lost
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1)) / 2**n
    assert paired(gained, lost, 8, 9).p == pytest.approx(min(1.0, 2 * tail))


def test_the_difference_by_hand():
    # Bonett and Price: p12 = (10+1)/(40+2), p21 = (2+1)/(40+2), d ± 1.96 √((p12 + p21 - (p12 - p21)²) /
    # (n+2))
    found = paired(10, 2, 20, 8)
    d, spread = 8 / 42, math.sqrt((14 / 42 - (8 / 42) ** 2) / 42)
    assert found.difference == pytest.approx(0.2)
    assert (found.low, found.high) == pytest.approx((d - 1.959964 * spread, d + 1.959964 * spread), abs=1e-6)
    assert found.p == pytest.approx(2 * (1 + 12 + 66) / 4096)


def test_nothing_changed():
    found = paired(0, 0, 5, 5)
    assert (found.difference, found.p) == (0.0, 1.0)
    assert found.low < 0 < found.high  # ten equal tasks do not prove equality


def test_several_attempts_are_compared_by_their_rates():
    before = report([(True, False), (False, False), (True, True)])
    after = report([(True, True, False), (True, True, True), (True, True, True)])
    found = paired_test(before, after)
    assert found.difference == pytest.approx((1 / 6 + 1 + 0) / 3)
    assert found.p == pytest.approx(0.5)  # of ± 1/6 ± 1, two in four are as far from 0


def test_pairing_is_by_task_not_by_order():
    results = [True, False, True, True, False]
    forward = report(results)
    groups = [Group(Task(str(i)), [attempt(Task(str(i)), results[i])]) for i in reversed(range(5))]
    assert paired_test(forward, summarize(groups)).p == 1.0
    assert paired_test(forward, summarize(groups)).difference == 0.0


def test_other_tasks_cannot_be_paired():
    with pytest.raises(AgentPeftError, match="task '2' is in one only"):
        paired_test(report([True, False]), report([True, False, True]))


def test_a_report_counts():
    insert, select = Task("i", ("insert", "where")), Task("s", ("select",))
    made = summarize(
        [
            Group(
                insert,
                [
                    attempt(insert, True, turns=2, tokens=3),
                    attempt(insert, False, turns=3, invalid=2, stop_reason=StopReason.TURN_LIMIT),
                ],
            ),
            Group(
                select, [attempt(select, False), attempt(select, True, stop_reason=StopReason.INFRASTRUCTURE)]
            ),
            Group(Task("lost"), []),
        ]
    )
    assert made.success.value == pytest.approx(0.25)  # of rates 1/2 and 0
    assert {skill: (rate.value, rate.tasks) for skill, rate in made.by_skill.items()} == {
        "insert": (0.5, 1),
        "select": (0.0, 1),
    }
    assert (made.attempts, made.infrastructure_failures) == (3, 1)
    assert made.stop_reasons == {"finished": 2, "turn_limit": 1}
    assert made.invalid_actions == pytest.approx(2 / 6)
    assert made.mean_turns == pytest.approx(2.0)
    assert made.mean_action_tokens == pytest.approx((6 + 3 + 1) / 3)
    assert made.pass_at == {1: 0.25}
    assert made.outcomes == {"i": ("correct", "incorrect"), "s": ("incorrect",)}


def test_cut_actions_are_counted_shown_and_read_back():
    task = Task("t")
    ours = attempt(task, True, turns=3)
    ours = replace(ours, turns=(replace(ours.turns[0], cut=True), *ours.turns[1:]))
    made = summarize([Group(task, [ours, attempt(task, False)])])
    assert made.cut_actions == 1 / 4
    assert EvaluationReport.from_json(json.loads(json.dumps(made.to_json()))) == made
    written = {key: value for key, value in made.to_json().items() if key != "cut_actions"}
    assert EvaluationReport.from_json(written).cut_actions == 0.0, "one that an earlier version wrote"
    out = io.StringIO()
    Console(file=out, width=100).print(table({"base": made}))
    assert re.search(r"cut actions\s+\W\s+25\.0%", out.getvalue())


def test_what_the_agent_crashed_or_what_met_a_defect_is_incorrect():
    task = Task("t", ("insert",))
    ends = [StopReason.FINISHED, StopReason.CRASHED, StopReason.DEFECT, StopReason.CRASHED]
    made = summarize(
        [Group(task, [attempt(task, end is StopReason.FINISHED, stop_reason=end) for end in ends])]
    )
    assert made.success.value == made.by_skill["insert"].value == made.pass_at[1] == 0.25
    assert made.outcomes == {"t": ("correct", "incorrect", "incorrect", "incorrect")}
    assert (made.attempts, made.infrastructure_failures) == (4, 0)
    assert made.to_json()["stop_reasons"] == {"crashed": 2, "defect": 1, "finished": 1}
    text = shown(table({"base": made}))
    assert re.search(r"ended: crashed +│ +50.0% ", text) and re.search(r"ended: defect +│ +25.0% ", text)
    assert "left out" not in text + made.summary


def test_what_is_left_out_is_told():
    groups = [Group(Task("t"), [attempt(Task("t"), True)] * 19)]
    one, two = summarize(groups, left_out=1), summarize(groups, left_out=2)
    assert (one.infrastructure_failures, one.attempts, one.summary) == (
        1,
        19,
        "success 100.0% (21–100) on 1 tasks",
    )
    assert (
        two.summary
        == "success 100.0% (21–100) on 1 tasks; 2 of 21 episodes are left out: their environment failed"
    )
    assert re.search(r"left out \(failed\) +│ +1 │ +2 ", shown(table({"one": one, "two": two})))
    assert EvaluationReport.from_json(json.loads(json.dumps(two.to_json()))) == two


def test_pass_at_powers_of_two_and_all():
    made = report([(True, False, False, False, False, False), (False,) * 6])
    assert made.pass_at == pytest.approx({1: 1 / 12, 2: 1 / 6, 4: 1 / 3, 6: 1 / 2})


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(AgentPeftError, match="no episode came to an end"):
        summarize([Group(Task("t"), [attempt(Task("t"), True, stop_reason=StopReason.INFRASTRUCTURE)])])


def test_a_report_survives_a_file():
    made = report([(True, False), (False, False)], skills=("insert",))
    assert EvaluationReport.from_json(json.loads(json.dumps(made.to_json()))) == made


def shown(renderable):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_tables_show_what_was_found():
    base, sft = report([False] * 9 + [True], ("insert",)), report([True] * 9 + [False], ("insert",))
    text = shown(table({"base": base, "after [sft]": sft}))
    assert "10.0% (2–40)" in text
    assert "+80.0 (" in text
    assert "0.021" in text  # 2 (1 + 10) / 2**10
    assert "after [sft]" in text
    assert len(tables({"base": base})) == 1, "a table of one skill repeats the first table"
    (_, by_skill) = tables({"base": base, "after [sft]": report([True] * 9 + [False], ("delete",))})
    assert "insert" in shown(by_skill)
    assert "other tasks" in shown(table({"base": base, "after sft": report([True])}))
    assert base.summary == "success 10.0% (2–40) on 10 tasks"


# -- scores --------------------------------------------------------------------------------------------------


def scored(*scores):
    """A report of tasks with these scores (one list of attempts per task); None is not a score."""
    groups = []
    for number, attempts in enumerate(scores):
        task = Task(str(number))
        groups.append(Group(task, [replace(attempt(task, False), score=score) for score in attempts]))
    return summarize(groups)


def test_the_mean_score_is_over_tasks_and_an_ungraded_episode_counts_as_zero():
    found = scored([0.5, 1.0], [0.25, None])
    assert found.score.value == pytest.approx((0.75 + 0.125) / 2)
    assert found.score.tasks == 2
    assert found.summary == "success 0.0% (0–66) on 2 tasks, score 43.8% (12–82)"  # Wilson, n = 4


def test_the_interval_of_scores_that_are_0_and_1_is_that_of_successes():
    scores = [[1.0], [0.0], [1.0], [1.0]]
    assert scored(*scores).score == report([True, False, True, True]).success


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_the_interval_of_scores_holds_their_mean_and_is_at_least_as_wide_as_the_normal_one(scores):
    found = scored(*([score] for score in scores)).score
    mean = math.fsum(scores) / len(scores)
    assert 0 <= found.low <= mean + 1e-9 and mean - 1e-9 <= found.high <= 1
    n, z = len(scores), 1.959964
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    assert found.high - found.low >= 2 * half - 1e-6


def test_reports_without_scores_say_nothing_of_them_and_those_with_scores_survive_a_file():
    plain, graded = report([True, False]), scored([0.5], [1.0])
    assert plain.score is None and "score" not in plain.to_json() and "score" not in plain.summary
    for each in (plain, graded):
        assert EvaluationReport.from_json(json.loads(json.dumps(each.to_json()))) == each
    shown = io.StringIO()
    Console(file=shown, width=200).print(table({"base": plain, "after": graded}))
    (row,) = [line for line in shown.getvalue().splitlines() if "score" in line]
    assert "75.0%" in row
    shown = io.StringIO()
    Console(file=shown, width=200).print(table({"base": plain}))
    assert "score" not in shown.getvalue()


# -- rewards -------------------------------------------------------------------------------------------------


def rewarded(*rewards, correct=False, **settings):
    """A report of tasks with these returns (one list of attempts per task)."""
    groups = []
    for number, attempts in enumerate(rewards):
        task = Task(str(number))
        made = [replace(attempt(task, correct), rewards=(reward,)) for reward in attempts]
        groups.append(Group(task, made))
    return replace(summarize(groups), settings=settings)


@pytest.mark.parametrize(  # R: qt(0.975, df)
    ("degrees", "point"),
    [
        (1, 12.70620),
        (2, 4.302653),
        (3, 3.182446),
        (4, 2.776445),
        (9, 2.262157),
        (29, 2.045230),
        (1318, 1.961773),
    ],
)
def test_the_points_of_students_t_as_in_r(degrees, point):
    assert t95(degrees) == pytest.approx(point, abs=0.004)


def test_the_mean_reward_by_hand_is_over_tasks():
    # tasks' means 0.5, 1.5, 4: mean 2, s² = (2.25 + 0.25 + 4) / 2, half = 4.302653 √(s² / 3)
    found = rewarded([0.0, 1.0], [1.5], [3.0, 4.0, 5.0]).reward
    half = 4.302653 * math.sqrt(3.25 / 3)
    assert (found.value, found.low, found.high, found.tasks) == pytest.approx((2, 2 - half, 2 + half, 3))
    assert rewarded([0.5] * 4, [1.5] * 4, [4.0] * 4).reward == found, "attempts that agree tell no more"


def test_tasks_that_are_all_alike_do_not_show_an_interval():
    for alike in (rewarded([1.0]), rewarded([0.5], [0.0, 1.0])):
        assert (alike.reward.low, alike.reward.high) == (None, None)
    assert rewarded([1.0]).reward.text == "1.000"


def test_the_interval_of_means_holds_the_truth_as_often_as_it_says():
    random, held, naive, runs = Random(1), 0, 0, 600
    for _ in range(runs):
        tasks = [random.gauss(0.0, 1.0) for _ in range(12)]
        attempts = [[random.gauss(mean, 1.0) for _ in range(4)] for mean in tasks]
        found = mean_over_tasks([math.fsum(four) / 4 for four in attempts])
        held += found.low <= 0 <= found.high
        apart = mean_over_tasks([one for four in attempts for one in four])  # as if attempts were independent
        naive += apart.low <= 0 <= apart.high
    assert 0.93 <= held / runs <= 0.98
    assert naive / runs < 0.85


def test_a_reward_that_follows_from_success_is_in_the_json_and_in_no_table():
    a, b = Task("a"), Task("b")
    mixed = [
        Group(a, [replace(attempt(a, True), rewards=(1.0,))]),
        Group(b, [replace(attempt(b, False), rewards=(0.0,))]),
    ]
    plain, graded = summarize(mixed), rewarded([0.25], [0.75])
    assert plain.reward_follows_success and not graded.reward_follows_success
    assert plain.to_json()["reward"]["value"] == 0.5
    assert "reward" not in plain.summary and "reward" not in shown(table({"base": plain}))
    assert graded.summary == "success 0.0% (0–66) on 2 tasks, reward 0.500 (-2.677…3.677)"
    (row,) = [
        line for line in shown(table({"base": plain, "after": graded})).splitlines() if "reward" in line
    ]
    assert "0.500 (-5.853…6.853)" in row and "0.500 (-2.677…3.677)" in row
    for each in (plain, graded):
        assert EvaluationReport.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_rewards_of_other_prices_are_marked():
    one = rewarded([0.0], [0.5], rewards={"correct": 1.0})
    two = rewarded([0.0], [1.0], rewards={"correct": 2.0})
    text = shown(table({"base": one, "after sft": two, "after grpo": two}))
    (row,) = [line for line in text.splitlines() if "reward " in line and "│" in line]
    assert row.count("*") == 1 and "* under the rewards of another stage than the last column's" in text
    assert "*" not in shown(table({"base": two, "after sft": two}))


def test_what_was_measured_is_in_the_json_and_does_not_count_in_comparisons():
    plain = report([True, False])
    made = replace(plain, name="after grpo", step=20, settings={"tasks": 2, "sampling": {"temperature": 0.0}})
    assert made == plain
    content = made.to_json()
    assert list(content)[:3] == ["name", "step", "settings"] and "groups" not in content
    back = EvaluationReport.from_json(json.loads(json.dumps(content)))
    assert (back.name, back.step, back.settings) == (made.name, made.step, made.settings)
    assert "name" not in plain.to_json() and "step" not in shown(table({"base": plain}))
    assert re.search(r"step +│ +20 ", shown(table({"after grpo": made})))
    assert len(made.groups) == 2 and back.groups == ()


def test_metrics_have_names():
    made = rewarded([0.25], [0.75], correct=True)
    assert [made.metric(f"evaluation.{name}") for name in ("success", "reward", "score")] == [1.0, 0.5, None]
