"""TRL's side of ``against_trl.py``: a GRPOTrainer that makes a step when the driver asks for one. It runs in
TRL's own environment.

    python benchmarks/trl_peer.py SETTINGS.json     # the driver writes the file and uses the standard streams
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from paired_episodes import EverySecond, EverySecondConfig, Turnstile
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# Every reply counts as a call of the one tool, so that a small model, which makes no valid calls, gets all
# its turns.
EVERY_REPLY_ACTS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "act", "arguments": {"reply": "{content}"}},
            },
        }
    },
}


class Acting:
    """Our environment with the interface of TRL's ``environment_factory``."""

    def __init__(self, environment: EverySecond) -> None:
        self._environment = environment
        self._episode = None

    def reset(self, task: int, **row: Any) -> None:
        if self._episode is not None:
            self._episode.close()
        self._episode = self._environment.episode(self._environment.tasks[task], seed=task)
        self._episode.start()

    def act(self, reply: str) -> str:
        """
        Act in the environment.

        Args:
            reply: What to do.

        Returns:
            What there is to read next.
        """
        return self._episode.step(reply).observation


def every_second(completions: list[Any], **_: Any) -> list[float]:
    return [float(number % 2 == 0) for number in range(len(completions))]


class Timed(GRPOTrainer):
    """Counts the sampled tokens and the time of sampling, including the environment's answers and TRL's
    bookkeeping of them.
    """

    turnstile: Turnstile

    def _generate(self, prompts: list[Any]) -> Any:
        with self.turnstile.spending("sampling"):
            made = super()._generate(prompts)
        prompt_ids, completion_ids, masks = made[:3]
        masks = masks or [[1] * len(ids) for ids in completion_ids]
        self.made = {
            "prompts": sorted({tuple(ids) for ids in prompt_ids}),
            "episodes": len(completion_ids),
            "tokens": sum(len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True)),
            "sampled": sum(map(sum, masks)),
            "turns": sum(
                now and not before for mask in masks for before, now in zip([0, *mask], mask, strict=False)
            ),
        }
        return made


class Steps(TrainerCallback):
    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile = turnstile

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.turnstile.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.turnstile.tell(**self.turnstile.stop(), **self.trainer.made)


def main() -> None:
    turnstile = Turnstile()
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    episodes = settings["tasks_per_step"] * settings["group_size"]
    several: dict[str, Any] = {}
    if settings["turns"] > 1:
        environment = EverySecond(EverySecondConfig(**settings["environment"]))
        several = {"environment_factory": lambda: Acting(environment)}
        tokenizer.response_template = EVERY_REPLY_ACTS
        logging.getLogger("transformers").setLevel(logging.ERROR)
    if settings["equal"]:
        chosen: dict[str, Any] = {
            "bf16": False,
            "gradient_checkpointing": False,
            "loss_type": "grpo",
            "disable_dropout": True,
            "lr_scheduler_type": "constant",
            "optim": "adamw_torch",
            "adam_beta2": 0.99,
            "model_init_kwargs": {"dtype": "float32"},
        }
    else:
        chosen = {}
    config = GRPOConfig(
        **chosen,
        output_dir=settings["folder"],
        use_cpu=True,
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=episodes // settings["microbatch"],
        num_generations=settings["group_size"],
        num_iterations=1,
        max_steps=settings["steps"],
        # of the whole episode where it has several turns; a turn's are bounded by what generate is told
        max_completion_length=settings["new_tokens"] if settings["turns"] == 1 else settings["max_tokens"],
        generation_kwargs={"max_new_tokens": settings["new_tokens"]},
        max_tool_calling_iterations=settings["turns"] - 1 or None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        shuffle_dataset=False,
        learning_rate=settings["learning_rate"],
        max_grad_norm=1.0,
        use_transformers_continuous_batching=settings["continuous"] is not None,
        transformers_continuous_batching_config=settings["continuous"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )
    steps = Steps(turnstile)
    trainer = Timed(
        model=settings["model"],
        reward_funcs=every_second,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": messages, "task": number} for number, messages in enumerate(settings["openings"])]
        ),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        if settings["lora"]
        else None,
        callbacks=[steps],
        **several,
    )
    trainer.turnstile, steps.trainer = turnstile, trainer
    weights = str(trainer.model.dtype).removeprefix("torch.")
    turnstile.tell(
        trained=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        precision=f"{weights}, bf16={config.bf16}",
    )
    trainer.train()


if __name__ == "__main__":
    main()
