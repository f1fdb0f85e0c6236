import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from agent_peft.seeding import derive, generator

parts = st.lists(
    st.one_of(st.integers(), st.text(alphabet=st.characters(exclude_characters="\x1f", codec="utf-8"))),
    max_size=4,
)


def test_a_seed_never_changes():
    assert (
        derive(0, "episode", 3) == 2372942966552740652
    )  # a change would make every checkpoint resume into another run


def test_a_seed_is_the_same_in_another_process():
    code = "from agent_peft.seeding import derive; print(derive(7, 'a', 1))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == derive(7, "a", 1)


@given(st.integers(), parts, parts)
def test_seeds_differ_where_the_names_differ(seed, left, right):
    assert 0 <= derive(seed, *left) < 2**63
    assert (derive(seed, *left) == derive(seed, *right)) == (left == right)


def test_a_number_and_its_text_are_two_names():
    assert derive(0, 1) != derive(0, "1")
    assert derive(0, "ab", "c") != derive(0, "a", "bc")


def test_generators_are_independent_of_each_other():
    first = generator(0, "tasks")
    first.random()
    assert generator(0, "tasks").random() != first.random()
    assert generator(0, "tasks").random() == generator(0, "tasks").random()
