"""An agent that crashes or stalls its machine half of the times that it would fail gains nothing, in the
training's collections and over HTTP. A collection is also what an evaluation summarizes.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.policies.engine.base import Conversation, EngineStatistics
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import Collection, Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.seeding import derive
from agent_peft.types import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sandboxed")]
SABOTAGE = (
    "kill -9 -1",
    "kill -9 $PPID $$; kill -9 1",
    ":(){ :|:& }; :; sleep 60",
    "sleep 600",
    "kill -STOP $PPID; kill -STOP $$",
    "trap '' INT TERM; while :; do :; done",
    'python3 -c "x = []\nwhile True: x.append(bytearray(1 << 24))"',
    "cat /dev/zero >/root/a; cat /dev/zero >/dev/shm/a",
    "rm -rf --no-preserve-root / 2>/dev/null",
    "exec 0<&- 1>&- 2>&-; exec sleep 600",
    "yes",
)
ENVIRONMENT: dict[str, Any] = {
    "kind": "os_interaction",
    "generate": {"num_tasks": 58, "split": "heldout"},
    "limits": {"memory_mb": 64, "processes": 40, "file_size_mb": 16, "cpu_seconds": 2},
    "command_timeout": 2,
    "script_timeout": 10,
    "max_turns": 4,
}


class Agent:
    """Stands in for an engine. It knows what is right in half of the episodes."""

    chat = ChatTokenizer(character_tokenizer(string.printable))

    def __init__(self, environment: Environment, sabotages: bool) -> None:
        self.environment, self.sabotages = environment, sabotages

    def generate(
        self, conversations: Sequence[Conversation], sampling: SamplingConfig, schedule: object = None
    ) -> EngineStatistics:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.play, conversations))
        return EngineStatistics(0, 0, 0, 0)

    def play(self, conversation: Any) -> None:
        if conversation.prompt is None:
            return
        for reply in self.replies(conversation):
            action = self.chat.action_tokens(reply)
            if conversation.act(action, [-0.5] * len(action), 100_000) is None:
                return

    def replies(self, conversation: Any) -> Sequence[str]:
        if derive(conversation.seed, "knows") % 2:
            demonstration = self.environment.demonstration(conversation.task)
            assert demonstration is not None
            return demonstration
        if not self.sabotages or derive(conversation.seed, "breaks") % 2:
            return ["Act: finish"] * 4
        command = SABOTAGE[derive(conversation.seed, "how") % len(SABOTAGE)]
        return [f"Act: bash\n\n```bash\n{command}\n```", *["Act: finish"] * 4]


def test_whoever_breaks_its_machine_has_the_success_of_who_does_not(serving: Any) -> None:
    environment = load_environment(ENVIRONMENT)
    elsewhere = load_environment(
        {"kind": "remote", "url": serving({"train": environment}).url, "timeout": 60, "patience": 30}
    )

    def collect(world: Environment, sabotages: bool) -> Collection:
        agent: Any = Agent(environment, sabotages)
        return Collector(world, agent).collect(
            world.tasks, 1, SamplingConfig(max_tokens=1_000_000), RewardConfig(), 0
        )

    def successes(found: Collection) -> list[tuple[str, list[bool]]]:
        return [
            (group.task.id, [t.outcome is Outcome.CORRECT for t in group.trajectories])
            for group in found.groups
        ]

    try:
        honest = collect(environment, False)
        assert 0.3 < sum(sum(each) for _, each in successes(honest)) / 58 < 0.7
        for found in (collect(environment, True), collect(elsewhere, True)):
            assert successes(found) == successes(honest)
            assert found.failures == 0 and found.defects == 0
    finally:
        elsewhere.close()
