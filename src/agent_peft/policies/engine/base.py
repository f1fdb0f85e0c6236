"""The sampler protocol, its configurations, and the statistics of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import AfterValidator, Discriminator, Field, Tag

from agent_peft.addresses import checked_url
from agent_peft.config import Config
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from agent_peft.policies.models.positions import Bound
    from agent_peft.policies.tokenization import ChatTokenizer


EnvironmentSeconds = Annotated[
    float | None,
    Field(
        gt=0,
        description="longest start or step of an environment: an episode whose step takes longer ends as "
        "incorrect (timeout), and one whose start does begins again; null waits for ever, with a warning",
    ),
]
# keys of every kind of server
Rows = Annotated[int, Field(ge=1, description="conversations at once, on all servers together")]
Timeout = Annotated[float, Field(gt=0, description="time limit of one answer in seconds")]


class EngineConfig(Config):
    """Sampling in this process: how much is computed at once. None of it changes what is sampled, except by
    rounding.
    """

    kind: Literal["local"] = "local"
    rows: int = Field(default=64, ge=1, description="conversations that hold keys and values at once")
    kv_tokens: int | None = Field(
        default=None,
        ge=1,
        description="budget of memory: no more rows than can each be max_tokens long within it; "
        "null sets no limit",
    )
    prefill_tokens: int = Field(default=2048, ge=1, description="tokens of one prefill, padding included")
    environment_threads: int | None = Field(
        default=None, ge=1, description="environments that answer at once; null is one for each row"
    )
    environment_seconds: EnvironmentSeconds = None
    overlap: int = Field(
        default=2,
        ge=1,
        description="decode steps until an environment's answer joins; a later answer joins when it arrives",
    )
    schedule: Path | None = Field(
        default=None,
        description="a run directory: answers join at the steps at which they joined in that run, "
        "so that this run repeats it bit for bit",
    )

    def rows_of(self, max_tokens: int) -> int:
        """The number of conversations at once, if each may be ``max_tokens`` long.

        >>> EngineConfig(rows=64, kv_tokens=8192).rows_of(max_tokens=1024)
        8
        """
        return self.rows if self.kv_tokens is None else max(1, min(self.rows, self.kv_tokens // max_tokens))


class ServerEngineConfig(Config):
    """Sampling on servers that get the trainer's adapter: `agent-peft serve-policy --adapters`, or vLLM."""

    kind: Literal["server"] = "server"
    urls: tuple[Annotated[str, AfterValidator(checked_url)], ...] = Field(
        min_length=1,
        description="addresses of the servers, such as http://127.0.0.1:8000; conversation i is sampled by "
        "server i mod their number",
    )
    model: str | None = Field(
        default=None, description="name of policy.model on the servers; null is the first that they list"
    )
    folder: Path | None = Field(
        default=None,
        description="where adapters are written, on a file system that the servers share; null is a "
        "temporary folder, for servers on this machine",
    )
    token: str | None = Field(
        default=None,
        description="name of the environment variable that holds the servers' token; null sends none",
    )
    rows: Rows = 64
    seeded: bool = Field(
        default=True,
        description="send each reply's seed, so that a run repeats up to rounding; false where a server "
        "fails with seeds, such as vLLM on a CPU",
    )
    timeout: Timeout = 300.0
    patience: float = Field(
        default=60.0, ge=0, description="seconds for which a server that does not answer is tried again"
    )
    environment_seconds: EnvironmentSeconds = None

    schedule: ClassVar[None] = None  # a server's decode steps are not recorded


class VllmEngineConfig(Config):
    """Sampling on a vLLM that the trainer starts on its own machine, keeps running, and ends."""

    kind: Literal["vllm"] = "vllm"
    python: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        description="interpreter of the environment that vLLM is installed in, such as vllm/bin/python; its "
        "packages are not the trainer's"
    )
    arguments: tuple[str, ...] = Field(
        default=(),
        description="more arguments of vllm serve, such as [--gpu-memory-utilization, '0.4'] for a GPU that "
        "the trainer uses, too; they replace those that the engine sets",
    )
    variables: dict[str, str] = Field(
        default={}, description="environment variables of vLLM, such as {CUDA_VISIBLE_DEVICES: '1'}"
    )
    ready: float = Field(
        default=600.0, gt=0, description="seconds within which vLLM must answer after a start"
    )
    restarts: int = Field(default=10, ge=0, description="how often vLLM is started again after it has ended")
    rows: Rows = 64
    seeded: bool | None = Field(
        default=None,
        description="send each reply's seed, so that a run repeats up to rounding; null is true, and false "
        "for a vLLM that is built for the CPU, which fails with seeds",
    )
    timeout: Timeout = 300.0
    environment_seconds: EnvironmentSeconds = None

    schedule: ClassVar[None] = None


def _kind_of(engine: Any) -> Any:
    return engine.get("kind", "local") if isinstance(engine, Mapping) else getattr(engine, "kind", None)


AnyEngine = Annotated[
    Annotated[EngineConfig, Tag("local")]
    | Annotated[ServerEngineConfig, Tag("server")]
    | Annotated[VllmEngineConfig, Tag("vllm")],
    Discriminator(_kind_of),
]


class NewRow(tuple[int, ...]):
    """Tokens that take the place of all before them: the chat template has rewritten the history.

    Attributes:
        before: how many tokens the episode's earlier rows have. A token's place in the episode decides its
            draw, so no two draws of an episode have one place.

    >>> NewRow((5, 6), before=3).before
    3
    """

    before: int

    def __new__(cls, tokens: Iterable[int], before: int) -> Self:
        made = super().__new__(cls, tokens)
        made.before = before
        return made


class Conversation(Protocol):
    """What a sampler drives: it hands out a prompt, takes an action, and answers with the tokens to read
    next.
    """

    @property
    def prompt(self) -> Sequence[int] | None:
        """The first tokens, or None where there is nothing to sample. The sampler asks once, on a thread, and
        only when there is a row for the conversation or will soon be one, so this may open an environment.
        """
        ...

    @property
    def seed(self) -> int:
        """Together with the distributions, it alone decides which tokens are drawn. It is asked for after the
        prompt.
        """
        ...

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        """Take the sampled action and return the tokens to read next, or None at the end. A `NewRow` is read
        in place of all before it. The sampler calls this on a thread, once at a time for each conversation.

        Args:
            logprobs: their log-probabilities in nats.
            room: the token budget left. If the observation would use it up, return None: no further action
                is possible.
        """
        ...


def prompt_of(conversation: Conversation, bound: Bound | None) -> Sequence[int] | None:
    """The first tokens of a conversation, or None. An empty prompt is a ValueError, one beyond the model's
    positions an `AgentPeftError`.
    """
    prompt = conversation.prompt
    if prompt is not None and not len(prompt):
        raise ValueError(
            "a conversation has an empty prompt, so its first token cannot be predicted: begin it with one"
        )
    if prompt is not None and bound is not None and len(prompt) > bound.positions:
        raise AgentPeftError(
            f"a prompt has {len(prompt)} tokens, and the model can read {bound.positions} ({bound.reason}); "
            "shorten the prompt, or take another model"
        )
    return None if prompt is None else prompt if isinstance(prompt, NewRow) else tuple(prompt)


@dataclass(frozen=True)
class EngineStatistics:
    """The counts of one call. Those of several calls can be added, without their schedules."""

    prefilled: int = 0  # tokens read
    prefilled_naive: int = 0  # tokens that would have been read with nothing shared and nothing kept
    sampled: int = 0  # tokens
    steps: int = 0  # decode steps
    row_halvings: int = 0  # because the memory was too small
    late: int = 0  # answers that joined later than they were due
    waited: float = field(default=0.0, compare=False)  # seconds without computation, for environments
    schedule: Schedule = ()

    def __add__(self, other: EngineStatistics) -> EngineStatistics:
        return EngineStatistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[:-1]))


class Sampler(Protocol):
    """Draws a policy's tokens, in this process or on a server, with the policy's weights at each call."""

    @property
    def chat(self) -> ChatTokenizer:
        """Turns conversations into the tokens that this sampler reads and draws."""
        ...

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingConfig,
        schedule: Schedule | None = None,
    ) -> EngineStatistics:
        """Drive every conversation to its end.

        Args:
            schedule: that of an earlier call with the same conversations, to be followed. None records one.
        """
        ...

    def hold(self) -> AbstractContextManager[None] | None:
        """A context in which ``generate`` samples with the weights of its beginning, and may be called on
        another thread while this one computes gradients. Inside, neither change the weights nor turn the
        adapter off. None where sampling and gradients would disturb each other.
        """
        ...

    def score(self, tokens: Sequence[int], sampling: SamplingConfig, adapter: bool = True) -> list[float]:
        """The sampler's log-probabilities (T - 1) in nats of tokens[1:], with the weights that it samples
        with.

        Args:
            adapter: False scores the base model under the adapter.
        """
        ...

    def close(self) -> None:
        """Release what the sampler holds outside of this process."""
        ...
