"""What the benchmarks share: the command line, results, tables, fair timing, and tiny models for --quick.

It imports torch, rich and the package only where it uses them, so that programs of other environments can
import it.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8192,
}

# -- the command line ----------------------------------------------------------------------------------------


def command_line(
    doc: str | None,
    positional: Mapping[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
    *,
    quick: Mapping[str, Any] | None = None,
    **options: Any,
) -> argparse.Namespace:
    """Parse the command line. Each option is a default, from which its type follows: a list has several
    values, ``False`` is a flag, a type has the default ``None``, and a dictionary is for ``add_argument``.

    ``results`` of the returned namespace is the folder for JSON. The flag ``--quick``, which every benchmark
    has, makes the values of ``quick`` the defaults and ``results`` a temporary folder, in which the defaults
    of ``output`` and ``runs`` are, too. A function among the values gets that folder.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = parser_of(doc, positional or {}, options)
    results = RESULTS
    if "--quick" in arguments:
        results = temporary_folder()
        inside = {key: results / Path(options[key]).name for key in ("output", "runs") if key in options}
        values = {key: value(results) if callable(value) else value for key, value in (quick or {}).items()}
        parser.set_defaults(**inside | values)
    given = parser.parse_intermixed_args(arguments)
    given.results = results
    return given


def parser_of(
    doc: str | None, positional: Mapping[str, Any], options: Mapping[str, Any]
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in positional.items():
        several = isinstance(value, list)
        keywords = {"nargs": "*" if several else "?", **({} if several else _keywords(value))}
        parser.add_argument(name, **keywords)
    for name, value in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **_keywords(value))
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing of results/ is written")
    return parser


def _keywords(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if value is False:
        return {"action": "store_true"}
    if isinstance(value, type):
        return {"type": value}
    if isinstance(value, list):
        return {"nargs": "+", "default": value, "type": type(value[0]) if value else str}
    return {"type": Path if isinstance(value, Path) else type(value), "default": value}


def skipped(what: str) -> None:
    """Print what was skipped and why, for the table of smoke.py."""
    print(f"skipped: {what}", flush=True)


def no_sandbox() -> str:
    """Why this machine has no sandbox, or an empty text."""
    from agent_peft.sandbox.build import missing
    from agent_peft.types import AgentPeftError

    try:
        missing("oci")
    except AgentPeftError as error:
        return str(error)
    return ""


def temporary_folder() -> Path:
    """A folder that is deleted when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="bench-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@contextmanager
def policy_server(target: str, *options: str, threads: int) -> Iterator[str]:
    """The address, with /v1, of ``agent-peft serve-policy TARGET`` in another process."""
    command = [sys.executable, "-m", "agent_peft", "serve-policy", target, "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split(" on ")[1].split(" ")[0]
        finally:
            process.terminate()


def tiny_model(folder: Path) -> str:
    """Write a model of random weights whose tokens are characters, and return its folder."""
    import string

    from agent_peft.policies.config import ScratchConfig
    from agent_peft.policies.loading import load_policy

    policy = load_policy(ScratchConfig(alphabet=string.printable, architecture=TINY, device="cpu"), 0)
    policy.save(folder / "tiny")
    policy.chat.tokenizer.save_pretrained(folder / "tiny")
    return str(folder / "tiny")


def tiny_run(folder: Path) -> Path:
    """Train that model for one step on two tasks of DB Bench, and return the run directory."""
    from agent_peft.configuration.yaml12 import dump

    content = {
        "run_dir": str(folder / "run"),
        "policy": {"kind": "pretrained", "model": tiny_model(folder), "lora": {"rank": 2}},
        "environment": {"kind": "db_bench", "generate": {"num_tasks": 2}, "max_turns": 2},
        "sampling": {"max_new_tokens": 4, "max_tokens": 8192},
        "stages": [{"algorithm": "sft", "steps": 1, "tasks_per_step": 2}],
    }
    (folder / "run.yaml").write_text(dump(content))
    command = [sys.executable, "-m", "agent_peft", "train", str(folder / "run.yaml")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "run"


# -- results -------------------------------------------------------------------------------------------------


def read(name: str) -> Any:
    """The content of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a description of the machine."""
    import torch

    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **content}, indent=1) + "\n")


def write_rows(path: Path, name: str, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the runs of the experiment ``name`` to a file of several experiments, one line a run."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content[name] = {**head, "rows": rows}
    parts = []
    for key, one in content.items():
        begin = json.dumps({k: v for k, v in one.items() if k != "rows"})[:-1]
        lines = ",\n".join(json.dumps(row) for row in one["rows"])
        parts.append(f'{json.dumps(key)}: {begin}, "rows": [\n{lines}\n]}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def table(columns: str, rows: Iterable[Iterable[object]] = (), title: str = "") -> Any:
    """A table for the terminal. A ``|`` separates the names of columns; floats have two decimals."""
    from rich.table import Table

    made = Table(*(name.strip() for name in columns.split("|")), title=title or None, title_justify="left")
    for row in rows:
        made.add_row(*map(cell, row))
    return made


def cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def show(*parts: object, width: int = 170) -> None:
    """Print tables and lines, each on a line that no terminal cuts."""
    from rich.console import Console

    Console(width=width).print(*parts, sep="\n", markup=False)


# -- time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The speed that this machine reaches with the current number of threads: the floor of every time."""

    flops: float  # operations a second, a large matrix product
    bytes: float  # bytes a second, a matrix read once by a product with a vector

    @property
    def text(self) -> str:
        import torch

        return (
            f"{torch.get_num_threads()} threads reach {self.flops / 1e9:.0f} GFLOP/s in fp32 "
            f"and read {self.bytes / 1e9:.1f} GB/s"
        )


def measure_limits(dtype: Any = None) -> Limits:
    """Measure a product of 2048 × 2048 × 2048 in ``dtype`` (fp32 if None), and one of an fp32 matrix of
    512 MiB with a vector (medians).
    """
    import torch

    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    product = statistics.median(seconds(lambda: a @ b) for _ in range(7))
    wide, vector = torch.randn(1 << 15, 1 << 12), torch.randn(1 << 12)
    reading = statistics.median(seconds(lambda: wide @ vector) for _ in range(7))
    return Limits(2 * 2048**3 / product, wide.numel() * wide.element_size() / reading)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def in_turn(ways: Mapping[str, Any], rounds: int, warm_up: bool = True) -> Iterable[tuple[int, str]]:
    """Yield (round, name of a way). The order of the ways alternates, so that noise affects all of them; the
    warm-up is round -1.
    """
    for number in range(-1 if warm_up else 0, rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            gc.collect()
            yield number, name


def alternate(
    ways: Mapping[str, Callable[[], object]], rounds: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """The seconds of each way in each round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number, name in in_turn(ways, rounds, warm_up):
        took = seconds(ways[name])
        if number >= 0:
            times[name].append(took)
    return times


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of ``of[i] / to[i]``. The times of a pair were measured one after the other."""
    return statistics.median(x / y for x, y in zip(of, to, strict=True))


# -- models and rollouts -------------------------------------------------------------------------------------


@dataclass
class OneTurn:
    """A conversation that ends after one action."""

    prompt: Sequence[int] = ()
    seed: int = 0
    action: Sequence[int] = ()
    logprobs: Sequence[float] = ()

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> None:
        self.action, self.logprobs = action, logprobs


def linear_weights(policy: Any) -> int:
    """The number of weights of the decoder's linear layers, without the output layer."""
    import torch

    linear = (m for m in policy.decoder.modules() if isinstance(m, torch.nn.Linear))
    return sum(p.numel() for module in linear for p in module.parameters())


def generation(new: int, **more: Any) -> Any:
    """Transformers' settings: ``new`` tokens at temperature 1 from the whole vocabulary, and no end token."""
    from transformers import GenerationConfig

    ends = {"eos_token_id": None, "pad_token_id": 0}
    whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(**whole, **ends, max_new_tokens=new, **more)
