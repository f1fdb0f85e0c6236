"""One server of policies, as its client sees it: vLLM's API, token ids in, token ids and log-probabilities
out. ``agent-peft serve-policy`` answers the same requests. Nothing is decoded and encoded again.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from agent_peft.addresses import is_loopback
from agent_peft.policies.engine.base import ServerEngineConfig
from agent_peft.policies.sampling import DISTRIBUTION, SamplingConfig, end_of
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.printable import printable
from agent_peft.types import AgentPeftError, InfrastructureError, TrustError

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts: doubled from the first to the longest
MAX_ANSWER_BYTES = 256 << 20
MESSAGE = 300  # characters of a server's text in a message
# what every request sends: the parameters of vLLM's sampling that we do not use, at the values that change
# nothing, since a server's defaults may come from its model's generation_config.json
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_LIMITS = {"n": 1, "min_p": 0.0, "min_tokens": 0, "ignore_eos": False, "stream": False}
# a stop string may be the text of a special token
NEUTRAL = {**_PENALTIES, **_LIMITS, "skip_special_tokens": False, "return_token_ids": True}


class UnknownModelError(AgentPeftError):
    """The server has no model of the name that a request gives."""


class RefusedError(AgentPeftError):
    """The server understands a request and refuses it."""


class _NoAnswer(Exception):
    """The attempt may be repeated."""


class _NoRedirect(HTTPRedirectHandler):
    """A redirect would carry the token to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class ServerClient:
    """One server. Threads may share it.

    Args:
        token: the secret that the server asks for.
        fault: why the server will not answer again; None while it may.

    Attributes:
        base: the name of the base model there.
        max_tokens: the most tokens of a prompt and its reply; 0 where the server does not list a limit.
        recovery: held while an adapter is loaded again.
    """

    def __init__(
        self,
        url: str,
        config: ServerEngineConfig,
        chat: ChatTokenizer,
        token: str | None,
        fault: Callable[[], str | None],
    ) -> None:
        self.fault = fault
        self.url, self.timeout, self.patience, self.chat = url, config.timeout, config.patience, chat
        self.recovery = threading.Lock()
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        local = is_loopback(urlsplit(url).hostname or "")
        self._opener = build_opener(_NoRedirect, *([ProxyHandler({})] if local else []))
        cards, name = self.models(), config.model
        bases = (card for card in cards.values() if not card.get("parent"))
        card = next(bases, None) if name is None else cards.get(name)
        if card is None:
            raise AgentPeftError(f"{url}: no model {name!r}; set engine.model to one of: {', '.join(cards)}")
        self.base: str = card["id"]
        self.max_tokens = int(card.get("max_model_len") or 0)

    def models(self) -> dict[str, dict[str, Any]]:
        """What the server lists, by name. An adapter has a ``parent``, and its folder as ``root``."""
        with self._reading("the models"):
            return {str(card["id"]): dict(card) for card in self.ask("/v1/models")["data"]}

    def load_adapter(self, name: str, folder: str) -> None:
        """Let the server read an adapter under a new name, and check that it lists it."""
        if name in self.models():
            raise TrustError(f"{self.url}: already has a model {name}: a version's name is never used again")
        try:
            self.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, repeat=False)
        except (UnknownModelError, RefusedError) as error:
            raise AgentPeftError(
                f"{error}; the server must accept adapters of this rank (agent-peft serve-policy --adapters "
                "FOLDER; VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve --enable-lora --max-lora-rank R), and "
                "see the files in engine.folder"
            ) from error
        root = self.models().get(name, {}).get("root")
        if root != folder:
            raise TrustError(f"{self.url}: has loaded the adapter {name}, and lists the folder {root}")

    def unload_adapter(self, name: str) -> None:
        self.ask("/v1/unload_lora_adapter", {"lora_name": name}, repeat=False)

    def score(self, model: str, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities (T - 1) in nats of tokens[1:] at temperature 1."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0}
        choice = self._complete({**NEUTRAL, **body, "prompt_logprobs": 0})
        with self._reading("prompt_logprobs"):
            places = choice["prompt_logprobs"][1:]
            return [float(place[str(t)]["logprob"]) for place, t in zip(places, tokens[1:], strict=True)]

    def draw(
        self, model: str, tokens: Sequence[int], sampling: SamplingConfig, seed: int | None
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Draw an action after ``tokens``: its tokens, and their log-probabilities in nats under the
        distribution that they were drawn from.
        """
        most, chat = min(sampling.max_new_tokens, sampling.max_tokens - len(tokens)), self.chat
        ends = {"stop": list(sampling.stop), "stop_token_ids": sorted(chat.end_of_turn)}
        body = {**NEUTRAL, **ends, "model": model, "prompt": list(tokens), "max_tokens": most, "logprobs": 0}
        body |= sampling.model_dump(include={*DISTRIBUTION, "max_thinking_tokens"}, exclude_none=True)
        choice = self._complete(body if seed is None else {**body, "seed": seed})
        with self._reading("token_ids and logprobs"):
            action = tuple(map(int, choice["token_ids"]))
            logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        if not 0 < len(action) <= most or len(action) != len(logprobs) or any(map(math.isnan, logprobs)):
            raise TrustError(
                f"{self.url}: returned {len(action)} tokens with {len(logprobs)} log-probabilities, and was "
                f"asked for {most} tokens at most"
            )
        # a server may draw some tokens after a stop string
        end = end_of(action, sampling.stop, chat.token_bytes, chat.end_of_turn)
        if end is None and len(action) < most:
            raise TrustError(
                f"{self.url}: a reply ended with token {action[-1]} after {len(action)} of {most} tokens, "
                "which is neither a stop string nor an end of turn here: the server has another tokenizer or "
                "other end tokens (vllm serve --generation-config vllm)"
            )
        return action[:end], logprobs[:end]

    def opening(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """The tokens of a conversation with the server's chat template; None where it has none."""
        body = {**NEUTRAL, "model": self.base, "messages": list(messages), "max_tokens": 1}
        try:
            tokens = self.ask("/v1/chat/completions", body).get("prompt_token_ids")
        except RefusedError:
            return None
        return tokens if isinstance(tokens, list) else None

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The choice of the model that was asked, which has read the tokens that were sent."""
        answer = self.ask("/v1/completions", body)
        if answer.get("model") != body["model"]:
            name = printable(answer.get("model"), MESSAGE)
            raise TrustError(
                f"{self.url}: the model {body['model']} was asked, and {name} answered: its tokens "
                "could be another policy's; is there a proxy that changes names?"
            )
        with self._reading("choices with prompt_token_ids"):
            (choice,) = answer["choices"]
            if choice["prompt_token_ids"] != body["prompt"]:
                raise TrustError(f"{self.url}: has read other tokens than the prompt that was sent")
            return dict(choice)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, repeat: bool = True) -> dict[str, Any]:
        """Get an answer, or post a request; try again for ``patience`` seconds while there is no answer.

        Args:
            repeat: False where a second request is refused if the first has arrived.

        Raises:
            InfrastructureError: no answer has come.
        """
        end, pause = math.inf, FIRST_PAUSE
        while True:
            try:
                return self._send(path, body)
            except _NoAnswer as error:
                if (fault := self.fault()) is not None:
                    raise InfrastructureError(fault) from error
                end = min(end, time.monotonic() + self.patience)
                if not repeat or time.monotonic() + pause > end:
                    waited = f" for {self.patience:g} s" if repeat else ""
                    raise InfrastructureError(
                        f"{self.url}{path}: no answer{waited} ({error}); see the server's log, start it "
                        "again, then run the same command again"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _send(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, content, self._headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as answer:
                parsed = json.loads(answer.read(MAX_ANSWER_BYTES))
        except HTTPError as error:
            with error:
                raise self._refusal(path, error.code, error.read(MAX_ANSWER_BYTES)) from error
        except TimeoutError as error:
            raise _NoAnswer(f"nothing within {self.timeout:g} s") from error
        except (OSError, HTTPException) as error:
            raise _NoAnswer(printable(getattr(error, "reason", error), MESSAGE)) from error
        except ValueError:  # vLLM answers to an adapter in plain text
            parsed = None
        return parsed if isinstance(parsed, dict) else {}

    def _refusal(self, path: str, status: int, body: bytes) -> Exception:
        text = body.decode("utf-8", "replace")
        with suppress(KeyError, TypeError, ValueError):  # a proxy's page
            text = str(json.loads(text)["error"]["message"])
        text = printable(" ".join(text.split()) or f"HTTP {status}", MESSAGE)
        if status == 404:
            return UnknownModelError(f"{self.url}{path}: {text}")
        if status in (401, 403):
            hint = "name the environment variable that holds the servers' token with engine.token"
            return AgentPeftError(f"{self.url}: {text}; {hint}")
        # vLLM refuses an adapter, such as one of too large a rank, with 500
        if (status < 500 and status not in (408, 429)) or (status == 500 and path.endswith("_adapter")):
            return RefusedError(f"{self.url}{path}: {text}")
        return _NoAnswer(f"HTTP {status}: {text}")

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise AgentPeftError(
                f"{self.url}: an answer lacks {what} ({type(error).__name__}); the server must be agent-peft "
                "serve-policy of this version, or vLLM 0.32 or newer"
            ) from error
