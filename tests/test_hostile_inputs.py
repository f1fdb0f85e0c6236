"""The command line on what anybody may bring: each command ends with 0, 1 or 2, in one line, and within a
time and a memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import agent_peft
from agent_peft.cli import run
from agent_peft.configuration.yaml12 import dump
from agent_peft.printable import printable

SRC = str(Path(agent_peft.__file__).parents[1])
SETTINGS = {
    "run_dir": "run",
    "policy": {
        "kind": "scratch",
        "alphabet": "0123456789+*-= ",
        "architecture": {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16},
    },
    "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 4},
    "evaluation": {"environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 2}},
    "sampling": {"max_new_tokens": 3},
    "tasks_per_step": 2,
    "group_size": 2,
    "algorithm": {"kind": "rloo"},
    "steps": 1,
}
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\ud800\r\nforged line"


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    """``said(*arguments)``: the exit code, what was printed, and the one line of an error without its
    beginning.
    """
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str, str]:
        code, told = run(arguments), capsys.readouterr()
        errors = [line for line in told.err.split("\n") if line.startswith("agent-peft: ")]
        assert code in (0, 1, 2), told.err
        assert len(errors) == (code == 2 or (code == 1 and not told.out)), told.err
        assert "Traceback" not in told.err and "unforeseen" not in told.err
        for line in (told.out + told.err).split("\n"):
            columns = line.split("\t") if arguments[0] == "explain" else [line]  # tabs of our own
            assert all(printable(column) == column for column in columns), line
            assert len(columns) in (1, 2, 4), line
        return code, told.out, errors[0].removeprefix("agent-peft: ") if errors else ""

    return command


def write(**changes) -> str:
    Path("c.yaml").write_text(dump({**SETTINGS, **changes}))
    return "c.yaml"


# -- code that a configuration names -------------------------------------------------------------------------

NAMED = {
    "environment": {"environment": {"kind": "subprocess:Popen", "args": ["touch", "PWNED"]}},
    "evaluation": {"evaluation": {"environment": {"kind": "evil_module:E"}}},
    "operation": {"environment": {"kind": "arithmetic", "operation": "evil_module:f"}},
    "term": {"rewards": {"terms": [{"kind": "evil_module:f"}]}},
    "model": {"policy": {**SETTINGS["policy"], "architecture": {"model_type": "evil_module:E"}}},
}


@pytest.fixture
def evil(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text(
        "open('PWNED', 'w').close()\ndef f(t): return 0.0\n"
        "class E:\n    def __init__(self, *a, **k): f(open('CALLED', 'w'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("evil_module", None)


@pytest.mark.parametrize("name", NAMED)
def test_explain_runs_no_code_that_a_configuration_names(said, evil, name):
    code, out, _ = said("explain", write(**NAMED[name]))
    assert code == 0
    assert "this is code that CONFIG names, and --trust runs it" in out
    assert ("Popen" if name == "environment" else "evil_module") in out.split("not run and not checked: ")[1]
    assert "optimizer updates" in out  # the rest is explained
    assert not (evil / "PWNED").exists()


def test_explain_imports_what_it_is_told_to_trust(said, evil):
    code, out, _ = said("explain", "--trust", write(**NAMED["term"]))
    assert code == 0
    assert "not run" not in out
    assert (evil / "PWNED").exists()


@pytest.mark.parametrize("command", ["train", "explain", "serve", "evaluate"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("environment", "is not a subclass of agent_peft.environments.Environment; name one"),
        ("evaluation", "is not a subclass of agent_peft.environments.Environment; name one"),
        ("operation", "not an agent_peft.environments.arithmetic.Operation"),
    ],
)
def test_nothing_but_the_right_class_is_ever_called(said, evil, command, name, told):
    if command == "evaluate":
        Path("run").mkdir()
        Path(write(**NAMED[name])).rename("run/config.yaml")
    code, _, error = said(
        command,
        *(["--trust"] if command == "explain" else []),
        "run" if command == "evaluate" else write(**NAMED[name]),
    )
    assert code == 2
    assert told in error
    assert not (evil / "CALLED").exists()
    assert name != "environment" or not (evil / "PWNED").exists()


def test_a_class_that_is_no_model_is_not_called(said, evil):
    code, _, error = said("train", write(**NAMED["model"]))
    assert (code, "not a subclass of nn.Module" in error) == (2, True)
    assert not (evil / "CALLED").exists()


def test_explain_runs_no_commands_of_tasks_without_a_sandbox(said, tmp_path):
    task = {
        "description": "x",
        "create": {"init": "touch PWNED"},
        "evaluation": {"match": "a", "example": f"touch {tmp_path}/PWNED; echo a"},
    }
    (tmp_path / "t.json").write_text(json.dumps([task]))
    code, out, _ = said(
        "explain", write(environment={"kind": "os_interaction", "tasks": "t.json", "sandbox": "none"})
    )
    assert code == 0
    assert "sandbox: none" in out.split("not run and not checked: ")[1]
    assert not (tmp_path / "PWNED").exists()


# -- files ---------------------------------------------------------------------------------------------------

LAUGHS = "x: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"x{i}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)
FILES = {
    "empty": b"",
    "laughs": LAUGHS.encode(),
    "brackets": b"[" * 100_000,
    "deep": b"[" * 5_000 + b"]" * 5_000,
    "digits": b"a: " + b"9" * 5_000,
    "objects": b'{"a":' * 5_000,
    "bytes": bytes(range(256)),
    "NULs": b"\0" * 1_000,
    "escapes": dump({**SETTINGS, HOSTILE.replace("\ud800", ""): 1}).encode(),
    "surrogate": b'{"\\ud800": "\\ud800"}',
    "number": b"1",
    "null": b"null",
    "list": b"[1, [2], {}, null]",
    "ids": json.dumps({HOSTILE: {"answer_info": 1}, "b": None}).encode(),
    "long id": json.dumps({"x" * 1_000_000: 1}).encode(),
    "lines": b'{}\n1\n"a"\n[',
    "entry": json.dumps({"question": HOSTILE, "answer": HOSTILE}).encode(),
    "large": b" " * 2_000_000,
}
COMMANDS = {
    "train": ["train", "FILE"],
    "explain": ["explain", "FILE"],
    "serve": ["serve", "FILE"],
    "evaluate": ["evaluate", "nowhere", "--config", "FILE"],
    "validate": ["validate", "db_bench", "tasks=FILE"],
    "validate os": ["validate", "os_interaction", "tasks=FILE"],
    "gsm8k": ["explain", "c.yaml", "environment={kind: gsm8k, tasks: FILE}"],
    "db_bench": ["train", "c.yaml", "environment={kind: db_bench, tasks: FILE}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_any_file_in_the_place_of_the_right_one(said, command):
    write()
    for name, content in FILES.items():
        Path("FILE").write_bytes(content)
        code, _, error = said(*COMMANDS[command])
        assert code in (1, 2), name
        assert len(error) <= 8_100, name  # 2,000 characters, each an escape at worst
    Path("FILE").unlink()
    for make in (
        lambda: os.mkfifo("FILE"),
        lambda: Path("FILE").mkdir(),
        lambda: Path("FILE").symlink_to("/dev/zero"),
        lambda: None,
    ):
        make()
        assert said(*COMMANDS[command])[0] == 2
        Path("FILE").rmdir() if Path("FILE").is_dir() else Path("FILE").unlink(missing_ok=True)


def test_ids_and_causes_are_printed_with_escapes(said):
    entry = {
        "instruction": "x",
        "table_info": {"name": "t", "column_info_list": [{"name": "a", "type": "INT"}], "row_list": [[1]]},
        "answer_info": {"sql": "SELECT nosuch\x1b[31m FROM t", "direct": [[1]], "md5": None},
        "skill_list": ["select"],
    }
    Path("t.json").write_text(json.dumps({HOSTILE.replace("\ud800", ""): entry}))
    code, out, _ = said("validate", "db_bench", "tasks=t.json")
    assert code == 1
    assert "cannot be used: \\x1b]0;owned\\x07\\x1b[2J\\u202e\\r\\nforged line: " in out
    code, out, _ = said("validate", "db_bench", "tasks=t.json", "--json")
    assert json.loads(out)["rejected"][0]["id"] == HOSTILE.replace("\ud800", "")


# -- values --------------------------------------------------------------------------------------------------

LEAVES = [
    "seed",
    "threads",
    "steps",
    "tasks_per_step",
    "group_size",
    "run_dir",
    "name",
    "algorithm",
    "rewards",
    "stages",
    "engine",
    "policy.device",
    "policy.alphabet",
    "policy.lora",
    "policy.kind",
    "policy.architecture.n_layer",
    "policy.architecture.n_embd",
    "policy.architecture.model_type",
    "policy.architecture.n_positions",
    "environment",
    "environment.digits",
    "environment.num_tasks",
    "environment.seed",
    "environment.operation",
    "sampling.max_new_tokens",
    "sampling.max_tokens",
    "sampling.temperature",
    "sampling.stop",
    "evaluation.every",
    "evaluation.num_tasks",
    "evaluation.at",
    "optimizer.learning_rate",
    "checkpoint.every",
]
VALUES = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            -1,
            0,
            1,
            2**31,
            2**63,
            2**64,
            10**70,
            -(10**70),
            1e-300,
            1e300,
            float("inf"),
            float("nan"),
            "",
            "a:b",
            ":",
            "..:x",
            "\0",
        ]
    ),
    st.sampled_from(
        [
            "cuda:99",
            "meta",
            "nothing",
            "x" * 10_000,
            HOSTILE.replace("\ud800", ""),
            "/",
            "..",
            [],
            {},
            [[]],
            {"kind": ":"},
            {"kind": 3},
        ]
    ),
    st.text(max_size=5),
    st.integers(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.sampled_from(LEAVES), value=VALUES)
@example(where="policy.architecture.model_type", value={"kind": ":"})
def test_any_value_anywhere_is_explained_or_refused_in_one_line(said, where, value):
    changed = json.loads(json.dumps(SETTINGS))
    holder = changed
    *above, last = where.split(".")
    for key in above:
        holder = holder.setdefault(key, {})
    holder[last] = value
    try:
        Path("c.yaml").write_text(dump(changed))
    except UnicodeEncodeError:
        return
    said("explain", "c.yaml")


@pytest.mark.parametrize(
    "override",
    [
        "seed=" + "[" * 5_000,
        "seed=" + LAUGHS,
        "a" * 10_000,
        ".".join(["a"] * 500) + "=1",
        "=",
        "seed=",
        "seed=*a",
        "seed=!!python/name:os.system x",
        "stages.99999999999999999999.steps=1",
        "policy=&a {b: *a}",
        "policy.device=''",
    ],
)
def test_any_override_is_refused_in_one_line(said, override):
    assert said("explain", write(), override)[0] == 2


# -- as a process --------------------------------------------------------------------------------------------


def test_a_process_is_bounded_and_its_warnings_are_printable(tmp_path):
    """With an address space that leaves no room for what the files could grow to."""
    (tmp_path / "laughs.yaml").write_text(LAUGHS)
    os.mkfifo(tmp_path / "pipe")
    script = (
        "import sys, warnings; from agent_peft import cli\n"
        "sys.argv = ['agent-peft', '--version']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        f"warnings.warn({HOSTILE!r})\nprint({HOSTILE!r}.replace('\\x1b', ''))\n"
        "sys.exit(max(cli.run(['explain', name]) for name in ('laughs.yaml', 'pipe', '/dev/zero')))"
    )
    environment = {**os.environ, "PYTHONPATH": SRC, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30)),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(b"\nagent-peft: ") == 3, done.stderr
    assert b"\x1b" not in done.stderr and "\u202e".encode() not in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"\\ud800" in done.stdout
