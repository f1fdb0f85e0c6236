import sys
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent_peft.environments import load_environment
from agent_peft.environments.arithmetic import ALPHABET, OPERATIONS, Arithmetic, ArithmeticConfig, Operation
from agent_peft.environments.arithmetic.operations import backwards, columns, partial_products
from agent_peft.environments.arithmetic.problems import Permutation, count_problems, operands_of
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

FORMS = ("plain", "reversed", "worked")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's."""
    (tmp_path / "own_operations.py").write_text(
        "from agent_peft.environments.arithmetic import Operation\n"
        "subtraction = Operation('-', lambda a, b: a - b)\n"
        "halves = Operation(':', lambda a, b: a / 2)\n"
        "nothing = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_operations"
    sys.modules.pop("own_operations", None)


def arithmetic(**keys):
    return Arithmetic(ArithmeticConfig(**{"num_tasks": 50, **keys}))


def step(environment, task, action):
    episode = environment.episode(task, seed=0)
    episode.start()
    return episode.step(action)


def problem(a, b, symbol="+"):
    return Task(f"{a}{symbol}{b}", content={"a": a, "b": b})


configurations = st.fixed_dictionaries(
    {
        "operation": st.sampled_from(sorted(OPERATIONS)),
        "digits": st.integers(1, 9) | st.tuples(st.integers(1, 4), st.integers(5, 9)),
        "answer": st.sampled_from(FORMS),
        "symbols": st.booleans(),
        "split": st.sampled_from(["train", "heldout"]),
        "seed": st.integers(0, 2**40),
    }
)


# -- what is asked, and what is correct ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "answer", "symbols", "question", "gold"),
    [
        ("addition", "plain", False, "123+456=", "579"),
        ("addition", "reversed", False, "123+456=", "975"),
        ("addition", "worked", False, "123+456=", "907050=975"),
        ("addition", "plain", True, "^123+456=", "579$"),
        ("multiplication", "plain", False, "123*456=", "56088"),
        ("multiplication", "reversed", True, "^123*456=", "88065$"),
        ("multiplication", "worked", True, "^123*456=", "8370+05160=88860+002940=88065$"),
    ],
)
def test_one_problem_by_hand(operation, answer, symbols, question, gold):
    environment, task = arithmetic(operation=operation, answer=answer, symbols=symbols), problem(123, 456)
    assert environment.episode(task, seed=0).start() == [Message("user", question)]
    assert environment.demonstration(task) == [gold]
    assert step(environment, task, f" {gold}\n") == StepResult("", True, Outcome.CORRECT, StopReason.FINISHED)


@given(keys=configurations, place=st.integers(0, 2**70), wrong=st.integers(0, 10**19))
def test_gold_is_correct_and_any_other_number_is_not(keys, place, wrong):
    environment = Arithmetic(ArithmeticConfig(**keys))
    task = environment.tasks[place % len(environment.tasks)]
    a, b = task.content["a"], task.content["b"]
    low, high = keys["digits"] if isinstance(keys["digits"], tuple) else (keys["digits"],) * 2
    assert len(str(a)) == len(str(b)) and low <= len(str(a)) <= high
    (gold,) = environment.demonstration(task)
    assert set(environment.episode(task, 0).start()[0].content + gold) <= set(ALPHABET)
    result = step(environment, task, gold)
    assert (result.outcome, result.valid) == (Outcome.CORRECT, True)
    assume(wrong != OPERATIONS[keys["operation"]].compute(a, b))
    number = str(wrong) if keys["answer"] == "plain" else backwards(wrong)
    work, equals, _ = gold.rpartition("=")
    result = step(environment, task, work + equals + number + "$" * keys["symbols"])
    assert (result.outcome, result.valid) == (Outcome.INCORRECT, True)


@pytest.mark.parametrize(
    ("action", "valid"),
    [
        *((reply, True) for reply in ("580", "0579", "-579")),
        *((r, False) for r in ("", "579.", "５７９", "5 79")),
    ],
)
def test_all_but_the_exact_answer_is_incorrect(action, valid):
    result = step(arithmetic(), problem(123, 456), action)
    assert (result.outcome, result.valid) == (Outcome.INCORRECT, valid)


@pytest.mark.parametrize(
    ("action", "outcome", "valid"),
    [
        ("804", Outcome.CORRECT, True),  # the question ends with "=", so the answer is expected here
        ("work of any kind\nis free=804", Outcome.CORRECT, True),
        ("=804", Outcome.CORRECT, True),
        ("804=805", Outcome.INCORRECT, True),  # the last number counts, and no other
        ("804=805=", Outcome.INCORRECT, False),
        ("840+0630=8040", Outcome.INCORRECT, True),  # not filled up: the answer is a number
        ("840+0630=408", Outcome.INCORRECT, True),
        ("840+0630", Outcome.INCORRECT, False),
        ("804 805", Outcome.INCORRECT, False),
        ("803,804", Outcome.INCORRECT, False),
    ],
)
def test_of_a_worked_answer_the_number_after_the_last_equals_sign_counts(action, outcome, valid):
    environment = arithmetic(operation="multiplication", digits=2, answer="worked")
    result = step(environment, problem(12, 34, "*"), action)
    assert (result.outcome, result.valid) == (outcome, valid)


@pytest.mark.parametrize("action", ["804", "804$$", "805=804", "$804$", "803$=804$", "804$=", "80$4$"])
def test_a_symbol_closes_the_answer_once(action):
    environment = arithmetic(operation="multiplication", digits=2, answer="worked", symbols=True)
    result = step(environment, problem(12, 34, "*"), action)
    assert (result.outcome, result.valid) == (Outcome.INCORRECT, False)


@pytest.mark.parametrize(
    "action", ["=" * 100_000, "1=" * 50_000 + "x", "1" * 100_000 + "x", "=" + "1" * 100_000 + "$"]
)
def test_grading_hostile_text_takes_no_time_to_speak_of(action):
    assert step(arithmetic(answer="worked"), problem(123, 456), action).outcome is Outcome.INCORRECT


# -- the work ------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 9).flatmap(
        lambda d: st.tuples(st.just(d), *[st.integers(10 ** (d - 1) if d > 1 else 0, 10**d - 1)] * 2)
    )
)
def test_the_work_leads_to_the_answer(drawn):
    digits, a, b = drawn
    written = columns(a, b, digits)
    assert int((written[::2] + written[-1])[::-1]) == a + b  # the columns' digits, then the last carry
    equations = partial_products(a, b, digits).split("=")
    sums = [sum(int(term[::-1]) for term in equation.split("+")) for equation in equations]
    assert sums[-1] == a * b
    begins = [int(equation.split("+")[0][::-1]) for equation in equations[1:]]
    assert begins == sums[:-1]  # each begins with the sum before it


@pytest.mark.parametrize("worked", [columns, partial_products])
@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_the_work_of_as_many_digits_has_one_layout(worked, digits):
    low = 10 ** (digits - 1) if digits > 1 else 0
    pairs = [(low, low), (low, 10**digits - 1), (10**digits - 1, low), (10**digits - 1, 10**digits - 1)]
    layouts = {"".join("0" if c.isdigit() else c for c in worked(a, b, digits)) for a, b in pairs}
    assert len(layouts) == 1


@pytest.mark.parametrize(
    ("operation", "most", "lengths"),
    [("addition", 999, (4, 4, 11)), ("multiplication", 99, (4, 4, 13)), ("multiplication", 999, (6, 6, 30))],
)
def test_the_longest_answers(operation, most, lengths):
    """What configurations rely on for ``max_new_tokens``, which also counts the end of the turn (and the
    closing symbol).
    """
    symbol = OPERATIONS[operation].symbol
    answers = [
        arithmetic(operation=operation, answer=form).demonstration(problem(most, most, symbol))[0]
        for form in FORMS
    ]
    assert tuple(map(len, answers)) == lengths


# -- which problems there are --------------------------------------------------------------------------------


@given(size=st.integers(1, 400), seed=st.integers())
def test_a_permutation_is_a_bijection(size, seed):
    assert sorted(map(Permutation(size, seed), range(size))) == list(range(size))


@given(
    size=st.integers(1, 10**18),
    seed=st.integers(0, 2**62),
    places=st.sets(st.integers(0, 10**18), min_size=2),
)
def test_a_large_permutation_stays_inside_and_repeats_nothing(size, seed, places):
    places = {place % size for place in places}
    images = {Permutation(size, seed)(place) for place in places}
    assert len(images) == len(places)
    assert all(0 <= image < size for image in images)


def test_permutations_are_as_good_as_random():
    """Of 24 orders of 4 numbers, 4,800 seeds give each about 200 times: χ² of 23 degrees of freedom stays
    below its 99.99 % point. A fixed set of seeds, so that this either holds or does not.
    """
    orders = Counter(tuple(map(Permutation(4, seed), range(4))) for seed in range(4800))
    assert sum((count - 200) ** 2 / 200 for count in orders.values()) + 200 * (24 - len(orders)) < 60


@pytest.mark.parametrize("digits", [1, 2])
def test_splits_are_disjoint_complete_a_fifth_and_blind_to_the_order_of_operands(digits):
    low, high = (0, 10) if digits == 1 else (10, 100)
    sides = {
        split: [operands_of(digits, split, i) for i in range(count_problems(digits, split))]
        for split in ("train", "heldout")
    }
    everything = [pair for side in sides.values() for pair in side]
    assert sorted(everything) == [(a, b) for a in range(low, high) for b in range(low, high)]
    assert len(sides["heldout"]) * 5 == len(everything)
    for side in sides.values():
        assert set(side) == {(b, a) for a, b in side}
    for operand in range(low, high):  # neither side lacks a number
        assert all(any(operand in pair for pair in side) for side in sides.values())


@given(one=configurations, other=configurations, digits=st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_no_seed_and_no_operation_trains_on_what_another_holds_out(one, other, digits):
    def pairs(keys, split):
        tasks = Arithmetic(ArithmeticConfig(**{**keys, "digits": digits, "split": split})).tasks
        return {(task.content["a"], task.content["b"]) for task in tasks}

    assert not pairs(one, "train") & pairs(other, "heldout")


@pytest.mark.parametrize("digits", [2, (1, 2), (1, 3)])
def test_the_same_configuration_gives_the_same_distinct_tasks_and_another_seed_others(digits):
    first, again, other = (arithmetic(digits=digits, num_tasks=500, seed=seed).tasks for seed in (0, 0, 1))
    assert first == again != other
    assert list(first) == list(again) != list(other)
    assert len({task.id for task in first}) == 500
    assert arithmetic(digits=digits, num_tasks=20).tasks == first[:20]
    assert list(first[10:40:7]) == list(first)[10:40:7]
    assert first[-1] == list(first)[-1]
    with pytest.raises(IndexError):
        first[500]


@pytest.mark.slow
def test_digits_take_turns_until_the_short_ones_run_out():
    tasks = arithmetic(digits=(1, 3), split="heldout", num_tasks=None).tasks
    assert [task.skills for task in tasks[:4]] == [(f"addition_{n}_digits",) for n in (1, 2, 3, 1)]
    assert Counter(task.skills[0] for task in tasks[:60]) == {f"addition_{n}_digits": 20 for n in (1, 2, 3)}
    assert Counter(task.skills[0] for task in tasks[60:3260]) == {
        f"addition_{n}_digits": 1600 for n in (2, 3)
    }
    assert len(tasks) == 20 + 1620 + 162_000 == len({tasks[i].id for i in range(len(tasks))})
    assert {tasks[i].skills[0] for i in range(3260, len(tasks), 997)} == {"addition_3_digits"}
    assert arithmetic().tasks[0].skills == ("addition",)


def test_nothing_is_listed_up_front():
    tasks = arithmetic(digits=9, num_tasks=None).tasks
    assert len(tasks) == 4 * (9 * 10**8) ** 2 // 5
    assert len({tasks[place].id for place in range(0, len(tasks), len(tasks) // 100)}) == 100


# -- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"digits": 1, "num_tasks": 81}, "1-digit addition has only 80 problems in its train"),
        (
            {"digits": [1, 2], "num_tasks": 1641, "split": "heldout"},
            "1- to 2-digit addition has only 1640 problems in its heldout split",
        ),
        ({"digits": [3, 2]}, r"environment.digits: .*\[3, 2\] is neither a number from 1"),
        ({"digits": [2, 2]}, "environment.digits"),
        ({"digits": [1, 2, 3]}, "environment.digits"),
        ({"digits": 10}, "environment.digits: .*10 is neither"),
        ({"digits": 0}, "environment.digits: .*0 is neither"),
        ({"digits": "2"}, "environment.digits: .*'2' is neither"),
        ({"answer": "backwards"}, "environment.answer"),
        ({"operation": "division"}, "there is no operation 'division'; give addition, multipl"),
        ({"operation": "nowhere:division"}, "'nowhere:division' cannot be imported"),
        ({"operation": "own_operations:nothing"}, "'own_operations:nothing' is a NoneType, not"),
        ({"operation": "own_operations:subtraction", "answer": "worked"}, "has no worked form"),
    ],
)
def test_mistakes_are_told_in_one_line(own, keys, told):
    with pytest.raises(AgentPeftError, match=told) as caught:
        load_environment({"kind": "arithmetic", **keys})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("symbol", ["", "3", " ", "=", "$"])
def test_a_symbol_that_cannot_stand_between_numbers(symbol):
    with pytest.raises(AgentPeftError, match="an operation's symbol stands between two numbers"):
        Operation(symbol, max)


def test_an_operation_of_ones_own(own):
    environment = arithmetic(operation=f"{own}:subtraction", digits=2)
    assert environment.tasks[0].skills == ("subtraction",)
    assert environment.episode(problem(12, 34), seed=0).start()[0].content == "12-34="
    assert environment.demonstration(problem(12, 34)) == ["-22"]
    assert step(environment, problem(12, 34), "-22").outcome is Outcome.CORRECT
    assert step(environment, problem(12, 34), "22").outcome is Outcome.INCORRECT
    lastfirst = arithmetic(operation=f"{own}:subtraction", digits=2, answer="reversed", symbols=True)
    assert lastfirst.demonstration(problem(10, 34)) == ["42-$"]
    assert step(lastfirst, problem(10, 34), "42-$").outcome is Outcome.CORRECT


def test_a_result_that_is_no_whole_number_is_told(own):
    environment = arithmetic(operation=f"{own}:halves", digits=2)
    with pytest.raises(AgentPeftError, match=r"own_operations:halves of 11:13 is 5\.5, no whole number"):
        environment.demonstration(problem(11, 13, ":"))
