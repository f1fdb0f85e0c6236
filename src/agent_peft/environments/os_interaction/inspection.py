"""Inspection of tasks, each time in a new episode: the gold must pass; nothing, and programs that do nothing,
must not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from agent_peft.environments.base import Inspection
from agent_peft.environments.os_interaction.config import OSInteractionConfig
from agent_peft.environments.os_interaction.episode import OSEpisode, demonstrate
from agent_peft.environments.os_interaction.problems import ShellProblem
from agent_peft.environments.os_interaction.protocol import PROTOCOLS, Command, Finish
from agent_peft.environments.os_interaction.shortcuts import executed_paths, warning, write_everywhere
from agent_peft.environments.os_interaction.tasks import read_problem
from agent_peft.environments.task_files.replay import replay
from agent_peft.types import AgentPeftError, InfrastructureError, Outcome, StepResult, StopReason, Task

ATTEMPTS = 3  # at a replay whose sandbox failed
# seconds between gold and finish: a command that the gold leaves in the background may need them, and an
# agent takes longer anyway
PAUSES = (0.0, 2.0)


def inspect_all(tasks: Sequence[Task], config: OSInteractionConfig) -> list[Inspection]:
    """Replay tasks, ``config.replay_threads`` at a time. Return their results in their order."""
    if len(tasks) <= 1 or config.replay_threads <= 1:
        return [inspect(task, config) for task in tasks]
    with ThreadPoolExecutor(config.replay_threads, thread_name_prefix="replay") as pool:
        return list(pool.map(lambda task: inspect(task, config), tasks))


def inspect(task: Task, config: OSInteractionConfig) -> Inspection:
    """Replay the gold, then replies that do nothing, through episodes."""
    try:
        problem = read_problem(task.id, task.content)
    except AgentPeftError as error:
        return Inspection(False, False, str(error))
    for _ in range(ATTEMPTS):
        try:
            gold = cause = _fault_of_gold(problem, config)
            nothing = _nothing_passes(problem, config)
            cause = cause or ("doing nothing passes" if nothing else None) or _own_verdict(problem, config)
            return Inspection(gold is None, nothing, cause, warning(problem))
        except InfrastructureError as error:
            failure = str(error)
    return Inspection(False, False, f"{ATTEMPTS} attempts failed: {failure}")


def _fault_of_gold(problem: ShellProblem, config: OSInteractionConfig) -> str | None:
    replies = demonstrate(problem, config)
    if replies is None:
        return "it has no ground truth that could be replayed"
    for pause in PAUSES:
        results = _replay(problem, config, replies, pause)
        if results[-1].outcome is Outcome.CORRECT:
            return None
    if results[-1].stop_reason is StopReason.TIMEOUT:
        return f"its ground truth takes longer than episode_seconds = {config.episode_seconds:g}"
    if not all(result.valid for result in results):
        return "its ground truth cannot be written as a reply"
    lines = results[0].observation.splitlines()
    said = [line for line in lines if not re.fullmatch(r"\[\d+\][+-]? +\d+", line)]  # no process numbers
    return f"the evaluation fails after the ground truth{f' ({said[-1][:100]})' if said else ''}"


def _nothing_passes(problem: ShellProblem, config: OSInteractionConfig) -> bool:
    write = PROTOCOLS[config.protocol].write
    replies = [write(Finish())] if not problem.needs_answer else []
    replies += [write(Finish(""))] if problem.answers else []
    return any(_replay(problem, config, [reply])[-1].outcome is Outcome.CORRECT for reply in replies)


def _own_verdict(problem: ShellProblem, config: OSInteractionConfig) -> str | None:
    """Say which programs of the agent are the verdict: it passes if they do nothing."""
    paths = executed_paths(problem)
    if not paths or problem.needs_answer:
        return None
    write = PROTOCOLS[config.protocol].write
    for content, what in (("", "an empty program"), ("#!/bin/sh\nexit 0\n", "a program that only exits 0")):
        replies = [write(Command(write_everywhere(paths, content))), write(Finish())]
        if _replay(problem, config, replies)[-1].outcome is Outcome.CORRECT:
            return f"it judges itself: {what} at {', '.join(paths)} passes"
    return None


def _replay(
    problem: ShellProblem, config: OSInteractionConfig, replies: Sequence[str], pause: float = 0.0
) -> list[StepResult]:
    return replay(OSEpisode(problem, config, seed=0), replies, pause).results
