"""The command line: what it prints, its exit codes, and one line per mistake."""

import json
import signal
import subprocess
import sys
import time

import pytest

from agent_peft import __version__
from agent_peft.cli import run

CONFIG = """\
run_dir: {folder}/run
policy:
  kind: scratch
  alphabet: "0123456789+*-= "
  architecture:
    {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
      num_attention_heads: 2, num_key_value_heads: 2}}
environment: {{kind: arithmetic, num_tasks: 8, digits: 1}}
sampling: {{max_new_tokens: 3, max_tokens: 16}}
tasks_per_step: 2
group_size: 2
steps: 2
stages: [sft, rloo]
"""
HELDOUT = "evaluation: {environment: {kind: arithmetic, num_tasks: 3, digits: 1, split: heldout}}\n"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(folder=tmp_path) + HELDOUT)
    return path


def test_help_and_version_do_not_wait_for_torch():
    code = (
        "import sys; from agent_peft.cli import run; assert run(['--help']) == run(['--version']) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout
    for command in ("train", "evaluate", "merge", "generate", "validate", "explain"):
        assert command in done.stdout


def test_a_shell_completes_commands_configurations_and_paths(tmp_path):
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "mine.yaml").touch()
    program = """if True:  # a fork for each line, since the imports take most of the time
        import os, sys
        from agent_peft.cli import main
        for line in sys.stdin.read().splitlines():
            print("--", flush=True)
            if not os.fork():
                words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
                os.environ.update(words, _AGENT_PEFT_COMPLETE="complete_bash")
                try:
                    main()
                finally:
                    assert "torch" not in sys.modules  # which takes seconds
            os.wait()
    """
    lines = "agent-peft tr\nagent-peft train qui\nagent-peft train quick/m"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, input=lines, capture_output=True, text=True)
    assert not done.stderr
    commands, configurations, paths = (part.split() for part in done.stdout.split("--\n")[1:])
    assert "train" in commands
    assert configurations == ["quick/", "quickstart"]
    assert paths == ["quick/mine.yaml"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train"], "Missing argument 'CONFIG'. (agent-peft train --help tells more)"),
        (
            ["evaluate", "runs/a/nowhere", "--config", "c.yaml"],
            "runs/a/nowhere: there is no run directory, adapter or model of this name",
        ),
        (["merge", "nowhere", "--output", "x"], "nowhere: there is no such run directory (seen from "),
        (
            ["generate", "db_bench", "num_tasks=few", "--output", "x"],
            'generate.num_tasks: must be a whole number, got "few"',
        ),
        (["generate", "db_bench", "num_tasks=3"], "Missing option '--output'"),
        (
            ["generate", "db_bench", "num_task=3", "--output", "x"],
            "generate.num_task: unknown key; did you mean 'num_tasks'?",
        ),
        (
            ["generate", "db_bench", "num_tasks", "--output", "x"],
            "'num_tasks': an override is written key=value",
        ),
        (
            ["generate", "db_bench", "num_tasks=3", "split=test", "--output", "x"],
            "generate.split: must be 'train', 'words', 'phrasing', 'composition' or 'heldout', got \"test\"",
        ),
        (["generate", "chess", "num_tasks=3", "--output", "x"], "there is no kind 'chess'; give one of"),
        (["generate", "gsm8k", "--output", "x"], "gsm8k has no tasks to generate; choose db_bench or"),
        (["validate", "db_bench", "tasks=nowhere.json"], "nowhere.json: cannot be read"),
        (["download", "db_bnech"], "there is no kind 'db_bnech'; did you mean 'db_bench'?"),
        (["explain", "quickstart", "--tasks-per-stpe=3"], "write tasks_per_step=VALUE"),
        (["train", "quikstart"], "no bundled configuration of this name; did you mean 'quickstart'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.startswith("agent-peft: ")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())  # nothing was written


def test_the_last_of_two_equal_keys_wins(config, capsys, caplog):
    assert run(["explain", str(config), "steps=3", "seed=1", "steps = 4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"]["stages.0.steps"]["value"] == 4
    assert caplog.messages == ["command line: 'steps = 4' replaces 'steps=3'"]
    caplog.clear()
    assert run(["validate", "arithmetic", "num_tasks=5", "num_tasks=3"]) == 0
    assert capsys.readouterr().out.startswith("3 tasks")
    assert caplog.messages == ["command line: 'num_tasks=3' replaces 'num_tasks=5'"]


def test_a_mistake_in_an_override_is_one_line(config, capsys):
    assert run(["train", str(config), "optimizer.learning_rat=1"]) == 2
    assert capsys.readouterr().err == (
        "agent-peft: command line: optimizer.learning_rat (for stages.0): unknown key; "
        "did you mean 'optimizer.learning_rate'?\n"
    )


@pytest.mark.parametrize(
    ("error", "code"), [("TrustError", 3), ("InfrastructureError", 1), ("AgentPeftError", 2)]
)
def test_what_failed_decides_the_exit_code(error, code, config, capsys, tmp_path, monkeypatch):
    name = f"failing_{error.lower()}"
    lines = (
        f"from agent_peft.environments.arithmetic import Arithmetic\nfrom agent_peft.types import {error}\n"
        f"class Env(Arithmetic):\n    def __init__(self, settings):\n        raise {error}('two\\nlines')\n"
    )
    (tmp_path / f"{name}.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    assert run(["explain", "--trust", str(config), f"environment={name}:Env"]) == code
    assert capsys.readouterr().err == "agent-peft: two lines\n"


def test_explain(config, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # a worker of pytest has one
    assert run(["explain", str(config), "stages.1.steps=5"]) == 0
    shown = capsys.readouterr().out
    assert "c.yaml:9, for" in shown
    assert "command line" in shown
    assert "5 steps of 2 × 2 = 4 episodes" in shown


def test_generate_says_what_it_wrote_and_validate_accepts_it(tmp_path, capsys):
    output = tmp_path / "deep" / "tasks.json"
    arguments = [
        "generate",
        "db_bench",
        "num_tasks=4",
        "seed=3",
        "skills=[insert, limit_only]",
        "split=heldout",
    ]
    assert run([*arguments, "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"wrote {output}: 4 tasks\n"
    entries = json.loads(output.read_text())
    assert [entry["skill_list"][0] for entry in entries.values()] == ["insert", "limit_only"] * 2 or len(
        entries
    ) == 4
    assert run(["validate", "db_bench", f"tasks={output}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tasks"], found["gold_correct"], found["nothing_correct"], found["rejected"]) == (
        4,
        4,
        0,
        [],
    )

    entries["broken"] = {**next(iter(entries.values()))}
    entries["broken"]["answer_info"] = {
        **entries["broken"]["answer_info"],
        "sql": "DELETE FROM no_such_table",
        "direct": None,
        "md5": "0" * 32,
    }
    output.write_text(json.dumps(entries))
    assert run(["validate", "db_bench", f"tasks={output}"]) == 1
    assert "cannot be used: broken: " in capsys.readouterr().out


def test_unknown_skills_are_told_with_the_valid_ones(tmp_path, capsys):
    arguments = ["generate", "db_bench", "num_tasks=4", "skills=[inserting]"]
    assert run([*arguments, "--output", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr().err
    assert "'inserting' is not a skill here; did you mean 'insert'?" in said
    assert said.count("\n") == 1


def test_a_folder_is_no_output_file(tmp_path, capsys):
    assert run(["generate", "db_bench", "num_tasks=1", "--output", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_run_from_its_start_to_a_merged_model(config, tmp_path, capsys):
    assert run(["train", str(config)]) == 0
    capsys.readouterr()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]

    assert run(["train", str(config)]) == 0  # nothing is left to do
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() == lines
    assert run(["train", str(config), "--fresh"]) == 0  # and the same again from the start
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() == lines

    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    stored = json.loads((tmp_path / "run" / "evaluations" / "step_000004.json").read_text())
    assert json.loads(capsys.readouterr().out)["outcomes"] == stored["outcomes"]

    assert (
        run(
            [
                "evaluate",
                str(tmp_path / "run"),
                "--attempts",
                "2",
                "--base",
                "evaluation.sampling.temperature=1",
            ]
        )
        == 0
    )
    assert "pass@2" in capsys.readouterr().out
    assert run(["evaluate", str(tmp_path / "run"), "--attempts", "2"]) == 2  # alike at temperature 0
    assert "attempts: 2 has no effect" in capsys.readouterr().err

    assert run(["merge", str(tmp_path / "run"), "--output", str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "config.json").is_file()
    assert run(["evaluate", str(tmp_path / "merged"), "--config", str(config), "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out.removeprefix(f"wrote {tmp_path / 'merged'}\n"))["outcomes"]
        == stored["outcomes"]
    )


@pytest.mark.slow
def test_merging_and_evaluating_in_one_go(tmp_path, capsys):
    """Each checkpoint's adapter and the model merged from it answer alike, and not all checkpoints do."""
    path, folder = tmp_path / "c.yaml", tmp_path / "run"
    path.write_text(CONFIG.format(folder=tmp_path))
    assert (
        run(["train", str(path), "stages.0.steps=40", "tasks_per_step=8", "optimizer.learning_rate=0.01"])
        == 0
    )
    both = ["merge", str(folder), "--evaluate", "--json", "--output"]
    asked = ["evaluation.sampling.temperature=1", "evaluation.attempts=8"]
    different = []
    for checkpoint in ("step_000040", "step_000042"):
        capsys.readouterr()
        assert run([*both, str(tmp_path / checkpoint), "--checkpoint", checkpoint, *asked]) == 0
        found = json.loads(capsys.readouterr().out)
        places = [
            {key: report.pop(key, None) for key in ("run", "checkpoint", "step")} for report in found.values()
        ]
        assert found["adapter"] == found["merged"]
        assert [place["checkpoint"] for place in places] == [checkpoint, None]
        assert found["adapter"]["attempts"] == 64
        assert (tmp_path / checkpoint / "config.json").is_file()
        different.append(found["adapter"]["success"]["value"])
    assert different[0] != different[1]

    assert run(["merge", str(folder), "--evaluate", "--output", str(tmp_path / "tabled"), *asked]) == 0
    said = capsys.readouterr().out
    assert "adapter" in said
    assert "merged" in said

    assert run([*both, str(tmp_path / "tabled"), *asked]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert run(["merge", str(folder), "--output", str(tmp_path / "x"), *asked]) == 2
    assert (
        "evaluation.sampling.temperature has no effect on merge; with --evaluate it may have"
        in capsys.readouterr().err
    )
    assert run(["merge", str(folder), "--output", str(tmp_path / "x"), "--json"]) == 2
    assert "--json has an effect with --evaluate only" in capsys.readouterr().err
    assert run(["merge", str(tmp_path), "--evaluate", "--output", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()


def test_interrupted(config, tmp_path, warm_process):
    """As a shell would do it: a signal to a process in the middle of training."""
    # a job in a shell's background inherits an ignored SIGINT, and so may this whole test run
    (tmp_path / "listening.py").write_text(
        "import runpy, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "runpy.run_module('agent_peft', run_name='__main__')\n"
    )
    told = tmp_path / "told.txt"
    with told.open("w") as output:
        command = ["listening.py", "train", str(config), "stages.1.steps=100000"]
        process = warm_process.start(*command, folder=tmp_path, output=output)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while (
            not (metrics.exists() and metrics.read_text().count("\n") > 2)
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()
    said = told.read_text()
    assert process.returncode == 130, said
    assert "agent-peft: interrupted; run the same command (without --fresh) to continue\n" in said
    assert "Traceback" not in said
