"""GSM8K: what is an answer, what the agent is shown, and where the problems come from. The problems here
are our own.
"""

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_peft.configuration.explain import effective_values
from agent_peft.configuration.load import dump_config, read_config
from agent_peft.environments.db_bench import environment as db_bench_environment
from agent_peft.environments.gsm8k import (
    GSM8K,
    HUB_SET,
    GSM8KConfig,
    answer_pattern,
    parse_number,
)
from agent_peft.environments.os_interaction import environment as os_environment
from agent_peft.environments.quantities import last_quantity
from agent_peft.environments.task_commands import download_tasks
from agent_peft.environments.task_files.download import convert
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason

OWN = Path(__file__).parent / "own_problems.jsonl"
TOP = "run_dir: r\npolicy: {kind: pretrained, model: smollm2-135m}\nalgorithm: grpo\nsteps: 1\nenvironment: "


def gsm8k(**settings):
    return GSM8K(GSM8KConfig(**{"tasks": OWN, **settings}))


def step(environment, line, reply):
    episode = environment.episode(environment.tasks[line - 1], seed=0)
    episode.start()
    return episode.step(reply)


# -- what is an answer ---------------------------------------------------------------------------------------


RIGHT = {  # by the line of the problem
    1: [
        "#### 7", "3 + 4 = 7\n#### 7\n", "####7", "####   7.0 \r\n", "#### 7.", "#### $7",
        "#### 7\nThat is all.", "#### 8\nNo: 3 + 4 is 7.\n#### 7", "The answer is #### 7", "#### 007",
    ],
    2: ["#### 1080", "#### 1,080", "#### $1,080.00"],
    3: ["#### -13", "#### −13", "#### -$13", "#### $-13", "#### - 13"],
}  # fmt: skip
WRONG = {  # numbers in the format
    1: ["#### -7", "#### 7.5", "#### 70", "#### 7\n#### 8"],
    2: ["#### 1.080", "#### 1"],
    3: ["#### 13"],
}
INVALID = {
    1: [
        "7", "#### seven", "#### 7 apples", "#### 3 + 4 = 7", "#### 7/1", "#### ７", "####\n7", "### 7",
        "#### --7", "#### 1e1", "#### nan", "####", "",
    ],
    2: ["#### 10,80"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reply", "outcome", "valid"),
    [
        (line, reply, outcome, valid)
        for replies, outcome, valid in (
            (RIGHT, Outcome.CORRECT, True),
            (WRONG, Outcome.INCORRECT, True),
            (INVALID, Outcome.INCORRECT, False),
        )
        for line in replies
        for reply in replies[line]
    ],
)
def test_the_last_number_in_the_format_counts_in_any_spelling(line, reply, outcome, valid):
    assert step(gsm8k(), line, reply) == StepResult("", True, outcome, StopReason.FINISHED, valid)


def test_without_strictness_the_last_number_is_graded_and_stays_invalid():
    lax = gsm8k(strict=False)
    for line, reply, outcome in [
        (1, "3 + 4 = 7 apples", Outcome.CORRECT),
        (1, "7, I think; there were 4 before", Outcome.INCORRECT),
        (2, "It makes $1,080.", Outcome.CORRECT),
        (3, "So it is -13 degrees now", Outcome.CORRECT),
        (3, "3-13", Outcome.INCORRECT),  # a difference, not a sign
        (1, "No idea.", Outcome.INCORRECT),
    ]:
        result = step(lax, line, reply)
        assert (result.outcome, result.valid) == (outcome, False), reply
    result = step(lax, 1, "#### 8, or rather\n#### 7\nnot 8")  # the format wins over the last number
    assert (result.outcome, result.valid) == (Outcome.CORRECT, True)


@pytest.mark.parametrize(
    ("answer_format", "reply", "other"),
    [
        ("\\boxed{{answer}}", "so $\\boxed{7}$ apples", "#### 7"),
        ("The answer is {answer}.", "The answer is 7. Good.", "The answer is 7"),
        ("<answer>{answer}</answer>", "<answer> 7.0 </answer>", "<answer>7"),
        ("{answer}", "3 + 4 =\n7", "3 + 4 = 7"),
    ],
)
def test_other_formats(answer_format, reply, other):
    environment = gsm8k(answer_format=answer_format)
    assert step(environment, 1, reply).outcome is Outcome.CORRECT
    assert step(environment, 1, other).outcome is Outcome.INCORRECT
    for line, task in enumerate(environment.tasks, 1):
        (reply,) = environment.demonstration(task)
        assert step(environment, line, reply).outcome is Outcome.CORRECT
    assert answer_format.replace("{answer}", "<number>") in environment.prompt


@given(
    number=st.integers(-(10**12), 10**12),
    decimals=st.sampled_from(["", ".", ".0", ".00"]),
    commas=st.booleans(),
    dollar=st.booleans(),
)
def test_any_spelling_of_any_number_is_that_number(number, decimals, commas, dollar):
    digits = f"{abs(number):,}" if commas else str(abs(number))
    written = ("-" if number < 0 else "") + ("$" if dollar else "") + digits + decimals
    assert parse_number(written) == number
    assert answer_pattern("#### {answer}").findall(f"Thus:\n#### {written}\n") == [written]
    assert last_quantity(f"1 and 2 are not it, it is {written}").value == number


@given(text=st.text(st.sampled_from("0123456789,.-−+$#\n \tx()"), max_size=200))
def test_whatever_looks_like_an_answer_can_be_read(text):
    for match in answer_pattern("#### {answer}").finditer(text):
        assert isinstance(parse_number(match[1]), Decimal)
    last_quantity(text)


@pytest.mark.parametrize(
    "text", ["#### " * 20_000, "#### " + "1,234," * 20_000, "-$ " * 30_000, "\n" * 100_000, "." * 100_000]
)
def test_hostile_replies_take_linear_time(text):
    pattern = answer_pattern("#### {answer}")  # a quadratic pattern would take minutes here
    assert pattern.findall(text) == []
    last_quantity(text)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gold_of_the_real_set(shared, split):
    path = shared / "data" / "gsm8k" / f"{split}.jsonl"
    environment = gsm8k(tasks=path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(environment.tasks) == len(rows)
    for task, row in zip(environment.tasks, rows, strict=True):
        gold = row["answer"].split("#### ")[1]
        number = int(gold.replace(",", ""))
        (reply,) = environment.demonstration(task)
        assert "<<" not in reply and reply.endswith(f"\n#### {gold}")
        for written, outcome in [
            (reply, Outcome.CORRECT),
            (f"#### {number:,}", Outcome.CORRECT),
            (f"#### {number}.0", Outcome.CORRECT),
            (f"#### ${gold}.", Outcome.CORRECT),
            (f"#### {number + 1}", Outcome.INCORRECT),
            (f"#### -{gold}", Outcome.CORRECT if number == 0 else Outcome.INCORRECT),
            (gold, Outcome.INCORRECT),  # no format
        ]:
            episode = environment.episode(task, 0)
            episode.start()
            assert episode.step(written).outcome is outcome, (task.id, written)


# -- what the agent is shown ---------------------------------------------------------------------------------


def test_the_opening_by_hand():
    environment = gsm8k()
    assert environment.episode(environment.tasks[0], seed=0).start() == [
        Message(
            "system",
            "Solve the problem step by step, each step on a line of its own. Then write the answer, a number, on a last line like this:\n"  # noqa: E501
            "#### <number>",
        ),
        Message("user", "Mia has 3 apples and buys 4 more. How many apples does she have?"),
    ]


def test_an_instruction_of_ones_own_or_none():
    environment = gsm8k(instruction="Finish with {answer_format} {{please}} {1}")
    assert environment.prompt == "Finish with #### <number> {please} {1}"
    bare = gsm8k(instruction="")
    assert [message.role for message in bare.episode(bare.tasks[0], 0).start()] == ["user"]


def test_demonstrations_with_and_without_annotations():
    plain, kept = gsm8k(), gsm8k(annotations=True)
    assert plain.demonstration(plain.tasks[3]) == [
        "A pen costs 12 / 3 = $4.\n5 pens cost 5 * 4 = $20.\n#### 20"
    ]
    assert kept.demonstration(kept.tasks[0]) == ["Mia has 3 + 4 = <<3+4=7>>7 apples.\n#### 7"]


def test_tasks_know_how_many_steps_they_take(tmp_path):
    assert [task.skills for task in gsm8k().tasks] == [(f"steps_{n}",) for n in (1, 1, 3, 2, 2, 1)]
    rows = [{"question": f"q{n}", "answer": "a\n\n" * n + "#### 1"} for n in (0, 7, 8, 12)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = gsm8k(tasks=tmp_path / "long.jsonl").tasks
    assert [task.skills[0] for task in tasks] == ["steps_0", "steps_7", "steps_8+", "steps_8+"]


def test_examples_come_from_the_problems_left_out_and_are_the_same_in_every_episode():
    environment = gsm8k(offset=2, num_tasks=2, examples=3)
    left_out = [task for task in gsm8k().tasks if task not in environment.tasks]
    assert [task.id for task in environment.tasks] == ["own_problems:3", "own_problems:4"]
    openings = {
        environment.episode(task, seed).start()[0].content for task in environment.tasks for seed in (0, 1)
    }
    (prompt,) = openings
    assert prompt.count("Problem: ") == prompt.count("\nSolution:\n") == 3
    assert sum(task.content["question"] in prompt for task in left_out) == 3
    assert not any(task.content["question"] in prompt for task in environment.tasks)
    assert "\n\nProblem: A box holds" in gsm8k(offset=2, num_tasks=2, examples=4).prompt
    assert "1,080 cans.\n#### 1,080" in gsm8k(offset=2, num_tasks=2, examples=4).prompt
    assert gsm8k(offset=2, num_tasks=2, examples=3).prompt == prompt
    others = {gsm8k(offset=2, num_tasks=2, examples=3, examples_seed=seed).prompt for seed in range(10)}
    assert len(others) > 1


def test_examples_from_a_file_never_show_a_task(tmp_path):
    # the first four of that file are the tasks
    environment = gsm8k(num_tasks=4, examples=2, examples_from=OWN)
    assert sum(task.content["question"] in environment.prompt for task in gsm8k().tasks[4:]) == 2
    assert not any(task.content["question"] in environment.prompt for task in environment.tasks)
    with pytest.raises(AgentPeftError, match=r"examples: 3, but only 2 problems of .*own_problems.jsonl"):
        gsm8k(num_tasks=4, examples=3, examples_from=OWN)
    with pytest.raises(AgentPeftError, match="examples: 1, but only 0 problems are left out"):
        gsm8k(examples=1)


# -- where the problems come from ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no rows"),
        ("nonsense\n", "line 1: is not JSON"),
        ('\n{"question": "q"}\n', "line 2: must be an object with two texts, question and answer"),
        ("[1]\n", "line 1: must be an object"),
        ('{"question": "q", "answer": "72"}\n', "line 1: needs a question, and an answer that ends"),
        ('{"question": "q", "answer": "#### many"}\n', "line 1: needs a question, and an answer"),
        ('{"question": " ", "answer": "#### 1"}\n', "line 1: needs a question, and an answer"),
    ],
)
def test_a_wrong_file_is_told_with_its_line(tmp_path, content, told):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(AgentPeftError) as raised:
        gsm8k(tasks=tmp_path / "x.jsonl")
    assert f"x.jsonl: {told}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unreadable_files_and_too_few_problems(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xff")
    with pytest.raises(AgentPeftError, match="is not UTF-8"):
        gsm8k(tasks=tmp_path / "x.jsonl")
    with pytest.raises(AgentPeftError, match=r"no.jsonl: cannot be read \(No such file"):
        gsm8k(tasks=tmp_path / "no.jsonl")
    with pytest.raises(AgentPeftError, match=r"offset: 2 \+ num_tasks: 5 is beyond its 6 problems"):
        gsm8k(offset=2, num_tasks=5)
    with pytest.raises(AgentPeftError, match="offset: 6 is beyond its 6 problems"):
        gsm8k(offset=6)


def test_lines_end_where_json_lines_end(tmp_path):
    entry = {"question": "a\u2028b\x85c?", "answer": "one\n#### 1"}
    (tmp_path / "x.jsonl").write_text(
        "\ufeff" + json.dumps(entry, ensure_ascii=False) + "\r\n\r\n", encoding="utf-8", newline=""
    )
    (task,) = gsm8k(tasks=tmp_path / "x.jsonl").tasks
    assert (task.id, task.content["question"]) == ("x:1", "a\u2028b\x85c?")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (f"{{tasks: {OWN}, split: test}}", "x.yaml:5: environment: split: a file has no split 'test'"),
        ("{tasks: openai/gsm8k}", "split is missing: 'openai/gsm8k' is taken for a hub id"),
        (f"{{tasks: {OWN}, instruction: '{{answer_form}}'}}", "there is no placeholder {answer_form}"),
        (f"{{tasks: {OWN}, examples_from: {OWN}}}", "examples_from has no effect with examples: 0"),
        (f"{{tasks: {OWN}, examples_seed: 3}}", "examples_seed has no effect with examples: 0"),
        (f"{{tasks: {OWN}, answer_format: '####'}}", "environment.answer_format: '####' must be one"),
        (f"{{tasks: {OWN}, example: 3}}", "environment.example: unknown key; did you mean"),
        (f"{{tasks: {OWN}, num_tasks: 0}}", "environment.num_tasks: must be greater than or equal to 1"),
        ("{tasks: nowhere.jsonl}", "environment.tasks: there is no file or folder 'nowhere.jsonl'"),
        (f"{{tasks: {OWN}, examples: 1, examples_from: no.jsonl}}", "there is no file or folder"),
        ("{tasks: 3}", "x.yaml:5: environment.tasks: must be"),
        ("{split: test}", "environment.tasks is missing (a file of rows (.jsonl, .json, .csv or .parquet)"),
    ],
)
def test_mistakes_in_a_configuration(tmp_path, written, told):
    (tmp_path / "x.yaml").write_text(TOP + written.replace("{", "{kind: gsm8k, ", 1) + "\n")
    with pytest.raises(AgentPeftError) as raised:
        read_config(tmp_path / "x.yaml")
    assert "\n" not in str(raised.value)
    assert told in str(raised.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("source", [str(OWN), "openai/gsm8k"])
def test_a_configuration_goes_there_and_back(tmp_path, source):
    split = "" if source.endswith("jsonl") else ", split: test"
    (tmp_path / "x.yaml").write_text(
        f"{TOP}{{kind: gsm8k, tasks: {source}{split}, examples: 2, examples_seed: 5}}\n"
    )
    config, _ = read_config(tmp_path / "x.yaml")
    dump_config(config, tmp_path / "again.yaml")
    again, _ = read_config(tmp_path / "again.yaml")
    assert again == config
    assert type(again.environment.tasks) is type(config.environment.tasks)
    assert isinstance(again.environment.tasks, Path) == source.endswith("jsonl")
    assert dict(effective_values(config))["environment.tasks"] == source


def test_a_path_needs_no_configuration_file():
    with pytest.raises(ValidationError, match="split is missing: 'data/train'"):
        GSM8KConfig(tasks="data/train")
    assert GSM8KConfig(tasks="data/train.jsonl").tasks == Path("data/train.jsonl")
    assert GSM8KConfig(tasks="/data/gsm8k/train").tasks == Path("/data/gsm8k/train")


# -- the hub, without a network ------------------------------------------------------------------------------


def table(rows):
    return pyarrow.Table.from_pylist(rows)


@pytest.fixture
def repository(tmp_path):
    """openai/gsm8k as it lies on the hub, of our own problems."""
    rows = [json.loads(line) for line in OWN.read_text(encoding="utf-8").splitlines()]
    folder = tmp_path / "repository" / "main"
    folder.mkdir(parents=True)
    parquet.write_table(table(rows[:2]), folder / "train-00000-of-00002.parquet")
    parquet.write_table(table(rows[2:4]), folder / "train-00001-of-00002.parquet")
    parquet.write_table(table(rows[4:]), folder / "test-00000-of-00001.parquet")
    return folder.parent


def test_parquet_becomes_the_files_that_the_environment_reads(repository, tmp_path):
    written = convert(HUB_SET, repository, tmp_path / "out")
    assert written == [tmp_path / "out" / "train.jsonl", tmp_path / "out" / "test.jsonl"]
    assert sorted((tmp_path / "out").iterdir()) == sorted(written)  # nothing is left aside
    train, test = (gsm8k(tasks=path).tasks for path in written)
    assert [task.content for task in (*train, *test)] == [task.content for task in gsm8k().tasks]
    assert (train[3].id, test[0].id) == ("train:4", "test:1")


def test_the_other_set_gets_its_structures_back(tmp_path):
    columns = [{"name": "a", "type": "INT"}]
    entry = {
        "sample_index": 8,
        "instruction": "[Add] a row.",
        "answer_info": {"direct": None, "md5": None, "sql": "INSERT INTO t VALUES (1, 'a')"},
        "table_info": {"name": "t", "column_info_list": columns, "row_list": "[[1, 'it''s'], [2, \"b\"]]"},
        "skill_list": ["insert"],
    }
    answer = {"direct": "[[1, null]]", "md5": None, "sql": "SELECT 1"}
    other = {**entry, "sample_index": 3, "answer_info": answer}
    check = '{"evaluation_command_item": {"script": "[ -f a ]"}}'
    system = {"sample_index": 0, "instruction": "x", "evaluation_info": check}
    for name, rows in {"db_bench": [entry, other], "os_interaction": [system]}.items():
        (tmp_path / "repository" / name).mkdir(parents=True)
        parquet.write_table(table(rows), tmp_path / "repository" / name / "train-00000-of-00001.parquet")
    places = tmp_path / "repository", tmp_path / "out"
    (db_bench,) = convert(db_bench_environment.HUB_SET, *places)
    assert db_bench == tmp_path / "out" / "entry_dict.json"
    found = json.loads(db_bench.read_text())
    assert list(found) == ["8", "3"]
    assert found["8"]["table_info"]["row_list"] == [[1, "its"], [2, "b"]]
    assert found["8"]["instruction"] == "[Add] a row."
    assert found["3"]["answer_info"]["direct"] == [[1, None]]
    (os_interaction,) = convert(os_environment.HUB_SET, *places)
    assert json.loads(os_interaction.read_text())["0"]["evaluation_info"] == json.loads(check)


def test_a_set_that_has_changed_is_told(tmp_path):
    with pytest.raises(AgentPeftError, match=r"openai/gsm8k: holds no .* file like main/train"):
        convert(HUB_SET, tmp_path, tmp_path / "out")
    with pytest.raises(AgentPeftError, match="there is no kind 'gsm8'; did you mean 'gsm8k'"):
        download_tasks("gsm8", tmp_path)
    with pytest.raises(AgentPeftError, match="has no tasks to download; choose db_bench or gsm8k or os_int"):
        download_tasks("arithmetic", tmp_path)
    (tmp_path / "db_bench").mkdir()
    (tmp_path / "db_bench" / "train.jsonl").write_text('{"sample_index": 1, "row_list": "__import__(1)"}\n')
    with pytest.raises(AgentPeftError, match="row_list: '__import__\\(1\\)' is neither JSON nor a literal"):
        convert(db_bench_environment.HUB_SET, tmp_path, tmp_path / "out")
    (tmp_path / "db_bench" / "train.jsonl").write_text('{"sample_index": 1}\n{"sample_index": 1}\n')
    with pytest.raises(AgentPeftError, match="one sample_index twice"):
        convert(db_bench_environment.HUB_SET, tmp_path, tmp_path / "out")


def test_files_that_cannot_be_read_are_told(repository, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(
            AgentPeftError, match=r"train-0.*parquet: reading parquet needs pyarrow: pip inst"
        ):
            convert(HUB_SET, repository, tmp_path / "out")
    (repository / "main" / "train-00000-of-00002.parquet").write_bytes(b"nonsense")
    with pytest.raises(AgentPeftError, match=r"train-0.*parquet: cannot be read \("):
        convert(HUB_SET, repository, tmp_path / "out")


def offline(home, *arguments):
    """Our command line with a hub cache of its own and no network."""
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def test_what_the_hub_does_not_give_is_one_line(tmp_path):
    found = offline(tmp_path, "-m", "agent_peft", "download", "gsm8k", "--output", str(tmp_path / "out"))
    assert found.returncode == 2
    assert found.stderr.startswith("agent-peft: openai/gsm8k: the hub does not give it (")
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_hub_id_through_the_hubs_own_cache(repository, tmp_path):
    cache = tmp_path / "hub" / "datasets--openai--gsm8k"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    repository.rename(cache / "snapshots" / ("0" * 40))
    script = (
        "from agent_peft.environments import load_environment\n"
        "made = load_environment({'kind': 'gsm8k', 'tasks': 'openai/gsm8k', 'split': 'test'})\n"
        "print([task.id for task in made.tasks], made.tasks[0].content['question'])"
    )
    found = offline(tmp_path, "-c", script)
    assert found.stdout == "['test:1', 'test:2'] Half of 18 birds fly away. How many stay?\n", found.stderr
    found = offline(tmp_path, "-m", "agent_peft", "download", "gsm8k", "--output", str(tmp_path / "out"))
    assert (
        found.stdout == f"wrote {tmp_path / 'out' / 'train.jsonl'}\nwrote {tmp_path / 'out' / 'test.jsonl'}\n"
    ), found.stderr
