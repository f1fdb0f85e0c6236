"""What each grader takes for the right answer."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.environments.graders import check_grader, check_pattern, find_grader, last_quantity
from agent_peft.types import AgentPeftError, Task

TASK = Task("t", content={"n": 3})


@pytest.mark.parametrize(
    ("reply", "answer", "correct", "valid"),
    [
        ("Paris", "Paris", True, True),
        ("  New\n  York ", "New York", True, True),
        ("Cafe\u0301", "Caf\u00e9", True, True),  # composed otherwise, the same letters
        ("paris", "Paris", False, True),  # case counts
        ("Paris.", "Paris", False, True),  # and so does punctuation
        ("It is Paris", "Paris", False, True),  # the whole reply is the answer
        ("7", 7, True, True),
        ("0.5", 0.5, True, True),
        (" ", "Paris", False, False),
    ],
)
def test_exact(reply, answer, correct, valid):
    grade = find_grader("exact")(reply, answer, TASK)
    assert (grade.correct, grade.valid, grade.score) == (correct, valid, None)


@pytest.mark.parametrize(
    ("reply", "answer", "correct"),
    [
        ("It is 1080.", "1,080", True),
        ("so 3 + 4 = 7", 7, True),
        ("7, no: 8", 7, False),  # the last one counts
        ("5-3", 3, True),  # a difference, not a sign
        ("that leaves -3", -3, True),
        ("-3", 3, False),
        ("$1,080.00", 1080, True),
        ("three quarters, 3/4", "0.75", True),
        ("0.75", "3/4", True),
        ("6/8 of it", "3/4", True),
        ("1 1/2 hours", "1.5", True),
        ("-1 1/2", "-1.5", True),
        ("-1 1/2", "-0.5", False),
        ("3/0", "3", False),
        ("48/2 = 24", "24", True),
        ("75%", "75", True),  # the sign may be left out
        ("75", "75 %", True),
        ("75%", "0.75", True),  # or worked out
        ("3/4", "75%", True),
        ("0.5%", "50%", False),
        ("7.5%", "75", False),
        ("0.00001", 1e-05, True),
        ("9" * 5000, 9, False),
        ("1/2/2024", "2024", True),
        ("seven", 7, False),
        ("1 1/", 1, True),  # a slash with nothing below it
        ("", 7, False),
    ],
)
def test_number(reply, answer, correct):
    assert find_grader("number")(reply, answer, TASK).correct is correct


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("1e3", "1000"),
        ("1.5e-3", "0.0015"),
        ("10^3", "1000"),
        ("10**3", "1000"),
        ("10³", "1000"),
        ("2^{10}", "1024"),
        ("10^{-3}", "0.001"),
        ("3x10^5", "300000"),
        (r"1.5 \times 10^{3}", "1500"),
        (r"\frac{3}{4}", "0.75"),
        (r"\boxed{-\dfrac{3}{4}}", "-0.75"),
        (r"\tfrac34", "0.75"),
        ("3 / 4", "0.75"),
        ("3/1.5", "2"),
        (r"1\frac{1}{2}", "1.5"),
        ("1½", "1.5"),
        ("-½", "-0.5"),
        ("1 000", "1000"),
        ("1\u2009234\u2009567", "1234567"),
        ("1\u202f000", "1000"),
        ("1'000", "1000"),
        ("1’000.5", "1000.5"),
        ("1_000", "1000"),
        (r"1{,}000", "1000"),
        (r"1\,000", "1000"),
        ("１，０００", "1000"),
        ("٣٤", "34"),
        ("१२", "12"),
        ("1\u200b0", "10"),
        ("−5", "-5"),
        (r"-\$5", "-5"),
        ("-€5", "-5"),
        ("x = - 5", "-5"),
        ("negative 5", "-5"),
        ("12.5\\%", "12.5%"),
        ("75 percent", "0.75"),
        ("5 million", "5000000"),
        ("3.", "3"),
        (".5", "0.5"),
        ("(5)", "5"),
        ("$1,234.50$", "1234.5"),
        ("The answer is **42**!", "42"),
        ("an area of 5 cm^2", "5"),
        (r"\boxed{5\text{ m}^2}", "5"),
        ("[8.124,12.852]", "12.852"),
        ("[8,12]", "12"),
        ("$200,000.", "200000"),
        (r"\boxed{72}", "72"),
        ("the pages 3–5", "5"),
        ("5%-10%", "10%"),
        ("wait...7", "7"),
    ],
)
def test_a_number_is_read_however_it_is_written(reply, answer):
    assert find_grader("number")(reply, answer, TASK).correct
    assert find_grader("number")(answer, reply, TASK).correct


REFUSED = """1,5|1.000,50|1.234.567|1,23,456|0,123|1, 000|1000 000|1 0000|5!|0x10|0xff|0b11|12:30|1 : 2|1/0
1/2,5|2^3^2|2^0.5|1e3.5|1e3e3|1e9999999|2^99999|0^-1|x^2|5^x|x_10|10₂|√4|∛8|\\sqrt{4}|\\sqrt4|\\sqrt[3]{8}|sqrt(4)
log_2 8|\\ln 5|\\binom{5}{2}|\\frac{a}{4}|\\frac{1}{\\frac{2}{3}}|(3)/4|3/(4)|x/4|(2)*10^5|2π|2\\pi|±5|5±1|--7
-(5)|-\\boxed{5}|minus 5|0.333...|0.(3)|0.\\overline{3}|1.2.3|2024-01-05|5k|5M|7万|2 million 500|3 out of 4
5'10|1 234,5|\\boxed{1,5}|2\\frac{100}{200}|1 000/3|5 hundredths"""


@pytest.mark.parametrize("reply", REFUSED.replace("\n", "|").split("|"))
def test_what_is_not_one_number_is_no_number(reply):
    assert last_quantity(reply) is None, reply
    assert last_quantity(f"It is {reply}") is None or reply == "5!"


def test_a_reply_without_a_number_is_invalid():
    grade = find_grader("number")
    assert not grade("seven", 7, TASK).valid
    assert grade("8", 7, TASK).valid


@given(text=st.text(st.sampled_from("0123456789,.-−+$/% \tx()^*e'_!{}\\½²٣\u2009"), max_size=200))
def test_whatever_looks_like_a_number_can_be_read(text):
    last_quantity(text)


@pytest.mark.parametrize(
    "text",
    [
        "1/" * 50_000,
        "1 " * 50_000,
        "1,234" * 20_000,
        "-$" * 50_000,
        "." * 100_000,
        r"\frac{" * 20_000,
        "1 000" * 20_000,
        "10^" * 30_000,
        "1 x 10^" * 15_000,
        "½²" * 20_000,
        "1'" * 50_000,
    ],
)
def test_hostile_replies_take_linear_time(text):
    last_quantity(text)  # a quadratic pattern would take minutes here


@pytest.mark.parametrize(
    ("reply", "correct", "valid"),
    [
        ("Answer: Paris", True, True),
        ("Answer: Rome\nAnswer:  Paris ", True, True),  # the last one counts
        ("Answer: Paris\nAnswer: Rome", False, True),
        ("Paris", False, False),
        ("", False, False),
    ],
)
def test_regex(reply, correct, valid):
    grade = find_grader("regex", r"Answer: (.+)")(reply, "Paris", TASK)
    assert (grade.correct, grade.valid) == (correct, valid)


def test_a_group_that_takes_no_part_is_no_answer():
    grade = find_grader("regex", r"yes|no: (\w+)")
    assert not grade("yes", "None", TASK).correct and not grade("yes", "None", TASK).valid


def test_a_pattern_without_end_is_stopped_and_named_once(caplog):
    grade = find_grader("regex", r"(?s)<answer>\s*(.*?)\s*</answer>")  # cubic
    begun = time.process_time()
    for _ in range(2):
        result = grade("<answer>" + " " * 20_000, "7", TASK)
        assert (result.correct, result.valid) == (False, False)
    assert time.process_time() - begun < 1  # another process spent the time
    assert grade("<answer> 7 </answer>", "7", TASK).correct
    assert caplog.text.count("took too much time or memory") == 1


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(", "is not a regular expression (missing )"),
        ("a+", "has no group; put parentheses around the answer"),
        ("(a)" * 500, "is not a regular expression (it is longer than 1000 characters)"),
    ],
)
def test_a_wrong_pattern_is_told(pattern, told):
    with pytest.raises(ValueError) as raised:
        check_pattern(pattern)
    assert told in str(raised.value) and "\n" not in str(raised.value)


OWN = """
def has(response, answer, task): return answer in response
def near(response, answer, task): return len(response) / task.content["n"]
def whole(response, answer, task): return 1
def says(response, answer, task): return response
def nothing(response, answer, task): return None
def over(response, answer, task): return 2.0
def nan(response, answer, task): return float("nan")
def fails(response, answer, task): return {}["oops"]
def two(response, answer): return True
value = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_graders.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name: find_grader(f"own_graders:{name}")


def test_a_function_of_ones_own(own):
    assert own("has")("in Paris", "Paris", TASK).correct
    assert own("has")("in Paris", "Paris", TASK).score is None
    assert not own("has")("in Rome", "Paris", TASK).correct
    graded = own("near")("ab", "", TASK)
    assert (graded.correct, graded.score) == (False, pytest.approx(2 / 3))
    assert (own("near")("abc", "", TASK).correct, own("near")("abc", "", TASK).score) == (True, 1.0)
    assert (own("whole")("", "", TASK).correct, own("whole")("", "", TASK).score) == (True, 1.0)


@pytest.mark.parametrize("name", ["says", "nothing", "over", "nan"])
def test_what_a_function_may_not_return_is_one_line(own, name):
    with pytest.raises(
        AgentPeftError, match=r"task 't': returned .*; return True, False, or a score"
    ) as raised:
        own(name)("x", "y", TASK)
    assert "\n" not in str(raised.value)


def test_an_unknown_grader_is_told(own):
    with pytest.raises(ValueError, match="there is no grader 'exakt'; did you mean 'exact'"):
        check_grader("exakt")
    with pytest.raises(
        ValueError, match=r"give one of exact, number, regex, or your own as package\.module:fun"
    ):
        check_grader("zzz")
    with pytest.raises(ValueError, match=r"cannot be called as a grader .*def f\(response, answer, task\)"):
        check_grader("own_graders:two")
    with pytest.raises(ValueError, match="is not a function but 3"):
        check_grader("own_graders:value")
    with pytest.raises(ValueError, match="cannot be imported"):
        check_grader("own_graders:nowhere")
    assert check_grader("own_graders:has") == "own_graders:has"
