"""Sampling on servers: conversations are driven here, and their tokens are drawn there.

The sampler acts with the policy's present weights in every call. So it compares the adapter's digest with
that of the version on the servers, and publishes a new version if they differ: the adapter is written aside,
synced and renamed to a name that is never used again; every server loads it and is proven to act with it
(``server_proofs``); only then does a conversation use it. Conversations end within the call that began them,
so a version is retired when the next one is proven.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import reduce
from operator import add
from pathlib import Path

from safetensors import SafetensorError

from agent_peft.addresses import read_token
from agent_peft.files import sync
from agent_peft.policies import adapters
from agent_peft.policies.engine.base import (
    Conversation,
    EngineStatistics,
    NewRow,
    ServerEngineConfig,
    prompt_of,
)
from agent_peft.policies.engine.daemon_threads import DaemonThreads
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.engine.server_proofs import Canary, Version, refuse_adapter
from agent_peft.policies.engine.wire import ServerClient, UnknownModelError
from agent_peft.policies.models.positions import fit
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.thinking import check_thinking
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)

GRACE = 5.0  # seconds for conversations that are under way when another one fails


class ServerSampler:
    """A ``Sampler`` over a pool of servers that hold the policy's base model.

    Args:
        token: the servers' secret; None takes it from the variable that ``config.token`` names, if any.
    """

    def __init__(self, policy: Policy, config: ServerEngineConfig, token: str | None = None) -> None:
        self.model = refuse_adapter(policy)
        self.policy, self.config = policy, config
        if config.token is not None:
            token = read_token(config.token)
        self.servers = [ServerClient(url, config, policy.chat, token, self.fault) for url in config.urls]
        self.canary = Canary(policy)
        for server in self.servers:
            self.canary.prove_base(server)
        folder = config.folder or Path(tempfile.mkdtemp(prefix="agent-peft-"))
        self._root = folder.expanduser().absolute()
        self._run, self.published = f"run-{secrets.token_hex(4)}", 0  # versions so far
        self.version: Version | None = None
        self._held: Version | None = None
        try:
            self.publish()
        except BaseException:
            self.close()
            raise

    @property
    def chat(self) -> ChatTokenizer:
        return self.policy.chat

    def fault(self) -> str | None:
        """Why no server will answer again; None where somebody else keeps them running."""
        return None

    def publish(self) -> Version:
        """Bring the present adapter to every server, unless it is there."""
        digest, before = adapters.digest(self.model), self.version
        if before is not None and before.digest == digest:
            return before
        name = f"{self._run}-v{self.published}-{digest[:12]}"
        version = Version(name, self._root / name, digest, *self.canary.measure())
        self.published += 1
        self._write(version.folder)
        try:
            with ThreadPoolExecutor(len(self.servers), "publish") as pool:
                list(pool.map(lambda server: self._install(server, version), self.servers))
        except BaseException:
            self._retire(version)
            raise
        self.version = version
        if before is not None:
            self._retire(before)
        return version

    def _write(self, folder: Path) -> None:
        aside = folder.with_name(f".{folder.name}")
        try:
            aside.mkdir(parents=True)
            adapters.save(self.model, aside)
            for path in (*aside.iterdir(), aside):
                sync(path)
            aside.rename(folder)
            sync(folder.parent)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise InfrastructureError(
                f"{folder.parent}: no adapter can be written ({error}); make room or set engine.folder, then "
                "run the same command again"
            ) from error

    def _install(self, server: ServerClient, version: Version, again: bool = True) -> None:
        server.load_adapter(version.name, str(version.folder))
        try:
            self.canary.prove(server, version, self.version)
        except UnknownModelError:  # it was started again meanwhile
            if not again:
                raise
            self._install(server, version, again=False)

    def _retire(self, version: Version) -> None:
        """Unload a version, then remove its files: a server may read those of a loaded adapter again."""
        for server in self.servers:
            with suppress(AgentPeftError, InfrastructureError):  # a server that has ended holds none
                server.unload_adapter(version.name)
        shutil.rmtree(version.folder, ignore_errors=True)

    def close(self) -> None:
        """Unload the present version, and remove its files."""
        if self.version is not None:
            self._retire(self.version)
            self.version = None
        if self.config.folder is None:
            shutil.rmtree(self._root, ignore_errors=True)

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingConfig,
        schedule: Schedule | None = None,
    ) -> EngineStatistics:
        """See ``Sampler.generate``. No schedule is recorded or followed: a server's rows are its own."""
        if not conversations:
            return EngineStatistics()
        sampling, limits = fit(sampling, self.policy.bound), [s.max_tokens for s in self.servers]
        check_thinking(self.chat, sampling.max_thinking_tokens)
        if (limit := min(filter(None, limits), default=sampling.max_tokens + 1)) < sampling.max_tokens:
            raise AgentPeftError(
                f"the servers read {limit} tokens at most, and sampling.max_tokens is {sampling.max_tokens}; "
                "start them with one more (--max-tokens; vllm --max-model-len)"
            )
        # to score a conversation, a server draws one more token
        sampling = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, limit - 1)})
        version, failed = self._held or self.publish(), threading.Event()
        threads = DaemonThreads(min(self.config.rows, len(conversations)), "conversation")

        def drive(conversation: Conversation, server: ServerClient) -> EngineStatistics:
            tokens, read, drawn = list[int](), 0, 0
            news = prompt_of(conversation, self.policy.bound)
            while news is not None and not failed.is_set():
                seed = conversation.seed if self.config.seeded else None
                if isinstance(news, NewRow):
                    tokens.clear()
                    seed = None if seed is None else derive(seed, "row", news.before)
                tokens += news
                action, logprobs = self._draw(server, version, tokens, sampling, seed)
                read, drawn = read + len(tokens), drawn + len(action)
                tokens += action
                news = conversation.act(action, logprobs, sampling.max_tokens - len(tokens))
            return EngineStatistics(prefilled=read, prefilled_naive=read, sampled=drawn)

        try:
            futures = [
                threads.submit(drive, conversation, self.servers[place % len(self.servers)])
                for place, conversation in enumerate(conversations)
            ]
            return reduce(add, (future.result() for future in as_completed(futures)))
        finally:
            failed.set()
            threads.shutdown(GRACE)

    def _draw(
        self,
        server: ServerClient,
        version: Version,
        tokens: Sequence[int],
        sampling: SamplingConfig,
        seed: int | None,
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Draw an action. A server that was started again gets the version once more, and is proven again."""
        try:
            return server.draw(version.name, tokens, sampling, seed)
        except UnknownModelError:
            with server.recovery:
                if version.name not in server.models():
                    logger.warning("%s: lost the adapter %s, which is loaded again", server.url, version.name)
                    self._install(server, version)
            return server.draw(version.name, tokens, sampling, seed)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """See ``Sampler.hold``. The servers have the adapter, and nothing here is computed."""
        self._held = self.publish()
        try:
            yield
        finally:
            self._held = None

    def score(self, tokens: Sequence[int], sampling: SamplingConfig, adapter: bool = True) -> list[float]:
        """See ``Sampler.score``, from the first server, at temperature 1: servers score nothing else."""
        if sampling.truncates or sampling.temperature != 1.0:
            raise ValueError("a server scores at temperature 1, without top-p and top-k")
        server = self.servers[0]
        return server.score(self.publish().name if adapter else server.base, tokens)
