"""The two sides of ``against_trl.py``, each in a process: a Trainer from a configuration file, and TRL's
GRPOTrainer in TRL's own environment. A side makes a step when the driver writes a line.

    python benchmarks/trl_sides.py ours|trl SETTINGS.json     # the driver writes the file

Both sides import the environments of this file, so nothing of torch or TRL is imported at its top.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from agent_peft.environments import AnyEnvironment, Environment, EnvironmentConfig, Episode, load_environment
from agent_peft.types import Message, Outcome, StepResult, StopReason, Task, Trajectory

# -- environments --------------------------------------------------------------------------------------------


class PromptsConfig(EnvironmentConfig):
    tasks: Path


class Prompts(Environment):
    """The tasks are a JSON list of conversations. An episode is one reply of any content."""

    config_class = PromptsConfig

    def __init__(self, config: PromptsConfig) -> None:
        conversations = json.loads(config.tasks.read_text())
        self._openings = {
            str(number): [Message(**message) for message in messages]
            for number, messages in enumerate(conversations)
        }
        self._tasks = [Task(name) for name in self._openings]

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> Episode:
        return _OneReply(self._openings[task.id])


class _OneReply(Episode):
    def __init__(self, opening: Sequence[Message]) -> None:
        self._opening = opening

    def start(self) -> Sequence[Message]:
        return self._opening

    def step(self, action: str) -> StepResult:
        return StepResult("", done=True, outcome=Outcome.CORRECT, stop_reason=StopReason.FINISHED)

    def close(self) -> None:
        pass


class EverySecondConfig(EnvironmentConfig):
    inner: AnyEnvironment


class EverySecond(Environment):
    """The environment ``inner`` with another verdict: every second episode of a task is correct, in the order
    in which the episodes are made. So every group has a gradient, a step has its full cost, and the policy
    does not drift. (A verdict by the order of their ends would teach it to end early.)
    """

    config_class = EverySecondConfig

    def __init__(self, config: EverySecondConfig) -> None:
        self.inner = load_environment(config.inner)
        self._made: defaultdict[str, Iterator[int]] = defaultdict(count)

    @property
    def tasks(self) -> Sequence[Task]:
        return self.inner.tasks

    def episode(self, task: Task, seed: int) -> Episode:
        return _EverySecond(self.inner.episode(task, seed), next(self._made[task.id]) % 2 == 0)

    def close(self) -> None:
        self.inner.close()


class _EverySecond(Episode):
    def __init__(self, inner: Episode, correct: bool) -> None:
        self._inner, self._outcome = inner, Outcome.CORRECT if correct else Outcome.INCORRECT

    def start(self) -> Sequence[Message]:
        return self._inner.start()

    def step(self, action: str) -> StepResult:
        result = self._inner.step(action)
        return replace(result, outcome=self._outcome) if result.done else result

    def close(self) -> None:
        self._inner.close()


# -- the pipe to the driver ----------------------------------------------------------------------------------


class Turnstile:
    """Only the driver reads standard output; libraries print to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._spent: defaultdict[str, float] = defaultdict(float)

    def report(self, **record: Any) -> None:
        print(json.dumps(record), file=self._out, flush=True)

    def wait(self) -> None:
        """Wait for the driver's signal. The process ends if the driver closes the pipe."""
        if not sys.stdin.readline():
            os._exit(0)
        self._spent.clear()
        self._begin = (time.perf_counter(), time.process_time())

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the wall and CPU seconds of the block."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._spent["sampling_wall"] += time.perf_counter() - wall
            self._spent["sampling_cpu"] += time.process_time() - cpu

    def stop(self) -> dict[str, float]:
        """Return the seconds since the driver's signal, and the peak resident memory of the process."""
        wall, cpu = time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]
        return {"wall": wall, "cpu": cpu, **self._spent, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Return the peak of this process alone: on Linux ru_maxrss begins with the parent's value."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- our side ------------------------------------------------------------------------------------------------


def ours(settings: dict[str, Any], turnstile: Turnstile) -> None:
    import torch

    from agent_peft.configuration.load import read_config
    from agent_peft.configuration.yaml12 import dump
    from agent_peft.policies.engine import load_sampler
    from agent_peft.policies.loading import load_policy
    from agent_peft.ranks import ALONE
    from agent_peft.training.source import build_source
    from agent_peft.training.trainer import Trainer

    class Timed:
        """The stage's source of episodes, whose time counts as sampling."""

        def collect(self, step: int) -> Any:
            with turnstile.sampling():
                return source.collect(step)

    folder = Path(settings["folder"])
    same = {key: settings[key] for key in ("tasks_per_step", "group_size", "steps", "threads", "seed")}
    if settings["equal"]:
        same["microbatch_tokens"] = settings["microbatch_tokens"]
        rows = settings["tasks_per_step"] * settings["group_size"]
        same["engine"] = {"rows": rows, "prefill_tokens": settings["prefill_tokens"]}
    content = {
        **same,
        "run_dir": str(folder / "run"),
        "policy": settings["policy"],
        "environment": {"kind": "trl_sides:EverySecond", **settings["environment"]},
        "sampling": {"max_new_tokens": settings["new_tokens"], "max_tokens": settings["max_tokens"]},
        "algorithm": "grpo",
        "task_order": "sequential",
        "optimizer": {"learning_rate": settings["learning_rate"]},
    }
    (folder / "config.yaml").write_text(dump(content))
    config, _ = read_config(folder / "config.yaml")
    torch.set_num_threads(settings["threads"])
    policy = load_policy(config.policy, config.seed)
    stage, environment = config.stages[0], load_environment(config.environment)
    engine = load_sampler(policy, config.engine)
    source = build_source(stage, environment, engine, config.seed, ALONE)
    trainer = Trainer(policy, environment, stage, engine, config.seed, source=Timed())
    trained = sum(p.numel() for p in policy.trainable_parameters())
    turnstile.report(trained=trained, precision=str(policy.dtype).removeprefix("torch."))
    turnstile.wait()
    for step in trainer:
        spent = turnstile.stop()
        made = [t for group in step.collection.groups for t in group.trajectories]
        counts = {
            "prompts": sorted({t.turns[0].observation for t in made}),
            "episodes": len(made),
            "tokens": sum(len(t.tokens) for t in made),
            "sampled": sum(t.num_action_tokens for t in made),
            "turns": sum(len(t.turns) for t in made),
            "skipped": step.metrics["updates_skipped"],
        }
        turnstile.report(**spent, **counts, floor=floor(policy, made))
        turnstile.wait()


def floor(policy: Any, trajectories: list[Trajectory]) -> dict[str, int]:
    """The minimum of work of a step, as the driver's docstring defines it."""
    from agent_peft.policies.forward.trie import build_trie

    text, head = policy.base.config.get_text_config(), policy.head.weight
    layers = {name: p for name, p in matrices(policy).items() if p is not head}
    adapter = sum(p.numel() for name, p in layers.items() if "lora_" in name)
    weights = sum(p.numel() for p in layers.values()) - adapter
    trained_weights = sum(p.numel() for name, p in layers.items() if "lora_" not in name and p.requires_grad)
    trie = build_trie([t.tokens for t in trajectories])
    read = {node for path in trie.paths for node in path[:-1]}  # an episode's last token is never read
    predict = {
        path[t - 1]
        for path, x in zip(trie.paths, trajectories, strict=True)
        for t, acted in enumerate(x.action_mask)
        if acted
    }
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = sum(trie.positions[node] + 1 for node in read)
    attended = pairs * 2 * text.num_hidden_layers * text.num_attention_heads * width
    heads = len(predict) * head.numel()
    passes = max(t.num_action_tokens for t in trajectories)
    sampling = len(read) * weights + heads + attended
    forward = len(read) * (weights + adapter) + heads + attended
    backward = len(read) * (weights + 2 * adapter + trained_weights) + 2 * attended
    backward += heads * (1 + head.requires_grad)
    touched = (weights + head.numel()) * passes + 2 * (weights + adapter + head.numel())
    return {
        "distinct_tokens": len(trie),
        "multiply_adds": sampling + forward + backward,
        "sampling_multiply_adds": sampling,
        "bytes": head.element_size() * touched,
        "passes": passes,
    }


def matrices(policy: Any) -> dict[str, Any]:
    """All weights that multiply tokens. A tied output layer is named by its module."""
    import torch

    return {
        f"{name}.{n}": p
        for name, module in policy.model.named_modules()
        if not isinstance(module, torch.nn.Embedding)
        for n, p in module.named_parameters(recurse=False)
        if p.ndim == 2
    }


# -- TRL's side ----------------------------------------------------------------------------------------------

# Every reply counts as a call of the one tool, so that a small model, which makes no valid calls, gets all
# its turns.
CALL = {"type": "function", "function": {"name": "act", "arguments": {"reply": "{content}"}}}
EVERY_REPLY_ACTS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"tool_calls": {"repeats": True, "content": "text", "transform": CALL}},
}
EQUAL = {
    "bf16": False,
    "gradient_checkpointing": False,
    "loss_type": "grpo",
    "disable_dropout": True,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "adam_beta2": 0.99,
    "model_init_kwargs": {"dtype": "float32"},
}


class Acting:
    """Our environment with the interface of TRL's ``environment_factory``."""

    def __init__(self, environment: EverySecond) -> None:
        self._environment = environment
        self._episode: Episode | None = None

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


def trl(settings: dict[str, Any], turnstile: Turnstile) -> None:
    import logging

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Timed(GRPOTrainer):
        """Counts the sampled tokens and the time of sampling, including the environment's answers and TRL's
        bookkeeping of them.
        """

        def _generate(self, prompts: list[Any]) -> Any:
            with turnstile.sampling():
                made = super()._generate(prompts)
            prompt_ids, completion_ids, masks = made[:3]
            masks = masks or [[1] * len(ids) for ids in completion_ids]
            begins = (now and not was for mask in masks for was, now in zip([0, *mask], mask, strict=False))
            self.made = {
                "prompts": sorted({tuple(ids) for ids in prompt_ids}),
                "episodes": len(completion_ids),
                "tokens": sum(len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True)),
                "sampled": sum(map(sum, masks)),
                "turns": sum(begins),
            }
            return made

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turnstile.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turnstile.report(**turnstile.stop(), **trainer.made)

    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    several: dict[str, Any] = {}
    if settings["turns"] > 1:
        environment = EverySecond(EverySecondConfig(**settings["environment"]))
        several = {"environment_factory": lambda: Acting(environment)}
        tokenizer.response_template = EVERY_REPLY_ACTS
        logging.getLogger("transformers").setLevel(logging.ERROR)
    episodes = settings["tasks_per_step"] * settings["group_size"]
    config = GRPOConfig(
        **(EQUAL if settings["equal"] else {}),
        output_dir=settings["folder"],
        use_cpu=True,
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=episodes // settings["microbatch"],
        num_generations=settings["group_size"],
        num_iterations=1,
        max_steps=settings["steps"],
        # of the whole episode where it has several turns; generation_kwargs bounds a turn's
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
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )
    lora = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
    prompts = [{"prompt": messages, "task": number} for number, messages in enumerate(settings["openings"])]
    trainer = Timed(
        model=settings["model"],
        reward_funcs=every_second,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM") if settings["lora"] else None,
        callbacks=[Steps()],
        **several,
    )
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    weights = str(trainer.model.dtype).removeprefix("torch.")
    turnstile.report(trained=trained, precision=f"{weights}, bf16={config.bf16}")
    trainer.train()


def main() -> None:
    side = {"ours": ours, "trl": trl}[sys.argv[1]]
    side(json.loads(Path(sys.argv[2]).read_text()), Turnstile())


if __name__ == "__main__":
    main()
