"""Whatever a task file or a client's task holds, it is read, or refused in one line, in a short time."""

import json
import os
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_peft.environments.os_interaction.problems import ShellProblem, Unusable
from agent_peft.environments.os_interaction.tasks import load_tasks, read_problem, task_of
from agent_peft.types import AgentPeftError

KEYS = (
    *(
        "description",
        "evaluation",
        "create",
        "start",
        "labels",
        "example",
        "match",
        "check",
        "init",
        "image",
        "code",
        "file",
        "language",
    ),
    *(
        "answer",
        "regex",
        "strip",
        "instruction",
        "initialization_command_item",
        "evaluation_info",
        "evaluation_command_item",
        "script",
    ),
    *("ground_truth_command_item", "command_name", "skill_list", "sample_index"),
)
TEXTS = st.sampled_from(
    [
        "",
        "bash",
        "python",
        "check/in.py",
        "check/none.sh",
        "true",
        "^(a+)+$",
        "(",
        "\0",
        "\ud800",
        "../x",
        "x" * 300,
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)
SCRIPT = {"command_name": "bash", "script": "true"}
AGENT_BENCH = {"description": "?", "create": {"init": "true"}, "start": "true", "labels": ["x"]}
LIFELONG = {"instruction": "?", "initialization_command_item": SCRIPT, "skill_list": ["mkdir"]}


def read(entry):
    """An entry is a problem, or is refused."""
    try:
        task_of("a\x1b\nb", entry)
        problem = read_problem("a\x1b\nb", entry)
    except AgentPeftError as error:
        assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 500
        return
    assert isinstance(problem, ShellProblem)
    for text in (
        problem.instruction,
        problem.gold or "",
        problem.start or "",
        *(script.bash for script in problem.initialization),
    ):
        text.encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
@example({"description": "?", "evaluation": {"check": [None, {"file": []}], "example": "true"}})
@example({"description": "?", "evaluation": {"check": {"file": {}, "language": []}}})
@example({"description": "?", "evaluation": {"check": "true"}, "create": {"image": "a\nb\x1b" * 1000}})
@example({"description": "?", "evaluation": {"check": {"file": "a\nb\x1b" * 1000}}})
@example({"description": "?", "evaluation": {"check": {"code": "true", "language": ["c"] * 1000}}})
@example({"description": "\ud800", "evaluation": {"match": "x"}})
@example({"description": "?", "evaluation": {"check": "echo \ud800"}})
@example({"description": "?", "evaluation": {"match": {"regex": "(?P<a\nb>x)"}}})
@example({"description": "?", "evaluation": {"match": {"regex": "(" * 5000}}})
@example(
    {
        "instruction": "\ud800",
        "evaluation_info": {"evaluation_command_item": SCRIPT},
        "initialization_command_item": SCRIPT,
    }
)
@example(
    {
        "instruction": "?",
        "evaluation_info": {"evaluation_command_item": {"script": "\udfff"}},
        "initialization_command_item": SCRIPT,
    }
)
def test_any_entry_is_read_or_refused(entry):
    read(entry)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([AGENT_BENCH, LIFELONG]),
    st.sampled_from(KEYS),
    VALUES,
    st.sampled_from(["evaluation", "evaluation_info"]),
    VALUES,
)
def test_an_entry_with_anything_in_one_place(base, key, value, evaluation, content):
    read({**base, key: value})
    read({**base, evaluation: content, key: value})
    read(
        {**base, evaluation: {"match": {"regex": value}, "check": content, "evaluation_command_item": value}}
    )


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | VALUES.map(lambda value: json.dumps([value]).encode())
)
def test_any_file_is_read_or_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    try:
        load_tasks(path)
    except AgentPeftError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "file",
    ["x\0y", "x" * 5_000, "a/" * 3_000, "..", ".", "", "/", "pipe", "loop", "large", "closed", "folder"],
)
def test_a_named_file_that_cannot_be_read_makes_a_task_unusable(file, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").write_text("#" * (2 << 20))
    (tmp_path / "folder").mkdir()
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"description": "?", "evaluation": {"check": {"file": file}}}]))
    task = load_tasks(path)[0]
    with pytest.raises(Unusable, match="names the file") as error:
        read_problem(task.id, task.content)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("depth", [100, 300, 900, 5_000, 100_000])
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_nesting_is_read_or_refused(depth, pair, tmp_path):
    opening = "[" if pair == "[]" else '{"file":'
    nested = opening * depth + ("1" if pair == "{}" else "") + pair[1] * depth
    path = tmp_path / "x.json"
    path.write_text(f'[{{"description": "?", "evaluation": {{"match": "x"}}, "extra": {nested}}}]')
    begun = time.monotonic()
    try:
        load_tasks(path)
    except AgentPeftError as error:
        assert "\n" not in str(error)
    assert time.monotonic() - begun < 20
