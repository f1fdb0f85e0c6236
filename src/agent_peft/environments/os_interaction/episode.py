"""An episode of OS interaction: the machine, the agent's replies, and the grade."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing

from agent_peft.environments.base import Episode
from agent_peft.environments.clock import Clock
from agent_peft.environments.os_interaction.config import OSInteractionConfig
from agent_peft.environments.os_interaction.grader import grade
from agent_peft.environments.os_interaction.problems import Matches, Script, ShellProblem
from agent_peft.environments.os_interaction.protocol import PROTOCOLS, Command, Finish, Reply
from agent_peft.environments.templates import fill
from agent_peft.environments.tool_calls import MalformedReply
from agent_peft.sandbox.base import CommandResult, MachineLost, Sandbox
from agent_peft.sandbox.build import build_sandbox
from agent_peft.seeding import derive
from agent_peft.types import InfrastructureError, Message, Outcome, StepResult, StopReason

logger = logging.getLogger(__name__)


class OSEpisode(Episode):
    """An episode: at most ``max_turns`` replies, of which the last should be a finish (or an answer).

    Another thread may close the episode: ``close`` waits until the current step is done.
    """

    def __init__(self, problem: ShellProblem, config: OSInteractionConfig, seed: int) -> None:
        self._problem, self._config, self._seed = problem, config, seed
        self._protocol = PROTOCOLS[config.protocol]
        self.tools = self._protocol.tools if problem.answers else self._protocol.tools[:-1]
        self._sandbox: Sandbox | None = None
        self._turns = 0
        self._done = False
        self._clock = Clock(config.episode_seconds)
        # a machine's descriptors must not be closed, and given to another's, while a step reads them
        self._lock = threading.RLock()

    def start(self) -> Sequence[Message]:
        problem, config = self._problem, self._config
        with self._lock:
            if self._done or self._sandbox is not None:
                raise RuntimeError("the episode was started before")
            self._sandbox = prepare(problem, config)
            try:
                start_programs(problem, config, self._sandbox, self._seed)
            except BaseException:
                self.close()
                raise
        system = self._protocol.prompt(config.max_turns, problem.answers, config.system_prompt)
        user = Message("user", fill(config.prompt, {"instruction": problem.instruction}))
        return (Message("system", system), user) if system else (user,)

    def step(self, action: str) -> StepResult:
        with self._lock:
            if self._done or self._sandbox is None:
                raise RuntimeError(
                    "the episode is done or closed" if self._done else "the episode was not started"
                )
            try:
                return self._act(self._sandbox, action)
            except MachineLost as error:
                return self._judge(error)
            except OSError as error:
                raise InfrastructureError(f"a sandbox failed: {error}") from error

    def _act(self, sandbox: Sandbox, action: str) -> StepResult:
        self._turns += 1
        reply: Reply | None = None
        try:
            reply = self._protocol.parse(action)
        except MalformedReply as malformed:
            why = str(malformed)
        if isinstance(reply, Finish) and reply.answer is not None and not self._problem.answers:
            how = "call finish." if self.tools else f"write\n{self._protocol.write(Finish())}"
            reply, why = None, f"This task asks for no answer. When it is done, {how}"
        if isinstance(reply, Finish):
            done = grade(self._problem, reply.answer, sandbox, self._run_example, self._config.script_timeout)
            return self._end(StopReason.FINISHED, Outcome.CORRECT if done else Outcome.INCORRECT, valid=True)
        if self._turns >= self._config.max_turns:  # nobody would see what the command did
            return self._end(StopReason.TURN_LIMIT, Outcome.INCORRECT, valid=reply is not None)
        if reply is None:
            return StepResult(why, valid=False)
        with self._clock.running():
            result = sandbox.run(reply.text, min(self._config.command_timeout, self._clock.left))
        if self._clock.ran_out:
            return self._end(StopReason.TIMEOUT, Outcome.INCORRECT, valid=True)
        return StepResult(
            observation(result, self._config.max_observation_chars, self._config.command_timeout)
        )

    def close(self) -> None:
        with self._lock:
            self._done = True
            if self._sandbox is not None:
                self._sandbox.close()

    def _judge(self, error: MachineLost) -> StepResult:
        """Grade an episode whose machine was lost: incorrect if a new one works, as the agent caused it."""
        self.close()
        try:
            with build_sandbox(self._config.sandbox, self._config.limits, self._config.runtime) as other:
                well = other.run_fresh("true", self._config.script_timeout).ok
        except (InfrastructureError, OSError) as failure:
            raise InfrastructureError(
                f"{error}, and a new sandbox does not work either: {failure}"
            ) from failure
        if not well:
            raise InfrastructureError(f"{error}, and a new sandbox does not work either")
        logger.warning("%s; a new one works: the episode counts as incorrect", error)
        return self._end(StopReason.CRASHED, Outcome.INCORRECT, valid=True)

    def _end(self, reason: StopReason, outcome: Outcome, valid: bool) -> StepResult:
        self.close()
        return StepResult("", done=True, outcome=outcome, stop_reason=reason, valid=valid)

    def _run_example(self, example: Script) -> CommandResult:
        """Run an example on a machine as the agent found it."""
        try:
            with closing(prepare(self._problem, self._config)) as sandbox:
                start_programs(self._problem, self._config, sandbox, self._seed)
                return sandbox.run_fresh(example.bash, self._config.script_timeout)
        except MachineLost as error:
            raise InfrastructureError(str(error)) from error  # the agent was never there


def prepare(problem: ShellProblem, config: OSInteractionConfig) -> Sandbox:
    """Start a machine, and run the task's initialization on it. The value of bash's RANDOM is fixed there, so
    that all episodes of a task get the same machine. Raises `InfrastructureError`: the machine did not start,
    or the initialization did not end.
    """
    sandbox = build_sandbox(config.sandbox, config.limits, config.runtime)
    try:
        sandbox.start()
        for i, script in enumerate(problem.initialization):
            result = sandbox.run_fresh(f"RANDOM={i + 1}\n{script.bash}", config.script_timeout)
            if result.exit_code is None:
                raise InfrastructureError(
                    f"the initialization of the task was stopped after {config.script_timeout:g} seconds"
                )
        return sandbox
    except BaseException:
        sandbox.close()
        raise


def start_programs(problem: ShellProblem, config: OSInteractionConfig, sandbox: Sandbox, seed: int) -> None:
    """Type the commands that the task wants to be running into the shell."""
    sandbox.run(f"RANDOM={derive(seed, 'shell') % 32768}", config.script_timeout)
    if problem.start is not None:
        sandbox.run(problem.start, config.script_timeout)


def demonstrate(problem: ShellProblem, config: OSInteractionConfig) -> tuple[str, ...] | None:
    """Replies that solve the problem: the gold, then a finish or the gold's output; None without a gold."""
    write = PROTOCOLS[config.protocol].write
    if isinstance(problem.evaluation, Matches) and problem.evaluation.answer is not None:
        return (write(Finish(problem.evaluation.answer)),)
    if problem.gold is None or isinstance(problem.evaluation, Matches):
        return None
    act = write(Command(problem.gold.strip()))
    if not problem.needs_answer:
        return (act, write(Finish()))
    sandbox = prepare(problem, config)
    try:
        start_programs(problem, config, sandbox, seed=0)
        return (act, write(Finish(sandbox.run_fresh(problem.gold, config.script_timeout).output.strip())))
    finally:
        sandbox.close()


def observation(result: CommandResult, limit: int, seconds: float) -> str:
    """A command's result as the agent reads it, in at most ``limit`` characters.

    >>> results = CommandResult("a\\n", 0), CommandResult("", 1), CommandResult("", 0)
    >>> [observation(result, 100, 20) for result in results]
    ['a', '[exit code 1]', '(no output)']
    """
    text = "".join(
        c if c.isprintable() or c in "\n\t" else "\ufffd" for c in result.output.replace("\r\n", "\n")
    ).strip("\n")
    note = ""
    if result.timed_out:
        note = f"[stopped after {seconds:g} seconds]"
    elif result.exit_code is None:
        note = "[killed]"
    elif result.exit_code != 0:
        note = f"[exit code {result.exit_code}]"
    elif not text:
        note = "(no output)"
    text = cut(text, limit - len(note) - 1) if note else cut(text, limit)
    return f"{text}\n{note}" if text and note else text or note


def cut(text: str, limit: int) -> str:
    """The text in at most ``limit`` characters, its middle left out.

    >>> cut("a" * 50 + "b" * 50, 60)
    'aaaaaaaaaaaaaaaaaaaaa\\n... 68 characters cut ...\\nbbbbbbbbbbb'
    """
    if len(text) <= limit:
        return text
    mark = f"\n... {len(text)} characters cut ...\n"
    head = (limit - len(mark)) * 2 // 3
    tail = limit - len(mark) - head
    mark = f"\n... {len(text) - head - tail} characters cut ...\n"
    return text[:head] + mark + text[len(text) - tail :]
