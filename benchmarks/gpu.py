"""Measure everything of interest on a GPU that is available for minutes only: the tests that need one, two
models of random weights, and a real model.

    python benchmarks/gpu.py [--seconds 480] [--output gpu.json] [--only limits tests 0.5B 7B smollm2-135m]
    [--device cuda]
    python benchmarks/gpu.py --device cpu --tiny     # the same code on small shapes

For each model, in bfloat16 with a LoRA adapter, it measures: the tokens per second of 32 decoding rows,
compared with Transformers' generate with the same adapter and with the time to read the weights; the
difference of the log-probabilities of sampler and trainer; the share of the GPU's arithmetic that training
uses, packed and padded; and the memory that `explain` predicts, compared with the allocated memory. "Useful"
operations are the minimum for both ways: attention only to visible tokens, and gradients only of the
adapter's weights.

The program ends after --seconds and prints its results so far. Each section is written to the JSON file when
it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import transformers
from gpu_models import Bench, Size, decoding, limits, random_policy, real_policy, training
from rich.console import Console
from rich.table import Table
from smoke import RESULTS, parse, skipped

from agent_peft.policies.models.bundled import cached
from agent_peft.policies.models.shape import ModelShape
from agent_peft.policies.policy import Policy

ROOT = Path(__file__).resolve().parent.parent
REAL = "smollm2-135m"
# from the models' config.json on the hub: Qwen/Qwen2.5-0.5B and Qwen/Qwen2.5-7B
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
TINY = {"hidden_size": 56, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}


class TimeUpError(Exception):
    """The time limit is reached."""


@dataclass
class Session:
    """The remaining time, and the results."""

    bench: Bench
    seconds: float
    output: Path
    begun: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def write(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.found, indent=1) + "\n")


def run_tests(session: Session, files: Sequence[str]) -> dict[str, Any]:
    """Run every test marked ``gpu`` in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = [
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            "--tb=short",
            f"--junitxml={report}",
        ]
        command = [sys.executable, "-m", "pytest", *options, *files]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=max(1.0, min(240.0, session.left - 5)),
            )
        except subprocess.TimeoutExpired:
            return {"error": "the tests did not end in time"}
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    wrong = [
        case.get("name", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"passed": len(cases) - len(wrong) - skipped, "failed": wrong, "skipped": skipped}
    return (
        counts
        if done.returncode in (0, 5)
        else {**counts, "output": done.stdout[-6000:] + done.stderr[-2000:]}
    )


def model_section(
    session: Session, make: Callable[[], tuple[Policy, ModelShape]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part of a model's results as soon as it is measured."""
    found, bench = session.found["limits"], session.bench
    policy, shape = make()
    yield (
        "model",
        {
            "parameters": shape.parameters,
            "packs": policy.packing,
            "device": str(policy.device),
            "dtype": str(policy.dtype),
        },
    )
    yield "decoding", decoding(bench, policy, shape, found)
    for packed in (True, False):
        yield "packed" if packed else "padded", training(bench, policy, shape, found, packed)


@contextmanager
def ending_in(seconds: float) -> Iterator[None]:
    """Raise TimeUpError inside the block after this many seconds."""

    def ring(*_: object) -> None:
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(
    session: Session,
    sections: Mapping[str, Callable[[], Mapping[str, Any] | Iterator[tuple[str, dict[str, Any]]]]],
) -> None:
    """Run the sections in order. A failure is recorded, and the next section runs."""
    for name, work in sections.items():
        content: dict[str, Any] = {}
        session.found[name] = content
        begun = time.monotonic()
        try:
            with ending_in(session.left):
                result = work()
                for part, value in result.items() if isinstance(result, Mapping) else result:
                    content[part] = value
        except TimeUpError:
            content["error"] = "the time was up"
        except Exception as error:  # the other sections still run
            content["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            content["traceback"] = traceback.format_exc()[-4000:]
        content["section_seconds"] = time.monotonic() - begun
        session.write()
        gc.collect()
        if session.bench.on_gpu:
            torch.cuda.empty_cache()


def show(session: Session, console: Console) -> None:
    found = session.found
    speed = found.get("limits", {})
    if "operations" in speed:
        title = f"{found['machine']['device']}: {speed['operations'] / 1e12:.0f} TFLOP/s in bfloat16, "
        title += f"{speed['bytes'] / 1e9:.0f} GB/s"
        table = Table("model", "", "", title=title, show_header=False)
        for name, parts in found.items():
            if name in ("machine", "limits", "tests"):
                continue
            for part, row in parts.items():
                if isinstance(row, Mapping):
                    table.add_row(name, part, sentence(part, row))
        console.print(table)
    if "tests" in found:
        console.print({key: value for key, value in found["tests"].items() if key != "output"})
    for name, parts in found.items():
        if "error" in parts:
            console.print(f"{name}: {parts['error']}", style="red", markup=False)
    console.print(f"{session.seconds - session.left:.0f} s; {session.output}")


def sentence(part: str, row: Mapping[str, Any]) -> str:
    if part == "decoding":
        return (
            f"{row['tokens_per_second']:.0f} tokens/s, {100 * row['of_bandwidth']:.0f} % of the bandwidth; "
            f"generate {row['generate_tokens_per_second']:.0f}; "
            f"mismatch {row['mismatch_mean']:.2g} nats on average, "
            f"{row['mismatch_max']:.2g} at most, k3 {row['mismatch_k3']:.2g}"
        )
    if part in ("packed", "padded"):
        bytes_ = row["allocated_bytes"]
        memory = (
            ""
            if bytes_ is None
            else f", allocated {bytes_ / 1e9:.2f} GB (ratio {row['predicted_bytes'] / bytes_:.2f})"
        )
        speed = f"{row['positions_per_second']:.0f} positions/s, {100 * row['utilisation']:.0f} % of the GPU"
        return f"{speed}; predicted {row['predicted_bytes'] / 1e9:.2f} GB{memory}"
    return ", ".join(f"{key} {value}" for key, value in row.items())


def marked_tests() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--only", nargs="+", help="run only these sections")
    parser.add_argument("--tests", nargs="+", default=marked_tests(), help="files with tests")
    parser.add_argument("--tiny", action="store_true", help="use small shapes, to test this program")
    given = parse(parser, arguments, tiny=True, only=["0.5B"])
    if given.quick and given.device == "cuda" and not torch.cuda.is_available():
        skipped("all of it: there is no CUDA device; tests/devices/test_gpu_benchmark.py runs it on a CPU")
        return {}
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device(given.device)
    size = Size(prompt=16, new=4, observed=12, sampled=4, matrix=64, rounds=1) if given.tiny else Size()
    bench = Bench(device, size)
    session = Session(bench, given.seconds, given.output)
    name = torch.cuda.get_device_name(device) if bench.on_gpu else platform.processor() or "CPU"
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    session.found["machine"] = {"device": name, **versions, "tiny": given.tiny}
    shapes = {model: {**settings, **(TINY if given.tiny else {})} for model, settings in SHAPES.items()}
    sections: dict[str, Callable[[], Any]] = {
        "limits": partial(limits, bench),
        "tests": partial(run_tests, session, given.tests),
    }
    for model, settings in shapes.items():
        sections[model] = partial(model_section, session, partial(random_policy, bench, settings))
    if cached(REAL) is not None and not given.tiny:
        sections[REAL] = partial(model_section, session, partial(real_policy, bench, REAL))
    run(
        session,
        {name: work for name, work in sections.items() if not given.only or name in (*given.only, "limits")},
    )
    show(session, Console(width=170))
    return session.found


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    main()
