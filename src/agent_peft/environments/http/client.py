"""The client of ``agent-peft serve``: an environment that runs in another process or on another machine."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, overload

from pydantic import AfterValidator, Field

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.connection import MAX_PAGE_BYTES, Connection, DefectError, checked_url
from agent_peft.types import AgentPeftError, InfrastructureError, Message, StepResult, Task

logger = logging.getLogger(__name__)

TASKS_PER_PAGE = 16  # tasks in a page of very many, of which a step looks at a few
MAX_CACHED_PAGES = 64  # such pages that are kept
MAX_SET_BYTES = 256 << 20  # bytes of all tasks, where these are not very many
PULSE_SECONDS = 60.0  # seconds between two signs of life
PAGE_NODES = 4_000_000  # commas and brackets of a page


class RemoteConfig(EnvironmentConfig):
    """The server of an environment, and the time limits of requests."""

    kind: str = "remote"
    url: Annotated[str, AfterValidator(checked_url)] = Field(
        description="address of the server, such as http://127.0.0.1:8000"
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
        default=30.0, ge=0, description="seconds for which an unanswered request is repeated"
    )
    examples: int = Field(default=0, ge=0, le=63, description="number of solved tasks shown before each task")


class RemoteEnvironment(Environment):
    """A served environment. Its tasks, seeds, demonstrations, results and errors are those of the environment
    on the server.

    An unanswered request is sent again, and the server executes it once. An episode that the server has lost
    (it was killed or restarted) raises ``InfrastructureError``. The collector then replays its actions in
    another episode, and counts the episode as incorrect if that fails, too.
    """

    config_class = RemoteConfig

    def __init__(self, config: RemoteConfig) -> None:
        """Fetch the tasks.

        Raises:
            AgentPeftError: no server answers, or it refuses.
        """
        self.config: RemoteConfig = config
        self.connection = Connection(config.url, config.token, config.timeout, config.patience)
        self._presence = Presence(self.connection)
        try:
            self._tasks = self._fetch_tasks()
            self.examples = self._fetch_examples() if config.examples else ()
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
            # random, not derived from the seed: two runs of one seed must not share an episode
            episode_id=uuid.uuid4().hex,
            environment=self.config.environment,
            task=self._name(task),
            seed=seed,
        )
        examples = [example for example in self.examples if example.task != task.id][: self.config.examples]
        return RemoteEpisode(
            self.connection,
            self._presence,
            request,
            [message.message() for example in examples for message in example.messages],
        )

    def demonstration(self, task: Task) -> Sequence[str] | None:
        request = messages.DemonstrationRequest(environment=self.config.environment, task=self._name(task))
        return self.connection.post("/demonstration", messages.Demonstration, request).replies()

    def close(self) -> None:
        self._presence.stop()
        self.connection.close()

    def _name(self, task: Task) -> str | messages.TaskMessage:
        """The id of a served task; any other task whole."""
        return task.id if self._by_id.get(task.id) == task else messages.TaskMessage.of(task)

    def _fetch_tasks(self) -> Sequence[Task]:
        """All tasks at once, or a sequence that fetches pages when there are very many."""
        where, connection = {"environment": self.config.environment}, self.connection
        tasks: list[Task] = []
        while True:
            page = connection.get(
                "/tasks", messages.TaskPage, {**where, "offset": len(tasks)}, MAX_PAGE_BYTES, PAGE_NODES
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
        """One example more than a prompt shows, because a task never shows its own solution."""
        count = self.config.examples
        examples = self.connection.get("/examples", messages.Examples, {"count": count + 1}).examples
        if len(examples) <= count:
            raise AgentPeftError(
                f"{self.connection.url}: has {len(examples)} solved tasks, and examples + 1 are needed; "
                f"set examples to {len(examples) - 1}"
            )
        return examples


@dataclass(frozen=True, eq=False)
class RemoteTasks(Sequence[Task]):
    """A sequence of very many tasks. It fetches a page when one of its tasks is read.

    Raises:
        InfrastructureError: on reading, if the server does not answer, or sends fewer tasks than it has.
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
        answer = self.connection.get("/tasks", messages.TaskPage, where)
        if len(answer.tasks) != min(TASKS_PER_PAGE, len(self.indices) - page * TASKS_PER_PAGE):
            raise InfrastructureError(
                f"{self.connection.url}: page {page} of its tasks has {len(answer.tasks)}"
            )
        return tuple(message.task() for message in answer.tasks)


class RemoteEpisode(Episode):
    """An episode on the server. The index of a step identifies its request."""

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
                f"{self._connection.url}: an episode of {response.metadata.task!r:.50} begins without a "
                "message"
            )
        leading = next(
            (place for place, message in enumerate(opening) if message.role != "system"), len(opening)
        )
        # the examples' own system messages say what the opening's does
        return [*opening[:leading], *(m for m in self._examples if m.role != "system"), *opening[leading:]]

    def step(self, action: str) -> StepResult:
        """Act. Only the first ``messages.MAX_ACTION_CHARS`` characters of an action are sent; this is longer
        than any context.

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
            action=messages.Action(text=action[: messages.MAX_ACTION_CHARS]),
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
        """Tell the server, if it answers. It closes idle episodes by itself. A step of another thread is
        still answered.
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
    """Sends a sign of life once a minute while episodes are open. A policy may need more time for one reply
    than a server waits for a silent client.
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
        while not self._stopped.wait(PULSE_SECONDS):
            with self._lock:
                episode = next(iter(self._open), None)
            if episode is not None:
                with suppress(AgentPeftError, InfrastructureError, DefectError):  # whoever steps is told
                    self._connection.get("/state", messages.State, {"episode_id": episode}, patient=False)
