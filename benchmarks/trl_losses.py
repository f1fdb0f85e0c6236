"""Record what TRL 1.16's own trainers compute on a small batch: losses, advantages and gradients.

    python benchmarks/trl_losses.py [--peer-python PATH]

The program prints a table and writes tests/algorithms/trl_1_16.json, which our losses are compared with in
tests/algorithms/test_trl_numbers.py. It runs in TRL's own environment: where ``trl`` cannot be imported,
it starts itself again with --peer-python, or with the Python of .venv-trl, which ``against_trl.py`` makes.

Nothing of TRL is written again here. A case makes the trainer (GRPOTrainer, RLOOTrainer, SFTTrainer,
DPOTrainer, KTOTrainer, ORPOTrainer, CPOTrainer), gives it the tokens below in place of sampled ones, and
calls the functions that its training loop calls: ``_generate_and_score_completions`` for rewards, old
log-probabilities and advantages, and ``compute_loss``. The model is a Llama of two layers with random
weights in fp32, on the CPU. Three sets of weights stand for the policy, the policy that sampled (old) and
the reference, so that ratios are far from 1 and some are clipped. A forward hook turns the log-probabilities
(the logits, for ORPOTrainer and CPOTrainer) into float64, so TRL computes its loss in float64.

A gradient is that of the loss with respect to log π of each token of a completion. The last two read
logits, so their gradient is that of the token's logit divided by 1 - π(token), which is the same. ``norm``
is the norm of the gradient with respect to the model's weights. Tokens with a mask of 0 are the
environment's: GRPOTrainer gets them as ``env_mask``, DPOTrainer and KTOTrainer in ``completion_mask``,
SFTTrainer, ORPOTrainer and CPOTrainer in the labels. RLOOTrainer knows no such mask, so it trains all tokens
of a completion.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, command_line, skipped
from torch import Tensor

OUTPUT = ROOT / "tests" / "algorithms" / "trl_1_16.json"
COMMAND = "python benchmarks/trl_losses.py"
GROUP = 3


@dataclass(frozen=True)
class Row:
    """A prompt, a completion, and which of the completion's tokens the policy wrote."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    mask: tuple[int, ...]
    reward: float = 0.0  # 1 is a chosen or desirable reply

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.completion


# Groups of three. The second row has two turns. The last group has no variance.
EPISODES = [
    Row((5, 6, 7), (8, 9, 10, 2), (1, 1, 1, 1), 1.0),
    Row((5, 6, 7), (8, 9, 4, 11, 3, 12, 2), (1, 1, 0, 0, 1, 1, 1), 0.0),
    Row((5, 6, 7), (2,), (1,), 0.5),
    Row((5, 6), (13, 7, 2), (1, 1, 1), 0.0),
    Row((5, 6), (9, 3, 9, 9, 2), (1, 1, 0, 1, 1), 0.25),
    Row((5, 6), (13, 8, 8, 8, 8, 2), (1, 1, 1, 1, 1, 1), 1.0),
    Row((4,), (3, 3), (1, 1), 1.0),
    Row((4,), (3, 2), (1, 1), 1.0),
    Row((4,), (6, 6, 11, 2), (1, 1, 1, 1), 1.0),
]
# Three chosen replies, then the rejected ones to the same prompts.
REPLIES = [
    Row((5, 6), (2, 3, 4), (1, 1, 1), 1.0),
    Row((7, 8, 9, 10), (11, 2, 5, 6, 3, 3, 2), (1, 1, 0, 0, 1, 1, 1), 1.0),
    Row((4, 12), (6,), (1,), 1.0),
    Row((5, 6), (4,), (1,)),
    Row((7, 8, 9, 10), (2, 2, 5, 6, 11), (1, 1, 0, 0, 1)),
    Row((4, 12), (5, 5, 4, 3, 2, 11), (1, 1, 1, 1, 1, 1)),
]

POLICY_GRADIENTS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28},
    "grpo_delta": {"loss_type": "grpo", "epsilon": 0.2, "delta": 1.5},
    "grpo_kl": {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.1},
    "grpo_kl_uncorrected": {
        "loss_type": "grpo",
        "epsilon": 0.2,
        "beta": 0.1,
        "use_bias_correction_kl": False,
    },
    "grpo_empty": {"loss_type": "grpo", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "dapo_minibatch": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {
        "loss_type": "dr_grpo",
        "epsilon": 0.2,
        "scale_rewards": "none",
        "max_completion_length": 7,
    },
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.02,
        "epsilon_high": 0.03,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
}
RLOO: dict[str, dict[str, Any]] = {
    "rloo_on_policy": {"epsilon": 0.2, "beta": 0.0},
    "rloo": {"epsilon": 0.2, "beta": 0.0},
    "rloo_kl": {"epsilon": 0.2, "beta": 0.1},
}
EMPTY = 4  # the row of grpo_empty whose tokens are all the environment's


class Models:
    """A Llama of two layers, and three sets of weights for it."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=14,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        self.folder = folder
        generator = torch.Generator().manual_seed(17)
        start = self.make().state_dict()
        self.weights = {
            name: {
                key: value + 0.03 * torch.randn(value.shape, generator=generator)
                for key, value in start.items()
            }
            for name in ("policy", "old", "reference")
        }

    def make(self, weights: str | None = None) -> Any:
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        if weights:
            model.load_state_dict(self.weights[weights])
        return model


class Reads:
    """Makes what a trainer reads of a model's output float64, and keeps it."""

    def __init__(self, trainer: Any, field: str = "log_probs") -> None:
        self.field = field
        self.policy = self._of(trainer.model)
        self.reference = (
            self._of(trainer.ref_model) if getattr(trainer, "ref_model", None) is not None else []
        )

    def _of(self, model: Any) -> list[Tensor]:
        kept: list[Tensor] = []

        def hook(_module: Any, _arguments: Any, output: Any) -> Any:
            values = output[self.field].double()
            if values.requires_grad:
                values.retain_grad()
            kept.append(values)
            mask = output.get("label_mask")
            # the values are 0 off the mask, and with this product their gradient is, too
            output[self.field] = values if mask is None else values * mask
            return output

        model.register_forward_hook(hook)
        return kept


def tokenizer() -> Any:
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Words(WordLevel({"pad": 0, "eos": 1, **{chr(95 + n): n for n in range(2, 14)}}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="eos", unk_token="a")


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "output"),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }


def measure(trainer: Any, reads: Reads, inputs: dict[str, Any], **keywords: Any) -> dict[str, float]:
    """``loss``, that of ``trainer.compute_loss``, and ``norm``. The gradient is in ``reads.policy``."""
    model = trainer.model
    model.train()
    model.zero_grad()
    reads.policy.clear()
    reads.reference.clear()
    loss = trainer.compute_loss(model, inputs, **keywords)
    loss.backward()
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    return {"loss": float(loss.detach()), "norm": squares**0.5}


def on_completions(rows: Sequence[Row], values: Tensor, left: bool = False) -> list[list[float]]:
    """The values of the rows' completion tokens. Column t - 1 of ``values`` is about token t. With ``left``,
    prompts are padded on the left, and otherwise all of a row on the right.
    """
    longest = max(len(row.prompt) for row in rows)
    parts = []
    for row, line in zip(rows, values, strict=True):
        first = (longest if left else len(row.prompt)) - 1
        parts.append(line[first : first + len(row.completion)].tolist())
    return parts


def policy_gradients(models: Models, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.trainer.utils import split_tensor_dict

    class Replayed(RLOOTrainer):
        """RLOOTrainer has no argument for completions from elsewhere."""

        def _generate(self, prompts: list[Any]) -> Any:
            lists = [list(row.prompt) for row in EPISODES], [list(row.completion) for row in EPISODES]
            return *lists, ["" for _ in EPISODES]

    prompts = [{"prompt": "c d"} for _ in EPISODES]
    shared: dict[str, list[list[float]]] = {}
    cases = {}
    for name, keys in {**POLICY_GRADIENTS, **RLOO}.items():
        steps = 3 if name == "dapo_minibatch" else 1
        arguments = {
            **settings(folder),
            "per_device_train_batch_size": len(EPISODES) // steps,
            "steps_per_generation": steps,
            "num_generations": GROUP,
            "num_iterations": 2,  # so that old log-probabilities are computed
            "temperature": 1.0,
            **keys,
        }
        made: dict[str, Any] = {
            "model": models.make(),
            "reward_funcs": lambda completions, **_: [row.reward for row in EPISODES],
            "train_dataset": Dataset.from_list(prompts),
            "processing_class": tokenizer(),
        }
        if name in RLOO:
            trainer = Replayed(**made, args=RLOOConfig(**arguments))
        else:
            empty = EMPTY if name == "grpo_empty" else None
            generated = {
                "prompt_ids": [list(row.prompt) for row in EPISODES],
                "completion_ids": [list(row.completion) for row in EPISODES],
                "logprobs": None,
                "env_mask": [[m * (n != empty) for m in row.mask] for n, row in enumerate(EPISODES)],
            }

            def replay(_prompts: Any, _trainer: Any, generated: dict[str, Any] = generated) -> dict[str, Any]:
                return dict(generated)

            trainer = GRPOTrainer(**made, args=GRPOConfig(**arguments), rollout_func=replay)
        trainer.current_gradient_accumulation_steps = 1  # as the training loop sets it
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(models.weights["reference"])
        trainer.model.load_state_dict(models.weights["policy" if name == "rloo_on_policy" else "old"])
        trainer.model.train()
        reads = Reads(trainer)
        inputs = trainer._generate_and_score_completions([dict(row) for row in prompts])
        found = {"old": reads.policy[0], "reference": reads.reference[0] if reads.reference else None}
        advantages, rows = inputs["advantages"], EPISODES
        if steps > 1:
            inputs, rows = split_tensor_dict(inputs, steps)[0], EPISODES[: len(EPISODES) // steps]
        trainer.model.load_state_dict(models.weights["policy"])
        case = measure(trainer, reads, inputs)
        if name == "rloo_on_policy":
            del found["old"]
        for key, values in {**found, "policy": reads.policy[0]}.items():
            if values is None:
                continue
            read = on_completions(rows, values.detach(), left=True)
            before = shared.setdefault(key, read)[: len(rows)]
            if any(
                abs(x - y) > 1e-6
                for a, b in zip(before, read, strict=True)
                for x, y in zip(a, b, strict=True)
            ):
                sys.exit(f"{name} read other log-probabilities than the cases before it")
        cases[name] = {
            "trainer": "RLOOTrainer" if name in RLOO else "GRPOTrainer",
            "settings": keys,
            **case,
            "advantages": advantages.tolist(),
            "gradient": on_completions(rows, reads.policy[0].grad, left=True),
        }
    episodes = [
        {**asdict(row), "group": number // GROUP, **{name: lists[number] for name, lists in shared.items()}}
        for number, row in enumerate(EPISODES)
    ]
    return episodes, cases


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def mask_of(rows: Sequence[Row]) -> Tensor:
    return padded([(0,) * len(row.prompt) + row.mask for row in rows], 0)


def labels_of(row: Row) -> list[int]:
    completion = zip(row.completion, row.mask, strict=True)
    return [-100] * len(row.prompt) + [token if mask else -100 for token, mask in completion]


def mismatched(rows: Sequence[Row]) -> list[Row]:
    """Each prompt with the completion of the row before it, as KTOTrainer pairs those of a dataset."""
    return [
        Row(row.prompt, other.completion, other.mask)
        for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True)
    ]


def supervised(models: Models, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=models.make("policy"),
        args=SFTConfig(**settings(folder), max_length=64),
        train_dataset=Dataset.from_list([{"text": "c d e"}]),
        processing_class=tokenizer(),
    )
    reads = Reads(trainer)
    count = torch.tensor(sum(sum(row.mask) for row in REPLIES))
    cases = {}
    for name, parts, items in (("sft", [REPLIES], None), ("sft_halves", [REPLIES[:3], REPLIES[3:]], count)):
        microbatches = []
        for rows in parts:
            inputs = trainer.data_collator(
                [{"input_ids": list(row.tokens), "labels": labels_of(row)} for row in rows]
            )
            case = measure(trainer, reads, inputs, num_items_in_batch=items)
            microbatches.append({**case, **read(rows, reads.policy[0], None)})
        cases[name] = {"trainer": "SFTTrainer", "settings": {}, "microbatches": microbatches}
    return cases


def read(rows: Sequence[Row], policy: Tensor, reference: Tensor | None) -> dict[str, Any]:
    found = {"policy": on_completions(rows, policy.detach())}
    if reference is not None:
        found["reference"] = on_completions(rows, reference)
    if policy.grad is not None:
        found["gradient"] = on_completions(rows, policy.grad)
    return {"rows": [asdict(row) for row in rows], **found}


def preferences(models: Models, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    pairs = Dataset.from_list([{"prompt": "c d", "chosen": "e", "rejected": "f"}] * 3)
    labels = Dataset.from_list([{"prompt": "c d", "completion": "e", "label": n % 2 == 0} for n in range(6)])
    common = {**settings(folder), "per_device_train_batch_size": 6, "max_length": 64}
    cases: dict[str, Any] = {}

    for name, loss_type in (("dpo", "sigmoid"), ("ipo", "ipo")):
        keys: dict[str, Any] = {"loss_type": [loss_type], "beta": 0.3}
        trainer = DPOTrainer(
            model=models.make("policy"),
            ref_model=models.make("reference"),
            args=DPOConfig(**common, **keys),
            train_dataset=pairs,
            processing_class=tokenizer(),
        )
        reads = Reads(trainer)
        examples = [
            {
                "prompt_ids": list(a.prompt),
                "chosen_ids": list(a.completion),
                "rejected_ids": list(b.completion),
            }
            for a, b in zip(REPLIES[:3], REPLIES[3:], strict=True)
        ]
        inputs = {**trainer.data_collator(examples), "completion_mask": mask_of(REPLIES)}
        case = measure(trainer, reads, inputs)
        part = {**case, **read(REPLIES, reads.policy[0], reads.reference[0])}
        cases[name] = {"trainer": "DPOTrainer", "settings": keys, "microbatches": [part]}

    keys = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.75}
    trainer = KTOTrainer(
        model=models.make("policy"),
        ref_model=models.make("reference"),
        args=KTOConfig(**common, **keys),
        train_dataset=labels,
        processing_class=tokenizer(),
    )
    reads = Reads(trainer)
    mixed = [REPLIES[number] for number in (0, 4, 2, 3, 1, 5)]
    for name, parts in (("kto", [mixed]), ("kto_halves", [mixed[:3], mixed[3:]])):
        microbatches = []
        for rows in parts:
            others = mismatched(rows)
            examples = [
                {
                    "prompt_ids": list(row.prompt),
                    "completion_ids": list(row.completion),
                    "KL_completion_ids": list(other.completion),
                    "label": bool(row.reward),
                }
                for row, other in zip(rows, others, strict=True)
            ]
            masks = {"completion_mask": mask_of(rows), "KL_completion_mask": mask_of(others)}
            case = measure(trainer, reads, {**trainer.data_collator(examples), **masks})
            (other, own), (other_reference, own_reference) = reads.policy, reads.reference
            microbatches.append(
                {
                    **case,
                    "z0": trainer._metrics["train"]["kl"][-1],
                    **read(rows, own, own_reference),
                    "mismatched": read(others, other, other_reference),
                }
            )
        cases[name] = {"trainer": "KTOTrainer", "settings": keys, "microbatches": microbatches}

    inputs = {}
    for side, rows in (("chosen", REPLIES[:3]), ("rejected", REPLIES[3:])):
        inputs[f"{side}_input_ids"] = padded([row.tokens for row in rows], 0)
        inputs[f"{side}_attention_mask"] = padded([[1] * len(row.tokens) for row in rows], 0)
        inputs[f"{side}_labels"] = padded([labels_of(row) for row in rows], -100)
    tokens = padded([row.tokens for row in REPLIES], 0)[:, 1:, None]
    simpo = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}
    for name, trainer_class, config_class, keys in (
        ("orpo", ORPOTrainer, ORPOConfig, {"beta": 0.6}),
        ("simpo", CPOTrainer, CPOConfig, simpo),
    ):
        trainer = trainer_class(
            model=models.make("policy"),
            args=config_class(**common, **keys),
            train_dataset=pairs,
            processing_class=tokenizer(),
        )
        reads = Reads(trainer, "logits")
        case = measure(trainer, reads, inputs)
        (logits,) = reads.policy
        policy = logits.detach()[:, :-1].log_softmax(-1).gather(-1, tokens)[..., 0]
        policy.grad = logits.grad[:, :-1].gather(-1, tokens)[..., 0] / -policy.expm1()
        prompts = [line[: len(row.prompt) - 1].tolist() for row, line in zip(REPLIES, policy, strict=True)]
        part = {**case, **read(REPLIES, policy, None), "policy_prompt": prompts}
        cases[name] = {"trainer": trainer_class.__name__, "settings": keys, "microbatches": [part]}
    return cases


def write(content: dict[str, Any], path: Path) -> None:
    """JSON with one line for each list of numbers."""
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def show(cases: dict[str, Any]) -> None:
    print(f"{'case':20}{'trainer':14}{'loss':>22}{'gradient norm':>22}")
    for name, case in cases.items():
        for part in case.get("microbatches", [case]):
            print(f"{name:20}{case['trainer']:14}{part['loss']:22.15f}{part['norm']:22.15f}")


def main() -> None:
    arguments = command_line(__doc__, peer_python=str, output=OUTPUT)
    if importlib.util.find_spec("trl") is None:
        if (python := arguments.peer_python) is None:
            from against_trl import make_peer, peer_is_made

            if arguments.quick and not peer_is_made():
                skipped("all of it: TRL is not installed; python benchmarks/against_trl.py makes .venv-trl")
                return
            python = make_peer()
        sys.exit(subprocess.run([python, __file__, "--output", str(arguments.output)]).returncode)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    import datasets
    import transformers
    import trl

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = Models(folder / "model")
        episodes, cases = policy_gradients(models, folder)
        cases |= {**supervised(models, folder), **preferences(models, folder)}
    show(cases)
    versions = {package.__name__: package.__version__ for package in (trl, transformers, torch)}
    content = {"command": COMMAND, "versions": versions, "episodes": episodes, "cases": cases}
    write(content, arguments.output)


if __name__ == "__main__":
    main()
