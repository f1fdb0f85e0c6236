"""The pages that say how something is done: their files are written, and their programs and commands are run,
as a reader would.
"""

import ast
import dataclasses
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agent_peft.algorithms import ALGORITHMS
from agent_peft.configuration import yaml12
from agent_peft.configuration.explain import effective_values
from agent_peft.configuration.load import load_config, read_config
from agent_peft.environments import load_environment
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.environments.db_bench.generator import GENERATED_SKILLS
from agent_peft.rollout.pairs import EPISODE_PAIR_METRICS
from agent_peft.rollout.sources import REFILL_METRICS, SUCCESS_METRICS
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.reading import load_run
from agent_peft.training.step_metrics import LAG_METRICS, THINKING_METRICS, metrics_of
from agent_peft.types import Outcome
from tests.conftest import case

DOCS = Path(__file__).parent.parent / "docs"
SRC = Path(__file__).parent.parent / "src"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# (\S+\.(?:py|yaml))\n")


def section(page: str, heading: str) -> str:
    """From its heading to the next one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    start = text.index(f"## {heading}\n")
    end = text.find("\n## ", start)
    return text[start : end if end >= 0 else len(text)].strip()


def follow(text: str, folder: Path, warm_process) -> None:
    """Write each block that begins with a file's name, run the commands of each console block."""
    for language, block in _BLOCK.findall(text):
        if name := _NAME.match(block):
            (folder / name[1]).write_text(block)
        elif language == "console":
            for line in block.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "agent-peft", f"only our own commands are run: {line}"
                done = warm_process.run("-m", "agent_peft", *arguments, folder=folder)
                assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def subtraction(tmp_path_factory, warm_process):
    """The folder of a reader who has added subtraction."""
    folder = tmp_path_factory.mktemp("reader")
    follow(section("arithmetic.md", "Adding an operation"), folder, warm_process)
    return folder


def test_adding_an_operation_takes_at_most_forty_lines():
    assert len(section("arithmetic.md", "Adding an operation").splitlines()) <= 40


@pytest.mark.slow
def test_subtraction_is_learnt(subtraction):
    lines = (subtraction / "runs/subtraction/metrics.jsonl").read_text().splitlines()
    steps = list(map(json.loads, lines))
    assert {m["demonstrations_incorrect"] for m in steps if m["stage"] == "sft"} == {0.0}
    attempts = [m["success"] for m in steps if m["stage"] == "rloo"]
    assert sum(attempts[:5]) / 5 > 0.1, "the supervised stage has taught nothing"
    assert sum(attempts[-5:]) / 5 > sum(attempts[:5]) / 5 + 0.05, attempts


@pytest.mark.slow
def test_subtraction_is_graded_right(subtraction, monkeypatch):
    monkeypatch.syspath_prepend(subtraction)
    written = yaml12.plain(yaml12.parse((subtraction / "subtraction.yaml").read_text(), "subtraction.yaml"))
    try:
        environment = load_environment(written["environment"])
    finally:
        sys.modules.pop("my_operations", None)
    signs = set()
    for task in environment.tasks:
        (gold,) = environment.demonstration(task)
        assert int(gold) == task.content["a"] - task.content["b"]
        assert environment.episode(task, 0).step(gold).outcome is Outcome.CORRECT
        assert environment.episode(task, 0).step(str(-1 - int(gold))).outcome is Outcome.INCORRECT
        signs.add(gold[0] == "-")
    assert signs == {True, False}


@pytest.mark.slow
def test_a_module_of_ones_own_learns(tmp_path, warm_process):
    follow(section("models.md", "A module of your own"), tmp_path, warm_process)
    lines = [json.loads(line) for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert [m["success"] for m in lines if m["stage"] == "rloo"][-1] > 0.3, (
        "guessing is right about one time in ten"
    )


@pytest.mark.slow
def test_an_evaluation_ends_a_stage_early(tmp_path, warm_process):
    follow(section("evaluation.md", "End a stage early"), tmp_path, warm_process)
    lines = (tmp_path / "runs/early/metrics.jsonl").read_text().splitlines()
    assert len(lines) < 400 and len(lines) % 20 == 0
    best = json.loads((tmp_path / "runs/early/checkpoints/best.json").read_text())
    assert best["metric"] == "evaluation.success" and best["step"] <= len(lines)


@pytest.mark.slow
def test_tables_of_ones_own_are_read_and_trained_on(tmp_path, warm_process):
    text = (DOCS / "questions.md").read_text(encoding="utf-8")
    tables = re.findall(r"^`(\S+\.jsonl)`\n```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in tables] == ["sums.jsonl", "chat.jsonl", "pairs.jsonl"]
    for name, rows in tables:
        (tmp_path / name).write_text(rows)
    follow(text, tmp_path, warm_process)
    for run in ("sums", "chat", "pairs"):
        assert len((tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()) == 3


def of_own_table(folder: Path, text: str, warm_process) -> None:
    (folder / "make_orders.py").write_text(next(block for _, block in _BLOCK.findall(text)))
    assert warm_process.run("make_orders.py", folder=folder).returncode == 0
    written = (folder / "orders.csv").read_text()
    for question, *others in re.findall(r"^\| (Order.*) \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE):
        assert f'"{question}",{",".join(others)}\n' in written
    follow(text, folder, warm_process)


@pytest.mark.slow
def test_the_tutorial_has_the_results_of_its_page(tmp_path, warm_process):
    text = (DOCS / "own_table.md").read_text(encoding="utf-8")
    of_own_table(tmp_path, text, warm_process)
    shown = re.findall(r"^│ success .*$", text, re.MULTILINE)
    for run, row in zip(("orders", "worked"), shown, strict=True):
        intervals = [tuple(map(int, pair)) for pair in re.findall(r"\((\d+)–(\d+)\)", row)]
        for step, (low, high) in zip((0, 12, 24), intervals, strict=True):
            # another processor rounds otherwise, and trains another adapter: both have an interval
            report = json.loads((tmp_path / f"runs/{run}/evaluations/step_{step:06}.json").read_text())
            here = report["success"]
            assert low <= 100 * here["high"] and 100 * here["low"] <= high, (run, step)


def test_the_page_says_what_the_code_has():
    text = (DOCS / "arithmetic.md").read_text(encoding="utf-8")
    assert f'`"{ALPHABET}"`' in text
    first = next(block for language, block in _BLOCK.findall(text) if language == "yaml")
    keys = yaml12.plain(yaml12.parse(first, "arithmetic.md"))["environment"]
    assert set(keys) == set(load_environment(keys).config.model_dump())
    for row, settings in (
        ("| `312101=3201` | `840+0630=804` |", {"answer": "worked"}),
        ("| `3201` | `804` |", {"answer": "reversed"}),
    ):
        shown = re.findall(r"`(.+?)`", row)
        for gold, operation, a, b in ((shown[0], "addition", 345, 678), (shown[1], "multiplication", 12, 34)):
            environment = load_environment({"kind": "arithmetic", "operation": operation, **settings})
            task = type(environment.tasks[0])("t", content={"a": a, "b": b})
            assert row in text
            assert environment.demonstration(task) == [gold]


SMALL = """
import os

import agent_peft as ap

load_policy, load_environment, load_config = ap.load_policy, ap.load_environment, ap.load_config
Stage, evaluate = ap.Stage, ap.evaluate


def small_policy(model, **keys):
    return load_policy(os.environ["TINY"] if model == "smollm2-135m" else model, **keys)


def small_environment(kind, **keys):
    if "generate" in keys:
        keys["generate"] = {**keys["generate"], "num_tasks": 2}
    return load_environment(kind, **keys)


def small_config(source, **keys):
    return load_config(source, **keys, tasks_per_step=4)


def small_stage(**keys):
    group = {} if keys["algorithm"] == "sft" else {"group_size": 2}
    return Stage(**{**keys, **group, "steps": 1, "tasks_per_step": 2, "sampling": {"max_new_tokens": 4}})


def small_evaluation(policy, environment, evaluation={}):
    sampling = {**evaluation.get("sampling", {}), "max_new_tokens": 4}
    return evaluate(policy, environment, {**evaluation, "sampling": sampling})


ap.load_policy, ap.load_environment, ap.load_config = small_policy, small_environment, small_config
ap.Stage, ap.evaluate = small_stage, small_evaluation
"""


@pytest.fixture(scope="module")
def tiny(smollm2, tmp_path_factory):
    """A model's folder, with SmolLM2's tokenizer and few random weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


PROGRAMS = [
    "README.md",
    "docs/python.md",
    "docs/debugging.md",
    "docs/evaluation.md",
    "docs/runs.md",
    "docs/trackers.md",
    "docs/trajectories.md",
]


@pytest.mark.parametrize("page", [case(page, fast=page == "README.md") for page in PROGRAMS])
def test_the_programs_of_a_page_run(page, tiny, tmp_path, warm_process):
    """Its Python blocks are one program. It runs with a tiny model, few tasks and short answers."""
    text = (DOCS.parent / page).read_text(encoding="utf-8")
    program = "\n".join(block for language, block in _BLOCK.findall(text) if language == "python")
    (tmp_path / "program.py").write_text(SMALL + program, encoding="utf-8")
    done = warm_process.run("program.py", folder=tmp_path, TINY=str(tiny))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_ports_of_trl_scripts_run(tiny, tmp_path, warm_process):
    shorter = {"model: smollm2-135m": f"model: {tiny}", "80%": "98%", "_size: 8 ": "_size: 2 "}
    shorter |= {"steps: 20 ": "steps: 2 ", "epochs: 2 ": "steps: 2 ", "_per_step: 8 ": "_per_step: 2 "}
    pages = [section("trl.md", f"{name} script and its port") for name in ("An SFT", "A GRPO")]
    (program,) = [block for _, block in _BLOCK.findall(pages[0]) if block.startswith("# make_sums.py")]
    (tmp_path / "make_sums.py").write_text(program)
    assert warm_process.run("make_sums.py", folder=tmp_path).returncode == 0
    for page in pages:
        for long, short in shorter.items():
            page = page.replace(long, short)
        follow(page, tmp_path, warm_process)
    assert load_run(tmp_path / "runs/grpo").evaluation("after grpo").report.success.tasks == 4
    assert list(load_run(tmp_path / "runs/sft").evaluation("after sft").report.means) == [
        "loss",
        "token_accuracy",
    ]


def test_every_program_of_every_page_imports_names_that_exist():
    missing = []
    for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        for language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(block)) if language == "python" else ():
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("agent_peft"):
                    module = importlib.import_module(str(node.module))
                    missing += [f"{page.name}: {a.name}" for a in node.names if not hasattr(module, a.name)]
    assert not missing


def test_the_configuration_of_the_readme_is_valid(tmp_path):
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (block,) = [block for language, block in _BLOCK.findall(text) if language == "yaml"]
    (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    assert [stage.name for stage in load_config(tmp_path / "mine.yaml").stages] == ["sft", "grpo"]


def test_the_page_of_metrics_has_each_metric():
    penalties = {"kl_coef": 1, "entropy_coef": 1}
    algorithms = [
        config_class(
            **{key: penalties[key] for key in penalties.keys() & config_class.model_fields.keys()},
            **({"constant_length": 1} if kind == "dr_grpo" else {}),
        ).build()
        for kind, config_class in ALGORITHMS.items()
    ]
    steps = {name for algorithm in algorithms for name in metrics_of(algorithm)} | {
        *REFILL_METRICS,
        *SUCCESS_METRICS,
        *EPISODE_PAIR_METRICS,
        *LAG_METRICS,
        *THINKING_METRICS,
    }
    report = {field.name for field in dataclasses.fields(EvaluationReport)}
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    names = re.findall(
        r"^\| `(\w+)` \|", text.replace(section("metrics.md", "Time and memory"), ""), re.MULTILINE
    )
    assert set(names) == steps | report


# numbers of README that no benchmark gives
NOT_MEASURED = [
    f"of {len(GENERATED_SKILLS)} skills",
    "Stable-Baselines3](docs/stable_baselines3.md)",
    "mean of 3 seeds (the quickstart's base score is 1 seed)",
    "24 minutes on two cores; prints a results table",
    "on two CPU cores",
    "two small classes, and a third one for keys",
    "a row of three functions",
    "at most 30 lines of code",
    "`agent-peft train mine.yaml seed=1`",
    "`agent-peft train other.yaml --from runs/mine:12`",
    "`agent-peft show runs/mine --step 9`",
    "`--task ID --attempt 0`",
    "`torchrun --nproc_per_node=2 -m agent_peft train mine.yaml`",
    "Exit codes are 0 (worked), 1 (failed), 2 (bad input) and 3 (a check failed)",
    "GSM8K",
    "with Python 3.11 or newer",
    "pip install torch==2.13.0",
    "Apache-2.0",
]
_NUMBER = re.compile(
    r"[\d½¼¾]|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|"
    r"ninety|hundred|thousand|million|half|quarter|twice|thrice|double|dozen)\b",
    re.IGNORECASE,
)


def readme() -> str:
    """In one line. Of a block of code, its comments are left: the rest is run, or loaded, by other tests."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    return " ".join(_BLOCK.sub(lambda block: "\n".join(re.findall("#.*", block[2])), text).split())


def unknown_numbers(text: str, known: list[str]) -> list[str]:
    """The numbers of ``text`` that stand in none of the passages ``known``, with what is around them."""
    for passage in known:
        text = text.replace(" ".join(passage.split()), " … ")
    return [text[max(0, at.start() - 30) : at.end() + 30] for at in _NUMBER.finditer(text)]


@pytest.fixture(scope="module")
def figures():
    """benchmarks/figures.py, which computes them from results/*.json."""
    return benchmark("figures")


def benchmark(name: str):
    folder = str(DOCS.parent / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def test_the_figures_of_the_pages_are_those_of_the_benchmarks(figures):
    lacking = figures.missing()
    assert not lacking, "\n\n".join(["python benchmarks/figures.py prints:", *lacking])
    for name in figures.AGENTS:
        figures.overrides_of(name)  # three seeds, one setting


def test_the_readme_has_no_figure_that_no_benchmark_gives(figures):
    text, known = readme(), [*figures.readme(), *NOT_MEASURED]
    assert unknown_numbers(text, known) == []
    assert not [passage for passage in NOT_MEASURED if passage not in text], (
        "the list has what README has not"
    )


def test_any_other_last_digit_of_a_figure_is_found(figures):
    text, known = readme(), [*figures.readme(), *NOT_MEASURED]
    for passage in figures.readme():
        passage = " ".join(passage.split())
        for number in re.finditer(r"\d+(?=\D|$)", passage):
            last = number.end() - 1
            wrong = passage[:last] + str((int(passage[last]) + 1) % 10) + passage[last + 1 :]
            assert unknown_numbers(text.replace(passage, wrong), known), wrong
    assert unknown_numbers(text + " It is 3 times faster.", known)
    assert unknown_numbers(text + " It is twice as fast.", known)


def test_the_command_of_each_row_of_the_readme_is_valid_and_that_of_the_measurement(figures):
    table = re.findall(
        r"^\| `([^`]+)` \|.*\*\*", (DOCS.parent / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert [command.split()[0] for command in table] == list(figures.AGENTS)
    for command in table:
        name, *overrides = shlex.split(command)
        config, _ = read_config(DOCS.parent / "configs" / f"{name}.yaml", overrides)
        assert overrides == figures.overrides_of(name) and len(config.stages) == 2


def benchmark_commands() -> list[str]:
    """Those of the pages; the log has those of older commits."""
    pages = [DOCS.parent / "README.md", DOCS.parent / "benchmarks/RESULTS.md", *sorted(DOCS.rglob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.name != "log.md")
    inline = re.findall(r"`python\s+(benchmarks/[^`]+)`", text)
    claims = re.findall(r"\| `(\w+\.py[^`]*)` \| \d{4}-", text)  # RESULTS begins with a table of them
    inline += [f"benchmarks/{command}" for command in claims]
    return [*inline, *re.findall(r"^ +python (benchmarks/[^#\n]+)", text, re.MULTILINE)]


def test_every_command_of_a_benchmark_names_a_script_that_takes_these_arguments():
    commands = benchmark_commands()
    assert len(commands) > 30
    for command in commands:
        path, *arguments = shlex.split(command)
        assert (DOCS.parent / path).is_file(), command
        source = (DOCS.parent / path).read_text(encoding="utf-8")
        for argument in arguments:
            if argument.startswith("--"):
                option = argument.removeprefix("--").replace("-", "_")
                assert option == "quick" or f" {option}=" in source, f"{command}: {argument}"
        if path == "benchmarks/seeds.py" and "NAME" not in command:
            flag = next(
                (at for at, argument in enumerate(arguments) if argument == "--seeds"), len(arguments)
            )
            assert read_config(DOCS.parent / arguments[0], arguments[1:flag])
        if path == "benchmarks/against_trl.py":
            assert set(arguments[:1]) <= set(benchmark("against_trl").SHAPES)


def test_the_commands_of_the_comparison_with_trl_are_those_that_the_results_record(figures):
    for name, found in figures.read("against_trl").items():
        path, *arguments = shlex.split(found["command"].removeprefix("python "))
        given = benchmark("against_trl").command(arguments)
        parts = [given.part, *([str(given.prompt)] if given.part == "step" else []), "generate"]
        assert path == "benchmarks/against_trl.py"
        assert name == " ".join([*parts, *(["defaults"] if given.settings == "defaults" else [])])
        assert given.pairs == len(found["ratios"])


def test_every_benchmark_is_in_the_smoke_run():
    """One that has a main is found there, or is run by another one. So none of them is forgotten."""
    smoke = benchmark("smoke")
    files = {
        path.stem: path.read_text(encoding="utf-8") for path in (DOCS.parent / "benchmarks").glob("*.py")
    }
    mains = {
        name for name, text in files.items() if re.search(r"^(def main\(|if __name__ ==)", text, re.MULTILINE)
    }
    assert set(smoke.scripts()) == mains - {"smoke"} - smoke.DRIVEN.keys()
    for name in smoke.scripts():
        assert "command_line(" in files[name], f"{name}.py has no --quick"
    for name, driver in smoke.DRIVEN.items():
        assert driver in smoke.scripts() and f'"{name}.py"' in files[driver]


def test_every_message_of_the_page_on_debugging_is_one_of_ours():
    """A row of its tables quotes what stands in src, its pieces parted by an ellipsis."""
    texts = "\n".join(
        "".join(
            part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
        for file in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if (parts := node.values if isinstance(node, ast.JoinedStr) else [node])
    )
    page = (DOCS / "debugging.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message \|.*\n\|[-|]*\n((?:\|.*\n)*)", page, re.MULTILINE)
    quotes = [
        quote
        for table in tables
        for row in table.splitlines()
        for quote in re.findall("`(.+?)`", row.split(" | ")[0])
    ]
    assert len(quotes) > 20
    assert not [quote for quote in quotes if quote not in texts]


def test_every_link_of_the_index_leads_somewhere_and_every_page_is_in_it():
    links = re.findall(r"\]\(([^)#]+)", (DOCS / "README.md").read_text(encoding="utf-8"))
    assert not [link for link in links if not (DOCS / link).exists()]
    assert not {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")} - {"README.md", *links}


def test_every_attack_of_the_table_names_a_test_that_is_there():
    text = (DOCS / "internals/attacks.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    families = int(re.search(r"^## (\d+) families$", text, re.MULTILINE)[1])
    numbers = [*range(1, families + 1), *range(1, len(rows) - families + 1)]
    assert len(rows) >= 168
    assert [int(row.split("|")[1]) for row in rows] == numbers, "the heading counts the first table"
    for row in rows:
        tests = re.findall(r"`([\w/]+\.py)`(?: (\w+))?", row)
        assert tests, row
        for file, name in tests:
            text = (Path(__file__).parent / file).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in text, row


def test_values_and_origins_of_a_configuration_that_extends_another_one(tmp_path, monkeypatch, warm_process):
    follow(section("config_files.md", "Extend another file"), tmp_path, warm_process)
    monkeypatch.chdir(tmp_path)
    config, provenance = read_config("mine.yaml")
    values = dict(effective_values(config))
    shown = section("config_files.md", "Where does a value come from?")
    rows = re.findall(r"^(\S+)\t(.+)\t(.+)$", shown, re.MULTILINE)
    assert len(rows) == 6
    for key, value, origin in rows:
        assert json.dumps(values[key]) == value
        assert Path(provenance.of(key)).name == Path(origin).name
