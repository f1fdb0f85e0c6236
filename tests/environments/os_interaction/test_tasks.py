"""Task files of both formats: what they may hold, and what is said of those that hold something else."""

import json

import pytest

from agent_peft.environments.os_interaction.problems import (
    AnswerCheck,
    Checks,
    Exits,
    Matches,
    Script,
    Unusable,
)
from agent_peft.environments.os_interaction.tasks import by_rarity, load_tasks, read_problem, task_of
from agent_peft.types import AgentPeftError

ENTRY = {
    "sample_index": 3,
    "instruction": "Make /a.",
    "initialization_command_item": {"command_name": "bash", "script": ""},
    "evaluation_info": {
        "evaluation_command_item": {"command_name": "bash", "script": "[ -d /a ]"},
        "ground_truth_command_item": {"command_name": "bash", "script": "mkdir /a"},
    },
    "skill_list": ["mkdir", "sed"],
}
COUNTING = {
    "description": "How many files are in ~?",
    "create": {"init": "touch ~/a"},
    "evaluation": {
        "check": [None, {"language": "python", "file": "check/integer-match.py"}],
        "example": "ls ~ | wc -l",
    },
    "labels": ["file"],
}


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "content", "ids"),
    [
        ("x.json", {"5": ENTRY, "6": COUNTING}, ["5", "6"]),
        ("x.json", [ENTRY, COUNTING], ["3", "1"]),
        ("x.json", ENTRY, ["3"]),
        ("x.json", COUNTING, ["0"]),
        ("x.jsonl", json.dumps(ENTRY) + "\n\n" + json.dumps(COUNTING) + "\n", ["3", "1"]),
        ("x.json", json.dumps(COUNTING) + "\n" + json.dumps(COUNTING), ["0", "1"]),
        ("x.json", "\ufeff" + json.dumps([ENTRY]), ["3"]),
    ],
)
def test_files_that_are_read(name, content, ids, tmp_path):
    assert [task.id for task in load_tasks(write(tmp_path / name, content))] == ids


def test_an_entry_of_lifelong_agent_bench():
    problem = read_problem("3", ENTRY)
    assert (problem.instruction, problem.gold, problem.answers, problem.needs_answer) == (
        "Make /a.",
        "mkdir /a",
        False,
        False,
    )
    assert problem.evaluation == Exits(Script("[ -d /a ]"))
    assert problem.initialization == ()
    assert task_of("3", ENTRY).skills == ("sed", "mkdir")


def test_an_entry_of_agent_bench():
    problem = read_problem("x", COUNTING)
    assert problem.evaluation == Checks((None, AnswerCheck.INTEGER), Script("ls ~ | wc -l"))
    assert problem.initialization == (Script("touch ~/a"),)
    assert (problem.gold, problem.answers, problem.needs_answer, problem.start) == (
        "ls ~ | wc -l",
        True,
        True,
        None,
    )
    assert task_of("x", COUNTING).skills == ("file",)


@pytest.mark.parametrize(
    ("evaluation", "means"),
    [
        ({"match": " 76 "}, Matches("76")),
        ({"match": {"answer": " 76 ", "strip": False}}, Matches(" 76 ", strip=False)),
        ({"match": {"regex": "^7"}}, Matches(regex="^7")),
        ({"check": {"code": "exit 0"}}, Checks((Script("exit 0"),))),
        (
            {"check": [{"language": "python", "code": "pass"}, "true"]},
            Checks((Script("pass", "python"), Script("true"))),
        ),
        (
            {"check": [None, {"language": "python", "file": "check/in.py"}], "example": {"code": "nproc"}},
            Checks((None, AnswerCheck.ANSWER_IN_TRUTH), Script("nproc")),
        ),
    ],
)
def test_evaluations_of_agent_bench(evaluation, means):
    assert read_problem("x", {"description": "?", "evaluation": evaluation}).evaluation == means


def test_the_start_and_several_initializations():
    create = {"local": "default", "init": [{"code": "touch /a"}, {"language": "python", "code": "pass"}]}
    problem = read_problem("x", {**COUNTING, "create": create, "start": {"code": "sleep 9 &"}})
    assert problem.initialization == (Script("touch /a"), Script("pass", "python"))
    assert problem.start == "sleep 9 &"


def test_scripts_in_files_are_brought_along(tmp_path):
    (tmp_path / "check").mkdir()
    (tmp_path / "check" / "own.sh").write_text("[ $1 = 3 ]")
    entry = {**COUNTING, "evaluation": {"check": {"file": "check/own.sh"}}}
    task = load_tasks(write(tmp_path / "x.json", [entry]))[0]
    assert read_problem(task.id, task.content).evaluation == Checks((Script("[ $1 = 3 ]"),))
    assert json.loads(json.dumps(task.content)) == task.content


@pytest.mark.parametrize("file", ["check/none.sh", "../secret.sh", "/etc/hostname"])
def test_a_file_that_is_not_beside_the_tasks_makes_a_task_unusable(file, tmp_path):
    (tmp_path / "secret.sh").write_text("true")
    (tmp_path / "in").mkdir()
    entry = {**COUNTING, "evaluation": {"check": {"file": file}}}
    task = load_tasks(write(tmp_path / "in" / "x.json", [entry]))[0]
    with pytest.raises(Unusable, match="names the file"):
        read_problem(task.id, task.content)


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ({**COUNTING, "create": {"image": "local-os/packages"}}, "container image local-os/packages"),
        ({**COUNTING, "create": {"init": {"language": "c++", "code": "int main(){}"}}}, "written in c\\+\\+"),
    ],
)
def test_what_cannot_be_had_here_is_unusable(entry, cause):
    with pytest.raises(Unusable, match=cause):
        read_problem("x", entry)
    assert task_of("x", entry).id == "x"  # it is listed with its cause, not refused with the whole file


def without(entry, *path):
    copy = json.loads(json.dumps(entry))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return copy


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (7, "must be a JSON object, not int"),
        (without(ENTRY, "instruction"), "instruction must be a text"),
        ({**ENTRY, "instruction": " "}, "instruction must be a text"),
        (without(ENTRY, "initialization_command_item"), "initialization_command_item must be an object"),
        (
            without(ENTRY, "initialization_command_item", "script"),
            r"initialization_command_item.script must be a bash script",
        ),
        (
            {**ENTRY, "initialization_command_item": {"command_name": "zsh", "script": ""}},
            "command_name must be bash",
        ),
        ({**ENTRY, "initialization_command_item": {"script": "a\0b"}}, "script must be a bash script"),
        (without(ENTRY, "evaluation_info"), "evaluation_info must be an object"),
        (
            without(ENTRY, "evaluation_info", "evaluation_command_item"),
            r"evaluation_info.evaluation_command_item must be an object",
        ),
        ({**ENTRY, "skill_list": "mkdir"}, "skill_list must be a list of skill names"),
        ({**COUNTING, "labels": [1]}, "labels must be a list"),
        ({**COUNTING, "description": 5}, "description must be a text"),
        ({**COUNTING, "evaluation": []}, "evaluation must be an object"),
        ({**COUNTING, "evaluation": {}}, "an object with match or check"),
        ({**COUNTING, "evaluation": {"match": 5}}, "evaluation.match must be a text"),
        ({**COUNTING, "evaluation": {"match": {"regex": "("}}}, "a regular expression"),
        ({**COUNTING, "evaluation": {"check": []}}, "a list of at least one step"),
        ({**COUNTING, "evaluation": {"check": [None]}}, "evaluation.example must be a script"),
        (
            {**COUNTING, "evaluation": {"check": [{"file": "check/integer-match.py"}]}},
            r"check\[0\] must be null or a script",
        ),
        ({**COUNTING, "evaluation": {"check": [3]}}, r"check\[0\] must be a bash script"),
        ({**COUNTING, "create": {"init": 3}}, "create.init must be a bash script"),
    ],
)
def test_a_wrong_entry_is_named_with_its_key(entry, told, tmp_path):
    with pytest.raises(AgentPeftError, match=told) as error:
        load_tasks(write(tmp_path / "x.json", {"seven": entry}))
    assert "entry 'seven'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not JSON"),
        ("3", "must hold a JSON object or list"),
        ('"x"', "must hold a JSON object or list"),
        ("{}", "holds no entry"),
        ("[]", "holds no entry"),
        (json.dumps([ENTRY, ENTRY]), "two entries are called '3'"),
        (json.dumps(ENTRY) + "\n{", "line 2 is not JSON"),
    ],
)
def test_a_wrong_file_is_told(content, told, tmp_path):
    with pytest.raises(AgentPeftError, match=told):
        load_tasks(write(tmp_path / "x.json", content))


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(AgentPeftError, match="cannot be read"):
        load_tasks(tmp_path / "none.json")
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(AgentPeftError, match="not UTF-8"):
        load_tasks(tmp_path / "x.json")


def test_the_rarest_skill_is_the_primary_one():
    assert by_rarity(["chmod", "own", "mkdir", "gpasswd", "mkdir"]) == ("gpasswd", "mkdir", "chmod", "own")


@pytest.mark.parametrize(
    "name", ["lifelong_agent_bench/os_interaction/entry_dict.json", "agentbench/os_train.json"]
)
def test_the_real_entries_are_read(name, shared):
    path = shared / "data" / name
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    tasks = load_tasks(path)
    assert len(tasks) == len(json.loads(path.read_text())) >= 400
    for task in tasks:
        assert read_problem(task.id, task.content).gold
