"""A conversation with a policy, in a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue

from agent_peft.agents.serving.choices import Draw
from agent_peft.agents.serving.prompts import Prompt
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.service import Service
from agent_peft.policies.native import format_of
from agent_peft.policies.policy import Policy
from agent_peft.policies.reply_text import TextStream
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Message

NAME = "policy"
CLEAR, EXIT = "/clear", "/exit"


@dataclass(frozen=True)
class ChatSettings:
    """The system message, and how replies are drawn.

    >>> ChatSettings(temperature=0.0).system is None
    True
    """

    system: str | None = None
    temperature: float = 0.7
    max_new_tokens: int = 512
    max_tokens: int = 4096
    seed: int = 0


class Dialogue:
    """A conversation with a policy, as an episode reads it."""

    def __init__(self, service: Service, settings: ChatSettings) -> None:
        self.service, self.settings = service, settings
        self.chat = service.policies[NAME].chat
        self.tokens: list[int] = []
        self.messages: list[Message] = []
        self.turns = 0
        self._action: list[int] = []

    def clear(self) -> None:
        self.tokens, self.messages, self._action = [], [], []

    def reply(self, text: str) -> Generator[str, None, None]:
        """Yield the parts of the reply to a message as they come. Closed early, the reply ends there."""
        settings, limit = self.settings, self.service.max_tokens[NAME]
        messages: list[Message] = []
        if self.tokens:
            row, native = [*self.tokens, *self._action], format_of(self.chat, (), acts=False)
            reply = Message("assistant", self.chat.open_thought + self.chat.decode_action(self._action))
            messages, new = [*self.messages, reply], [Message("user", text)]
            is_new, tokens = native.next_prompt(messages, new, row, self._action)
            prompt = tokens if is_new else [*row, *tokens]
        else:
            new = [] if settings.system is None else [Message("system", settings.system)]
            new.append(Message("user", text))
            prompt = self.chat.opening(new)
        if len(prompt) >= limit:
            raise AgentPeftError(
                f"with this the conversation has {len(prompt)} tokens, and {limit} are the most; write "
                f"{CLEAR} to begin another, or something shorter"
            )
        sampling = SamplingConfig(
            temperature=settings.temperature,
            max_new_tokens=min(settings.max_new_tokens, limit - len(prompt)),
            max_tokens=limit,
        )
        changes: SimpleQueue[Draw] = SimpleQueue()
        seed = derive(settings.seed, "chat", self.turns)
        draw = Draw(Prompt(prompt), seed, sampling, changes.put, streamed=True)
        self.messages = [*messages, *new]
        self.tokens, self.turns = prompt, self.turns + 1
        self.service.submit(NAME, draw)
        text_stream, read = TextStream(self.chat, ()), 0
        try:
            while True:
                changes.get()
                ended, drawn = draw.ended, draw.drawn[read:]
                read += len(drawn)
                for one in drawn:
                    yield text_stream.push(one.token)
                if ended:
                    break
        finally:
            draw.cancelled = True
            self._action = draw.tokens[:read]
        if draw.error is not None:
            raise AgentPeftError(f"the reply has failed: {draw.error}")
        yield text_stream.finish()


def converse(
    policy: Policy,
    settings: ChatSettings,
    lines: Iterable[str],
    write: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Answer each of the lines, until they end or one is ``/exit``. ``write`` gets the parts of the replies,
    each of which ends with a line break; ``warn`` gets messages that are not the policy's.
    """
    with closing(Service({NAME: policy}, EngineConfig(rows=1), settings.max_tokens)) as service:
        dialogue = Dialogue(service, settings)
        for line in lines:
            if line.strip() == EXIT:
                return
            if line.strip() == CLEAR:
                dialogue.clear()
            if line.strip() in ("", CLEAR):
                continue
            with closing(dialogue.reply(line)) as parts:
                try:
                    for part in parts:
                        write(part)
                except AgentPeftError as error:
                    warn(str(error))
                except KeyboardInterrupt:
                    warn("the reply ends here")
            write("\n")
