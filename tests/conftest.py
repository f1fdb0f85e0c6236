"""Fixtures that many tests share. Models are small and random; the real ones skip, with the reason, where
they cannot be had.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Generator, Iterator
from copy import copy, deepcopy
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.hardware import has_bf16
from agent_peft.policies.config import LoraSettings, PretrainedConfig, ScratchConfig
from agent_peft.policies.engine import schedule
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models import bundled
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout import evaluation
from agent_peft.types import AgentPeftError

from .warm_process import ForkedProgram

torch.set_num_threads(1)
_MADE: dict[str, Policy] = {}


def case(*values: Any, fast: bool, name: str | None = None) -> Any:
    """Parameters of a test, which are slow unless ``fast``. A product of several lists shows most of what it
    shows in few rows, where each value is in one; all rows are run by ``make test-slow``.
    """
    return pytest.param(*values, marks=[pytest.mark.slow] * (not fast), id=name)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported while tests are collected stays: no search for garbage looks at it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """A run syncs some eighty times, for about ten milliseconds each. It is for a loss of power, which no
    test plays; what was written before a kill is there without it. Processes of their own do sync.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_tree_of_commands() -> Iterator[None]:
    """Typer makes all commands again for each command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_warning_of_few_tasks() -> None:
    """It comes once in a process, and tests evaluate on few tasks."""
    for number in range(1, evaluation.FEW_TASKS):
        evaluation._check_number(number)


def made_once(key: str, make: Callable[[], Policy]) -> Policy:
    """A copy of the policy of this key."""
    if key not in _MADE:
        _MADE[key] = make()
    return copy_policy(_MADE[key])


def fresh_policy(config: ScratchConfig, seed: int) -> Policy:
    """``load_policy`` once for each configuration, and a copy of the policy for each test."""
    return made_once(f"{config!r} {seed}", partial(load_policy, config, seed))


def copy_policy(policy: Policy) -> Policy:
    return deepcopy(policy, {id(policy.chat): copy(policy.chat)})  # its tokenizer has a lock


@pytest.fixture(scope="session", autouse=True)
def one_load_of_each_random_policy() -> Iterator[None]:
    """A third of a small run is the making and proving of its policy, which the configuration decides."""

    def load(config: PretrainedConfig | ScratchConfig, seed: int, **keys: Any) -> Policy:
        if config.kind == "scratch" and config.device == "cpu" and not keys:
            return fresh_policy(config, seed)
        return load_policy(config, seed, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent_peft.runs.run.load_policy", load)
        patch.setattr("agent_peft.runs.targets.load_policy", load)
        yield


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators have made and that are still there: exact, and the same
    each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if (
                    key not in self.known and key not in given
                ):  # made here, and no view of what was there before
                    self.known.add(key)
                    self.now += size
                    weakref.finalize(storage, self.forget, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def forget(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.now -= size


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """``peak_bytes(work)``: the most bytes of tensors that ``work`` has made and holds at once, its
    backward included.
    """

    def measure(work: Callable[[], object]) -> int:
        with _LiveBytes() as live:
            work()
        return live.peak

    return measure


@pytest.fixture
def shared() -> Path:
    """The folder of real sets next to the repository. Never committed, so it may be absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder.name}/ next to the repository: the real sets are not here")
    return folder


@pytest.fixture
def char_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("0123456789+-*= \n")


@pytest.fixture
def tiny_llama(char_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two random layers over ``char_tokenizer``'s tokens, tied embeddings, grouped heads, fp32, in
    evaluation mode.
    """
    config = LlamaConfig(
        vocab_size=len(char_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=char_tokenizer.pad_token_id,
        bos_token_id=char_tokenizer.bos_token_id,
        eos_token_id=char_tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny_policy(request: pytest.FixtureRequest, char_tokenizer: PreTrainedTokenizerFast) -> Policy:
    """The policy of ``tiny_llama``."""
    chat = ChatTokenizer(char_tokenizer)
    return made_once("tiny_llama", lambda: Policy(request.getfixturevalue("tiny_llama"), chat))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched on first use."""
    try:
        return bundled.fetch("smollm2-135m")
    except AgentPeftError as error:
        pytest.skip(f"SmolLM2 is not in the cache and cannot be fetched: {error}")


@pytest.fixture(params=["float32", "bfloat16"])
def real_dtype(request: pytest.FixtureRequest) -> str:
    """A type for a real model. A CPU that emulates bfloat16 takes thirty times as long as in float32."""
    if request.param == "bfloat16" and not has_bf16(torch.device("cpu")):
        pytest.skip("this CPU does not multiply bfloat16 natively")
    return str(request.param)


ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # a peaked distribution, so that a wrong temperature or a wrong token shows
}


@pytest.fixture
def policy_config() -> ScratchConfig:
    """Two processes write the same bytes for it: ``matmul: auto`` would be measured by each of them."""
    lora = LoraSettings(rank=4, alpha=8)
    return ScratchConfig(
        architecture=ARCHITECTURE, alphabet=ALPHABET, lora=lora, device="cpu", matmul="torch"
    )


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process wait for each answer, also on a computer so loaded that a thread is late."""
    for name in ("PATIENCE", "FIRST_PATIENCE"):
        monkeypatch.setattr(schedule, name, 60.0)


@pytest.fixture
def run_contents(patient: None) -> Callable[[Path], dict[str, bytes]]:
    """The bytes of every file that the configuration alone decides; what was late is a file, too."""

    def contents(folder: Path) -> dict[str, bytes]:
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in ("timing.jsonl", "run.json", "log.txt", ".lock")
        ]
        found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        if "config.yaml" in found:  # its paths are absolute
            found["config.yaml"] = found["config.yaml"].replace(os.fsencode(folder.absolute().parent), b".")
        return found

    return contents


@pytest.fixture(scope="session")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a distribution, such as ``trl==1.16.0``. Without a download the test is skipped."""

    def unpacked(distribution: str) -> Path:
        folder = tmp_path_factory.mktemp("wheel")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*pip, distribution], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"{distribution} cannot be downloaded: {done.stderr.strip()[-200:]}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        return folder

    return unpacked


class WarmProcess:
    """Runs ``python PROGRAM`` and ``python -m MODULE`` without the seconds that torch takes to import."""

    def __init__(self, place: str) -> None:
        self.place = place

    def start(
        self, *command: str, folder: Path, output: IO[Any], errors: IO[Any] | None = None, **variables: str
    ) -> ForkedProgram:
        """
        Args:
            errors: where stderr goes; None takes ``output``.
            variables: of its environment, next to ours.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        return ForkedProgram(self.place, [*command], folder, environment, output, errors or output)

    def run(self, *command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            code = self.start(*command, folder=folder, output=output, errors=errors, **variables).wait()
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess([*command], code, output.read(), errors.read())


@pytest.fixture(scope="session")
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """Programs that start at once. Tests of the start itself start processes of their own."""
    tests = Path(__file__).parent
    place = tmp_path_factory.mktemp("warm") / "socket"
    environment = {**os.environ, "PYTHONPATH": str(tests.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tests / "warm_process.py"), str(place)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield WarmProcess(str(place))
        process.communicate("")
