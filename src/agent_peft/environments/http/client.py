"""An environment that runs in another process, or on another machine: the other end of ``agent-peft
serve``.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Literal, overload
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.connection import LONGEST_PAGE, Connection, DefectError, checked_url
from agent_peft.types import AgentPeftError, InfrastructureError, Message, StepResult, Task

logger = logging.getLogger(__name__)

LOOK = 16  # tasks in a page of very many, of which a step looks at a few
LOOKS = 64  # such pages that are kept
LONGEST_SET = 256 << 20  # bytes of all tasks, where these are not very many
PULSE = 60.0  # seconds between two signs of life
PAGE_NODES = 4_000_000  # commas and brackets of a page


class RemoteConfig(EnvironmentConfig):
    """Where the environment is, and how long to wait for it."""

    kind: Literal["remote"] = "remote"
    url: Annotated[str, AfterValidator(checked_url)] = Field(description="such as http://127.0.0.1:8000")
    environment: str = Field(
        default=messages.TRAIN, description="train or evaluation, as the server calls it"
    )
    token: str | None = Field(
        default=None, description="the name of the environment variable that holds the server's token"
    )
    timeout: float = Field(default=120.0, gt=0, description="seconds for one answer")
    patience: float = Field(
        default=30.0, ge=0, description="seconds within which an unanswered request is tried again"
    )
    examples: int = Field(default=0, ge=0, le=63, description="solved tasks shown before each task")
    examples_url: Annotated[str, AfterValidator(checked_url)] | None = Field(
        default=None, description="default: the server's next port"
    )

    @model_validator(mode="after")
    def _effective(self) -> RemoteConfig:
        if self.examples_url is not None and not self.examples:
            raise ValueError(
                "examples_url has no effect without examples; set how many are shown, or leave it out"
            )
        return self


class RemoteEnvironment(Environment):
    """Nobody above can tell it from the environment that is served: tasks, seeds, demonstrations, results and
    errors are the same.

    A request that is not answered is sent again, and executed once. An episode that the server has lost (it
    was killed, or started anew) raises ``InfrastructureError``: the collector replays its actions in another
    episode, which is incorrect where that fails, too.
    """

    def __init__(self, config: RemoteConfig) -> None:
        """Ask for the tasks.

        Raises:
            AgentPeftError: no server answers, or it refuses.
        """
        self.config = config
        self.connection = Connection(config.url, config.token, config.timeout, config.patience)
        self._presence = Presence(self.connection)
        try:
            self._tasks = self._fetch_tasks()
            self._examples = self._fetch_examples() if config.examples else ()
        except DefectError as error:
            self.connection.close()
            raise AgentPeftError(str(error)) from error
        except InfrastructureError as error:
            self.connection.close()
            raise AgentPeftError(
                f"no server answers ({error}); start it with: agent-peft serve CONFIG"
            ) from error
        except BaseException:
            self.connection.close()
            raise
        self._by_id = {task.id: task for task in self._tasks} if isinstance(self._tasks, tuple) else {}

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> RemoteEpisode:
        request = messages.ResetRequest(
            # an address, not a draw: two runs of one seed must not meet in one episode
            episode_id=uuid.uuid4().hex,
            environment=self.config.environment,
            task=self._name(task),
            seed=seed,
        )
        shown = [example for example in self._examples if example.task != task.id][: self.config.examples]
        return RemoteEpisode(
            self.connection,
            self._presence,
            request,
            [message.message() for example in shown for message in example.messages],
        )

    def demonstration(self, task: Task) -> Sequence[str] | None:
        request = messages.DemonstrationRequest(environment=self.config.environment, task=self._name(task))
        return self.connection.post("/demonstration", messages.Demonstration, request).actions

    def close(self) -> None:
        self._presence.stop()
        self.connection.close()

    def _name(self, task: Task) -> str | messages.TaskMessage:
        """A served task by its id, another whole."""
        return task.id if self._by_id.get(task.id) == task else messages.TaskMessage.of(task)

    def _fetch_tasks(self) -> Sequence[Task]:
        """All of them at once, or, where they are very many, as they are looked at."""
        where, connection = {"environment": self.config.environment}, self.connection
        tasks: list[Task] = []
        while True:
            page = connection.get(
                "/tasks", messages.TaskPage, {**where, "offset": len(tasks)}, LONGEST_PAGE, PAGE_NODES
            )
            if page.total > messages.MANY:
                return RemoteTasks(connection, self.config.environment, range(page.total))
            if connection.received > LONGEST_SET:
                raise AgentPeftError(
                    f"{connection.url}: its tasks have more than {LONGEST_SET >> 20} MiB; serve fewer of them"
                )
            tasks += [message.task() for message in page.tasks]
            if len(tasks) >= page.total or not page.tasks:
                return tuple(tasks)

    def _fetch_examples(self) -> tuple[messages.Example, ...]:
        """One more than are shown: a task is never shown its own solution."""
        config = self.config
        url = config.examples_url or next_port(config.url)
        connection = Connection(url, config.token, config.timeout, config.patience)
        try:
            found = connection.get("/examples", messages.Examples, {"count": config.examples + 1}).examples
        finally:
            connection.close()
        if len(found) <= config.examples:
            raise AgentPeftError(
                f"{url}: has {len(found)} solved tasks, and examples + 1 are needed; set examples to {len(found) - 1}"
            )
        return found


@dataclass(frozen=True, eq=False)
class RemoteTasks(Sequence[Task]):
    """More tasks than one wants to hold: each page is fetched when it is looked at.

    Raises:
        InfrastructureError: of every look, where the server does not answer, or with fewer tasks than it says
            it has.
    """

    connection: Connection
    environment: str
    indices: range
    pages: Callable[[int], tuple[Task, ...]] | None = field(default=None, repr=False)  # shared with slices

    def __post_init__(self) -> None:
        if self.pages is None:
            object.__setattr__(self, "pages", lru_cache(maxsize=LOOKS)(self._fetch))

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> RemoteTasks: ...
    def __getitem__(self, index: int | slice) -> Task | RemoteTasks:
        if isinstance(index, slice):
            return replace(self, indices=self.indices[index])
        assert self.pages is not None
        page, place = divmod(self.indices[index], LOOK)
        return self.pages(page)[place]

    def __len__(self) -> int:
        return len(self.indices)

    def _fetch(self, page: int) -> tuple[Task, ...]:
        where = {"environment": self.environment, "offset": page * LOOK, "limit": LOOK}
        told = self.connection.get("/tasks", messages.TaskPage, where)
        if len(told.tasks) != min(LOOK, len(self.indices) - page * LOOK):
            raise InfrastructureError(
                f"{self.connection.url}: page {page} of its tasks has {len(told.tasks)}"
            )
        return tuple(message.task() for message in told.tasks)


class RemoteEpisode(Episode):
    """One episode elsewhere. Its requests are told apart by their index."""

    def __init__(
        self,
        connection: Connection,
        presence: Presence,
        request: messages.ResetRequest,
        examples: Sequence[Message],
    ) -> None:
        self._connection, self._presence, self._request, self._examples = (
            connection,
            presence,
            request,
            examples,
        )
        self._name = request.episode_id or ""
        self._server: str | None = None
        self._started = self._over = False
        self._steps = 0

    def start(self) -> Sequence[Message]:
        if self._started or self._over:
            raise RuntimeError("the episode was started before")
        self._started = True
        self._presence.add(self._name)
        response = self._connection.post("/reset", messages.ResetResponse, self._request)
        if response.metadata.episode_id != self._name:
            raise InfrastructureError(f"{self._connection.url}: answered for another episode")
        self._server = response.metadata.server_id
        opening = response.messages()
        if not opening:
            raise AgentPeftError(
                f"{self._connection.url}: an episode of {response.metadata.task!r:.50} begins without a message"
            )
        leading = next(
            (place for place, message in enumerate(opening) if message.role != "system"), len(opening)
        )
        # the examples' own system messages say what the opening's does
        return [*opening[:leading], *(m for m in self._examples if m.role != "system"), *opening[leading:]]

    def step(self, action: str) -> StepResult:
        """Act, with the first ``messages.LONGEST_ACTION`` characters of an action that is longer than any
        context.

        Raises:
            DefectError: the environment raised.
            InfrastructureError: the world under it failed, or the server is lost.
        """
        if self._over or self._server is None:
            raise RuntimeError(
                "the episode is done or closed" if self._over else "the episode was not started"
            )
        request = messages.StepRequest(
            episode_id=self._name,
            index=self._steps,
            action=messages.Action(text=action[: messages.LONGEST_ACTION]),
            server_id=self._server,
        )
        response = self._connection.post("/step", messages.StepResponse, request)
        if (response.metadata.episode_id, response.metadata.index) != (self._name, self._steps):
            raise InfrastructureError(f"{self._connection.url}: answered for another step")
        self._steps += 1
        result = response.result()
        if result.done:  # the server has freed it then
            self._over = True
            self._presence.remove(self._name)
        return result

    def close(self) -> None:
        """Tell the server, if it answers; it closes idle episodes by itself. Another thread may be at a
        step, which is answered.
        """
        self._presence.remove(self._name)
        if self._started and not self._over:
            try:
                self._connection.post(
                    "/close", messages.Pong, messages.CloseRequest(episode_id=self._name), patient=False
                )
            except (AgentPeftError, InfrastructureError, DefectError) as error:
                logger.debug("episode %s is left to the server to close: %s", self._name, error)
        self._over = True


class Presence:
    """Says now and then that this client is still there, while it has episodes open: a policy may write
    for longer at one reply than a server waits for a client that is silent.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open: dict[str, None] = {}  # ids of episodes
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, episode: str) -> None:
        with self._lock:
            self._open[episode] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
                self._thread.start()

    def remove(self, episode: str) -> None:
        with self._lock:
            self._open.pop(episode, None)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(PULSE):
            with self._lock:
                episode = next(iter(self._open), None)
            if episode is not None:
                with suppress(AgentPeftError, InfrastructureError, DefectError):  # whoever steps is told
                    self._connection.get("/state", messages.State, {"episode_id": episode}, patient=False)


def next_port(url: str) -> str:
    """Where the example conversations are, unless it is said.

    >>> next_port("http://127.0.0.1:8000")
    'http://127.0.0.1:8001'
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port + 1}"
