"""Reasoning Gym (https://github.com/open-thought/reasoning-gym): over 100 generators of problems; one turn.

The library scores the last ``<answer>…</answer>``; 1 is CORRECT. A question is held out always, or never.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any, Literal

from pydantic import Field

from agent_peft.environments.base import Environment, EnvironmentConfig
from agent_peft.environments.contract import error_text, quote
from agent_peft.environments.graders import Grade, QuestionEpisode
from agent_peft.lookup import install, nearest
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Message, Outcome, Task

PROMPT = "Think step by step. Then write the final answer between <answer> and </answer>."
# faults of the datasets of version 0.1.25, which are taken only on request
RUNS = "its scorer runs the agent's answer as Python code"  # with eval, or with sympy's parse_expr
HASHES = "its problems change with PYTHONHASHSEED, so a run that is resumed would have others"
FAULTS = {
    **dict.fromkeys(("binary_matrix", "countdown", "intermediate_integration", "n_queens"), RUNS),
    **dict.fromkeys(("polynomial_multiplication", "puzzle24", "simple_integration"), RUNS),
    **dict.fromkeys(("spiral_matrix", "string_insertion"), RUNS),
    **dict.fromkeys(("isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"), HASHES),
    "list_functions": "its problems change from load to load",
    "coin_flip": "its scorer takes 0 for every probability below 1",
    "complex_arithmetic": "its scorer takes nan for every number",
    "game_of_life_halting": "its scorer takes every answer for the right one",
}

DATASET = "name of a dataset, a list of names, or a mapping of names to the parameters of each"


class ReasoningGymConfig(EnvironmentConfig):
    """Problems of Reasoning Gym's seeded generators."""

    kind: str = "reasoning_gym"
    dataset: str | tuple[str, ...] | dict[str, dict[str, Any]] = Field(min_length=1, description=DATASET)
    split: Literal["train", "heldout"] = Field("train", description="train or heldout, with other questions")
    num_tasks: int = Field(500, ge=1, description="number of tasks; the datasets take turns")
    seed: int = Field(0, description="seed of the problems")
    system_prompt: str = Field(PROMPT, description="system message, which asks for the tags; empty for none")
    accept_faults: bool = Field(False, description="whether to take datasets that have a known fault")


class ReasoningGym(Environment):
    config_class = ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig) -> None:
        try:
            from reasoning_gym import factory, utils
        except ImportError as error:
            raise AgentPeftError(f"reasoning_gym needs: {install('reasoning-gym')}") from error
        self.config, self._factory, self._extract = config, factory, utils.extract_answer
        names = [config.dataset] if isinstance(config.dataset, str) else config.dataset
        problems = map(next, islice(cycle(map(self._draw, names)), config.num_tasks))
        self._problems = {task.id: (task, dataset, entry) for task, dataset, entry in problems}

    @property
    def tasks(self) -> Sequence[Task]:
        return [task for task, *_ in self._problems.values()]

    @property
    def sandboxed(self) -> bool:
        return not self.config.accept_faults

    def episode(self, task: Task, seed: int) -> QuestionEpisode:
        if task.id not in self._problems:
            raise AgentPeftError(f"task {quote(task.id)} is none of this environment's")
        task, dataset, entry = self._problems[task.id]
        prompt, question = self.config.system_prompt, Message("user", task.content["question"])
        opening = [Message("system", prompt), question] if prompt else [question]
        return QuestionEpisode(opening, lambda reply: self._grade(dataset, entry, reply))

    def demonstration(self, task: Task) -> Sequence[str] | None:
        reply = f"<answer>{task.content['answer']}</answer>"
        return [reply] if self.episode(task, 0).step(reply).outcome is Outcome.CORRECT else None

    def _grade(self, dataset: Any, entry: Any, reply: str) -> Grade:
        if (answer := self._extract(reply)) is None:
            return Grade(correct=False, valid=False, score=0.0)
        try:
            score = min(1.0, max(0.0, float(dataset.score_answer(answer, entry))))
        except Exception:  # the scorer cannot read what the agent wrote
            return Grade(correct=False, valid=False, score=0.0)
        return Grade(score == 1, score=score)

    def _draw(self, name: str) -> Iterator[tuple[Task, Any, Any]]:  # with its dataset, and its entry there
        if name not in (names := self._factory.DATASETS.keys()):
            raise AgentPeftError(f"environment.dataset: no {name!r}; {nearest(name, names)}")
        if name in FAULTS and not self.config.accept_faults:
            raise AgentPeftError(f"environment.dataset: {name}: {FAULTS[name]}; or set accept_faults: true")
        parameters = self.config.dataset[name] if isinstance(self.config.dataset, dict) else {}
        questions: set[str] = set()
        for chunk in count():  # of 500 problems; the library's seeds n and n + 1 have 499 in common
            known, seed = len(questions), derive(self.config.seed, "reasoning_gym", name, chunk) >> 32
            try:
                dataset = self._factory.create_dataset(name, seed=seed, size=500, **parameters)
                for entry in dataset:
                    question = entry["question"]
                    heldout = derive(0, "reasoning_gym", question) % 5 == 0  # one in five
                    if heldout == (self.config.split == "heldout") and question not in questions:
                        questions.add(question)
                        content = {"question": question, "answer": entry["answer"]}
                        yield Task(f"{name}-{len(questions)}", (name,), content), dataset, entry
            except Exception as error:
                raise AgentPeftError(f"environment.dataset: {name}: {error_text(error)}") from error
            if len(questions) == known:
                raise AgentPeftError(f"environment.num_tasks: {name} has only {known} different questions")
