"""Sets of tasks to train on: by name, from a file, a hub id, or rows in memory. Each is the configuration of
one of our environments, and a sequence of rows to look at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, overload

from agent_peft.environments import Environment, load_environment
from agent_peft.environments.chat import as_json, message_list, read_messages, read_prompt
from agent_peft.environments.graders import spelled
from agent_peft.environments.gsm8k import GOLD_MARK
from agent_peft.environments.quantities import last_quantity
from agent_peft.environments.task_files.download import MAX_ROWS
from agent_peft.environments.task_files.rows import SUFFIXES, file_or_hub_id, read_table
from agent_peft.files import write_atomic
from agent_peft.lookup import nearest
from agent_peft.printable import cause_of
from agent_peft.types import AgentPeftError, Message, Task

Form = Literal["sft", "rl"]
GSM8K_HUB = "openai/gsm8k"
GSM8K_FOLDER = Path("data/gsm8k")  # where `agent-peft download gsm8k` writes it
NAMES = ("gsm8k", "arithmetic", "db_bench")
CUSTOM = "a file of rows (.jsonl, .json, .csv or .parquet), or a hub id"
COLUMNS = {  # what a column is -> the names that it may have, the first ones first
    "question": ("question", "prompt", "problem", "instruction", "input"),
    "completion": ("completion", "response", "output", "solution", "full_answer"),
    "answer": ("ground_truth", "answer", "target", "completion", "response", "output", "solution"),
}


@dataclass(frozen=True)
class Dataset(Sequence[dict[str, Any]]):
    """Tasks to train on, and their rows.

    Attributes:
        environment: the keys of the environment that asks and grades them.
        heldout: those of an environment to measure on; None where nothing is held out.
        form: the rows: ``prompt``, ``completion`` and ``text`` (sft), or ``prompt`` and ``ground_truth``
            (rl).
        model_name: its chat template writes the prompts; None leaves them plain.

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

    @cached_property
    def truths(self) -> dict[str, Any]:
        """The right answers, also to what is held out, by the ids of the tasks."""
        truths = dict[str, Any]()
        for keys in (self.environment, *([] if self.heldout is None else [self.heldout])):
            with closing(load_environment(keys)) as environment:
                truths |= {task.id: _truth(environment, task) for task in environment.tasks}
        return truths

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
    """
    return find_dataset(dataset, split, max_samples, "sft", model_name)


def create_rl_dataset(
    dataset: Any = "gsm8k",
    split: str = "train",
    max_samples: int | None = None,
    model_name: str | None = None,
) -> Dataset:
    """As ``create_sft_dataset``: tasks with answers to grade by, rows of ``prompt`` and ``ground_truth``."""
    return find_dataset(dataset, split, max_samples, "rl", model_name)


def find_dataset(
    dataset: Any,
    split: str = "train",
    max_samples: int | None = None,
    form: Form = "sft",
    model_name: str | None = None,
    folder: Path = Path("datasets"),
) -> Dataset:
    """A dataset as ``create_sft_dataset`` takes it. Rows of memory and of a file are written to ``folder``
    in the form of our environments, under a name that their content decides.
    """
    if isinstance(dataset, Dataset):
        if max_samples is not None:
            raise AgentPeftError("max_samples: has no effect on a Dataset; set it where you create it")
        return dataset
    if max_samples is not None and not 0 < max_samples <= MAX_ROWS:
        raise AgentPeftError(f"max_samples: must be from 1 to {MAX_ROWS:,}, got {max_samples!r:.40}")
    name, heldout = "rows" if not isinstance(dataset, str | Path) else str(dataset), None
    if not isinstance(dataset, str | Path):
        keys = _of_rows(name, _rows_in_memory(dataset), split, folder) | {"limit": max_samples}
    elif name in _NAMED:
        keys, heldout = _NAMED[name](split, max_samples)
    else:
        source = file_or_hub_id(name)
        if isinstance(source, Path) and source.suffix not in SUFFIXES:
            raise AgentPeftError(f"dataset: there is no {name!r:.80}; {nearest(name, NAMES, CUSTOM)}")
        content = [row.content for row in read_table(source, split)[1]]
        part = split if isinstance(source, Path) else "train"  # the hub has cut out the split's rows already
        keys = _of_rows(name, content, part, folder) | {"limit": max_samples}
    return Dataset(name, keys, heldout, form, model_name)


# -- by name: the environment to train in, and the one to measure on -----------------------------------------

_Keys = dict[str, Any]


def _gsm8k(split: str, max_samples: int | None) -> tuple[_Keys, _Keys | None]:
    name, _, part = split.partition("[")
    file, test = GSM8K_FOLDER / f"{name}.jsonl", GSM8K_FOLDER / "test.jsonl"
    if name not in ("train", "test") or not file.is_file():  # a split names no other file
        return _gsm8k_of_hub(split, max_samples)
    keys = _gsm8k_keys(str(file), f"train[{part}" if part else None, max_samples)
    return keys, _gsm8k_keys(str(test), None) if test.is_file() and name != "test" else None


def _gsm8k_of_hub(split: str, max_samples: int | None) -> tuple[_Keys, _Keys | None]:
    keys = _gsm8k_keys(GSM8K_HUB, split, max_samples)
    return keys, None if split.partition("[")[0] == "test" else _gsm8k_keys(GSM8K_HUB, "test")


def _gsm8k_keys(tasks: str, split: str | None, limit: int | None = None) -> _Keys:
    return {"kind": "gsm8k", "tasks": tasks, "split": split, "limit": limit, "strict": False}


def _arithmetic(split: str, max_samples: int | None) -> tuple[_Keys, _Keys | None]:
    keys = {"kind": "arithmetic", "digits": 1, "num_tasks": max_samples}
    heldout = {"kind": "arithmetic", "digits": 1, "split": "heldout"}
    return (heldout | {"num_tasks": max_samples}, None) if _is_test(split) else (keys, heldout)


def _db_bench(split: str, max_samples: int | None) -> tuple[_Keys, _Keys | None]:
    skills = ["insert", "update", "delete", "where_single_condition"]  # as the quickstart configuration
    base = {"skills": skills, "combined": 0, "max_answer_chars": 120}
    rest = {"kind": "db_bench", "max_turns": 3, "max_observation_chars": 400}
    keys = rest | {"generate": base | {"split": "train", "num_tasks": max_samples or 800}}
    number = (max_samples if _is_test(split) else None) or 200
    heldout = rest | {"generate": base | {"split": "heldout", "seed": 1, "num_tasks": number}}
    return (heldout, None) if _is_test(split) else (keys, heldout)


def _is_test(split: str) -> bool:
    if split not in ("train", "test", "heldout"):
        raise AgentPeftError(f"split: generated tasks have train and test, and no {split!r:.60}")
    return split != "train"


_NAMED = {"gsm8k": _gsm8k, GSM8K_HUB: _gsm8k_of_hub, "arithmetic": _arithmetic, "db_bench": _db_bench}


# -- own rows ------------------------------------------------------------------------------------------------


def _rows_in_memory(dataset: Any) -> list[Any]:
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        raise AgentPeftError(
            f"dataset: {type(dataset).__name__} is none; give a name, a file, a list of mappings, or a "
            "Dataset of the datasets library"
        )
    rows = list(islice(dataset, MAX_ROWS + 1))
    if len(rows) > MAX_ROWS:
        raise AgentPeftError(f"dataset: has more than {MAX_ROWS:,} rows; take a part of it")
    return rows


def _of_rows(name: str, content: Sequence[Any], split: str, folder: Path) -> dict[str, Any]:
    """Write rows for an environment, which checks them when it reads them, and return its keys: preferences
    if they have chosen and rejected replies, or completions with labels; GSM8K if their answers are written
    like its; else questions.
    """
    if not content:
        raise AgentPeftError(f"dataset {name}: has no rows")
    first = content[0] if isinstance(content[0], Mapping) else {}
    labeled = {"prompt", "completion", "label"} <= first.keys()
    if labeled or {"chosen", "rejected"} <= first.keys():
        rows = [dict(row) if isinstance(row, Mapping) else row for row in content]
        keys: dict[str, Any] = {"kind": "preferences", "label": "label" if labeled else None}
    else:
        rows = [_known(f"{name}: row {number}", row) for number, row in enumerate(content, 1)]
        texts = all(isinstance(row["question"], str) and isinstance(row["answer"], str) for row in rows)
        if texts and all(GOLD_MARK in row["answer"] for row in rows):
            rows = [{"question": row["question"], "answer": row["answer"]} for row in rows]
            keys = {"kind": "gsm8k", "strict": False}
        else:
            numbers = all(last_quantity(spelled(row["answer"])) is not None for row in rows)
            grader = "number" if numbers else "exact"
            keys = {"kind": "questions", "grader": grader, "demonstration": "completion"}
    try:
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        file = folder / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    except (TypeError, ValueError) as error:
        raise AgentPeftError(
            f"dataset {name}: a value is not JSON ({error!s:.80}); give texts and numbers"
        ) from error
    try:
        write_atomic(file, text)  # also if it is there: it may hold something else
    except OSError as error:
        raise AgentPeftError(f"{file}: cannot be written ({error.strerror})") from error
    return keys | {"tasks": str(file), "split": None if split == "train" else split}


def _known(place: str, row: Any) -> dict[str, Any]:
    """A row with the columns question, answer and completion."""
    if not isinstance(row, Mapping):
        raise AgentPeftError(f"{place}: is not a mapping from columns to values")
    known = {}
    for column, names in COLUMNS.items():
        name = next((name for name in names if row.get(name) is not None), column)
        known[column] = _text_or_prompt(place, row.get(name), name, column)
    question, completion, answer = known.values()
    is_prompt = isinstance(question, str | list)
    if not is_prompt or isinstance(answer, bool) or not isinstance(answer, str | int | float):
        wrong = "answer" if is_prompt else "question"
        raise AgentPeftError(
            f"{place}: has no text or number as {wrong} (its columns are {', '.join(map(str, row)):.200}); "
            f"name one of them {' or '.join(COLUMNS[wrong][:3])}"
        )
    return known | {"completion": completion if isinstance(completion, str) else spelled(answer)}


def _text_or_prompt(place: str, value: Any, name: str, column: str) -> Any:
    """A value of a row. The messages of a question stay messages, and those of a reply become its text."""
    listed = message_list(place, value, name)
    if listed is None:
        return None if isinstance(value, list) else value
    if column == "question":
        read_prompt(place, listed, name)
        return listed
    messages = read_messages(place, listed, name, "assistant")
    if [message.role for message in messages] != ["assistant"]:
        raise AgentPeftError(f"{place}: {name} must be a text, or one message of the assistant's")
    return messages[0].content


# -- rows to look at -----------------------------------------------------------------------------------------


def _row(environment: Environment, task: Task, form: Form, render: Any) -> dict[str, Any]:
    with closing(environment.episode(task, 0)) as episode:
        prompt = render(episode.start())
    if form == "sft":
        solution = "\n".join(environment.demonstration(task) or ())
        return {"id": task.id, "prompt": prompt, "completion": solution, "text": f"{prompt}\n{solution}"}
    return {"id": task.id, "prompt": prompt, "ground_truth": _truth(environment, task)}


def _truth(environment: Environment, task: Task) -> Any:
    """The right answer: that of the row, else the demonstration."""
    answer = task.content.get("answer")
    if answer is None:
        answer = "\n".join(environment.demonstration(task) or ())
    return (
        spelled(answer).rpartition(GOLD_MARK)[2].strip() if isinstance(answer, str | int | float) else answer
    )


def _plain(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.content for message in messages)


def _template_of(model_name: str) -> Callable[[Sequence[Message]], str]:
    """What writes messages as a model reads them."""
    from transformers import AutoTokenizer

    from agent_peft.policies.config import PretrainedConfig
    from agent_peft.policies.models.bundled import resolve_model
    from agent_peft.policies.models.start import start_of

    try:
        model = resolve_model(start_of(PretrainedConfig(model=model_name)).model)
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise AgentPeftError(
            f"model_name: {model_name!r:.80} has no tokenizer here ({cause_of(error)})"
        ) from error
    if not tokenizer.chat_template:
        return _plain

    def render(messages: Sequence[Message]) -> str:
        return str(
            tokenizer.apply_chat_template(as_json(messages), tokenize=False, add_generation_prompt=True)
        )

    return render
