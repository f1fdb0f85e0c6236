"""YAML 1.2, with places, and back."""

import math
from functools import partial

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.configuration import yaml12
from agent_peft.configuration.yaml12 import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES, dump, leaves, parse, plain
from agent_peft.types import AgentPeftError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5E3", 1500.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("+1", 1),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("off", "off"),
        ("y", "y"),
        ("True", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2024-01-31", "2024-01-31"),
        ("1:30", "1:30"),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        ("[1, a, {b: c}]", [1, "a", {"b": "c"}]),
        ("1.0.0", "1.0.0"),
    ],
)
def test_values(text, value):
    found = plain(parse(text, "x.yaml"))
    assert found == value
    assert type(found) is type(value)


def test_not_a_number():
    assert math.isnan(plain(parse(".nan", "x.yaml")))


def test_places():
    node = parse("a:\n  b: 1\n  c:\n    - 2\n    - d: 3\n", "x.yaml")
    assert {".".join(path): (leaf.value, leaf.origin, leaf.path) for path, leaf in leaves(node)} == {
        "a.b": (1, "x.yaml:2", "a.b"),
        "a.c.0": (2, "x.yaml:4", "a.c.0"),
        "a.c.1.d": (3, "x.yaml:5", "a.c.1.d"),
    }


def test_anchors_and_merge_keys():
    text = "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\nboth: {<<: [{a: 5}, *base]}\n"
    assert plain(parse(text, "x"))["more"] == {"a": 1, "b": 3}
    assert plain(parse(text, "x"))["both"] == {"a": 5, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "x.yaml:3: a is set twice; keep one"),
        ("a: {b: 1,\n b: 1}", "x.yaml:2: a.b is set twice; keep one"),
        ("a: [1", "x.yaml:1: is not YAML: "),
        ("a: b: c", "x.yaml:1: is not YAML: "),
        ("a: 1\n\tb: 2", "x.yaml:2: is not YAML: "),
        ("a:\n\tb: 2", "; indent with spaces, not with tabs"),
        (
            'a: "C:\\Users\\me"',
            "; a backslash in double quotes begins an escape: write a path in single quotes",
        ),
        ('a: "C:\\models"', "begins an escape: write a path in single quotes, or with /"),
        ("a: *b", "x.yaml:1: is not YAML: "),
        ("a: &b [*b]", "is too much: 50,000 values and 50 levels are the most"),
        ("a: !!python/name:os.system x", "x.yaml:1: a has the tag"),
        ("a: !mine {b: 1}", "x.yaml:1: a has the tag !mine"),
        ("a: !!int x", "x.yaml:1: a has a tag that 'x' does not fit"),
        ("? [1]\n: 2", "x.yaml:1: the document has a key that is not a text"),
        ("a: {<<: 3}", "x.yaml:1: a has a << that is not a mapping"),
        ("a: 1\n--- \nb: 2", "is not YAML"),
        ("a: \x01", "x.yaml: is not text"),
        ('a: "\\ud800"', "x.yaml:1: a holds half of a character"),
        ('"\\ud800": 1', "x.yaml:1: the document holds half of a character"),
        ('a: "\\UFFFFFFFF"', "x.yaml: is not YAML: "),
        ("%YAML " + "1" * 5000 + ".1\n--- 1", "x.yaml: is not YAML: "),
        ("a: " + "9" * 5000, "is a number beyond 256 bits"),
        ("a: 0x" + "f" * 5000, "is a number beyond 256 bits"),
        ("a: -1" + "0" * 80 + "", "is a number beyond 256 bits"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(AgentPeftError) as raised:
        parse(text, "x.yaml")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
WORDS = "1e5 1e-5 0o17 0x1f yes off ~ null 1_000 2024-01-31 << = 1:30 .inf"
words = st.sampled_from([*WORDS.split(), "- a", "a: b", ""])


@given(
    st.recursive(
        scalars | words,
        lambda inner: st.lists(inner) | st.dictionaries(st.text("ab1.~:<", min_size=1), inner),
        max_leaves=12,
    )
)
def test_what_is_dumped_reads_back_equal(content):
    assert plain(parse(dump(content), "x")) == content


# -- a text of anybody's -------------------------------------------------------------------------------------

LAUGHS = "x: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"x{i}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


GROWING = {
    "laughs": LAUGHS,
    "brackets": "a: " + "[" * 5000 + "]" * 5000,
    "open": "[" * 100_000,
    "braces": "{" * 100_000,
    "questions": "? " * 50_000,
    "dashes": "- " * 50_000,
    "chain": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 500)),
    "merges": "a0: &a0 {b: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}}}\n" for i in range(1, 500)),
    "merged list": "x: &x {a: 1}\ny: {<<: [" + ",".join(["*x"] * MAX_VALUES) + "]}",
    "itself": "a: &a [*a, *a]",
    "long": "x" * (MAX_CHARACTERS + 1),
}


@pytest.mark.parametrize("text", GROWING.values(), ids=GROWING)
def test_what_would_grow_without_bound_is_refused(text):
    with pytest.raises(AgentPeftError) as raised:
        parse(text, "x.yaml")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_what_is_within_the_bounds_is_read():
    deep = "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH
    assert str(plain(parse(deep, "x"))) == deep
    aliases = "a: &a [1, 2]\nb: [" + ", ".join(["*a"] * 1000) + "]"
    assert plain(parse(aliases, "x"))["b"] == [[1, 2]] * 1000


MARKS = "[]{}:,-?|>&*!%@`#'\"\n \t\\<=~.0x"
marks = st.sampled_from([*MARKS, "- ", ": ", "<<: ", "*a", "&a ", "!!", "---\n", "\\u", "1e9", "\ud800"])


@given(st.lists(marks | st.text(max_size=3), max_size=40).map("".join))
def test_any_text_is_read_or_refused_in_one_line(text):
    try:
        plain(parse(text, "x.yaml"))
    except AgentPeftError as error:
        assert str(error).startswith("x.yaml")


@given(st.lists(st.sampled_from([*MARKS, "a", "\n  ", "- ", ": ", "<<: ", "1e9"]), max_size=20).map("".join))
def test_libyaml_reads_what_pyyaml_reads(text):
    slowly = partial(yaml.compose, Loader=yaml12._Loader)

    def read(compose):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml12, "_compose", compose)
            try:
                return [(*vars(leaf).values(), keys) for keys, leaf in leaves(parse(text, "x.yaml"))]
            except AgentPeftError as error:
                return str(error)

    assert repr(read(yaml12._compose)) == repr(read(slowly))


def test_a_document_of_usual_characters_is_read_by_libyaml(monkeypatch):
    monkeypatch.setattr(yaml12, "_Loader", None)
    assert plain(parse('a: {b: [1e-5, "x"]} # as\n', "x.yaml")) == {"a": {"b": [1e-5, "x"]}}
