"""Earlier successes in the prompt: which ones, where they stand, and within which limit."""

from __future__ import annotations

import json

import pytest

from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.environments.base import Environment, Episode
from agent_peft.environments.digests import task_digest
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import Collector
from agent_peft.rollout.conversation import EpisodeConversation
from agent_peft.rollout.replays import Replay, Replays, ReplayWindow, read_replays
from agent_peft.rollout.rewards import ReasoningStepsConfig, RewardConfig, reasoning_steps
from agent_peft.types import (
    AgentPeftError,
    Group,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

SYSTEM = Message("system", "8+8=")


class Letters:
    """A tokenizer that writes everything but special tokens."""

    def opening(self, messages):
        if any("<" in message.content for message in messages):
            raise AgentPeftError("'<' is not in its alphabet")
        return [0]


ANY = Letters()


def episode(task: str, *texts: str, outcome: Outcome = Outcome.CORRECT, system: bool = True) -> Trajectory:
    """An episode that begins with the user's first text and ends with the assistant's last one."""
    roles = ("user", "assistant")
    spoken = [Message(roles[number % 2], text) for number, text in enumerate(texts)]
    turns = tuple(Turn((1,), (2,), (0.0,)) for _ in range(len(texts) // 2))
    messages = (*((SYSTEM,) if system else ()), *spoken)
    return Trajectory(Task(task), turns, messages, outcome)


def group(*trajectories: Trajectory) -> Group:
    return Group(trajectories[0].task, trajectories)


def texts(replays) -> list[list[str]]:
    return [[message.content for message in replay.messages] for replay in replays]


def test_the_latest_successes_are_kept_one_of_each_task():
    replays = Replays(2)
    wrong = episode("a", "1+1=", "3", outcome=Outcome.INCORRECT)
    replays.add([group(wrong, episode("a", "1+1=", "2"), episode("a", "1+1=", "02")), group(wrong)], ANY)
    replays.add([group(episode("b", "1+2=", "?", "Again.", "3"))], ANY)
    assert texts(replays.latest()) == [["1+1=", "2"], ["1+2=", "?", "Again.", "3"]]
    replays.add([group(episode("a", "1+1=", "2.")), group(episode("c", "4=", "4"))], ANY)
    assert texts(replays.latest()) == [["1+2=", "?", "Again.", "3"], ["1+1=", "2."], ["4=", "4"]]
    replays.add([group(episode("d", "5=", "5"))], ANY)
    kept = [task_digest(Task(name)) for name in ("a", "c", "d")]
    assert [replay.task for replay in replays.latest()] == kept, "one more than is shown"
    replays.add([group(episode("e", "6=", "<pad>6"), episode("e", "6=", "6"))], ANY)
    assert texts(replays.latest())[-1] == ["6=", "6"], "a text that cannot be written is not a replay"
    none = Replays(0)
    none.add([group(episode("a", "1+1=", "2"))], ANY)
    assert none.latest() == ()


def test_only_what_follows_the_opening_is_kept_also_of_an_episode_that_showed_replays():
    shown = episode("b", "1+1=", "2", "3=", "3")
    shown = Trajectory(shown.task, shown.turns[:1], shown.messages, shown.outcome)  # one turn of its own
    replays = Replays(4)
    replays.add([group(shown)], ANY)
    assert texts(replays.latest()) == [["3=", "3"]]


def test_an_opening_without_a_users_message_is_one_line():
    lone = Trajectory(Task("a"), (Turn((1,), (2,), (0.0,)),), (SYSTEM, Message("assistant", "2")))
    lone = Trajectory(lone.task, lone.turns, lone.messages, Outcome.CORRECT)
    with pytest.raises(AgentPeftError, match="task 'a' begins with a message of the system; set replay_in_p"):
        Replays(1).add([group(lone)], ANY)


def test_they_are_written_and_read(tmp_path):
    replays, other = Replays(1), Replays(1)
    replays.add([group(episode(name, "1=", f"{name}\n")) for name in ("a", "b", "c")], ANY)
    replays.write(tmp_path)
    other.read(tmp_path)
    assert other.latest() == replays.latest() == read_replays(tmp_path) != ()
    assert read_replays(tmp_path / "older") == ()
    (tmp_path / "replays.json").write_text(json.dumps([{"task": "a"}]))
    with pytest.raises(AgentPeftError, match=r"replays.json: is damaged \(KeyError"):
        read_replays(tmp_path)


def test_a_window_shows_the_latest_of_other_tasks_before_the_task():
    kept = tuple(
        Replay(task_digest(Task(n)), (Message("user", n), Message("assistant", n.upper()))) for n in "abc"
    )
    opening = [SYSTEM, Message("user", "task")]

    def shown(task: str, number: int, room: int = 99) -> str:
        messages = ReplayWindow(kept, number).before(Task(task), opening, lambda them: len(them) <= room)
        assert messages[0] == opening[0] and messages[-1] == opening[-1]
        return "".join(message.content for message in messages[1:-1])

    assert shown("d", 2) == "bBcC" and shown("c", 2) == "aAbB" and shown("b", 9) == "aAcC"
    assert shown("d", 0) == "" and shown("d", 3, room=5) == "cC" and shown("d", 3, room=6) == "bBcC"
    assert shown("d", 3, room=1) == "", "the opening stays as it is, whether it fits or not"


# -- in an episode -------------------------------------------------------------------------------------------


@pytest.fixture
def sampler():
    architecture = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
    }
    return load_sampler(
        load_policy(ScratchConfig(architecture=architecture, alphabet=ALPHABET, device="cpu"), 0)
    )


def shown_of(number: int, count: int = 6) -> ReplayWindow:
    replays = Replays(number)
    replays.add([group(episode(f"t{n}", f"{n}+{n}=", str(2 * n))) for n in range(count)], ANY)
    return ReplayWindow(replays.latest(), number)


def test_the_policy_reads_them_as_turns_and_learns_only_its_own(sampler):
    environment, sampling = Arithmetic(ArithmeticConfig(digits=1, num_tasks=4)), {"max_new_tokens": 2}
    collect = Collector(environment, sampler).collect
    arguments = (environment.tasks[:2], 2, SamplingConfig(max_tokens=200, **sampling), RewardConfig(), 7)
    plain, replayed = (
        [t for g in collect(*arguments, replays=replays).groups for t in g.trajectories]
        for replays in (None, shown_of(3))
    )
    for before, after in zip(plain, replayed, strict=True):
        said = [
            Message(*pair) for n in (3, 4, 5) for pair in (("user", f"{n}+{n}="), ("assistant", str(2 * n)))
        ]
        assert list(after.messages[:-1]) == [*before.messages[:-2], *said, *before.messages[-2:-1]]
        assert list(after.turns[0].observation) == sampler.chat.opening(after.messages[:-1])
        assert sum(after.action_mask) == after.num_action_tokens <= 2
    assert len({t.turns[0].observation for t in replayed}) == 2, "the members of a group read the same"


def test_the_oldest_go_where_the_opening_would_take_more_than_half_of_max_tokens(sampler):
    environment, window = Arithmetic(ArithmeticConfig(digits=1, num_tasks=4)), shown_of(6)
    lengths = {}
    for number in (0, 2, 6):
        conversation = EpisodeConversation(
            environment, environment.tasks[0], sampler.chat, [], max_tokens=999, replays=shown_of(number)
        )
        lengths[number] = len(conversation.prompt)
        conversation.close()
    for room, number in (
        (2 * lengths[6], 6),
        (2 * lengths[6] - 1, 5),
        (2 * lengths[2], 2),
        (lengths[0] + 1, 0),
    ):
        conversation = EpisodeConversation(
            environment, environment.tasks[0], sampler.chat, [], max_tokens=room, replays=window
        )
        prompt = conversation.prompt
        conversation.close()
        users = [message.content for message in conversation.messages if message.role == "user"]
        assert users[:-1] == [f"{n}+{n}=" for n in range(6)][6 - number :]
        assert len(prompt) == len(sampler.chat.opening(conversation.messages))


class Failing(Environment):
    """Its first world fails at the second action; the next one continues."""

    def __init__(self) -> None:
        self.worlds = 0

    @property
    def tasks(self):
        return (Task("x"),)

    def episode(self, task, seed):
        self.worlds += 1
        return FailingEpisode(self.worlds == 1)


class FailingEpisode(Episode):
    def __init__(self, fails: bool) -> None:
        self.fails, self.turns = fails, 0

    def start(self):
        return (SYSTEM, Message("user", "1="))

    def step(self, action):
        self.turns += 1
        if self.turns == 1:
            return StepResult("2=")
        if self.fails:
            raise InfrastructureError("gone")
        return StepResult("", done=True, outcome=Outcome.CORRECT, stop_reason=StopReason.FINISHED)

    def close(self):
        pass


def test_an_episode_that_is_replayed_in_another_world_shows_the_same(sampler):
    sampling = SamplingConfig(max_new_tokens=2, max_tokens=200)
    collection = Collector(Failing(), sampler).collect(
        (Task("x"),), 1, sampling, RewardConfig(), 0, replays=shown_of(2)
    )
    assert collection.failures == 1 and collection.crashed == 0
    trajectory = collection.groups[0].trajectories[0]
    assert [m.content for m in trajectory.messages][1:6] == ["4+4=", "8", "5+5=", "10", "1="]
    replays = Replays(1)
    replays.add(collection.groups, sampler.chat)
    assert texts(replays.latest())[0][::2] == ["1=", "2="]


def test_a_reward_of_steps_counts_those_of_the_episode_alone():
    replayed = episode("b", "1+1=", "one\ntwo\n2", "3=", "three\n3")
    replayed = Trajectory(replayed.task, replayed.turns[:1], replayed.messages)
    assert reasoning_steps(ReasoningStepsConfig(), replayed) == 1.0
