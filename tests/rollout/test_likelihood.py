"""Held-out conversations and pairs, whose replies no outcome grades, have a loss with its interval."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import agent_peft as ap
from agent_peft.cli import run as command_line
from agent_peft.configuration.load import read_config
from agent_peft.configuration.yaml12 import dump
from agent_peft.ranks import Ranks
from agent_peft.reports.content import read_content
from agent_peft.rollout import likelihood
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.intervals import in_words
from agent_peft.rollout.report_tables import tables
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.statistics import EvaluationReport, paired_test
from agent_peft.runs.reading import load_run
from agent_peft.types import AgentPeftError

SUMS = [(f"{n}+1=", str(n + 1), str(n)) for n in range(8)]
LONG = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
LONG = [*LONG, {"role": "user", "content": "2+20="}, {"role": "assistant", "content": "22+0"}]
ROWS = {
    "chat": [
        *({"messages": [*LONG[:1], {"role": "assistant", "content": right}]} for _, right, _ in SUMS),
        {"messages": LONG},
    ],
    "preferences": [{"prompt": p, "chosen": right, "rejected": wrong} for p, right, wrong in SUMS],
}


@pytest.fixture
def tables_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, rows in ROWS.items():
        Path(f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {kind: ap.load_environment({"kind": kind, "tasks": f"{kind}.jsonl"}) for kind in ROWS}


@pytest.fixture
def policy(policy_config):
    return ap.load_policy(policy_config)


def change(policy, size=0.3):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def distributions(policy, tokens):
    """(T, V) log-probabilities of each token, read alone by the model itself; the first has none."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([tokens])).logits[0]
    return torch.cat([torch.zeros_like(logits[:1]), logits[:-1].float().log_softmax(-1)])


def test_the_loss_and_the_token_accuracy_of_conversations(policy, tables_of, monkeypatch):
    change(policy)
    environment, losses, counts, hits = tables_of["chat"], [], [], []
    for task in environment.tasks:
        replay = demonstrate(environment, task, policy.chat, RewardConfig(), seed=0)
        logp, tokens = distributions(policy, replay.tokens), torch.tensor(replay.tokens)
        mask = torch.tensor(replay.action_mask)
        losses.append(-float(logp.gather(1, tokens[:, None])[mask].sum()))
        hits.append(int((logp.argmax(1) == tokens)[mask].sum()))
        counts.append(int(mask.sum()))
    report = ap.evaluate(policy, environment)
    n, total = len(counts), sum(counts)
    loss, accuracy = report.means["loss"], report.means["token_accuracy"]
    assert report.success is None and report.unit == "conversations" and report.headline == loss
    assert loss.value == pytest.approx(sum(losses) / total, abs=1e-6)
    assert accuracy.value == pytest.approx(sum(hits) / total, abs=1e-9) and 0 < accuracy.value < 1
    # the variance of a ratio of means, by hand: 2.306 is Student's t with 8 degrees of freedom
    residuals = [x - loss.value * count for x, count in zip(losses, counts, strict=True)]
    half = 2.306 * math.sqrt(n / (n - 1) * sum(r * r for r in residuals)) / total
    assert loss.high - loss.value == pytest.approx(half, rel=1e-3)
    assert report.mean_action_tokens == total / n and report.attempts == n

    monkeypatch.setattr(likelihood, "POSITIONS", 1)
    monkeypatch.setattr(likelihood, "TASKS", 2)
    alone = ap.evaluate(policy, environment)
    assert alone.means["loss"].value == pytest.approx(loss.value, abs=1e-6), "whatever the microbatch"


def test_held_out_loss_is_that_which_a_supervised_step_reports(policy, tables_of):
    change(policy)
    report = ap.evaluate(policy, tables_of["chat"])
    stage = {"algorithm": "sft", "steps": 1, "tasks_per_step": 9, "optimizer": {"learning_rate": 1e-4}}
    (step,) = ap.Trainer(policy, tables_of["chat"], stage)
    assert report.means["loss"].value == pytest.approx(step.metrics["loss"], abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_before_training_are_ties_and_later_those_of_dpo(policy_config, tables_of, dtype):
    policy = ap.load_policy(policy_config.model_copy(update={"dtype": dtype}))
    pairs = tables_of["preferences"]
    report = ap.evaluate(policy, pairs)
    assert report.means["loss"].value == pytest.approx(math.log(2), abs=1e-7)
    assert (report.means["accuracy"].value, report.means["margin"].value) == (0.5, 0.0)
    change(policy, 0.05)
    after = ap.evaluate(policy, pairs)
    margin = after.means["margin"]
    assert margin.value != 0.0 and margin.low < margin.value < margin.high
    stage = {"algorithm": "dpo", "steps": 1, "tasks_per_step": 8, "reference": "base"}
    (step,) = ap.Trainer(policy, pairs, stage | {"optimizer": {"learning_rate": 1e-4}})
    close = 1e-6 if dtype == "float32" else 1e-2
    for name, mean in after.means.items():
        assert mean.value == pytest.approx(step.metrics[name], abs=close), name
    assert paired_test(report, after).difference == pytest.approx(
        after.means["loss"].value - report.means["loss"].value
    )


def test_a_loss_without_a_reference_and_a_policy_without_an_adapter(policy_config, tables_of):
    policy = ap.load_policy(policy_config.model_copy(update={"lora": None}))
    pairs = tables_of["preferences"]
    simpo = ap.Stage(algorithm="simpo", steps=1, tasks_per_step=8, optimizer={"learning_rate": 1e-4})
    report = ap.evaluate(policy, pairs, pairs=simpo.algorithm)
    without = ap.evaluate(policy, pairs)
    (step,) = ap.Trainer(policy, pairs, simpo)
    assert report.means["loss"].value == pytest.approx(step.metrics["loss"], abs=1e-6)
    assert without.settings["reference"] == report.settings["reference"] == "none"
    assert without.means["margin"].value != 0.0


def test_two_ranks_measure_as_one(policy, tables_of):
    parts = []

    class Rank(Ranks):
        def gather_objects(self, content):
            parts.append(json.loads(json.dumps(content)))
            return parts

    alone = ap.evaluate(policy, tables_of["chat"])
    ap.evaluate(policy, tables_of["chat"], ranks=Rank(0, 2))
    assert list(map(len, parts)) == [5]
    both = ap.evaluate(policy, tables_of["chat"], ranks=Rank(1, 2))
    assert list(both.losses) == list(alone.losses)
    assert both.means["loss"].value == pytest.approx(alone.means["loss"].value, abs=1e-6)


def test_settings_without_an_effect_are_refused(policy, tables_of):
    with pytest.raises(AgentPeftError, match=r"^evaluation.attempts has no effect on recorded replies"):
        ap.evaluate(policy, tables_of["chat"], {"attempts": 2, "sampling": {"temperature": 1.0}})
    with pytest.raises(AgentPeftError, match=r"give the policy itself$"):
        ap.evaluate(ap.load_sampler(policy), tables_of["chat"])
    assert ap.evaluate(policy, tables_of["chat"], {"num_tasks": 3}).headline.tasks == 3


# -- in a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tables_of, policy_config):
    stage = {"tasks_per_step": 4, "optimizer": {"learning_rate": 0.02}}
    return {
        "run_dir": "run",
        "threads": 1,
        "policy": policy_config.model_dump(mode="json"),
        "environment": {"kind": "preferences", "tasks": "preferences.jsonl"},
        "evaluation": {
            "environment": {"kind": "preferences", "tasks": "preferences.jsonl"},
            "every": 1,
        },
        "checkpoint": {"keep_last": 9, "keep_best": {"metric": "evaluation.loss", "mode": "min"}},
        "stages": [{"algorithm": "sft", **stage, "epochs": 1}, {"algorithm": "dpo", **stage, "steps": 2}],
    }


def write(content):
    Path("c.yaml").write_text(dump(content))
    return "c.yaml"


def test_a_run_measures_pairs_whenever_an_evaluation_is_due(settings, capsys, run_contents):
    reports = ap.train(read_config(write(settings))[0])
    assert list(reports) == ["base", "step 1", "after sft", "step 3", "after dpo"]
    assert reports["base"].means["margin"].value == 0.0
    shown = capsys.readouterr().out
    assert "after dpo: loss 0." in shown and "held-out replies (95 % interval)" in shown
    on_disk = load_run("run").evaluation("after dpo").report
    assert on_disk == replace(reports["after dpo"], name="after dpo", step=4)
    assert "success" not in (content := on_disk.to_json())
    assert EvaluationReport.from_json(json.loads(json.dumps(content))) == on_disk
    best = min(reports, key=lambda name: reports[name].means["loss"].value)
    assert json.loads(Path("run/checkpoints/best.json").read_text())["step"] == reports[best].step

    (row,) = read_content([Path("run")]).values["runs"]
    assert [one["unit"] for one in row["evaluations"]] == ["pairs"] * 5 and not row["notices"]
    assert row["evaluations"][-1]["means"]["accuracy"] == in_words("accuracy", on_disk.means["accuracy"])
    assert re.fullmatch(r"[+-]\d\.\d{3} \(.*\)", row["evaluations"][-1]["change"]["nats"])

    assert command_line(["evaluate", "run", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert {name: measured[name] for name in ("loss", "margin", "losses", "settings")} == {
        name: json.loads(json.dumps(content))[name] for name in ("loss", "margin", "losses", "settings")
    }, "against the same reference"
    assert command_line(["runs", "."]) == 0
    assert "loss 0." in capsys.readouterr().out

    # killed after the checkpoint of step 4 and before its evaluation, it measures with that checkpoint
    before = run_contents(Path("run"))
    Path("run/evaluations/step_000004.json").unlink()
    ap.train(read_config("c.yaml")[0])
    assert run_contents(Path("run")) == before


def test_runs_are_compared_by_their_loss(settings, capsys, monkeypatch):
    settings = settings | {
        "evaluation": settings["evaluation"] | {"every": 0},
        "stages": settings["stages"][1:],
    }
    ap.train(read_config(write(settings), ["run_dir=runs/a"])[0])
    ap.train(read_config("c.yaml", ["run_dir=runs/b", "optimizer.learning_rate=0.001"])[0])
    capsys.readouterr()
    assert command_line(["compare", "runs", "--json"]) == 0
    slow, fast = sorted(json.loads(capsys.readouterr().out)["groups"], key=lambda one: -one["loss"])
    assert fast["learning_rate"] == "0.02" and slow["losses"] == [slow["loss"]]
    assert slow["start"] == fast["start"] == pytest.approx(math.log(2))
    monkeypatch.setenv("COLUMNS", "200")
    assert command_line(["compare", "runs"]) == 0
    assert (
        "held-out loss, mean over seeds" in (shown := capsys.readouterr().out)
        and "to the best, nats" in shown
    )
    shutil.copytree("runs/a", "runs/c")
    chat = {"environment": {"kind": "chat", "tasks": "chat.jsonl"}}
    ap.train(read_config(write(settings | {"evaluation": chat, "run_dir": "runs/d"}))[0])
    assert command_line(["compare", "runs"]) == 2
    assert "the runs measured different things (pairs by runs/c, conversations by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampling": {"temperature": 1.0}}, r"sampling has no effect with environment.kind: preferences"),
        ({"attempts": 1}, r"attempts has no effect with environment.kind: preferences, whose recorded"),
        (
            {"environment": {"kind": "preferences", "tasks": "preferences.jsonl", "label": "x"}},
            r"environment.label makes rows of one reply",
        ),
        (
            {"environment": {"kind": "chat", "tasks": "chat.jsonl"}, "at": ["start"]},
            None,
        ),
    ],
    ids=["sampling", "attempts", "label", "chat"],
)
def test_the_evaluation_of_a_configuration(settings, more, message):
    settings["evaluation"] |= more
    if message is None:
        config = read_config(write(settings))[0]
        assert config.evaluation.of_replies and config.evaluation.measures == ("loss", "token_accuracy")
        return
    with pytest.raises(AgentPeftError, match=message) as raised:
        read_config(write(settings))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("place", ["best", "until"])
def test_a_metric_that_is_not_measured_is_refused(settings, place):
    if place == "best":
        settings["checkpoint"]["keep_best"]["metric"] = "evaluation.success"
    else:
        del settings["stages"][0]  # whose steps are not known yet
        settings["stages"][0]["until"] = {"metric": "evaluation.token_accuracy", "above": 0.5}
    with pytest.raises(AgentPeftError, match=r"kind: preferences does not measure 'evaluation\.\w+'; "):
        read_config(write(settings))


def test_a_table_of_reports_shows_losses_and_their_change(policy, tables_of):
    before = ap.evaluate(policy, tables_of["chat"])
    change(policy)
    after = ap.evaluate(policy, tables_of["chat"])
    out = io.StringIO()
    Console(file=out, width=120).print(*tables({"base": before, "after sft": after}))
    text = out.getvalue()
    for line in ("conversations", "loss, nats", "token accuracy", "change, nats", "p, if no change"):
        assert line in text
    assert "success" not in text and "invalid actions" not in text
