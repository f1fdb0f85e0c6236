"""Compare a GRPO step of Agent-PEFT with one of TRL 1.16's GRPOTrainer on this machine's CPU: time, memory,
and the floor of both.

    python benchmarks/against_trl.py PART [--settings equal|defaults] [--pairs 3] [--prompt 256]
    [--threads 2] [--peer-python PATH] [--output FILE]

PART is `step` (SmolLM2-135M with LoRA, one reply to a prompt of --prompt tokens), `episodes` (the same on
generated DB Bench tasks with five turns) or `arithmetic` (the model of configs/adder_reinforce.yaml from
random weights). The program prints a table and writes the part to benchmarks/results/against_trl.json.
Without --peer-python, it makes TRL's virtual environment in .venv-trl. Two ratios of the times are printed
and stored: the ratio of the medians, which is the quotient of two columns, and the median of the pairs.

Each side is a process (trl_sides.py) and pauses while the other makes a step, so that every pair of steps is
measured in turn. The first step of each side is left out. Our side does the same as `agent-peft train`: it
reads a configuration file and steps through the Trainer. A pair begins when the cores have been idle for a
second, or after two minutes. The program ends if the numbers of sampled tokens of a pair differ by more than
a twentieth. CPU seconds of other processes meanwhile are `others_cpu` (from /proc/stat), and are printed if
they exceed a twentieth of the cores' time.

Equal settings (the default): the weights and the tokenizer's folder; the prompts, token for token (this is
checked); the number of sampled tokens (counted and printed); temperature 1 without top-p or top-k; GRPO
without KL, one AdamW update over all episodes of a step, gradients clipped at 1, constant learning rate;
LoRA of rank 16 and alpha 32 on all linear layers; fp32 (TRL's default is bf16, here `bf16=False`); no
gradient checkpointing (TRL's default is on); no dropout; the number of threads. Every second episode is
worth 1 and the others 0, so that all of them have a gradient. The end token is one that SmolLM2 does not
generate (`<issue_closed>`), so that every reply has the maximum length. Our checks of each step (on-policy
ratio, canary after the update) stay on.

With `--settings defaults` each side keeps its own defaults: TRL bf16, the dtype of the checkpoint, gradient
checkpointing, batches of 8 rows, its loss and its optimizer; ours `policy.dtype: auto` and the default
engine and microbatches. Prompts, numbers of tokens and tasks, temperature, LoRA, the learning rate and the
number of threads stay equal, because they define the work. The floor is of fp32, so it is left out there.

Microbatches differ. Ours holds a group in `step` (prompt + 8 × 64 positions), 1,792 positions in `episodes`
and 8,192 in `arithmetic`. TRL's holds 8 rows (also a group) in `step` up to a prompt of 256, 4 beyond it and
in `episodes`, so that both sides fit into 24 GB together, and all 512 in `arithmetic`. Neither side computes
the old log-probabilities a second time: TRL does not with these settings, and ours are recorded by sampling.

`episodes`: both sides act in the same DBBench environment with the same observations. TRL gets it through
`environment_factory`. A `response_template` turns every reply into a call of the one tool, since SmolLM2
makes no valid calls. `max_tool_calling_iterations` ends the episode after the fifth reply, which neither
side executes. TRL's max_completion_length holds for the whole episode, so `generation_kwargs` limits a turn.
One difference remains: the tool's observation has the role `tool` there and `user` here. The chat template
renders both equally. `arithmetic`: an episode may end early, at the end token. Both sides start from the same
weights and draw their own tokens.

The floor counts the multiply-adds of matrix products and attention, if every distinct token of the trie is
computed once by the sampler and once forward and once backward by the trainer, with the output layer only at
sampled tokens. Its bytes are the weights once for each sequential pass. Its seconds are the longer of both
at the speed of this machine's matrix product and of its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from measuring import RESULTS, ROOT, Limits, command_line, measure_limits, show, skipped, table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import set_verbosity_error

from agent_peft.environments import load_environment
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.bundled import fetch

SIDES = ROOT / "benchmarks" / "trl_sides.py"
TRL = ["trl==1.16.*", "sqlglot"]  # our environments, which run on TRL's side, too, need sqlglot
END = "<issue_closed>"
# One chat template for both sides: SmolLM2's frames, but plain text closes a reply, so that only END ends
# one. Tools are rendered as users.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + (m['content'] or '') }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ call['function']['name'] + (call['function']['arguments'] | tojson) }}{% endfor %}"
    "{% else %}{{ '\n(end)\n' if not loop.first and loop.previtem['role'] == 'assistant' else '' }}"
    "{{ '<|im_start|>' + ('user' if m['role'] == 'tool' else m['role']) + '\n' + m['content'] "
    "+ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADDER = {
    "kind": "scratch",
    "alphabet": ALPHABET,
    "device": "cpu",
    "architecture": {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_head": 8,
        "n_embd": 256,
        "n_positions": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    },
}
# tasks, group, new tokens a turn, turns, most tokens of an episode, our microbatch (positions), our prefill,
# TRL's microbatch (rows)
SHAPES = {
    "step": (4, 8, 64, 1, None, None, 2048, 8),
    "episodes": (2, 8, 32, 5, 1536, 1792, 2048, 4),
    "arithmetic": (64, 8, 6, 1, 64, 8192, 8192, 512),
}
# what --quick runs: each part, and each of the settings
QUICK = (("step", "equal"), ("episodes", "defaults"), ("arithmetic", "equal"))


# -- settings of both sides ---------------------------------------------------------------------------------


def prepare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the settings of both sides. The model's folder and the prompts are in ``folder``."""
    tasks, group, new, turns, most, positions, prefill, rows = SHAPES[given.part]
    rows = rows // 2 if given.part == "step" and given.prompt > 256 else rows
    rows = 8 if given.settings == "defaults" else rows
    if given.quick:
        tasks, group, new, rows = 1, 4, 4, 4
    steps = given.pairs + 1
    if given.part == "arithmetic":
        model = folder / "model"
        policy, scratch = ADDER, load_policy(ScratchConfig(**ADDER), seed=0)
        scratch.save(model)
        scratch.chat.tokenizer.save_pretrained(model)
        inner: dict[str, Any] = {"kind": "arithmetic", "operation": "addition", "digits": 3}
        inner |= {"answer": "reversed", "symbols": True}
    else:
        model = fetch("smollm2-135m")
        model = never_ending(few_weights(model, folder / "few") if given.quick else model, folder / "model")
        dtype = "float32" if given.settings == "equal" else "auto"
        policy = {"kind": "pretrained", "model": str(model), "device": "cpu", "dtype": dtype}
        policy["lora"] = {"rank": 16, "alpha": 32}
        inner = {"kind": "db_bench", "generate": {"num_tasks": tasks * steps}, "max_turns": turns}
    if given.part == "step":
        prompts = [one_prompt(model, given.prompt, seed) for seed in range(tasks * steps)]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        inner = {"kind": "trl_sides:Prompts", "tasks": str(folder / "prompts.json")}
        most, positions = given.prompt + new + 1, given.prompt + group * new
    environment = load_environment(inner)
    starts = [environment.episode(task, seed=0).start() for task in environment.tasks[: tasks * steps]]
    return {
        "part": given.part,
        "equal": given.settings == "equal",
        "folder": str(folder),
        "model": str(model),
        "environment": {"inner": inner},
        "openings": [[{"role": m.role, "content": m.content} for m in start] for start in starts],
        "policy": policy,
        "lora": "lora" in policy,
        "tasks_per_step": tasks,
        "group_size": group,
        "new_tokens": new,
        "turns": turns,
        "max_tokens": most,
        "steps": steps,
        "threads": given.threads,
        "seed": 0,
        "learning_rate": 1e-6,  # TRL's default: the policies hardly change, and so does the work
        "microbatch_tokens": positions,
        "prefill_tokens": prefill,
        "microbatch": min(rows, tasks * group),
    }


def never_ending(model: Path, folder: Path) -> Path:
    """Copy the model's folder, with our chat template and an end token that the model does not generate."""
    folder.mkdir()
    for file in ("model.safetensors", "tokenizer.json"):
        (folder / file).symlink_to(model / file)
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(END)
    for file in ("config.json", "generation_config.json"):
        changed = {"eos_token_id": end, "pad_token_id": end}
        (folder / file).write_text(json.dumps({**json.loads((model / file).read_text()), **changed}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "eos_token": END, "pad_token": END})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def few_weights(model: Path, folder: Path) -> Path:
    """Write a model of one narrow layer with the tokenizer of ``model``."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.from_pretrained(model)
    config.update({**sizes, "num_key_value_heads": 2, "head_dim": 8, "layer_types": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, folder)
    return folder


def one_prompt(model: Path, length: int, seed: int) -> list[dict[str, str]]:
    """Return a conversation of one message with exactly ``length`` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    nouns = ("time", "water", "house", "book", "light", "paper", "river", "music")
    words = (*nouns, "small", "green", "run", "old")
    chosen = [" " + random.Random(seed).choice(words) for _ in range(length)]
    random.Random(seed).shuffle(chosen)
    for size in range(length, 0, -1):
        messages = [{"role": "user", "content": "Go on:" + "".join(chosen[:size])}]
        if len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]) == length:
            return messages
    sys.exit(f"--prompt {length}: no prompt of this length can be made; raise it")


# -- the driver ----------------------------------------------------------------------------------------------


class Side:
    """The process of one side."""

    def __init__(self, name: str, python: str, folder: Path, threads: int) -> None:
        self.name, self.steps = name, []
        self._log: IO[str] = (folder / f"{name}.log").open("w+")
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
        own |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        command = [python, str(SIDES), name, str(folder / "settings.json")]
        self._process = subprocess.Popen(command, text=True, env={**os.environ, **own}, **pipes)

    def begin(self) -> None:
        """Wait until the model is loaded."""
        first = self._read()
        self.trained, self.precision = first["trained"], first["precision"]

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        before = busy_seconds()
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        step = self._read()
        others = max(0.0, busy_seconds() - before - step["cpu"])
        line = (
            f"{self.name}: {step['wall']:.2f} s, {step['cpu']:.2f} CPU s, {step['peak_bytes'] / 1e9:.2f} GB"
        )
        busy = others > 0.05 * (os.cpu_count() or 1) * step["wall"]
        print(line + (f"; others took {others:.1f} CPU s" if busy else ""), flush=True)
        return {**step, "others_cpu": others}

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            code = f"exit code {self._process.wait()} (-9: out of memory?)"
            sys.exit(f"{self.name} ended early, {code}:\n{self._log.read()[-4000:]}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()


def busy_seconds() -> float:
    """Return the CPU seconds of all cores since the machine started, or 0 if they are unknown."""
    status = Path("/proc/stat")
    if not status.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, status.read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(longest: float = 120.0) -> None:
    """Wait until the cores are nearly idle for a second."""
    end = time.monotonic() + longest
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(1)
        if busy_seconds() - before < 0.1:
            return
    print(f"the machine has not been quiet for {longest:.0f} s; measured all the same", flush=True)


def peer_is_made() -> bool:
    return (ROOT / ".venv-trl" / "made").exists()


def make_peer() -> str:
    """Make TRL's environment: PyTorch first, as `make install` does, the rest as in constraints.txt."""
    folder = ROOT / ".venv-trl"
    python = folder / "bin" / "python"
    if not peer_is_made():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (folder / ".gitignore").write_text("*\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        for wanted in (["torch==2.13.0"], [*TRL, "transformers", "peft", "pydantic", "PyYAML"]):
            subprocess.run([*install, *wanted], check=True)
        (folder / "made").touch()
    return str(python)


def without_paths(words: list[str]) -> list[str]:
    """The command's words without the path of TRL's Python, which belongs to one machine."""
    places = {words.index(name) for name in ("--peer-python",) if name in words}
    return [word for i, word in enumerate(words) if not places & {i, i - 1}]


def summary(side: Side) -> dict[str, float]:
    """Medians over the steps of a side."""

    def middle(of: Callable[[dict[str, Any]], float]) -> float:
        return float(median(map(of, side.steps)))

    episodes = sum(step["episodes"] for step in side.steps)
    means = {key: sum(step[key] for step in side.steps) / episodes for key in ("sampled", "tokens", "turns")}
    keys = ("wall", "cpu", "sampling_wall", "sampling_cpu", "others_cpu")
    return {
        **{key: middle(lambda step, key=key: step[key]) for key in keys},
        "training_wall": middle(lambda step: step["wall"] - step["sampling_wall"]),
        "training_cpu": middle(lambda step: step["cpu"] - step["sampling_cpu"]),
        "episodes_per_second": middle(lambda step: step["episodes"] / step["wall"]),
        "peak_bytes": max(step["peak_bytes"] for step in side.steps),
        **{f"{key}_per_episode": mean for key, mean in means.items()},
    }


def summarize(
    settings: dict[str, Any], sides: list[Side], limits: Limits, given: argparse.Namespace
) -> dict[str, Any]:
    ours, peer = (side.steps for side in sides)
    rows = {side.name: summary(side) for side in sides}
    least = {key: median(s["floor"][key] for s in ours) for key in ours[0]["floor"]}
    least["seconds"] = max(2 * least["multiply_adds"] / limits.flops, least["bytes"] / limits.bytes)
    paired = [b["wall"] / a["wall"] for a, b in zip(ours, peer, strict=True)]
    keys = ("part", "tasks_per_step", "group_size", "new_tokens", "turns", "threads", "microbatch_tokens")
    return {
        **{key: settings[key] for key in keys},
        "settings": given.settings,
        "command": " ".join(["python", "benchmarks/against_trl.py", *without_paths(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "precision": {side.name: side.precision for side in sides},
        "prompt_tokens": len(ours[0]["prompts"][0]),
        "peer": "generate",
        "peer_microbatch_rows": settings["microbatch"],
        "pairs": len(paired),
        "ratio_of_medians": rows["trl"]["wall"] / rows["ours"]["wall"],
        "median_of_pairs": median(paired),
        "ratios": paired,
        "cpu_ratio": median(b["cpu"] / a["cpu"] for a, b in zip(ours, peer, strict=True)),
        "memory_ratio": rows["trl"]["peak_bytes"] / rows["ours"]["peak_bytes"],
        "updates_skipped": sum(s["skipped"] for s in ours),
        "sides": rows,
        "floor": least,
        "multiply_adds_per_second": limits.flops / 2,
        "bytes_per_second": limits.bytes,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "steps": {
            side.name: [{k: v for k, v in s.items() if k not in ("prompts", "floor")} for s in side.steps]
            for side in sides
        },
    }


def table_of(found: dict[str, Any]) -> object:
    sides, least = found["sides"], found["floor"]
    title = f"{found['part']}: {found['tasks_per_step']} tasks × {found['group_size']} episodes, prompt"
    title += f" {found['prompt_tokens']}, {found['turns']} × {found['new_tokens']} tokens, "
    title += f"{found['threads']} threads, {found['pairs']} pairs, {found['settings']} settings"
    keys = ("wall", "cpu", "sampling_wall", "training_wall")
    rows: list[list[object]] = []
    for name, row in sides.items():
        counts = row["peak_bytes"] / 1e9, row["sampled_per_episode"], row["turns_per_episode"]
        label = f"{name} ({found['precision'][name]})"
        rows.append([label, *(row[key] for key in keys), f"{row['episodes_per_second']:.3f}", *counts])
    quotients = [sides["trl"][key] / sides["ours"][key] for key in keys]
    times = [f"{x:.2f} ×" for x in (*quotients, quotients[0], found["memory_ratio"])]
    rows.append(["TRL / ours, ratio of medians", *times])
    paired = f"{found['median_of_pairs']:.2f} ×", f"{found['cpu_ratio']:.2f} ×"
    rows.append(["TRL / ours, median of pairs", *paired])
    if found["settings"] == "equal":
        work = [f"{least['multiply_adds'] / 1e9:.0f} G multiply-adds", f"{least['bytes'] / 1e9:.1f} GB read"]
        rows.append(["floor", least["seconds"], "", *work])
    columns = "median of a step|s|CPU s|sampling s|training s|episodes/s|peak GB|sampled|turns"
    return table(columns, rows, title)


def measure(given: argparse.Namespace, peer_python: str | None) -> None:
    """Measure one part, and write it. Without a peer, run our side alone."""
    torch.set_num_threads(given.threads)
    limits = measure_limits()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = prepare(given, folder)
        (folder / "settings.json").write_text(json.dumps(settings))
        pythons = {"ours": sys.executable, **({"trl": peer_python} if peer_python else {})}
        sides = [Side(name, python, folder, given.threads) for name, python in pythons.items()]
        for side in sides:
            side.begin()
        if len({side.trained for side in sides}) > 1:
            sys.exit(f"the sides train different numbers of parameters: {[side.trained for side in sides]}")
        for number in range(settings["steps"]):
            if not given.quick:
                wait_for_quiet()
            pair = [side.step() for side in sides]
            check_equal(number, pair)
            if number:
                for side, step in zip(sides, pair, strict=True):
                    side.steps.append(step)
        for side in sides:
            side.close()
        if peer_python is None:
            return
        found = summarize(settings, sides, limits, given)
    show(table_of(found))
    parts = [given.part, *([str(given.prompt)] if given.part == "step" else []), "generate"]
    name = " ".join([*parts, *(["defaults"] if given.settings == "defaults" else [])])
    before = json.loads(given.output.read_text()) if given.output.exists() else {}
    given.output.write_text(json.dumps({**before, name: found}, indent=1, sort_keys=True) + "\n")


def check_equal(number: int, pair: list[dict[str, Any]]) -> None:
    """End the program if the two sides of a step did not do the same work."""
    for other in pair[1:]:
        if pair[0]["prompts"] != other["prompts"]:
            sys.exit(f"step {number}: the two sides read different prompts")
        if abs(pair[0]["sampled"] / other["sampled"] - 1) > 0.05:
            counts = f"ours sampled {pair[0]['sampled']} tokens, TRL {other['sampled']}"
            sys.exit(f"step {number}: {counts}: the work was not equal")


def command(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    return command_line(
        __doc__,
        {"part": str},
        arguments,
        quick={"pairs": 1, "prompt": 64, "threads": 1},
        settings={"choices": ["equal", "defaults"], "default": "equal"},
        pairs=3,  # measured steps of each side, after one warm-up step
        prompt=256,  # tokens, in part `step`
        threads=2,
        peer_python=str,
        output=RESULTS / "against_trl.json",
    )


def main() -> None:
    given = command()
    set_verbosity_error()
    if not given.quick:
        if given.part not in SHAPES:
            sys.exit(f"name a part: {', '.join(SHAPES)}")
        measure(given, given.peer_python or make_peer())
        return
    peer_python = given.peer_python or (make_peer() if peer_is_made() else None)
    if peer_python is None:
        skipped("TRL's side: it is not installed; python benchmarks/against_trl.py PART makes .venv-trl")
    for part, settings in QUICK:
        if given.part in (None, part):
            measure(argparse.Namespace(**vars(given) | {"part": part, "settings": settings}), peer_python)


if __name__ == "__main__":
    main()
