"""Sets of tasks to train on: by name, from a file, a hub id, or rows in memory. Each is the configuration of
one of our environments, and a sequence of rows to look at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

from agent_peft.environments import Environment, load_environment
from agent_peft.environments.graders import spelled
from agent_peft.environments.gsm8k import GOLD_MARK
from agent_peft.environments.quantities import last_quantity
from agent_peft.environments.task_files.reading import MAX_FILE_BYTES
from agent_peft.environments.task_files.rows import SUFFIXES, file_or_hub_id, read_table
from agent_peft.files import MEGABYTE, write_atomic
from agent_peft.lookup import nearest
from agent_peft.types import AgentPeftError, Task

Form = Literal["sft", "rl"]
GSM8K_HUB = "openai/gsm8k"
GSM8K_FOLDER = Path("data/gsm8k")  # where `agent-peft download gsm8k` writes it
NAMES = ("gsm8k", "arithmetic", "db_bench")
CUSTOM = "a file of rows (.jsonl, .json, .csv or .parquet), or a hub id"
MAX_ROWS = 1_000_000
COLUMNS = {  # what a column is -> the names that it may have, the first ones first
    "question": ("question", "prompt", "problem", "instruction", "input"),
    "completion": ("completion", "response", "output", "solution", "full_answer"),
    "answer": ("ground_truth", "answer", "target", "completion", "response", "output", "solution"),
}


@dataclass(frozen=True)
class Dataset(Sequence[dict[str, Any]]):
    """Tasks to train on, and their rows.

    Attributes:
        name: what a user calls them.
        environment: the keys of the environment that asks and grades them.
        heldout: those of an environment to measure on; None where nothing is held out.
        form: the rows: ``prompt``, ``completion`` and ``text`` (sft), or ``prompt`` and ``ground_truth``
        (rl). model_name: prompts are as the chat template of this model writes them; None leaves them plain.

    >>> rows = Dataset("arithmetic", {"kind": "arithmetic", "digits": 1, "num_tasks": 2}, form="rl")
    >>> len(rows), sorted(rows[0])
    (2, ['ground_truth', 'id', 'prompt'])
    """

    name: str
    environment: Mapping[str, Any]
    heldout: Mapping[str, Any] | None = None
    form: Form = "sft"
    model_name: str | None = None

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """
        Raises:
            AgentPeftError: the tasks cannot be read.
        """
        with closing(load_environment(self.environment)) as environment:
            render = _plain if self.model_name is None else _template_of(self.model_name)
            return [_row(environment, task, self.form, render) for task in environment.tasks]

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def column_names(self) -> list[str]:
        return list(self.rows[0])


def create_sft_dataset(
    dataset: Any = "gsm8k",
    split: str = "train",
    max_samples: int | None = None,
    model_name: str | None = None,
) -> Dataset:
    """Tasks with solutions to learn from: rows of ``prompt``, ``completion`` and ``text``.

    Args:
        dataset: ``gsm8k``, ``arithmetic``, ``db_bench``; a file of rows; a hub id; or rows in memory: a list
            of mappings, or a ``Dataset`` of the ``datasets`` library.
        split: ``train``, ``test``, or a part such as ``train[:90%]``.
        max_samples: the most tasks; None takes all.
        model_name: writes the prompts with this model's chat template.

    Raises:
        AgentPeftError: there is no such dataset, it is too large, or its columns are not known.
    """
    return find_dataset(dataset, split, max_samples, "sft", model_name)


def create_rl_dataset(
    dataset: Any = "gsm8k",
    split: str = "train",
    max_samples: int | None = None,
    model_name: str | None = None,
) -> Dataset:
    """Tasks with answers to grade by: rows of ``prompt`` and ``ground_truth``. The arguments and errors are
    those of ``create_sft_dataset``.
    """
    return find_dataset(dataset, split, max_samples, "rl", model_name)


def find_dataset(
    dataset: Any,
    split: str = "train",
    max_samples: int | None = None,
    form: Form = "sft",
    model_name: str | None = None,
    folder: Path = Path("datasets"),
) -> Dataset:
    """
    Args:
        folder: where rows of memory and of a file are written in the form of our environments, under a name
            that their content decides.

    Raises:
        AgentPeftError: as ``create_sft_dataset``.
    """
    if isinstance(dataset, Dataset):
        return dataset
    if max_samples is not None and not 0 < max_samples <= MAX_ROWS:
        raise AgentPeftError(f"max_samples: must be from 1 to {MAX_ROWS:,}, got {max_samples!r:.40}")
    if not isinstance(dataset, str | Path):
        return _of_rows("rows", _rows_in_memory(dataset), split, max_samples, form, model_name, folder)
    name = str(dataset)
    if name in NAMES:
        keys, heldout = _NAMED[name](split, max_samples)
        return Dataset(name, keys, heldout, form, model_name)
    source = file_or_hub_id(name)
    if isinstance(source, Path) and source.suffix not in SUFFIXES:
        raise AgentPeftError(f"dataset: there is no {name!r:.80}; {nearest(name, NAMES, CUSTOM)}")
    if source == GSM8K_HUB:
        keys = _gsm8k_keys(GSM8K_HUB, split, max_samples)
        return Dataset(name, keys, _gsm8k_keys(GSM8K_HUB, "test", None), form, model_name)
    content = [row.content for row in read_table(source, split)[1]]
    part = split if isinstance(source, Path) else "train"  # the hub has cut out the split's rows already
    return _of_rows(name, content, part, max_samples, form, model_name, folder)


# -- by name -------------------------------------------------------------------------------------------------


def _gsm8k(split: str, max_samples: int | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    name, _, part = split.partition("[")
    file, test = GSM8K_FOLDER / f"{name}.jsonl", GSM8K_FOLDER / "test.jsonl"
    if name not in ("train", "test") or not file.is_file():  # a split names no other file
        heldout = _gsm8k_keys(GSM8K_HUB, "test", None)
        return _gsm8k_keys(GSM8K_HUB, split, max_samples), None if name == "test" else heldout
    keys = _gsm8k_keys(str(file), f"train[{part}" if part else None, max_samples)
    return keys, _gsm8k_keys(str(test), None, None) if test.is_file() and name != "test" else None


def _gsm8k_keys(tasks: str, split: str | None, limit: int | None) -> dict[str, Any]:
    return {"kind": "gsm8k", "tasks": tasks, "split": split, "limit": limit, "strict": False}


def _arithmetic(split: str, max_samples: int | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    keys = {"kind": "arithmetic", "digits": 1, "num_tasks": max_samples}
    heldout = {"kind": "arithmetic", "digits": 1, "split": "heldout"}
    return (heldout, None) if _is_test(split) else (keys, heldout)


def _db_bench(split: str, max_samples: int | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    skills = ["insert", "update", "delete", "where_single_condition"]  # as the quickstart configuration
    base = {"skills": skills, "combined": 0, "max_answer_chars": 120}
    rest = {"kind": "db_bench", "max_turns": 3, "max_observation_chars": 400}
    keys = rest | {"generate": base | {"split": "train", "num_tasks": max_samples or 800}}
    heldout = rest | {"generate": base | {"split": "heldout", "seed": 1, "num_tasks": max_samples or 200}}
    return (heldout, None) if _is_test(split) else (keys, heldout)


def _is_test(split: str) -> bool:
    if split not in ("train", "test", "heldout"):
        raise AgentPeftError(f"split: generated tasks have train and test, and no {split!r:.60}")
    return split != "train"


_NAMED = {"gsm8k": _gsm8k, "arithmetic": _arithmetic, "db_bench": _db_bench}


# -- rows of one's own ---------------------------------------------------------------------------------------


def _rows_in_memory(dataset: Any) -> list[Any]:
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        raise AgentPeftError(
            f"dataset: {type(dataset).__name__} is none; give a name, a file, a list of mappings, or a "
            "Dataset of the datasets library"
        )
    rows: list[Any] = []
    for row in dataset:
        if len(rows) == MAX_ROWS:
            raise AgentPeftError(f"dataset: has more than {MAX_ROWS:,} rows; take a part of it")
        rows.append(dict(row) if isinstance(row, Mapping) else row)
    return rows


def _of_rows(
    name: str,
    content: Sequence[Any],
    split: str,
    max_samples: int | None,
    form: Form,
    model_name: str | None,
    folder: Path,
) -> Dataset:
    """The environment of rows: preferences if they have chosen and rejected replies or labels, that of GSM8K
    if their answers are written like its, else questions.
    """
    if not content:
        raise AgentPeftError(f"dataset {name}: has no rows")
    first = content[0] if isinstance(content[0], Mapping) else {}
    preferences = {"chosen", "rejected"} <= first.keys() or "label" in first
    rows = [
        dict(row) if preferences and isinstance(row, Mapping) else _known(f"{name}: row {number}", row)
        for number, row in enumerate(content, 1)
    ]
    if preferences:
        keys: dict[str, Any] = {"kind": "preferences", "label": "label" if "label" in first else None}
    elif all(isinstance(row["answer"], str) and GOLD_MARK in row["answer"] for row in rows):
        rows = [{"question": row["question"], "answer": row["answer"]} for row in rows]
        keys = {"kind": "gsm8k", "strict": False}
    else:
        numbers = all(last_quantity(spelled(row["answer"])) is not None for row in rows)
        keys = {
            "kind": "questions",
            "grader": "number" if numbers else "exact",
            "demonstration": "completion",
        }
    try:
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        text.encode()
    except (TypeError, ValueError) as error:
        raise AgentPeftError(
            f"dataset {name}: a value is not JSON ({error!s:.80}); give texts and numbers"
        ) from error
    if len(text.encode()) > MAX_FILE_BYTES:
        raise AgentPeftError(
            f"dataset {name}: is larger than {MAX_FILE_BYTES // MEGABYTE} MB, which is the most that is "
            "read; take a part of it"
        )
    file = folder / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not file.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text)
        except OSError as error:
            raise AgentPeftError(f"{file}: cannot be written ({error.strerror})") from error
    part = None if split == "train" else split
    return Dataset(
        name, keys | {"tasks": str(file), "split": part, "limit": max_samples}, None, form, model_name
    )


def _known(place: str, row: Any) -> dict[str, Any]:
    """A row with the columns question, answer and completion.

    Raises:
        AgentPeftError: one is missing.
    """
    if not isinstance(row, Mapping):
        raise AgentPeftError(f"{place}: is no mapping from columns to values")
    known = {}
    for column, names in COLUMNS.items():
        known[column] = next((row[name] for name in names if row.get(name) is not None), None)
    question, answer = known["question"], known["answer"]
    if not isinstance(question, str) or isinstance(answer, bool) or not isinstance(answer, str | int | float):
        wrong = "question" if not isinstance(question, str) else "answer"
        raise AgentPeftError(
            f"{place}: has no text or number as {wrong} (its columns are {', '.join(map(str, row)):.200}); "
            f"name one of them {' or '.join(COLUMNS[wrong][:3])}"
        )
    completion = known["completion"]
    known["completion"] = completion if isinstance(completion, str) else spelled(answer)
    return known


# -- rows to look at -----------------------------------------------------------------------------------------


def _row(environment: Environment, task: Task, form: Form, render: Any) -> dict[str, Any]:
    with closing(environment.episode(task, 0)) as episode:
        prompt = render(episode.start())
    gold = environment.demonstration(task)
    if form == "sft":
        completion = "\n".join(gold or ())
        return {"id": task.id, "prompt": prompt, "completion": completion, "text": f"{prompt}\n{completion}"}
    answer = task.content.get("answer", "\n".join(gold or ()))
    truth = (
        spelled(answer).rpartition(GOLD_MARK)[2].strip() if isinstance(answer, str | int | float) else answer
    )
    return {"id": task.id, "prompt": prompt, "ground_truth": truth}


def _plain(messages: Sequence[Any]) -> str:
    return "\n\n".join(message.content for message in messages)


def _template_of(model_name: str) -> Any:
    """What writes messages as a model reads them."""
    from transformers import AutoTokenizer

    from agent_peft.policies.config import PretrainedConfig
    from agent_peft.policies.models.bundled import resolve_model
    from agent_peft.policies.models.start import start_of

    try:
        model = resolve_model(start_of(PretrainedConfig(model=model_name)).model)
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise AgentPeftError(
            f"model_name: {model_name!r:.80} has no tokenizer here ({cause:.200})"
        ) from error
    if not tokenizer.chat_template:
        return _plain

    def render(messages: Sequence[Any]) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True))

    return render
