"""Mistakes of a demonstration: the policy reads them and their repair, and learns what the repair changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from agent_peft.batch import collate
from agent_peft.environments import Environment, Episode, Mistake
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.runs.reading import load_run
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task, Trajectory


class Sum(Environment, Episode):
    """One sum, whose demonstration goes wrong first."""

    tasks = (Task("t"),)

    def __init__(self, demonstration: Sequence[str]) -> None:
        super().__init__()
        self.replies = demonstration

    def episode(self, task: Task, seed: int) -> Episode:
        return self

    def demonstration(self, task: Task) -> Sequence[str]:
        return self.replies

    def start(self) -> Sequence[Message]:
        return [Message("user", "1+1=")]

    def step(self, action: str) -> StepResult:
        if action in ("2", "22"):
            return StepResult("", True, Outcome.CORRECT, StopReason.FINISHED)
        return StepResult("-", valid=False)


@pytest.fixture
def step_of(policy_config):
    """step_of(demonstration): a trainer on it, and its first step."""

    def made(demonstration: Sequence[str], weighting: str = "token_mean"):
        policy = load_policy(policy_config, 0)
        algorithm = {"kind": "sft", "weighting": weighting}
        stage = StageConfig.model_validate({"algorithm": algorithm, "steps": 1, "tasks_per_step": 1})
        trainer = Trainer(policy, Sum(demonstration), stage, load_sampler(policy, EngineConfig()), 0)
        return trainer, next(iter(trainer))

    return made


def logprobs(policy_config, trajectory: Trajectory, count: int) -> torch.Tensor:
    """(count,) of the last tokens of a trajectory, under the policy before the step."""
    policy = load_policy(policy_config, 0)
    batch = collate([trajectory], [0])
    mask = torch.zeros_like(batch.action_mask)
    mask[0, -count:] = True
    return policy.forward(replace(batch, action_mask=mask), SamplingConfig()).logprobs[mask].detach()


@pytest.mark.parametrize("weighting", ["token_mean", "turn_mean"])
def test_a_mistake_is_read_and_not_learnt(step_of, policy_config, weighting):
    """The loss is that of the repair's tokens alone, after the mistake and its answer."""
    _, step = step_of([Mistake("3"), "2"], weighting)
    (group,) = step.collection.groups
    (trajectory,) = group.trajectories
    assert [message.content for message in trajectory.messages] == ["1+1=", "3", "-", "2"]
    assert [turn.mistake for turn in trajectory.turns] == [True, False]
    repair = len(trajectory.turns[-1].action)
    expected = -logprobs(policy_config, trajectory, repair).mean().item()
    assert step.metrics["surprisal"] == pytest.approx(expected, rel=1e-5)
    _, plain = step_of(["3", "2"], weighting)
    assert plain.metrics["surprisal"] != pytest.approx(expected, rel=1e-3)


def test_what_a_repair_keeps_of_the_mistake_is_read_and_not_learnt(step_of, policy_config):
    """The loss is that of the second 2 and of the end token, not of the 2 that the mistake has, too."""
    _, step = step_of([Mistake("23"), "22"], "turn_mean")
    ((trajectory,),) = (group.trajectories for group in step.collection.groups)
    assert len(trajectory.turns[-1].action) == 3
    expected = -logprobs(policy_config, trajectory, 2).mean().item()
    assert step.metrics["surprisal"] == pytest.approx(expected, rel=1e-5)
    whole = -logprobs(policy_config, trajectory, 3).mean().item()
    assert whole != pytest.approx(expected, rel=1e-3)


def test_the_record_says_which_turns_are_mistakes(step_of, tmp_path):
    for step, (demonstration, expected) in enumerate([([Mistake("3"), "2"], (0,)), (["3", "2"], ())]):
        _, made = step_of(demonstration)
        write_trajectories(tmp_path / "trajectories", step, "sft", made.collection.groups, sampled=False)
        (tmp_path / "config.yaml").write_text("{}\n")
        (episode,) = load_run(tmp_path).trajectories.of_step(step)
        assert (episode.mistake_turns, episode.invalid_turns) == (expected, (0,))
        assert episode.num_action_tokens == 4, "the tokens of a mistake are the agent's, too"
    (line,) = (tmp_path / "trajectories/step_000001.jsonl").read_text().splitlines()
    assert "mistake_turns" not in json.loads(line), "as an earlier version wrote it"


def test_a_demonstration_has_to_repair_its_mistake(step_of):
    with pytest.raises(AgentPeftError, match="task t: its demonstration ends with a mistake"):
        step_of([Mistake("2")])
