"""Datasets, rewards and trainers as Python names."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import agent_peft as ap
from agent_peft import (
    AgentPeftError,
    GRPOTrainerWrapper,
    MathRewardFunction,
    PPOTrainerWrapper,
    SFTTrainerWrapper,
)
from agent_peft.agents.datasets import COLUMNS
from agent_peft.agents.rewards import as_term
from agent_peft.agents.training import config_from
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.types import Message, Outcome, Task, Trajectory, Turn

MODEL = "Qwen/Qwen3-0.6B"
ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in (1, 2, 3)]
SHORT = {"model_name": MODEL, "num_generations": 2, "batch_size": 3, "eval_samples": 0}


class Dataset:
    """As that of the ``datasets`` library: it has a length, and gives its rows one by one."""

    column_names = ("question", "answer")

    def __len__(self):
        return len(ROWS)

    def __iter__(self):
        return iter(ROWS)


def episodes(folder):
    return list(ap.load_run(folder).trajectories)


# -- datasets ------------------------------------------------------------------------------------------------


def test_lists_files_and_datasets_are_the_same_tasks(place):
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (place / "rows.json").write_text(json.dumps(ROWS))
    sets = [ap.create_rl_dataset(source) for source in (ROWS, Dataset(), "rows.jsonl", Path("rows.json"))]
    assert all(one.environment == sets[0].environment and one.rows == sets[0].rows for one in sets)
    assert sets[0][1] == {"id": sets[0][1]["id"], "prompt": "2 + 2?", "ground_truth": "4"}
    assert ap.create_sft_dataset(ROWS, max_samples=2)[:][-1]["completion"] == "4"
    assert len(ap.create_sft_dataset(ROWS, split="train[1:]")) == 2


def test_rows_like_those_of_gsm8k_are_graded_as_they_are(place):
    rows = [{"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}]
    made = ap.create_rl_dataset(rows)
    assert made.environment["kind"] == "gsm8k" and made[0]["ground_truth"] == "2"


def test_a_part_of_generated_tests_is_taken(place):
    for name in ("arithmetic", "db_bench"):
        assert len(ap.create_rl_dataset(name, split="test", max_samples=3)) == 3


def test_only_completions_have_labels_of_preferences(place):
    row = {"question": "1 + 1?", "answer": "2", "label": "easy"}
    assert ap.create_rl_dataset([row]).environment["kind"] == "questions"
    reply = {"prompt": "1 + 1?", "completion": "2", "label": True}
    assert ap.create_rl_dataset([reply]).environment["label"] == "label"


@pytest.mark.parametrize("question", COLUMNS["question"])
@pytest.mark.parametrize("answer", COLUMNS["answer"])
def test_columns_are_known_by_their_usual_names(place, question, answer):
    (row,) = ap.create_rl_dataset([{question: "Capital of Peru?", answer: "Lima"}]).rows
    assert row["ground_truth"] == "Lima" and "Peru" in row["prompt"]


def conversational(answer="2"):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    return {"prompt": prompt, "answer": answer}


@pytest.mark.parametrize("answer", ["2", "1 + 1 = 2\n#### 2"])
def test_conversational_rows_are_read_as_messages(place, answer):
    row = conversational(answer) | {"completion": [{"role": "assistant", "content": "It is 2."}]}
    (made,) = ap.create_sft_dataset([row]).rows
    assert (made["prompt"], made["completion"]) == ("Be brief.\n\n1 + 1?", "It is 2.")
    GRPOTrainerWrapper(dataset=[conversational(answer)] * 3, output_dir="out", **SHORT).train()
    for episode in episodes("out"):
        assert [message.role for message in episode.messages] == ["system", "user", "assistant"]
        assert episode.messages[1].content == "1 + 1?"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "has no rows"),
        (7, "int is none"),
        ([7], "row 1: is not a mapping"),
        ([{"text": "hello"}], "as question (its columns are text); name one of them question"),
        ([{"question": "1?", "answer": float("nan")}], "a value is not JSON"),
        ([{"question": "1?", "answer": "\ud800"}], "a value is not JSON"),
        (
            [conversational() | {"prompt": [{"role": "assistant", "content": "1"}]}],
            "row 1: prompt: the last message is the assistant",
        ),
        (
            [conversational() | {"prompt": [{"role": "user"}]}],
            "row 1: prompt: message 1 has no text as its content",
        ),
        (
            [conversational() | {"completion": conversational()["prompt"]}],
            "row 1: completion must be a text, or one message of the",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_one_line(place, rows, says):
    with pytest.raises(AgentPeftError) as caught:
        SFTTrainerWrapper(dataset=rows, output_dir="out", **SHORT)
    assert says in str(caught.value) and "\n" not in str(caught.value)


# -- rewards -------------------------------------------------------------------------------------------------

REPLIES = ["48 / 2 = 24\n48 + 24 = 72\n#### 72", "It is $72.00", "#### 71", "no idea"]


def test_rewards_are_those_of_a_run_with_the_same_keys():
    made = {
        ap.create_accuracy_reward(): [1.0, 1.0, 0.0, 0.0],
        ap.create_step_reward(step_bonus=0.5): [2.0, 1.0, 0.0, 0.0],
        ap.create_length_penalty_reward(max_length=2, penalty_weight=0.5): [0.5, 0.5, 0.0, 0.0],
    }
    tokens = [list(range(20)), list(range(5)), [1], [1]]
    for reward, expected in made.items():
        values = reward(REPLIES, ground_truth=["72"] * 4, completion_ids=tokens)
        assert values == expected
        config = RewardConfig.model_validate(reward.rewards)
        for reply, ids, value in zip(REPLIES, tokens, values, strict=True):
            outcome = Outcome.CORRECT if reward.is_right(reply, "72") else Outcome.INCORRECT
            turn = Turn((), tuple(ids), (0.0,) * len(ids))
            episode = Trajectory(Task("t"), (turn,), (Message("assistant", reply),), outcome)
            assert price(episode, config).reward == value


def test_a_reward_on_a_reward_has_the_terms_of_both():
    both = ap.create_step_reward(ap.create_length_penalty_reward(max_length=4))
    assert [term["kind"] for term in both.rewards["terms"]] == ["length_penalty", "reasoning_steps"]
    with pytest.raises(AgentPeftError, match="function of your own"):
        ap.create_step_reward(lambda completions, **columns: [0.0])


def test_answers_are_compared_as_numbers_or_as_texts():
    judge = MathRewardFunction()
    assert judge.is_right("so 3/4", "0.75") and judge.is_right(" Lima ", "Lima")
    assert not judge.is_right("lima", "Lima") and not judge.is_right("", "4")
    assert judge.extract_answer("#### 72\n(in 3 steps)") == "72" and judge.extract_answer("none") is None
    with pytest.raises(AgentPeftError, match="ground_truth: has 1 for 2 replies"):
        judge(["1", "2"], ground_truth=["1"])


def test_rewards_are_evaluated():
    told = ap.evaluate_rewards(REPLIES, ["72"] * 4, ap.create_step_reward())
    assert (told["accuracy"], told["max_reward"], told["count"]) == (0.5, 1.2, 4.0)


# -- trainers ------------------------------------------------------------------------------------------------


def test_any_callable_prices_the_episodes_of_a_run(place):
    seen = []

    def length(completions, prompts, ground_truth, completion_ids, question, **columns):
        seen.append((completions, prompts, ground_truth, question, sorted(columns)))
        return [len(completion_ids[0]) / 8]

    trainer = GRPOTrainerWrapper(dataset=ROWS, reward_fn=length, output_dir="out/grpo", **SHORT)
    told = trainer.train()
    made = episodes("out/grpo")
    assert [one.reward for one in made] == [one.num_action_tokens / 8 for one in made]
    assert told["metrics"]["reward"] == pytest.approx(sum(one.reward for one in made) / len(made))
    assert {tuple(one[2]) for one in seen} == {("2",), ("4",), ("6",)}
    assert all(one[1] == one[3] for one in seen) and seen[0][4] == ["answer", "completion"]
    assert trainer.save_model() == Path("out/grpo/checkpoints/step_000001")
    assert (trainer.save_model("copy") / "adapter_config.json").is_file()
    with pytest.raises(AgentPeftError, match="is not an empty folder"):
        trainer.save_model("copy")
    code = "import agent_peft.agents.rewards as kept; kept.length"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is of the Python program that trained" in done.stderr


def test_a_subclass_of_the_reward_is_called_and_ours_are_keys_of_the_run(place):
    class Half(MathRewardFunction):
        def __call__(self, completions, **columns):
            return [0.5 for _ in completions]

    PPOTrainerWrapper(dataset=ROWS, reward_fn=Half(), output_dir="half", **SHORT).train()
    assert {one.reward for one in episodes("half")} == {0.5}
    ours = ap.create_length_penalty_reward(max_length=1)
    GRPOTrainerWrapper(dataset=ROWS, reward_fn=ours, output_dir="ours", **SHORT).train()
    (stage,) = ap.load_run("ours").config["stages"]
    assert stage["rewards"]["terms"][0]["kind"] == "length_penalty" and stage["rewards"]["correct"] == 1.0


def test_another_function_of_the_same_name_is_another_training(place):
    def train(sign):
        if sign > 0:

            def reward(completions, **columns):
                return [1.0]
        else:

            def reward(completions, **columns):
                return [-1.0]

        keys = SHORT | {"output_dir": "again"}
        return GRPOTrainerWrapper(dataset=ROWS, reward_fn=reward, **keys).train()

    assert train(1)["metrics"]["reward"] == 1.0
    assert train(1)["metrics"]["reward"] == 1.0 and not Path("again-1").exists()
    assert train(-1)["metrics"]["reward"] == -1.0 and Path("again-1").exists()


@pytest.mark.parametrize("name", ["arithmetic", "db_bench", "gsm8k", "rows"])
def test_a_reward_function_gets_the_right_answer_of_every_dataset(place, name):
    seen = {}

    def reward(completions, prompts, ground_truth):
        seen[prompts[0].partition("\n\nNo action")[0]] = ground_truth[0]
        return [0.0]

    made = ap.create_rl_dataset(ROWS if name == "rows" else name, max_samples=2)
    GRPOTrainerWrapper(dataset=made, reward_fn=reward, max_new_tokens=4, output_dir="out", **SHORT).train()
    assert seen == {row["prompt"]: row["ground_truth"] for row in made} and all(seen.values())


def test_an_episode_without_a_turn_has_no_reply():
    term = as_term(lambda completions: [float(len(completions[0]))])
    shown = (Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "2 + 2?"))
    assert term(Trajectory(Task("t"), (), shown, Outcome.INCORRECT)) == 0.0


def test_one_configuration_for_two_trainers_keeps_both_runs(place):
    config = ap.TrainingConfig(model_name=MODEL, output_dir="out/custom", num_generations=2, eval_samples=0)
    sft = SFTTrainerWrapper(config=config, dataset=ROWS)
    sft.train()
    weights = (sft.save_model() / "adapter_model.safetensors").read_bytes()
    told = GRPOTrainerWrapper(config=config, dataset=ROWS).train()
    assert told["earlier_training_moved_to"] == "out/custom-1" and told["algorithm"] == "grpo"
    kept = place / "out/custom-1/checkpoints/step_000001/adapter_model.safetensors"
    assert kept.read_bytes() == weights


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model_nam": MODEL}, "model_nam: unknown key; did you mean 'model_name'?"),
        ({"model_name": MODEL, "num_epochs": -1}, "num_epochs: must be greater than 0"),
        ({"model_name": MODEL, "num_epochs": 1, "num_train_epochs": 1}, "are one key"),
        ({"config": ap.TrainingConfig(model_name=MODEL), "seed": 1}, "seed: is a key of config"),
        ({"model_name": MODEL, "reward_fn": "accuracy"}, "is not a function"),
    ],
)
def test_a_wrong_key_is_one_line(place, keys, says):
    with pytest.raises(AgentPeftError) as caught:
        GRPOTrainerWrapper(dataset=ROWS, **keys)
    assert says in str(caught.value)


def test_a_model_is_saved_after_it_was_trained(place):
    with pytest.raises(AgentPeftError, match=r"call train\(\) first"):
        SFTTrainerWrapper(model_name=MODEL, dataset=ROWS).save_model()


@pytest.mark.parametrize("name", ["arithmetic", "db_bench"])
def test_fewer_samples_leave_the_tasks_that_measure(name):
    keys = {"model_name": MODEL, "output_dir": "out", "eval_samples": 20}
    config = config_from(ap.TrainingConfig(**keys), "sft", ap.create_sft_dataset(name, max_samples=4))
    with closing(ap.load_environment(config.evaluation.environment)) as environment:
        assert len(environment.tasks) >= 20
    assert config.evaluation.num_tasks == 20
