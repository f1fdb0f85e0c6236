"""TextArena's games of one player (https://github.com/LeonGuertler/TextArena) as Gymnasium's environments.

Importing this module registers each game as ``textarena/GAME``. A game gives one reward, at its end. A
negative one, of a game that is lost, counts as 0.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import gymnasium
import textarena
from textarena.envs.registration import ENV_REGISTRY

MAX_CHARS = 1000  # of an action; the last ones count, as in TextArena's ClipCharactersActionWrapper
_LOCK = threading.Lock()


class AnyText(gymnasium.spaces.Text):
    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class TextArenaGame(gymnasium.Env[str, str]):
    """One game. An observation is what the game has said since the last action."""

    observation_space = action_space = AnyText(max_length=1)

    def __init__(self, game: str, **arguments: Any) -> None:
        self._name, self._arguments = game, arguments

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._random = random.Random(seed).getstate()
        with self._own_random():
            try:
                self._game = self._bare = textarena.make(self._name, **self._arguments)
                while isinstance(self._bare, textarena.Wrapper):
                    self._bare = self._bare.env
                self._game.reset(num_players=1, seed=seed)
            except LookupError as error:  # its text has many lines
                raise ValueError(
                    "it needs words: python -m nltk.downloader words averaged_perceptron_tagger_eng"
                ) from error
            except AssertionError as error:
                raise ValueError(f"{error}; only games of one player can be played") from error
        if not isinstance(self._bare.state, textarena.SinglePlayerState):
            raise ValueError("it has several players; only games of one player can be played")
        return self._told(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._own_random():
            done, _ = self._game.step(action=action[-MAX_CHARS:])
        state = self._bare.state
        reward = state.rewards[0] if done else 0.0
        # some games swap the reward and the reason of an invalid move
        reward = max(0.0, float(reward)) if isinstance(reward, int | float) else 0.0
        valid = state.error_count == 0 and not state.game_info[0]["invalid_move"]
        out_of_turns = done and valid and reward < 1 and state.turn >= (state.max_turns or sys.maxsize)
        return self._told(), reward, done and not out_of_turns, out_of_turns, {"valid": valid}

    def _told(self) -> str:
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(text) for _, text, kind in self._bare.get_observation()[1] if kind is not own)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Let a game draw from ``random``, as it does, without a trace: many games run at once."""
        with _LOCK, redirect_stdout(sys.stderr):
            before = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(before)


for _game in ENV_REGISTRY:
    if "/" not in _game:  # Gymnasium's ids have none; it is in one game's, of two players
        gymnasium.register(f"textarena/{_game}", f"{__name__}:TextArenaGame", kwargs={"game": _game})
