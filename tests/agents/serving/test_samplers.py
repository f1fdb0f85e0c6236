"""Servers as samplers: ``engine: {kind: server}`` over ``serve-policy``, its proofs, and planted faults."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_peft.agents.serving.answers import CompletionBody
from agent_peft.child_processes import start_of
from agent_peft.configuration import yaml12
from agent_peft.configuration.load import load_config
from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import NewRow, ServerEngineConfig
from agent_peft.policies.engine.server import ServerSampler
from agent_peft.policies.engine.server_proofs import Canary
from agent_peft.policies.engine.service import OpenDecoding, Service
from agent_peft.policies.engine.wire import ServerClient
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.ranks import Ranks
from agent_peft.runs import run
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError, InfrastructureError, TrustError
from tests.conftest import case

from .conftest import post, wait_until

TOKEN = "AGENT_PEFT_TEST_TOKEN"
SECRET = {"authorization": "Bearer secret"}
STAGE = {
    "algorithm": {"kind": "rloo"},
    "steps": 3,
    "tasks_per_step": 4,
    "group_size": 4,
    "sampling": {"max_new_tokens": 3, "temperature": 0.9},
    "rewards": {"invalid_action": -0.5},  # a random policy is never right, but writes digits now and then
    "optimizer": {"learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """``models(seed)``: the folder of a random model that reads sums."""
    made: dict[int, Path] = {}

    def model(seed: int) -> Path:
        if seed not in made:
            tokenizer = character_tokenizer(ALPHABET)
            config = LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=128,
                tie_word_embeddings=False,
                initializer_range=0.2,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                network = LlamaForCausalLM(config).bfloat16()  # as models are stored
            made[seed] = tmp_path_factory.mktemp("model") / f"sums{seed}"
            network.save_pretrained(made[seed])
            tokenizer.save_pretrained(made[seed])
        return made[seed]

    return model


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TOKEN, "secret")
    return TOKEN


@pytest.fixture
def learner(models: Callable[[int], Path]) -> Callable[..., Policy]:
    def load(dtype: str = "float32", trained: bool = False, **lora: Any) -> Policy:
        settings = LoraSettings(**{"rank": 4, "alpha": 8, **lora})
        policy = load_policy(str(models(0)), lora=settings, dtype=dtype, device="cpu")
        if trained:
            train(policy, 0)
        return policy

    return load


def train(policy: Policy, seed: int, size: float = 0.1) -> None:
    """Another adapter, as if the policy had learned."""
    with torch.no_grad():
        for number, (_, layer) in enumerate(adapters.lora_layers(policy.model)):
            b = adapters.factors(layer)[1]
            draws = torch.Generator().manual_seed(seed * 1000 + number)
            b.copy_(torch.randn(b.shape, generator=draws) * size)


@pytest.fixture
def pool(serving, models, token, tmp_path) -> Callable[..., Any]:
    """``pool()``: a server in this process, which holds the model under the learner's adapter."""

    def start(seed: int = 0, dtype: str = "float32", **settings: Any) -> Any:
        base = load_policy(str(models(seed)), lora=None, dtype=dtype, device="cpu")
        folder = tmp_path / "adapters"
        return serving(**{"token": "secret", "adapters": folder, "base": base, **settings})

    return start


@pytest.fixture
def sampler_of(token, tmp_path) -> Iterator[Callable[..., ServerSampler]]:
    """``sampler_of(policy, server, …)``: with a folder that the servers read."""
    made: list[ServerSampler] = []

    def make(policy: Policy, *servers: Any, **keys: Any) -> ServerSampler:
        urls = [getattr(server, "url", server) for server in servers]
        settings = {"kind": "server", "urls": urls, "token": token, "folder": tmp_path / "adapters", **keys}
        sampler = load_sampler(policy, {"patience": 5.0, **settings})
        assert isinstance(sampler, ServerSampler)
        made.append(sampler)
        return sampler

    yield make
    for sampler in made:
        sampler.close()


class Talk:
    """A conversation of a few actions."""

    prompt = (1, 2, 3)

    def __init__(self, seed: int, turns: int = 1, pause: Callable[[], object] = lambda: None) -> None:
        self.seed, self.turns, self.pause = seed, turns, pause
        self.actions: list[tuple[int, ...]] = []
        self.logprobs: list[tuple[float, ...]] = []

    def act(self, action, logprobs, room):
        self.actions.append(tuple(action))
        self.logprobs.append(tuple(logprobs))
        self.pause()
        return (4, 5) if len(self.actions) < self.turns else None


class Rewritten(Talk):
    """Before its second action, the history is another one."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, turns=2)

    def act(self, action, logprobs, room):
        news = super().act(action, logprobs, room)
        return None if news is None else NewRow((1, 7), len(self.prompt) + len(action))


SHORT = SamplingConfig(max_new_tokens=5, max_tokens=60)


def trainer_of(policy: Policy, sampler: Any, **keys: Any) -> Trainer:
    environment = Arithmetic(ArithmeticConfig(digits=1, num_tasks=10))
    return Trainer(policy, environment, StageConfig.model_validate({**STAGE, **keys}), sampler, 0)


# -- it works ------------------------------------------------------------------------------------------------


@pytest.fixture
def processes(models, token, tmp_path, warm_process) -> Iterator[Callable[..., Any]]:
    """``processes(dtype)``: a serve-policy process; its url and the process."""
    started = []

    def start(dtype: str = "float32", port: int = 0) -> tuple[str, Any]:
        folder = tmp_path / "adapters"
        options = ["--token", TOKEN, "--adapters", str(folder), "--dtype", dtype, "--port", str(port)]
        output = (tmp_path / f"server{len(started)}.txt").open("w+")
        command = ["-m", "agent_peft", "serve-policy", f"base={models(0)}", "--device", "cpu", *options]
        process = warm_process.start(*command, folder=tmp_path, output=output)
        started.append((process, output))
        deadline = time.monotonic() + 60
        while not (line := re.search(r"on (http://\S+)/v1", Path(output.name).read_text())):
            assert process.poll() is None and time.monotonic() < deadline, Path(output.name).read_text()
            time.sleep(0.02)
        return line[1], process

    yield start
    for process, output in started:
        process.kill()
        output.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_on_two_servers(processes, learner, sampler_of, tmp_path, dtype):
    policy, (url, _), (other, _) = learner(dtype), processes(dtype), processes(dtype)
    sampler, names = sampler_of(policy, url, other), []
    trainer = trainer_of(policy, sampler)
    for step in trainer:
        names.append(sampler.version.name)
        assert step.metrics["mismatch_max" if dtype == "float32" else "mismatch"] < policy.rounding
        assert step.metrics["updates_skipped"] == 0
        for server in sampler.servers:
            assert set(server.models()) == {"base", names[-1]}  # the earlier versions are retired
    assert len(set(names)) == 3 and all(re.fullmatch(r"run-\w{8}-v\d+-\w{12}", name) for name in names)
    tokens = sampler.canary.tokens
    for server in sampler.servers:
        apart = torch.tensor(server.score(names[-1], tokens)) - sampler.canary.score()
        assert policy.drift(apart) <= policy.rounding
        assert policy.drift(torch.tensor(server.score("base", tokens)) - sampler.canary.score()) > 0.05
    sampler.close()
    assert [set(server.models()) for server in sampler.servers] == [{"base"}] * 2
    assert not list((tmp_path / "adapters").iterdir())


def test_tokens_are_those_of_the_local_engine(pool, learner, sampler_of):
    """The seeds are sent, so a step draws what it would draw here, over several turns."""
    policy = learner(trained=True)
    sampler, sampling = sampler_of(policy, pool(), pool()), SHORT.model_copy(update={"temperature": 0.8})
    remote, local = ([Talk(seed, turns=3) for seed in range(12)] for _ in range(2))
    statistics = sampler.generate(remote, sampling)
    load_sampler(policy).generate(local, sampling)
    assert [talk.actions for talk in remote] == [talk.actions for talk in local]
    for ours, theirs in zip(remote, local, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a == pytest.approx(b, abs=1e-3)
    assert statistics.sampled == sum(len(action) for talk in remote for action in talk.actions)
    unseeded = sampler_of(policy, pool(), seeded=False)
    again = [[Talk(0) for _ in range(8)] for _ in range(2)]
    for talks in again:
        unseeded.generate(talks, sampling)
    assert [t.actions for t in again[0]] != [t.actions for t in again[1]]


def test_a_rewritten_history_is_read_in_place_of_the_one_before(pool, learner, sampler_of):
    policy = learner(trained=True)
    talks, local = [Rewritten(seed) for seed in range(8)], load_sampler(policy)
    sampler_of(policy, pool()).generate(talks, SHORT)
    for talk in talks:
        for prompt, action, logprobs in zip(((1, 2, 3), (1, 7)), talk.actions, talk.logprobs, strict=True):
            expected = local.score([*prompt, *action], SHORT)[-len(action) :]
            assert logprobs == pytest.approx(expected, abs=1e-3)
    assert len({talk.actions[1] for talk in talks}) > 1, "each draws with a seed of its own"


def test_a_run_and_its_evaluations_use_the_servers(pool, models, token, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server, sums = pool(), {"kind": "arithmetic", "digits": 1, "num_tasks": 4}
    content = {
        "run_dir": "run",
        "policy": {"kind": "pretrained", "model": str(models(0)), "dtype": "float32", "device": "cpu"},
        "environment": sums,
        "evaluation": {"environment": sums, "at": ["stages"]},
        "engine": {"kind": "server", "urls": [server.url], "token": TOKEN, "folder": "adapters"},
        "stages": [{**STAGE, "steps": 1}],
    }
    drawn, submit = [], Service.submit
    monkeypatch.setattr(
        Service, "submit", lambda self, name, request: drawn.append(name) or submit(self, name, request)
    )
    run.train(load_config(content))
    (record,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert record["mismatch_max"] < 1e-3
    versions = [name for name in dict.fromkeys(drawn) if name != "base"]
    assert [name.split("-")[2] for name in versions] == ["v0", "v1"]
    assert drawn.count(versions[1]) > 4  # the evaluation's, after the update
    assert not list((tmp_path / "adapters").iterdir()) and set(server.service.policies) == {"base"}
    monkeypatch.setattr(run, "join", lambda *_: nullcontext(Ranks(0, 2)))
    content["engine"] = {"kind": "vllm", "python": sys.executable}
    with pytest.raises(AgentPeftError, match="each rank would start a vLLM"):
        run.train(load_config(content))


def test_servers_sample_ahead(pool, learner, sampler_of, monkeypatch):
    """On another thread, and what the local engine samples with that lag."""
    policy = learner()
    sampler, drawn, generate = sampler_of(policy, pool()), list[tuple[str, str]](), ServerSampler.generate

    def watched(self: ServerSampler, *arguments: Any) -> Any:
        drawn.append((self.publish().name.split("-")[2], threading.current_thread().name.partition("_")[0]))
        return generate(self, *arguments)

    monkeypatch.setattr(ServerSampler, "generate", watched)
    keys = {"algorithm": {"kind": "cispo"}, "lag": 1, "steps": 4}
    steps = list(trainer_of(policy, sampler, **keys))
    assert drawn == [("v0", "MainThread"), ("v0", "sampling"), ("v1", "sampling"), ("v2", "sampling")]
    local = learner()
    for ours, theirs in zip(steps, trainer_of(local, load_sampler(local), **keys), strict=True):
        assert [t.tokens for t in ours.trajectories] == [t.tokens for t in theirs.trajectories]


def test_a_version_is_published_where_the_weights_have_changed(pool, learner, sampler_of):
    policy = learner()
    sampler = sampler_of(policy, pool())
    names = [sampler.publish().name for _ in range(2)]
    train(policy, 1)
    scores = sampler.score(sampler.canary.tokens, SamplingConfig())  # publishes
    names.append(sampler.publish().name)
    assert names[0] == names[1] != names[2]
    assert scores == pytest.approx(sampler.canary.score().tolist(), abs=1e-3)
    base = sampler.score(sampler.canary.tokens, SamplingConfig(), adapter=False)
    assert base == pytest.approx(sampler.canary.base.tolist(), abs=1e-3) != scores
    train(policy, 0)
    train(policy, 1)  # the same content is the same version
    assert sampler.publish().name == names[2]
    with pytest.raises(ValueError, match="temperature 1"):
        sampler.score([1, 2], SamplingConfig(temperature=0.5))


def test_a_temporary_folder_is_removed(pool, learner, sampler_of, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "adapters"))
    (tmp_path / "adapters").mkdir()
    sampler = sampler_of(learner(), pool(), folder=None)
    assert sampler.version.folder.is_dir()
    sampler.close()
    assert not list((tmp_path / "adapters").iterdir())


# -- refused at the start ------------------------------------------------------------------------------------


def test_a_policy_whose_adapter_servers_would_drop(models, learner, sampler_of):
    with pytest.raises(AgentPeftError, match=r"set policy\.lora"):
        sampler_of(load_policy(str(models(0)), lora=None, device="cpu"), "http://127.0.0.1:9")
    with pytest.raises(AgentPeftError, match="the output layer"):
        sampler_of(learner(target_modules=["q_proj", "lm_head"]), "http://127.0.0.1:9")
    policy = learner()
    policy.model.peft_config["default"].use_dora = True
    with pytest.raises(AgentPeftError, match="DoRA"):
        sampler_of(policy, "http://127.0.0.1:9")


def test_another_model(pool, learner, sampler_of):
    server = pool(seed=1)
    with pytest.raises(TrustError, match=rf"{server.url}: its model base .* the same model and dtype"):
        sampler_of(learner(), server)
    with pytest.raises(AgentPeftError, match=r"no model 'other'; set engine\.model to one of: base"):
        sampler_of(learner(), server, model="other")


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [("float32", "bfloat16", r"\(float32\)"), ("bfloat16", "float32", "--dtype bfloat16")],
)
def test_another_dtype(pool, learner, sampler_of, ours, theirs, message):
    with pytest.raises(TrustError, match=message):
        sampler_of(learner(ours), pool(dtype=theirs))


def test_another_template(pool, learner, sampler_of):
    server = pool()
    chat = server.service.policies["base"].chat
    opening = chat.opening
    chat.opening = lambda messages, **keys: [*opening(messages, **keys), 4]
    with pytest.raises(TrustError, match=f"{server.url}: its chat template"):
        sampler_of(learner(), server)
    policy = learner()
    policy.chat.opening = lambda messages: opening([])  # which is refused, as by an alphabet without letters
    assert sampler_of(policy, server).version is not None


def test_log_probabilities_before_the_temperature(pool, learner, sampler_of, monkeypatch):
    draw = OpenDecoding._draw

    def raw(self, rows, logits, uniforms):
        tokens, _ = draw(self, rows, logits, uniforms)
        logp = log_distribution(logits, SamplingConfig())
        return tokens, [float(logp[i, token]) for i, token in enumerate(tokens)]

    monkeypatch.setattr(OpenDecoding, "_draw", raw)
    with pytest.raises(TrustError, match="--logprobs-mode processed_logprobs"):
        sampler_of(learner(), pool())


def test_servers_that_accept_no_adapters(pool, learner, sampler_of, tmp_path):
    with pytest.raises(AgentPeftError, match="serve-policy --adapters FOLDER"):
        sampler_of(learner(), pool(adapters=None))
    with pytest.raises(AgentPeftError, match=r"no adapter found .* engine\.folder"):
        sampler_of(learner(), pool(), folder=tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(AgentPeftError, match=r"engine\.token"):
        sampler_of(learner(), pool(), token=None)


def test_conversations_that_are_longer_than_the_servers_read(pool, learner, sampler_of):
    sampler = sampler_of(learner(), pool(max_tokens=70))
    with pytest.raises(AgentPeftError, match=r"read 70 tokens at most, and sampling\.max_tokens is 90"):
        sampler.generate([Talk(0)], SamplingConfig(max_tokens=90))
    whole = sampler_of(learner(), pool())
    talk = Talk(0)
    whole.generate([talk], SamplingConfig(max_new_tokens=120, max_tokens=128))  # all that the model reads
    assert len(whole.score([1, 2, 3, *talk.actions[0]], SamplingConfig())) == 2 + len(talk.actions[0])


# -- faults of versions --------------------------------------------------------------------------------------


def test_a_name_is_never_used_again(pool, learner, sampler_of):
    sampler = sampler_of(learner(), pool())
    with pytest.raises(TrustError, match="never used again"):
        sampler.servers[0].load_adapter(sampler.version.name, str(sampler.version.folder))


def test_swapped_files_of_an_adapter(pool, learner, sampler_of, monkeypatch, tmp_path):
    other = learner(trained=True)
    write = ServerSampler._write

    def swapped(self, folder):
        write(self, folder)
        adapters.save(other.model, folder)

    monkeypatch.setattr(ServerSampler, "_write", swapped)
    server, policy = pool(), learner()
    train(policy, 7)
    with pytest.raises(TrustError, match=rf"{server.url}: scores the same tokens under run-.* other weights"):
        sampler_of(policy, server)
    assert set(server.service.policies) == {"base"} and not list((tmp_path / "adapters").iterdir())


@pytest.mark.parametrize(
    ("stale", "dtype"),
    [
        case(stale, dtype, fast=(stale == "the base model") == (dtype == "float32"))
        for stale in ("the base model", "the version before it")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_a_server_that_keeps_acting_with_what_it_has(pool, learner, sampler_of, monkeypatch, stale, dtype):
    server, policy = pool(dtype=dtype), learner(dtype)
    train(policy, 1)
    sampler = sampler_of(policy, server)
    held = adapters.load

    def keep(model, folder):
        if stale == "the base model":
            for _, layer in adapters.lora_layers(model):
                torch.nn.init.zeros_(adapters.factors(layer)[1])
        else:
            held(model, before)

    before = tmp = sampler.version.folder.with_name("kept")
    shutil.copytree(sampler.version.folder, tmp)
    monkeypatch.setattr(adapters, "load", keep)
    name = sampler.version.name
    train(policy, 2)
    with pytest.raises(TrustError, match=rf"{server.url}: acts with {stale}"):
        sampler.generate([Talk(0)], SHORT)
    with pytest.raises(TrustError, match=rf"{server.url}: acts with {stale}"):  # nor at a second call
        sampler.score([1, 2, 3], SamplingConfig())
    monkeypatch.setattr(adapters, "load", held)
    assert sampler.publish().name != name  # a server that has recovered continues
    assert sampler.generate([Talk(0)], SHORT).sampled > 0


@pytest.mark.slow
def test_small_changes_raise_nothing(pool, learner, sampler_of):
    """Between two versions that hardly differ, rounding must not look like a stale version."""
    for dtype in ("float32", "bfloat16"):
        policy = learner(dtype)
        train(policy, 1)
        sampler = sampler_of(policy, pool(dtype=dtype))
        for size in (0.1001, 0.1, 0.10001, 0.1, 0.1002):
            train(policy, 1, size)
            sampler.publish()
        assert sampler.published == 6


def test_a_model_that_answers_under_another_name(pool, learner, sampler_of, monkeypatch):
    server = pool()
    sampler = sampler_of(learner(), server)
    init = CompletionBody.__init__
    monkeypatch.setattr(
        CompletionBody, "__init__", lambda self, **keys: init(self, **{**keys, "model": "base"})
    )
    with pytest.raises(TrustError, match=rf"{server.url}: the model run-.* was asked, and base answered"):
        sampler.generate([Talk(0)], SHORT)


def test_a_full_disk(pool, learner, sampler_of, monkeypatch, tmp_path):
    policy = learner()
    sampler = sampler_of(policy, pool())
    kept = sampler.version

    def full(model, folder):
        (folder / "part").write_bytes(b"1")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapters, "save", full)
    train(policy, 1)
    with pytest.raises(InfrastructureError, match=r"No space left on device.*make room"):
        sampler.publish()
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [kept.name]


# -- faults of the network -----------------------------------------------------------------------------------


def test_an_adapter_unloaded_during_a_conversation_is_loaded_and_proven_again(pool, learner, sampler_of):
    policy = learner(trained=True)
    sampler = sampler_of(policy, pool())
    name, server = sampler.version.name, sampler.servers[0]
    talks = [Talk(seed, turns=3) for seed in range(3)]
    once = threading.Lock()

    def unload():
        if once.acquire(blocking=False):
            server.unload_adapter(name)

    talks[0].pause = unload
    sampler.generate(talks, SHORT)
    expected = [Talk(seed, turns=3) for seed in range(3)]
    load_sampler(policy).generate(expected, SHORT)
    assert [talk.actions for talk in talks] == [talk.actions for talk in expected]
    server.unload_adapter(name)
    train(policy, 5)
    adapters.save(policy.model, sampler.version.folder)  # meanwhile, the files are swapped
    train(policy, 0)
    with pytest.raises(TrustError, match="other weights"):
        sampler.generate([Talk(0)], SHORT)


def test_a_server_that_is_started_again_during_a_proof(pool, learner, sampler_of, monkeypatch):
    lost, prove = [], Canary.prove

    def losing(self, server, version, before):
        if len(lost) < 1:
            lost.append(version.name)
            server.unload_adapter(version.name)
        prove(self, server, version, before)

    monkeypatch.setattr(Canary, "prove", losing)
    assert lost == [sampler_of(learner(), pool()).version.name]


@pytest.mark.slow
def test_a_server_killed_in_a_request(processes, learner, sampler_of):
    url, process = processes()
    other, _ = processes()
    sampler = sampler_of(learner(trained=True), url, other, patience=1.0)
    talks = [Talk(seed, turns=2) for seed in range(4)]
    talks[0].pause = process.kill  # the next request of conversations 0 and 2 meets a dead server
    with pytest.raises(InfrastructureError, match=rf"{url}/v1/completions: no answer for 1 s"):
        sampler.generate(talks, SHORT)


@pytest.mark.slow
def test_a_server_that_is_started_again_gets_its_adapter_again(processes, learner, sampler_of):
    url, process = processes()
    policy = learner(trained=True)
    sampler = sampler_of(policy, url, patience=60.0)
    talks = [Talk(seed, turns=2) for seed in range(3)]

    def restart():
        process.kill()
        processes(port=int(url.rpartition(":")[2]))

    talks[0].pause = lambda: restart() if len(talks[0].actions) == 1 else None
    sampler.generate(talks, SHORT)
    expected = [Talk(seed, turns=2) for seed in range(3)]
    load_sampler(policy).generate(expected, SHORT)
    assert [talk.actions for talk in talks] == [talk.actions for talk in expected]


def test_a_slow_server(pool, learner, sampler_of, monkeypatch):
    server = pool()
    sampler = sampler_of(learner(), server)
    sampler.servers[0].timeout, sampler.servers[0].patience = 0.2, 0.3
    advance = OpenDecoding.advance
    monkeypatch.setattr(OpenDecoding, "advance", lambda self: time.sleep(0.1) or advance(self))
    with pytest.raises(
        InfrastructureError, match=rf"{server.url}/v1/completions: no answer .*nothing within"
    ):
        sampler.generate([Talk(0)], SamplingConfig(max_new_tokens=100, max_tokens=120))


def test_a_failure_ends_the_other_conversations_soon(pool, learner, sampler_of):
    sampler = sampler_of(learner(), pool())
    talks = [Talk(seed, turns=10_000, pause=lambda: time.sleep(0.01)) for seed in range(2)]

    def fail():
        raise ValueError("planted")

    talks[0].pause = fail
    with pytest.raises(ValueError, match="planted"):
        sampler.generate(talks, SHORT)
    assert len(talks[1].actions) < 10_000


# -- a vLLM of the trainer's own, whose place a double takes -------------------------------------------------


@pytest.fixture
def vllm(warm_process, tmp_path, monkeypatch) -> Callable[..., dict[str, Any]]:
    """``vllm(key=…)``: the keys of the engine, with the double as its Python."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))  # of programs
    python, double = tmp_path / "python", Path(__file__).parents[2] / "vllm_double.py"
    start = f"import runpy; runpy.run_path({str(double)!r}, run_name='__main__')"
    python.write_text(f"#!{sys.executable} -S\n{start}\n")
    python.chmod(0o755)
    variables = {"WARM_PROCESS": warm_process.place, "PROGRAM": str(tmp_path / "program")}
    return lambda **keys: {"kind": "vllm", "python": str(python), "variables": variables, **keys}


def lives(pid: int) -> bool:
    return start_of(pid) is not None


@pytest.mark.slow
def test_a_vllm_that_is_killed_between_steps_is_started_again_and_changes_no_byte(
    vllm, pool, learner, sampler_of, tmp_path, caplog
):
    theirs = learner()
    keys = {"algorithm": {"kind": "reinforce"}}  # whose gradient has no rounding of the sampler's
    expected = list(trainer_of(theirs, sampler_of(theirs, pool()), **keys))
    policy, killed, steps = learner(), [], []
    with closing(load_sampler(policy, vllm())) as sampler:
        for step in trainer_of(policy, sampler, **keys):
            steps.append(step)
            if len(steps) < 3:
                killed.append(int((tmp_path / "program").read_text()))
                if len(steps) == 2:
                    os.kill(killed[-1], signal.SIGKILL)
        last = int((tmp_path / "program").read_text())
        assert killed[0] == killed[1] != last and lives(last)
    assert "vllm: ended with signal 9" in caplog.text and "vllm: answers after" in caplog.text
    for one, other in zip(steps, expected, strict=True):
        assert [t.tokens for t in one.trajectories] == [t.tokens for t in other.trajectories]
        assert one.metrics["mismatch_max"] < policy.rounding
    assert adapters.digest(policy.model) == adapters.digest(theirs.model)
    wait_until(lambda: not lives(last))
    assert not list((tmp_path / "temporary").iterdir())


def test_a_trainer_that_is_killed_leaves_no_vllm(vllm, models, warm_process, tmp_path):
    sums, file = {"kind": "arithmetic", "digits": 1, "num_tasks": 4}, tmp_path / "train.yaml"
    policy = {"kind": "pretrained", "model": str(models(0)), "dtype": "float32", "device": "cpu"}
    policy |= {"lora": {"rank": 4}}
    content = {"run_dir": "run", "policy": policy, "environment": sums, "engine": vllm(), **STAGE}
    file.write_text(yaml12.dump(content))
    with (tmp_path / "output").open("w") as output:
        trainer = warm_process.start("-m", "agent_peft", "train", str(file), folder=tmp_path, output=output)
    wait_until(lambda: (tmp_path / "program").exists() or trainer.poll() is not None)
    program = int((tmp_path / "program").read_text())
    assert lives(program)
    trainer.kill()
    wait_until(lambda: not lives(program))


def test_a_vllm_that_cannot_start(vllm, learner, models):
    policy = learner()
    with pytest.raises(InfrastructureError) as failure:
        load_sampler(policy, vllm(arguments=["--fail", "no GPU here"]))
    line = str(failure.value)
    log = re.fullmatch(r"vllm: ended with exit code 1; the last line of (\S+): no GPU here", line)
    assert log and Path(log[1]).read_text() == "no GPU here\n"
    with pytest.raises(AgentPeftError, match=r"/nowhere/bin/python cannot be .* python3 -m venv /nowhere &&"):
        load_sampler(policy, vllm(python="/nowhere/bin/python"))
    with pytest.raises(AgentPeftError, match=r"has no vLLM; install it with: \S+ -m pip install 'vllm>="):
        load_sampler(policy, vllm(python=sys.executable))
    with pytest.raises(AgentPeftError, match=r"set policy\.lora"):
        load_sampler(load_policy(str(models(0)), lora=None, device="cpu"), vllm())
    with pytest.raises(InfrastructureError, match=r"^vllm: ended$"):  # soon, and not after its patience
        ServerClient(
            "http://127.0.0.1:9",
            ServerEngineConfig(urls=("http://127.0.0.1:9",)),
            policy.chat,
            None,
            lambda: "vllm: ended",
        )


# -- the server's side ---------------------------------------------------------------------------------------


def test_prompts_are_scored_as_they_are_sampled(serving, policies):
    url = serving().url
    tokens = policies["trained"].chat.tokenizer.encode("12+34=46", add_special_tokens=False)
    body = {"prompt": [tokens, tokens[:3]], "max_tokens": 1, "prompt_logprobs": 0, "model": "trained"}
    first, second = post(url, "completions", **body).json()["choices"]
    ids = torch.tensor([tokens])
    with torch.no_grad():
        expected = policies["trained"].model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    assert first["prompt_logprobs"][0] is None
    for place, token, row in zip(first["prompt_logprobs"][1:], tokens[1:], expected, strict=True):
        assert place == {str(token): {"logprob": pytest.approx(float(row[token]), abs=1e-3)}}
    assert len(second["prompt_logprobs"]) == 3
    refused = post(url, "completions", prompt="1", prompt_logprobs=0, stream=True)
    assert refused.status_code == 400 and "stream: false" in refused.json()["error"]["message"]


def test_stop_tokens_are_those_that_end_a_turn(serving, policies):
    url, ends = serving().url, sorted(policies["trained"].chat.end_of_turn)
    assert post(url, "completions", prompt="1", stop_token_ids=ends).status_code == 200
    refused = post(url, "completions", prompt="1", stop_token_ids=[*ends, 7])
    assert refused.status_code == 400 and "7 ends no turn" in refused.json()["error"]["message"]
    refused = post(url, "completions", prompt="1", skip_special_tokens=False)
    assert "needs return_token_ids" in refused.json()["error"]["message"]


def test_adapters_are_read_below_the_folder_and_with_a_token_only(pool, serving, learner, tmp_path):
    server = pool()
    inside, outside = tmp_path / "adapters/one", tmp_path / "other"
    for folder in (inside, outside):
        adapters.save(learner(trained=True).model, folder)

    def load(name: str, path: Path, headers: Any = SECRET) -> Any:
        return post(server.url, "load_lora_adapter", headers, lora_name=name, lora_path=str(path))

    assert load("one", inside, headers=None).status_code == 401
    (tmp_path / "adapters/link").symlink_to(outside)
    for path in (
        outside,
        tmp_path / "adapters/../other",
        tmp_path / "adapters/link",
        tmp_path / "adapters/no",
    ):
        assert load("one", path).status_code == 404
    assert load("one", inside).status_code == 200
    assert load("one", inside).status_code == 400  # the name is taken
    assert load("base", inside).status_code == 400
    (inside / "adapter_model.safetensors").write_bytes(b"broken")
    assert load("two", inside).status_code == 400
    for status in (200, 404):
        assert post(server.url, "unload_lora_adapter", SECRET, lora_name="one").status_code == status
    assert post(server.url, "completions", SECRET, prompt="1", model="one").status_code == 404
    assert post(server.url, "unload_lora_adapter", SECRET, lora_name="base").status_code == 404
    with pytest.raises(AgentPeftError, match="add --token"):
        serving(token=None, adapters=tmp_path)


def test_requests_for_an_adapter_that_is_unloaded_fail(pool, learner, tmp_path, monkeypatch):
    server = pool(max_tokens=128)
    adapters.save(learner(trained=True).model, tmp_path / "adapters/one")
    client = {"lora_name": "one", "lora_path": str(tmp_path / "adapters/one")}
    advance, started = OpenDecoding.advance, threading.Event()

    def slowly(self):
        started.set()
        time.sleep(0.02)
        return advance(self)

    monkeypatch.setattr(OpenDecoding, "advance", slowly)
    for _ in range(2):  # the second time, the engine of the first is used again
        assert post(server.url, "load_lora_adapter", SECRET, **client).status_code == 200
        answers: list[Any] = []
        body = {"prompt": [1, 2], "model": "one", "max_tokens": 120, "temperature": 0}
        thread = threading.Thread(
            target=lambda body=body, answers=answers: answers.append(
                post(server.url, "completions", SECRET, **body)
            )
        )
        started.clear()
        thread.start()
        assert started.wait(20)
        assert post(server.url, "unload_lora_adapter", SECRET, lora_name="one").status_code == 200
        thread.join(20)
        assert answers[0].status_code == 503 and "unloaded" in answers[0].json()["error"]["message"]
    base = post(server.url, "completions", SECRET, prompt=[1, 2], model="base", max_tokens=2)
    assert base.status_code == 200
