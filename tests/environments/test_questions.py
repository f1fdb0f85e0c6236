"""Questions of one's own: what is asked, how it is graded, and every mistake in one line."""

import json

import pytest
from huggingface_hub import constants
from pydantic import ValidationError

from agent_peft.configuration.load import dump_config, read_config
from agent_peft.configuration.yaml12 import dump
from agent_peft.environments import load_environment
from agent_peft.environments.questions import Questions, QuestionsConfig
from agent_peft.environments.task_commands import validate_tasks
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason

ROWS = [{"question": f"{n}+1=", "answer": n + 1} for n in range(10)]


@pytest.fixture
def table(tmp_path):
    """table(rows): a JSONL file of them."""

    def written(rows=ROWS, name="own.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    return written


def questions(tasks, **keys):
    return Questions(QuestionsConfig(tasks=tasks, **keys))


def step(environment, number, reply):
    episode = environment.episode(environment.tasks[number], seed=0)
    episode.start()
    return episode.step(reply)


def test_a_row_is_a_task(table):
    environment = questions(table())
    assert [task.id for task in environment.tasks] == [f"own:{line}" for line in range(1, 11)]
    assert environment.tasks[2].content == {"question": "2+1=", "answer": 3}
    episode = environment.episode(environment.tasks[2], seed=0)
    assert list(episode.start()) == [Message("user", "2+1=")]
    assert environment.reference(environment.tasks[2]) == "3"
    result = episode.step("3")
    assert result == StepResult("", True, Outcome.CORRECT, StopReason.FINISHED)
    assert step(environment, 2, "4").outcome is Outcome.INCORRECT


@pytest.mark.parametrize(
    ("keys", "right", "wrong"),
    [
        ({"grader": "exact"}, " 3 ", "it is 3"),
        ({"grader": "number"}, "it is 3.0", "3, no: 4"),
        ({"grader": "regex", "pattern": "= (\\d+)"}, "2 + 1 = 3", "3"),
    ],
)
def test_graders(table, keys, right, wrong):
    environment = questions(table(), **keys)
    assert step(environment, 2, right).outcome is Outcome.CORRECT
    assert step(environment, 2, wrong).outcome is Outcome.INCORRECT


def test_a_function_reads_the_whole_row_and_may_give_a_score(table, tmp_path, monkeypatch):
    (tmp_path / "own_rows.py").write_text(
        "def close(response, answer, task): return float(response) / answer * task.content['w']\n"
        "def wrong(response, answer, task): return 'yes'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = table([{"question": "1+1=", "answer": 2, "w": 0.5}])
    result = step(questions(path, grader="own_rows:close"), 0, "2")
    assert (result.outcome, result.score) == (Outcome.INCORRECT, 0.5)
    assert step(questions(path, grader="own_rows:close"), 0, "4").outcome is Outcome.CORRECT
    with pytest.raises(AgentPeftError, match="grader 'own_rows:wrong', task 'own:1': returned 'yes'"):
        step(questions(path, grader="own_rows:wrong"), 0, "2")


def test_columns_of_other_names_and_prompts_with_columns(table):
    first = {"problem": "Which?", "gold": "Rome", "choices": ["Rome", "Oslo"], "country": "Italy"}
    second = {"problem": "What?", "gold": "Oslo", "choices": [], "country": "{problem}"}
    rows = [
        {**first, "name": "r", "topics": ["geography", "easy"], "worked": "I think so: Rome"},
        {**second, "name": 7, "topics": "geography", "worked": None},
    ]
    environment = questions(
        table(rows),
        **{"question": "problem", "answer": "gold", "id": "name", "skills": "topics"},
        **{"demonstration": "worked", "grader": "regex", "pattern": r"(\w+)$"},
        system_prompt="You know {country}, {{country}}.",
        prompt="{question} {choices}",
    )
    assert [(task.id, task.skills) for task in environment.tasks] == [
        ("r", ("geography", "easy")),
        ("7", ("geography",)),
    ]
    assert [list(environment.episode(task, 0).start()) for task in environment.tasks] == [
        [Message("system", "You know Italy, {country}."), Message("user", 'Which? ["Rome", "Oslo"]')],
        [Message("system", "You know {problem}, {country}."), Message("user", "What? []")],
    ]
    assert [environment.demonstration(task) for task in environment.tasks] == [["I think so: Rome"], None]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", "question,answer,s\na,b,x\nc,d,\n"),
        ("t.jsonl", '{"question":"a","answer":"b","s":"x"}\n{"question":"c","answer":"d","s":null}\n'),
        ("t.jsonl", '{"question":"a","answer":"b","s":["x"]}\n{"question":"c","answer":"d"}\n'),
    ],
)
def test_a_row_without_a_skill_has_none(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert [task.skills for task in questions(tmp_path / name, skills="s").tasks] == [("x",), ()]


def test_a_prompt_may_do_without_the_question(table):
    environment = questions(table([{"english": "cat", "answer": "Katze"}]), prompt="{english} in German?")
    assert environment.episode(environment.tasks[0], 0).start()[0].content == "cat in German?"


def test_the_answer_itself_is_the_demonstration_of_exact_and_number(table):
    for grader in ("exact", "number"):
        assert questions(table(), grader=grader).demonstration(questions(table()).tasks[0]) == ["1"]
    regex = questions(table(), grader="regex", pattern="(.)")
    assert regex.demonstration(regex.tasks[0]) is None


def test_parts_and_limits(table):
    first, rest = (questions(table(), split=f"train[{part}]") for part in (":70%", "70%:"))
    assert len(first.tasks) == 7 and [*first.tasks, *rest.tasks] == list(questions(table()).tasks)
    assert [task.id for task in questions(table(), split="train[70%:]", limit=2).tasks] == ["own:8", "own:9"]


Q = {"question": "q", "answer": 1}


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        ([], {}, "holds no rows; give a file of rows"),
        (ROWS, {"answer": "gold"}, "there is no column 'gold' for answer; it has question, answer; set"),
        (ROWS, {"question": "qestion"}, "there is no column 'qestion' for question; it has question, ans"),
        (ROWS, {"id": "name"}, "there is no column 'name' for id"),
        (ROWS, {"prompt": "{questoin}"}, "there is no column 'questoin' for {questoin}"),
        ([*ROWS[:2], {"question": "q"}], {}, "line 3: has no answer (column 'answer')"),
        ([*ROWS[:2], {**Q, "answer": " "}], {}, "line 3: has no answer"),
        ([*ROWS[:2], {**Q, "answer": None}], {}, "line 3: has no answer"),
        ([*ROWS[:2], {**Q, "question": " "}], {}, "line 3: has no 'question', which the prompt shows"),
        ([{**Q, "answer": [1]}], {}, "line 1: the answer [1] is neither a text nor a number"),
        ([{**Q, "answer": True}], {}, "line 1: the answer True is neither a text nor a number"),
        ([Q, {**Q, "answer": "seven"}], {"grader": "number"}, "line 2: the answer 'seven' holds no number"),
        ([*ROWS[:2], ROWS[0]], {"id": "question"}, "line 3: the id '0+1=' is that of line 1"),
        ([{**Q, "n": None}], {"id": "n"}, "line 1: its id None is no text of 1 to 200"),
        ([{**Q, "s": 3}], {"skills": "s"}, "line 1: its skills 3 are no text and no list"),
        (ROWS, {"split": "train[50:]"}, "split: train[50:] holds none of its 10 tasks"),
    ],
)
def test_a_wrong_table_is_one_line(table, rows, keys, message):
    path = table(rows)
    with pytest.raises(AgentPeftError) as raised:
        questions(path, **keys)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert "\n" not in str(raised.value)


TOP = "run_dir: r\npolicy: {kind: pretrained, model: smollm2-135m}\nalgorithm: grpo\nsteps: 1\nenvironment: "


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("grader: exakt", "x.yaml:5: environment.grader: there is no grader 'exakt'; did you mean 'exact'?"),
        ("grader: 'no_such:thing'", "environment.grader: 'no_such:thing' cannot be imported"),
        ("grader: regex", "environment: pattern is missing: grader: regex needs a regular expression"),
        ("pattern: (a)", "environment: pattern has no effect with grader: exact"),
        ("grader: regex, pattern: '('", "environment.pattern: '(' is not a regular expression"),
        ("grader: regex, pattern: 'a'", "environment.pattern: 'a' has no group"),
        ("prompt: hello", "environment: prompt has no placeholder"),
        ("prompt: '{a}', question: b", "environment: question has no effect, since prompt has no {question}"),
        ("split: test", "environment: split: a file has no split 'test'"),
        ("anwser: x", "environment.anwser: unknown key; did you mean 'environment.answer'?"),
    ],
)
def test_a_wrong_configuration_is_one_line(table, tmp_path, keys, told):
    (tmp_path / "x.yaml").write_text(f"{TOP}{{kind: questions, tasks: {table()}, {keys}}}\n")
    with pytest.raises(AgentPeftError) as raised:
        read_config(tmp_path / "x.yaml")
    assert told in str(raised.value).replace(f"{tmp_path}/", "")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("question", ["question", "answer"])  # also without the key that then has no effect
def test_a_configuration_goes_there_and_back(table, tmp_path, question):
    prompt = f"{{{question}}} {{{{x}}}}"
    keys = f"grader: regex, pattern: '(\\d+)', prompt: '{prompt}', split: 'train[:5]', limit: 3"
    (tmp_path / "x.yaml").write_text(f"{TOP}{{kind: questions, tasks: {table()}, {keys}}}\n")
    config, _ = read_config(tmp_path / "x.yaml")
    dump_config(config, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml")[0] == config


def test_a_task_of_a_stranger_is_checked(table):
    environment = questions(table())
    with pytest.raises(AgentPeftError, match="task 'own:1': has no answer"):
        environment.episode(type(environment.tasks[0])("own:1", content={"question": "q"}), 0)


def test_a_hub_id_needs_a_split():
    with pytest.raises(
        ValidationError, match=r"split is missing: 'own/sums' is taken for a hub id .*such as train"
    ):
        QuestionsConfig(tasks="own/sums")


def test_a_hub_id_in_the_local_cache(tmp_path, monkeypatch):
    cache = tmp_path / "datasets--own--sums"
    rows = cache / "snapshots" / ("0" * 40) / "data"
    rows.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    files = {"train-00000-of-00002": (1, 2), "train-00001-of-00002": (3,), "train_hard": (9,)}
    for name, numbers in files.items():
        lines = [json.dumps({"question": f"{n}+1=", "answer": n + 1}) for n in numbers]
        (rows / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def read(split):
        tasks = load_environment("questions", tasks="own/sums", split=split).tasks
        return [(task.id, task.content["answer"]) for task in tasks]

    assert read("train") == [("train:1", 2), ("train:2", 3), ("train:3", 4)]
    assert read("train[2:]") == [("train:3", 4)]
    with pytest.raises(
        AgentPeftError, match=r"own/sums: holds no \.parquet or \.jsonl file of a split 'test'"
    ):
        read("test")


def test_validation_replays_the_demonstrations(table):
    report = validate_tasks("questions", tasks=table())
    assert (report["tasks"], report["gold_correct"], report["nothing_correct"]) == (10, 10, 0)
    rows = [{"question": "q", "answer": "a", "shown": "a"}, {"question": "q", "answer": "a", "shown": "b"}]
    report = validate_tasks("questions", tasks=table(rows), demonstration="shown")
    assert report["rejected"] == [{"id": "own:2", "cause": "its demonstration is graded incorrect"}]


TEN_LINES = """\
run_dir: {folder}/run
policy:
  kind: scratch
  alphabet: "0123456789+-*= "
  architecture: {{model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 16, n_positions: 64}}
environment: {{kind: questions, tasks: {tasks}, {keys}}}
sampling: {{max_new_tokens: 4}}
algorithm: reinforce
steps: 2
tasks_per_step: 4
"""


@pytest.mark.parametrize("keys", ["grader: exact", "grader: number", "grader: regex, pattern: '(.)$'"])
def test_ten_lines_of_yaml_train_on_ten_rows(table, tmp_path, keys):
    assert len(TEN_LINES.splitlines()) == 10
    text = TEN_LINES.format(folder=tmp_path, tasks=table(), keys=keys)
    train(read_config(_write(tmp_path / "c.yaml", text))[0])
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all("loss" in step for step in steps)


def test_questions_are_learnt_from_their_answers_and_then_measured(table, tmp_path):
    """A supervised stage learns four answers by heart, and the evaluation says so."""
    text = TEN_LINES.format(folder=tmp_path, tasks=table(ROWS[:4]), keys="grader: exact")
    settings = read_config(_write(tmp_path / "c.yaml", text))[0].model_dump(mode="json")
    del settings["stages"]
    settings |= {
        "algorithm": "sft",
        "steps": 40,
        "tasks_per_step": 4,
        "checkpoint": {"every": 40},
        "optimizer": {"learning_rate": 1e-2},
        "sampling": {"max_new_tokens": 4},
        "evaluation": {"environment": settings["environment"]},
    }
    before, after = train(read_config(_write(tmp_path / "c.yaml", dump(settings)))[0]).values()
    assert before.success.value == 0.0 and after.success.value >= 0.5


def _write(path, text):
    path.write_text(text, "utf-8")
    return path


SYSTEM, FIRST, SECOND = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1="},
    {"role": "user", "content": "2+{a}="},
)
TALK = [SYSTEM, FIRST, {"role": "assistant", "content": "2"}, SECOND]


@pytest.mark.parametrize("spelled", [lambda value: value, json.dumps, str], ids=["list", "JSON", "Python"])
@pytest.mark.parametrize("column", ["question", "prompt"])
def test_a_list_of_messages_is_a_conversation(table, column, spelled):
    environment = questions(table([{column: spelled(TALK), "answer": "4"}]), question=column)
    opening = environment.episode(environment.tasks[0], seed=0).start()
    assert [message.to_json() for message in opening] == TALK
    assert step(environment, 0, "4").outcome is Outcome.CORRECT


def test_the_prompt_shows_the_last_message_of_a_conversation(table):
    path = table([{"prompt": TALK[1:], "answer": 4, "unit": ["m"]}])
    environment = questions(path, prompt="{prompt} (in {unit})", system_prompt="In {unit}.")
    opening = environment.episode(environment.tasks[0], seed=0).start()
    assert [message.content for message in opening] == ['In ["m"].', "1+1=", "2", '2+{a}= (in ["m"])']


@pytest.mark.parametrize(
    ("question", "keys", "message"),
    [
        ([{"content": "1+1="}], {}, "question: message 1 is {'content': '1+1='}; write it as"),
        ([{"from": "human", "value": "1+1="}], {}, "question: message 1 is {'from': 'human'"),
        ([SYSTEM, "1+1="], {}, "question: message 2 is '1+1='; write it as"),
        ([{"role": "human", "content": "1"}], {}, "question: message 1 has the role 'human'"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "question: message 1 has no text"),
        ([{"role": "user"}], {}, "question: message 1 has no text as its content"),
        ([SYSTEM], {}, "question: the last message is the system's; end with the user's"),
        (TALK[:3], {}, "question: the last message is the assistant's; end with the user's"),
        ([FIRST, SECOND], {}, "question: message 2 is the user's where the assistant's is expected"),
        ([], {}, "has no 'question', which the prompt shows"),
        ('[{"role": "user", "content": "1"', {}, "question begins as a list of messages, and is not JSON"),
        (TALK, {"system_prompt": "Help."}, "its messages begin with a system message, and system_prompt"),
        (TALK, {"system_prompt": "{question}", "prompt": "{answer}"}, "question is a list of messages; show"),
    ],
)
def test_wrong_messages_are_one_line_with_the_row(table, question, keys, message):
    path = table([{"question": TALK[1:], "answer": 4}, {"question": question, "answer": 4}])
    if "system_prompt" in keys:
        path = table([{"question": "1+1=", "answer": 2}, {"question": question, "answer": 4}])
    with pytest.raises(AgentPeftError) as raised:
        questions(path, **keys)
    assert str(raised.value).startswith(f"{path}: line 2: {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("question", [["a", "b"], [[1, 2]], {"a": 1}, '{"a": 1}', "[1]", "[role]"])
def test_what_is_no_list_of_messages_is_shown_as_before(table, question):
    environment = questions(table([{"question": question, "answer": 4}]))
    (message,) = environment.episode(environment.tasks[0], seed=0).start()
    assert message.content == (question if isinstance(question, str) else json.dumps(question))
