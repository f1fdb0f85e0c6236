"""The client of ``agent-peft serve``: an environment that runs in another process or on another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, overload

from pydantic import AfterValidator, Field

from agent_peft.addresses import checked_url
from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.digests import digests_of
from agent_peft.environments.http import messages
from agent_peft.environments.http.client import ClientSession, Connection, DefectError, SessionRefusal
from agent_peft.types import AgentPeftError, InfrastructureError, Message, StepResult, Task

TASKS_PER_PAGE = 16  # tasks in a page of very many, of which a training step reads a few
MAX_CACHED_PAGES = 64  # such pages
MAX_SET_BYTES = 256 << 20  # bytes of all tasks, where these are not very many
# bytes of a page: a server's own are shorter, unless a single task is longer
MAX_PAGE_BYTES = 4 * messages.MAX_PAGE_BYTES
PAGE_NODES = 4_000_000  # commas and brackets of a page


Url = Annotated[str, AfterValidator(checked_url)]


class RemoteConfig(EnvironmentConfig):
    """The server of an environment, and the time limits of requests."""

    kind: str = "remote"
    url: Url | Annotated[tuple[Url, ...], Field(min_length=1)] = Field(
        description="address of the server, such as http://127.0.0.1:8000, or a list of servers, which "
        "share the episodes by their seeds"
    )
    environment: str = Field(
        default=messages.TRAIN, description="name of the environment on the server: train or evaluation"
    )
    token: str | None = Field(
        default=None,
        description="name of the environment variable that holds the server's token; null sends none",
    )
    timeout: float = Field(default=120.0, gt=0, description="time limit of one answer in seconds")
    patience: float = Field(
        default=30.0, ge=0, description="seconds for which a server that is down or full is tried again"
    )
    examples: int = Field(default=0, ge=0, le=63, description="number of solved tasks shown before each task")


class RemoteEnvironment(Environment):
    """A served environment. Its tasks, seeds, demonstrations, results and errors are those of the environment
    on the server.

    An episode is one connection. If that breaks, or takes too long, its step raises ``InfrastructureError``,
    and the collector replays its actions in another episode.
    """

    config_class = RemoteConfig

    def __init__(self, config: RemoteConfig) -> None:
        self.config: RemoteConfig = config
        urls = (config.url,) if isinstance(config.url, str) else config.url
        self._connections = [Connection(url, config.token, config.timeout, config.patience) for url in urls]
        self.connection = self._connections[0]
        try:
            self._tasks = self._fetch_tasks(self.connection)
            for other in self._connections[1:]:
                if digests_of(self._fetch_tasks(other)) != digests_of(self._tasks):
                    raise AgentPeftError(
                        f"{other.url}: has other tasks than {urls[0]}; serve one CONFIG on all"
                    )
            self.examples = self._fetch_examples() if config.examples else ()
        except BaseException as error:
            self.close()
            if isinstance(error, InfrastructureError):
                raise AgentPeftError(
                    f"no server answers ({error}); start it with: agent-peft serve CONFIG"
                ) from error
            if isinstance(error, DefectError):
                raise AgentPeftError(str(error)) from error
            raise
        self._by_id = {task.id: task for task in self._tasks} if isinstance(self._tasks, tuple) else {}

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> RemoteEpisode:
        request = messages.ResetRequest(environment=self.config.environment, task=self._name(task), seed=seed)
        examples = [example for example in self.examples if example.task != task.id][: self.config.examples]
        return RemoteEpisode(
            self._connections[seed % len(self._connections)],
            request,
            [message.message() for example in examples for message in example.messages],
        )

    def demonstration(self, task: Task) -> Sequence[str] | None:
        request = messages.DemonstrationRequest(environment=self.config.environment, task=self._name(task))
        return self.connection.fetch(messages.Demonstration, "/demonstration", request).replies()

    def reference(self, task: Task) -> str | None:
        """None: it is not worth a request for each group."""
        return None

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _name(self, task: Task) -> str | messages.TaskMessage:
        """Return the id of a served task; any other task whole."""
        return task.id if self._by_id.get(task.id) == task else messages.TaskMessage.of(task)

    def _fetch_tasks(self, connection: Connection) -> Sequence[Task]:
        """Fetch all tasks at once, or return a sequence that fetches pages if there are very many."""
        where = {"environment": self.config.environment}
        tasks: list[Task] = []
        while True:
            page = connection.fetch(
                messages.TaskPage,
                "/tasks",
                params={**where, "offset": len(tasks)},
                most=MAX_PAGE_BYTES,
                nodes=PAGE_NODES,
            )
            if page.total > messages.MAX_LISTED_TASKS:
                return RemoteTasks(connection, self.config.environment, range(page.total))
            if connection.received > MAX_SET_BYTES:
                raise AgentPeftError(
                    f"{connection.url}: its tasks have more than {MAX_SET_BYTES >> 20} MiB; serve fewer"
                )
            tasks += [message.task() for message in page.tasks]
            if len(tasks) >= page.total or not page.tasks:
                return tuple(tasks)

    def _fetch_examples(self) -> tuple[messages.Example, ...]:
        """Fetch one example more than a prompt shows, because a task never shows its own solution."""
        count = self.config.examples
        asked = {"count": count + 1}
        examples = self.connection.fetch(messages.Examples, "/examples", params=asked).examples
        if len(examples) <= count:
            raise AgentPeftError(
                f"{self.connection.url}: has {len(examples)} solved tasks, and examples + 1 are needed; "
                f"set examples to {len(examples) - 1}"
            )
        return examples


@dataclass(frozen=True, eq=False)
class RemoteTasks(Sequence[Task]):
    """A sequence of very many tasks. It fetches a page when one of its tasks is read. Raises
    `InfrastructureError`: on reading, if the server does not answer, or sends fewer tasks than it has.
    """

    connection: Connection
    environment: str
    indices: range
    pages: Callable[[int], tuple[Task, ...]] | None = field(default=None, repr=False)  # shared with slices

    def __post_init__(self) -> None:
        if self.pages is None:
            object.__setattr__(self, "pages", lru_cache(maxsize=MAX_CACHED_PAGES)(self._fetch))

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> RemoteTasks: ...
    def __getitem__(self, index: int | slice) -> Task | RemoteTasks:
        if isinstance(index, slice):
            return replace(self, indices=self.indices[index])
        assert self.pages is not None
        page, place = divmod(self.indices[index], TASKS_PER_PAGE)
        return self.pages(page)[place]

    def __len__(self) -> int:
        return len(self.indices)

    def _fetch(self, page: int) -> tuple[Task, ...]:
        where = {"environment": self.environment, "offset": page * TASKS_PER_PAGE, "limit": TASKS_PER_PAGE}
        answer = self.connection.fetch(messages.TaskPage, "/tasks", params=where)
        if len(answer.tasks) != min(TASKS_PER_PAGE, len(self.indices) - page * TASKS_PER_PAGE):
            raise InfrastructureError(
                f"{self.connection.url}: page {page} of its tasks has {len(answer.tasks)}"
            )
        return tuple(message.task() for message in answer.tasks)


class RemoteEpisode(Episode):
    """An episode on the server: one session."""

    def __init__(
        self, connection: Connection, request: messages.ResetRequest, examples: Sequence[Message]
    ) -> None:
        self._connection, self._request, self._examples = connection, request, examples
        self._session = ClientSession(connection)
        self._steps = 0

    def start(self) -> Sequence[Message]:
        try:
            answer = self._session.reset(self._request.model_dump())
        except SessionRefusal as refusal:
            raise self._error(refusal) from refusal
        response = self._connection.parse(messages.ResetResponse, answer)
        opening = response.messages()
        if not opening:
            raise AgentPeftError(
                f"{self._connection.url}: an episode of {response.metadata.task!r:.50} begins without a "
                "message"
            )
        leading = next(
            (place for place, message in enumerate(opening) if message.role != "system"), len(opening)
        )
        # the examples' system messages equal the opening's
        return [*opening[:leading], *(m for m in self._examples if m.role != "system"), *opening[leading:]]

    def step(self, action: str) -> StepResult:
        """Act. Only the first ``messages.MAX_ACTION_CHARS`` characters are sent, more than any context.
        Raises `DefectError`: the environment raised.
        """
        try:
            answer = self._session.step({"text": action[: messages.MAX_ACTION_CHARS]})
        except SessionRefusal as refusal:
            raise self._error(refusal) from refusal
        facts = answer.get("metadata")
        if not isinstance(facts, dict) or facts.get("index") != self._steps:
            raise InfrastructureError(f"{self._connection.url}: answered another message")
        response = self._connection.parse(messages.StepResponse, answer)
        self._steps += 1
        if response.done:
            self.close()
        return response.result()

    def close(self) -> None:
        self._session.close()

    def _error(self, refusal: SessionRefusal) -> Exception:
        text = f"{self._connection.url}: {messages.one_line(refusal)}"
        return DefectError(text) if refusal.code == "EXECUTION_ERROR" else AgentPeftError(text)
