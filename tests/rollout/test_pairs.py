"""Where preferences come from: an environment's two replies, its labels, and the episodes of a run."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from tokenizers import normalizers

from agent_peft.algorithms.preference import Kto, KtoConfig
from agent_peft.batch import collate_groups
from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.environments.chat import Chat, ChatConfig
from agent_peft.environments.preferences import Preferences, PreferencesConfig
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.ranks import ALONE
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.pairs import EpisodePairs, EpisodesOfConfig, Pairs, read_groups, with_mismatched
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.rollout.task_order import TaskOrder
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.types import AgentPeftError, Group, Message, Outcome, Task, Trajectory, Turn

CHAT = ChatTokenizer(character_tokenizer(ALPHABET))
SUMS = Arithmetic(ArithmeticConfig(digits=1))


def pairs(environment, per_step: int, form="pairs") -> Pairs:
    order = TaskOrder(environment.tasks, per_step, seed=0)
    return Pairs(environment, order, CHAT, RewardConfig(), 0, ALONE, form)


def table(tmp_path: Path, *rows) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("answer", ["plain", "reversed", "worked"])
def test_a_generator_gives_the_right_and_a_wrong_answer(answer):
    environment = Arithmetic(ArithmeticConfig(digits=(1, 2), num_tasks=60, answer=answer, symbols=True))
    source = pairs(environment, 60)
    groups = source.collect(0).groups
    assert groups == source.collect(0).groups
    for group in groups:
        chosen, rejected = group.trajectories
        assert (chosen.outcome, rejected.outcome) == (Outcome.CORRECT, Outcome.INCORRECT)
        assert chosen.turns[0].observation == rejected.turns[0].observation
        assert rejected.turns[0].valid, "a wrong answer that is not a number would teach the format alone"
        assert not group.mismatched


def test_an_environment_without_worse_replies_is_told(tmp_path):
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    environment = Chat(ChatConfig(tasks=table(tmp_path, {"messages": said})))
    with pytest.raises(AgentPeftError, match="the environment has no rejection, so it is not a pair; take"):
        pairs(environment, 1).collect(0)
    (group,) = pairs(environment, 1, "labels").collect(0).groups
    assert [t.outcome for t in group.trajectories] == [Outcome.CORRECT]  # kto takes what there is


def test_labels_are_single_replies_with_others_to_measure(tmp_path):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1 + n % 2), "label": n % 2 == 0} for n in range(6)]
    environment = Preferences(PreferencesConfig(tasks=table(tmp_path, *rows), label="label"))
    groups = pairs(environment, 6, "labels").collect(0).groups
    outcomes = {group.task.id: [t.outcome for t in group.trajectories] for group in groups}
    assert outcomes == {f"rows:{n + 1}": [Outcome.INCORRECT if n % 2 else Outcome.CORRECT] for n in range(6)}
    for group, other in zip(groups, [*groups[1:], groups[0]], strict=True):
        (own,), (mismatched,), following = group.trajectories, group.mismatched, other.trajectories[0]
        assert mismatched.turns[0].observation == own.turns[0].observation
        assert mismatched.turns[0].action == following.turns[0].action
    with pytest.raises(AgentPeftError, match=r"has no rejection|has no demonstration"):
        pairs(environment, 6).collect(0)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_label_is_that_of_the_table_whatever_a_tokenizer_makes_of_the_text(form, tmp_path):
    tokenizer = character_tokenizer("caf\u00e9no")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # as Qwen's
    good, bad = unicodedata.normalize(form, "caf\u00e9"), "no"
    rows = [
        {"prompt": "a", "completion": good, "label": True},
        {"prompt": "a", "completion": bad, "label": False},
    ]
    environment = Preferences(PreferencesConfig(tasks=table(tmp_path, *rows), label="label"))
    source = replace(pairs(environment, 2, "labels"), chat=ChatTokenizer(tokenizer))
    groups = source.collect(0).groups
    collated = collate_groups(dict(enumerate(groups)))
    batch = Kto(KtoConfig(kind="kto")).prepare(replace(collated, reference_logprobs=collated.logprobs))
    labels = {t.task.id: t.desirable for group in groups for t in group.trajectories}
    assert labels == {"rows:1": True, "rows:2": False}
    assert [t.outcome for t in groups[[g.task.id for g in groups].index("rows:1")].trajectories] == [
        Outcome.CORRECT
    ]
    signs = [1.0 if labels[group.task.id] else -1.0 for group in groups]
    own = batch.groups >= 0
    assert [float(row.max() if row.max() > 0 else row.min()) for row in batch.advantages[own]] == signs


def test_a_mismatched_trajectory_is_as_long_as_the_longest_at_most():
    def group(name: str, opening: int, *actions: tuple[int, ...]) -> Group:
        turns = tuple(Turn((1,) * opening, action, (0.0,) * len(action)) for action in actions)
        return Group(Task(name), [Trajectory(Task(name), turns, rewards=(0.0,) * len(turns))])

    groups = [group("a", 6, (2, 2)), group("b", 1, (3,) * 4, (4, 4)), group("c", 3, (5,))]
    found = [g.mismatched[0].tokens for g in with_mismatched(Collection(groups)).groups]
    assert found == [(1,) * 6 + (3,) * 2, (1, 5), (1, 1, 1, 2, 2)]
    assert with_mismatched(Collection(groups[:1])).groups == groups[:1]


def test_mismatched_actions_are_of_another_task_and_of_no_policy():
    def group(name: str, action: int) -> Group:
        return Group(Task(name), [Trajectory(Task(name), (Turn((1,), (action,), (-3.0,)),), rewards=(0.0,))])

    one, two, three = with_mismatched(Collection([group("a", 2), group("a", 3), group("b", 4)])).groups
    assert [g.mismatched[0].turns[0].action for g in (one, two, three)] == [(4,), (4,), (2,)]
    assert all(g.mismatched[0].turns[0].logprobs == (0.0,) for g in (one, two, three))
    assert not any(g.mismatched for g in with_mismatched(Collection([group("a", 2), group("a", 3)])).groups)


# -- the episodes of a run -----------------------------------------------------------------------------------


def episode(task: str, answer: str, outcome: Outcome, opening: str = "", seed: int = 0) -> Trajectory:
    """An episode of two turns, the first of which is the same in all."""
    question = Message("user", opening or f"{task}=")
    begin = Turn(tuple(CHAT.opening([question])), tuple(CHAT.action_tokens("0")), (-0.5, -0.25))
    action = tuple(CHAT.action_tokens(answer))
    end = Turn(
        tuple(CHAT.following("1", begin.action)), action, (-1.0,) * len(action), valid=answer != "-", cut=True
    )
    messages = (question, Message("assistant", "0"), Message("user", "1"), Message("assistant", answer))
    return Trajectory(Task(task, ("sum",)), (begin, end), messages, outcome, rewards=(0.0, 9.0), seed=seed)


GOOD, BAD = Outcome.CORRECT, Outcome.INCORRECT
FIRST = [
    Group(Task("1+1"), [episode("1+1", "3", BAD), episode("1+1", "2", GOOD), episode("1+1", "-", BAD)]),
    Group(Task("1+2"), [episode("1+2", "3", GOOD), episode("1+2", "3", GOOD)]),
]
SECOND = [
    Group(Task("2+2"), [episode("2+2", "4", GOOD), episode("2+2", "5", BAD, opening="4+4=")]),
    Group(Task("2+3"), [episode("2+3", "5", GOOD), episode("2+3", "7", BAD)]),
]
PRICES = RewardConfig(invalid_action=-0.5)


@pytest.fixture
def run(tmp_path) -> Path:
    """Two steps of episodes, of two stages, and one of demonstrations."""
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    write_trajectories(folder, 0, "sft", FIRST, sampled=False)
    write_trajectories(folder, 1, "rloo", FIRST)
    write_trajectories(folder, 2, "grpo", SECOND)
    return tmp_path / "run"


def test_a_run_s_episodes_come_back_token_for_token(run):
    groups = list(read_groups(EpisodesOfConfig(run=run), CHAT, PRICES))
    assert [group.task.id for group in groups] == ["1+1", "1+2", "2+2", "2+3"]
    for found, written in zip(groups, [*FIRST, *SECOND], strict=True):
        for one, other in zip(found.trajectories, written.trajectories, strict=True):
            assert (one.turns, one.messages, one.outcome, one.task.skills) == (
                other.turns,
                other.messages,
                other.outcome,
                ("sum",),
            )
    # priced by this stage, and not as they were
    assert [t.reward for t in groups[0].trajectories] == [PRICES.incorrect, 1.0, PRICES.incorrect - 0.5]


def test_what_each_turn_added_to_the_score_comes_back(run):
    begin, end = episode("1+1", "3", BAD).turns
    scored = replace(
        episode("1+1", "3", BAD), turns=(replace(begin, score=0.5), replace(end, score=0.25)), score=0.25
    )
    write_trajectories(
        run / "trajectories", 1, "rloo", [Group(Task("1+1"), [scored, episode("1+1", "2", GOOD)])]
    )
    graded = RewardConfig(score=1.0)
    (group,) = read_groups(EpisodesOfConfig(run=run, stage="rloo"), CHAT, graded)
    assert group.trajectories[0].turns == scored.turns
    assert group.trajectories[0].rewards == price(scored, graded).rewards
    assert group.trajectories[0].rewards[0] == 0.5


def test_the_best_against_the_worst_and_ties_are_counted(run):
    groups = read_groups(EpisodesOfConfig(run=run), CHAT, PRICES)
    source = EpisodePairs(groups, 2, 0, "pairs", "run")
    collection = source.collect(0)
    assert collection.metrics == {"groups_tied": 1.0, "groups_unlike": 1.0}
    answers = {g.task.id: [t.messages[-1].content for t in g.trajectories] for g in collection.groups}
    assert answers == {"1+1": ["2", "-"], "2+3": ["5", "7"]}
    assert source.collect(5).groups == source.collect(5).groups
    twice = EpisodePairs(read_groups(EpisodesOfConfig(run=run), CHAT, PRICES), 4, 0, "pairs", "run")
    trajectories = [t for group in twice.collect(0).groups for t in group.trajectories]
    assert len({id(t) for t in trajectories}) == 8, "a group that comes twice in a step is told apart"


def test_kto_takes_every_episode(run):
    groups = read_groups(EpisodesOfConfig(run=run, stage="rloo"), CHAT, PRICES)
    collection = EpisodePairs(groups, 2, 0, "labels", "run").collect(0)
    assert sorted(len(group.trajectories) for group in collection.groups) == [2, 3]
    assert all(len(group.mismatched) == len(group.trajectories) for group in collection.groups)
    assert not collection.metrics


def test_a_run_without_a_pair_is_told(run):
    tied = [FIRST[1], SECOND[0]]
    with pytest.raises(AgentPeftError, match=r"^place: 1 groups have one reward each, and in 1 the best and"):
        EpisodePairs(tied_priced(tied), 2, 0, "pairs", "place")
    with pytest.raises(AgentPeftError, match=r"no episodes of a stage 'dpo' .* it has those of grpo, rloo"):
        list(read_groups(EpisodesOfConfig(run=run, stage="dpo"), CHAT, PRICES))
    with pytest.raises(AgentPeftError, match="nowhere holds no episodes that its policy sampled; give the"):
        list(read_groups(EpisodesOfConfig(run=run / "nowhere"), CHAT, PRICES))


def tied_priced(groups: list[Group]) -> list[Group]:
    return [
        Group(g.task, [replace(t, rewards=(0.0, float(t.outcome is GOOD))) for t in g.trajectories])
        for g in groups
    ]


def test_the_episodes_of_another_tokenizer_are_refused(run):
    other = ChatTokenizer(character_tokenizer("=" + ALPHABET[::-1].replace("=", "")))
    with pytest.raises(AgentPeftError, match="row 0 are not those of this policy's tokenizer; give a run"):
        list(read_groups(EpisodesOfConfig(run=run), other, PRICES))


@pytest.mark.parametrize("damage", ["line", "arrays", "turns"])
def test_a_damaged_file_is_one_line(run, damage):
    path = run / "trajectories" / "step_000001.jsonl"
    if damage == "line":
        path.write_text(path.read_text()[:-20])
    elif damage == "arrays":
        path.with_suffix(".safetensors").write_bytes(b"no")
    else:
        from safetensors.numpy import load_file, save_file

        arrays = load_file(path.with_suffix(".safetensors"))
        save_file({**arrays, "mask": numpy.zeros_like(arrays["mask"])}, path.with_suffix(".safetensors"))
    with pytest.raises(AgentPeftError, match=rf"^{path}: is damaged \(.*\); take another run$"):
        list(read_groups(EpisodesOfConfig(run=run), CHAT, PRICES))
