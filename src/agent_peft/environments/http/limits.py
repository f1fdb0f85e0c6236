"""The limits of a server for clients that it does not trust."""

from __future__ import annotations

from dataclasses import dataclass

from agent_peft.environments.http import messages


@dataclass(frozen=True)
class Limits:
    """Limits of a server. Sizes are in bytes; ``action_chars`` is in characters.

    >>> Limits(episodes=8).threads
    64
    """

    episodes: int = 1024  # at once
    idle_seconds: float = 600.0  # until an episode, none of whose client's requests came, is closed
    threads: int = 64  # environments that act at once; more wait for their turn
    longest_seconds: float = (
        86_400.0  # until an episode that has taken no step since is closed, even if its client speaks
    )
    body_bytes: int = 16 << 20  # of a step; a task may have ``task_bytes``
    bodies_bytes: int = 128 << 20  # of all requests together
    task_bytes: int = 1 << 20  # of any other request, such as a reset with a whole task
    tasks_bytes: int = 64 << 20  # of the whole tasks of all episodes together
    action_chars: int = messages.MAX_ACTION_CHARS
    answers_bytes: int = 16 << 20  # kept of episodes that are over
    connections: int = 1024  # at once; fewer where the process may have few descriptors
    head_seconds: float = 10.0  # until a request has sent its header
    body_seconds: float = 30.0  # until it has sent its body
    answer_seconds: float = 120.0  # until a client has read its answer
    keep_alive_seconds: float = 75.0  # until a connection that asks for nothing is closed
    shutdown_seconds: float = 30.0  # that episodes get to finish a step when the server stops
