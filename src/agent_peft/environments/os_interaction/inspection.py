"""Which tasks can be used: the gold must pass, and doing nothing must not, each in a fresh episode."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from agent_peft.environments.os_interaction.episode import OSEpisode, Rules, demonstrate
from agent_peft.environments.os_interaction.problems import Problem
from agent_peft.environments.os_interaction.protocol import PROTOCOLS, Finish
from agent_peft.environments.os_interaction.tasks import read_problem
from agent_peft.environments.task_files.replay import Inspection
from agent_peft.types import AgentPeftError, InfrastructureError, Outcome, StepResult, StopReason, Task

ATTEMPTS = 3  # at a replay whose sandbox failed
PAUSES = (
    0.0,
    2.0,
    # seconds between gold and finish: what a gold left running in the background may need them, an agent takes
    # them anyway
)


def inspect_all(tasks: Sequence[Task], rules: Rules, threads: int) -> list[Inspection]:
    """Replay tasks, several at a time; one result each, in their order."""
    if len(tasks) <= 1 or threads <= 1:
        return [inspect(task, rules) for task in tasks]
    with ThreadPoolExecutor(threads, thread_name_prefix="replay") as pool:
        return list(pool.map(lambda task: inspect(task, rules), tasks))


def inspect(task: Task, rules: Rules) -> Inspection:
    """Replay the gold, then replies that do nothing, through episodes."""
    try:
        problem = read_problem(task.id, task.content)
    except AgentPeftError as error:
        return Inspection(False, False, str(error))
    for attempt in range(1, ATTEMPTS + 1):
        try:
            cause = _fault_of_gold(problem, rules)
            nothing = _nothing_passes(problem, rules)
            return Inspection(cause is None, nothing, cause or ("doing nothing passes" if nothing else None))
        except InfrastructureError as error:
            if attempt == ATTEMPTS:
                return Inspection(False, False, f"{ATTEMPTS} attempts failed: {error}")
    raise AssertionError


def _fault_of_gold(problem: Problem, rules: Rules) -> str | None:
    replies = demonstrate(problem, rules)
    if replies is None:
        return "it has no ground truth that could be replayed"
    for pause in PAUSES:
        results = _replay(problem, rules, replies, pause)
        if results[-1].outcome is Outcome.CORRECT:
            return None
    if results[-1].stop_reason is StopReason.TIMEOUT:
        return f"its ground truth takes longer than episode_seconds = {rules.episode_seconds:g}"
    if not all(result.valid for result in results):
        return "its ground truth cannot be written as a reply"
    said = [
        line for line in results[0].observation.splitlines() if not re.fullmatch(r"\[\d+\][+-]? +\d+", line)
    ]  # no process numbers
    return f"the evaluation fails after the ground truth{f' ({said[-1][:100]})' if said else ''}"


def _nothing_passes(problem: Problem, rules: Rules) -> bool:
    write = PROTOCOLS[rules.protocol].write
    replies = [write(Finish())] if not problem.needs_answer else []
    replies += [write(Finish(""))] if problem.answers else []
    return any(_replay(problem, rules, [reply])[-1].outcome is Outcome.CORRECT for reply in replies)


def _replay(problem: Problem, rules: Rules, replies: Sequence[str], pause: float = 0.0) -> list[StepResult]:
    episode = OSEpisode(problem, rules, seed=0)
    try:
        episode.start()
        results = []
        for reply in replies:
            if reply is replies[-1]:
                time.sleep(pause)
            results.append(episode.step(reply))
            if results[-1].done:
                break
        return results
    finally:
        episode.close()
