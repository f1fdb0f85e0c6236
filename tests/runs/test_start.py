"""A run that starts from another one, and what it needs of it afterwards: nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agent_peft.cli import run
from agent_peft.configuration.load import read_config
from agent_peft.configuration.yaml12 import dump, parse, plain
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.runs.run import train
from agent_peft.runs.targets import evaluate_target, merge_run, open_run

TASKS = {"kind": "arithmetic", "digits": 1, "num_tasks": 6}
SFT = {"algorithm": "sft", "steps": 12, "tasks_per_step": 6, "optimizer": {"learning_rate": 0.02}}
GRPO = {
    "algorithm": "grpo",
    "steps": 2,
    "tasks_per_step": 3,
    "group_size": 4,
    "optimizer": {"learning_rate": 0.02},
}
LORA = {"rank": 4, "alpha": 8}
TOKENS = torch.tensor([[1, 4, 7, 13, 5, 2, 9, 3]])


def settings(run_dir: str, policy: dict[str, Any], stage: dict[str, Any] = GRPO) -> dict[str, Any]:
    return {
        "run_dir": run_dir,
        "threads": 1,
        "policy": {"kind": "pretrained", "device": "cpu", "dtype": "float32", **policy},
        "environment": TASKS,
        "sampling": {"max_new_tokens": 3},
        "evaluation": {"environment": TASKS, "at": ["stages"]},
        **stage,
    }


def make(run_dir: str, policy: dict[str, Any], stage: dict[str, Any] = GRPO) -> None:
    Path("c.yaml").write_text(dump(settings(run_dir, policy, stage)))
    assert run(["train", "c.yaml"]) == 0


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens).logits
        return found


def of_run(folder: str | Path) -> Tensor:
    return logits(open_run(folder)[1].model)


def base_named_by(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"])


def tiny() -> None:
    """A Llama of random weights and its tokenizer, in the current folder."""
    tokenizer = character_tokenizer(ALPHABET)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny``, ``sft``, a run of LoRA on it, and ``full``, one of all its parameters."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tiny()
        make("sft", {"model": "tiny", "lora": LORA}, SFT)
        make("full", {"model": "tiny", "lora": None}, SFT)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of what was trained."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("merges", [False, True], ids=["continues", "merges"])
def test_sft_then_grpo_then_merge_then_without_us(folder, trained, merges):
    """The policy, the merged model and PEFT's own are the same, also once the first run is gone and the
    second lies elsewhere.
    """
    make("grpo", {"model": "sft", **({"merge_adapter": True, "lora": {"rank": 2}} if merges else {})})
    expected, before = of_run("grpo"), of_run("sft")
    assert (expected - before).abs().max() > 1e-3
    assert (logits(open_run("grpo", base=True)[1].model) - before).abs().max() < 1e-5
    report = evaluate_target("grpo")
    shutil.move("grpo", "elsewhere")
    shutil.rmtree("sft")
    for place in ("elsewhere", folder / "elsewhere"):
        assert torch.equal(of_run(place), expected)
    assert evaluate_target("elsewhere") == report
    assert run(["merge", "elsewhere", "--output", "merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert (logits(merged) - expected).abs().max() < 1e-5
    checkpoint = Path("elsewhere/checkpoints/step_000002")
    base = AutoModelForCausalLM.from_pretrained("elsewhere/start" if merges else "tiny")
    assert (logits(PeftModel.from_pretrained(base, checkpoint)) - expected).abs().max() < 1e-5
    assert base_named_by(checkpoint) == str(folder / "grpo/start" if merges else trained / "tiny")
    assert (
        Path("elsewhere/start/config.json").is_file(),
        Path("elsewhere/start/adapter_config.json").is_file(),
    ) == (
        merges,
        not merges,
    )
    assert plain(parse(Path("elsewhere/config.yaml").read_text(), ""))["policy"]["lora"]["rank"] == (
        2 if merges else 4
    )


@pytest.mark.parametrize("merges", [False, True], ids=["continues", "merges"])
def test_a_copy_resumes_to_the_same_bytes_without_the_first_run(folder, run_contents, merges, monkeypatch):
    """Also the KL, which is measured to the start."""
    stage = {**GRPO, "algorithm": {"kind": "grpo", "kl_coef": 0.1}}
    make("grpo", {"model": "sft", "merge_adapter": merges}, stage)
    shutil.copytree("grpo", "far/grpo")
    shutil.rmtree("far/grpo/checkpoints/step_000002")
    shutil.rmtree("sft")
    shutil.rmtree("tiny") if merges else None
    monkeypatch.chdir(folder / "far")
    assert run(["train", "grpo/config.yaml"]) == 0
    whole, again = run_contents(folder / "grpo"), run_contents(folder / "far" / "grpo")
    names = {name for name in whole if name.endswith((".safetensors", "metrics.jsonl"))}
    assert len(names) > 4
    assert merges or "start/adapter_model.safetensors" in names
    assert {name: again[name] for name in names} == {name: whole[name] for name in names}


def test_a_step_and_a_folder_name_a_checkpoint_too(folder):
    shutil.copytree("sft/checkpoints/step_000012", "received")  # from somebody
    expected = of_run("sft")
    for name in ("sft", "sft:step_000012", "sft/checkpoints/step_000012", "received"):
        assert torch.equal(logits(load_policy(name, device="cpu", dtype="float32").model), expected)


def test_all_parameters_then_a_new_adapter(folder):
    """Checkpoints of full training are models: with their tokenizer, and without the run."""
    checkpoint = folder / "full/checkpoints/step_000012"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer("1+2=")["input_ids"] == AutoTokenizer.from_pretrained("tiny")("1+2=")["input_ids"]
    assert tokenizer.chat_template
    before = of_run("full")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(checkpoint)), before)
    config = read_config(Path("c.yaml"))[0]
    assert evaluate_target(checkpoint, config) == evaluate_target("full")
    make("grpo", {"model": "full", "lora": LORA})
    shutil.rmtree("full")
    assert torch.equal(logits(open_run("grpo", base=True)[1].model), before)
    assert not torch.equal(of_run("grpo"), before)
    assert base_named_by(folder / "grpo/checkpoints/step_000002") == str(folder / "grpo/start")


@pytest.mark.slow
def test_a_chain_of_three_runs(folder):
    """The third continues with an adapter whose model is the second's own."""
    make("second", {"model": "sft", "merge_adapter": True})
    make("third", {"model": "second"})
    shutil.rmtree("sft")
    assert base_named_by(folder / "third/start") == str(folder / "second/start")
    expected = of_run("third")
    merge_run("third", "merged")
    assert (logits(AutoModelForCausalLM.from_pretrained("merged")) - expected).abs().max() < 1e-5
    shutil.move("second/start", "kept")
    (message,) = refused_lines(lambda: open_run("third"))
    assert "was trained on" in message and "name that model as policy.model" in message
    assert torch.equal(of_third_on("kept"), expected)


def refused_lines(act: Any) -> list[str]:
    with pytest.raises(Exception) as raised:
        act()
    return str(raised.value).splitlines()


def of_third_on(model: str) -> Tensor:
    config = read_config(Path("third/config.yaml"), [f"policy.model={model}"], check_files=False)[0]
    return logits(open_run("third", config=config)[1].model)


def test_an_adapter_is_never_silently_on_another_runs_model(folder, caplog):
    make("one", {"model": "sft", "merge_adapter": True})
    shutil.copytree("one/start", "two/start")
    make("on", {"model": "two/start", "adapter": "one/checkpoints/step_000002"})
    assert any("one/start" in line and "two/start" in line for line in caplog.messages)
    caplog.clear()
    config = read_config(Path("c.yaml"), ["policy.model=tiny", "policy.adapter=null"])[0]
    evaluate_target(folder / "one/checkpoints/step_000002", config)
    assert any("one/start" in line and "/tiny" in line for line in caplog.messages)
    caplog.clear()
    evaluate_target("one")
    evaluate_target(folder / "one/checkpoints/step_000002", read_config(Path("one/config.yaml"))[0])
    assert not [line for line in caplog.messages if "tasks of training" not in line]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"model": "sft", "lora": {"rank": 8}}, "policy.lora.rank: is 8, and that of the adapter in sft"),
        ({"model": "sft", "lora": {"alpha": 1}}, "policy.lora.alpha: is 1, and that of the adapter"),
        ({"model": "sft", "lora": None}, "policy.lora: null trains every parameter, and sft/checkpoints"),
        ({"model": "tiny", "merge_adapter": True}, "policy.merge_adapter: policy.model 'tiny' has no"),
        ({"model": "sft", "adapter": "received"}, "is an adapter, and so is policy.model 'sft'"),
        ({"model": "sft:step_000099"}, "policy.model: 'sft:step_000099': there is no checkpoint"),
        ({"model": "empty"}, "policy.model: 'empty' is a run that has no checkpoint yet; train it first"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_from_is_told_in_one_line(folder, capsys, policy, told):
    shutil.copytree("sft/checkpoints/step_000012", "received")
    Path("empty").mkdir()
    shutil.copy("sft/config.yaml", "empty/config.yaml")
    Path("c.yaml").write_text(dump(settings("grpo", policy)))
    for command in ("explain", "train"):
        capsys.readouterr()
        assert run([command, "c.yaml"]) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1
    assert not Path("grpo/checkpoints").exists()


def test_explain_says_where_the_rank_comes_from(folder, capsys):
    Path("c.yaml").write_text(dump(settings("grpo", {"model": "sft"})))
    capsys.readouterr()
    assert run(["explain", "c.yaml", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert (values["policy.lora.rank"]["value"], values["policy.lora.rank"]["from"]) == (
        4,
        "the adapter that it continues with",
    )


def test_an_own_model_takes_no_other(folder, capsys):
    make("grpo", {"model": "sft", "merge_adapter": True})
    capsys.readouterr()
    for command in (["evaluate", "grpo"], ["merge", "grpo", "--output", "m"]):
        assert run([*command, "policy.model=tiny"]) == 2
        assert "policy.model has no effect on" in capsys.readouterr().err
    shutil.copytree("sft", "other")
    assert run(["train", "c.yaml", "policy.model=other", "--change"]) == 2
    assert "policy.model has no effect, since the run has its own copy" in capsys.readouterr().err


def test_a_merged_run_is_a_model_and_nothing_else(folder):
    assert run(["merge", "sft", "--output", "merged"]) == 0
    assert sorted(path.name for path in Path("merged").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert AutoTokenizer.from_pretrained("merged").chat_template


def test_a_start_that_was_killed_is_made_again(folder, monkeypatch):
    from agent_peft.runs import branch

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    config = read_config({**settings("grpo", {"model": "sft", "merge_adapter": True})})[0]
    with monkeypatch.context() as patch:
        patch.setattr(branch, "sync_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert not Path("grpo/start").exists()
    train(config)
    assert sorted(path.name for path in Path("grpo").glob(".*")) == [".lock"] or not list(
        Path("grpo").glob(".a*")
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("merges", [False, True], ids=["continues", "merges"])
def test_the_same_with_smollm2(smollm2, tmp_path, monkeypatch, merges):
    monkeypatch.chdir(tmp_path)
    small = {"tasks_per_step": 1, "steps": 1, "evaluation": None, "optimizer": {"learning_rate": 1e-3}}
    make("sft", {"model": "smollm2-135m", "lora": LORA}, {**SFT, **small})
    grpo = {**GRPO, **small, "group_size": 2, "sampling": {"max_new_tokens": 8}}
    make("grpo", {"model": "sft", "merge_adapter": merges}, grpo)
    assert base_named_by(tmp_path / "sft/checkpoints/step_000001") == "smollm2-135m"
    shutil.move("grpo", "elsewhere")
    shutil.rmtree("sft")
    policy = open_run("elsewhere")[1]
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis"
    tokens = policy.chat.tokenizer(text, return_tensors="pt")["input_ids"]
    expected = logits(policy.model, tokens)
    merge_run("elsewhere", "merged")
    bound = 1e-5 * float(expected.abs().max())  # sums of other order round differently
    assert (logits(AutoModelForCausalLM.from_pretrained("merged"), tokens) - expected).abs().max() < bound
    base = AutoModelForCausalLM.from_pretrained("elsewhere/start" if merges else smollm2)
    again = PeftModel.from_pretrained(base, "elsewhere/checkpoints/step_000001")
    assert (logits(again, tokens) - expected).abs().max() < bound
    assert AutoTokenizer.from_pretrained("merged").chat_template
