"""The report of runs: what is on the page, and that no state of a run directory keeps it from being made."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy
import pytest
import yaml

from agent_peft.reports.content import read_content
from agent_peft.reports.page import embedded_json, write_report
from agent_peft.rollout.intervals import rate_of
from agent_peft.rollout.statistics import paired_test
from agent_peft.runs.reading import load_run
from agent_peft.types import AgentPeftError, Group, Task


def block(page, name):
    """The JSON that the page holds under a name."""
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(f'<script type="application/json" id="{name}">(.*)</script>', text)[1])


@pytest.fixture
def page(run, tmp_path):
    write_report([run], tmp_path / "report.html")
    return tmp_path / "report.html"


def test_the_curves_are_those_of_the_run(page):
    (told,) = block(page, "values")["runs"]
    curves = told["curves"]
    assert curves["step"] == [0, 1, 2, 3], "up to the torn line"
    assert curves["stages"] == [[0, "sft"], [1, "rloo"]]
    assert curves["metrics"]["reward"] == [0.0, 0.1, 0.2, 0.3]
    assert curves["metrics"]["gradient_norm"] == [None] * 4, "JSON has no NaN"
    assert curves["metrics"]["tokens_per_second"] == [150.0, None, None, None]
    assert (told["name"], told["done"], told["steps"]) == ("run", 4, 9)


def test_intervals_stop_reasons_and_skills_come_from_the_episodes(page):
    (told,) = block(page, "values")["runs"]
    # at step 0 both groups have the rewards -0.5, 0, 1, -0.5
    rate = rate_of([(1, 4), (1, 4)])
    assert told["intervals"]["low"][0] == pytest.approx(rate.low, abs=1e-6)
    assert told["intervals"]["high"][0] == pytest.approx(rate.high, abs=1e-6)
    assert told["stops"]["shares"]["turn_limit"][0] == 0.5
    assert {skill: rates[0] for skill, rates in told["skills"]["rates"].items()} == {
        "db_skill": 0.25,
        "os_skill": 0.25,
    }


def test_the_success_of_demonstrations_is_not_shown(run, tmp_path):
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    first = {name: value for name, value in json.loads(lines[0]).items() if name not in ("reward", "success")}
    metrics.write_text("".join([json.dumps(first) + "\n", *lines[1:]]), encoding="utf-8")
    write_report([run], tmp_path / "report.html")
    (told,) = block(tmp_path / "report.html", "values")["runs"]
    assert 0 in told["stops"]["step"] and 0 not in told["intervals"]["step"] and told["intervals"]["step"]
    assert 0 not in told["skills"]["step"]


def test_every_token_has_its_numbers(run, page):
    content = block(page, "r0_step_000002")
    for shown, record in zip(content["episodes"], load_run(run).trajectories.of_step(2), strict=True):
        ids = [content["words"][place][0] for place in shown["tokens"]]
        assert ids == record.tokens.tolist()
        mask = numpy.repeat(numpy.arange(len(shown["runs"])) % 2 == 1, shown["runs"])
        assert mask.tolist() == record.mask.tolist()
        assert shown["sampler"] == pytest.approx(record.sampler_logprobs[mask].tolist(), abs=1e-4)
        assert set(shown["trainer"]) == {-0.125}
        advantages = [value for value, count in shown["advantages"] for _ in range(count)]
        assert advantages == record.token_advantages[mask].tolist()
        text = "".join(content["words"][place][1] for place in shown["tokens"])
        assert all(said in text for _, said in shown["messages"])


def test_evaluations_are_tested_in_pairs(disk, tmp_path):
    runs = [disk.write_run(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 1))]
    values = read_content(runs).values
    base, after = values["runs"][0]["evaluations"]
    reports = [one.report for one in load_run(runs[0]).evaluations.values()]
    test = paired_test(*reports)
    assert base["change"] is None and base["name"] == "base"
    assert (after["change"]["difference"], after["change"]["p"]) == (test.difference, test.p)
    assert after["success"]["low"] == reports[1].success.low
    between = {pair["evaluation"]: pair for pair in values["pairs"]}
    other = load_run(runs[1]).evaluation("base").report
    assert between["base"]["p"] == paired_test(reports[0], other).p


def test_runs_that_differ_in_the_seed_only_belong_together(disk, tmp_path):
    runs = [disk.write_run(tmp_path / str(seed), seed, steps=1) for seed in range(3)]
    odd = disk.write_run(tmp_path / "odd", 3, steps=1)
    config = yaml.safe_load((odd / "config.yaml").read_text())
    (odd / "config.yaml").write_text(yaml.safe_dump({**config, "optimizer": {"learning_rate": 1.0}}))
    values = read_content([*runs, odd]).values
    assert values["seeds"] == [[0, 1, 2], [3]]
    assert values["runs"][3]["config"]["optimizer.learning_rate"] == "1.0"
    assert "optimizer.learning_rate" not in values["runs"][0]["config"]


def test_what_is_too_much_for_the_page_lies_beside_it(run, tmp_path):
    out = tmp_path / "report.html"
    folder = tmp_path / "report_episodes"
    folder.mkdir()
    (folder / "r0_step_999999.js").write_text("of an earlier report")
    (folder / "notes.js").write_text("a user's own")
    written = write_report([run], out, max_inside=10_000)
    names = sorted(path.name for path in folder.iterdir())
    assert written.beside == folder and written.episodes == 4 * 8 + 2 * 8
    assert names == ["notes.js", "r0_evaluation_0.js", "r0_evaluation_1.js"] + [
        f"r0_step_00000{step}.js" for step in range(4)
    ]
    script = (folder / "r0_step_000001.js").read_text()
    assert script.startswith('agentPeft.take("r0_step_000001",{')
    assert "r0_step_000001.js" not in out.read_text() and block(out, "values")["episodes_in"] == folder.name
    (folder / "notes.js").unlink()
    assert write_report([run], out).beside is None
    assert not folder.exists(), "what an earlier report left there is of no use"


def test_nothing_that_a_run_brought_is_believed(run, tmp_path):
    """A stranger's file next to the page is written over, whatever it holds; an equal one stays."""
    out, folder = run / "report.html", run / "report_episodes"
    write_report([run], out, max_inside=0)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = "r0_step_000001.js"
    for evil in (
        b'agentPeft.take("r0_step_000001",{});\nalert(1);\n//' + first[name].splitlines()[-1],
        first[name] + b"alert(1)",
        first[name][:-1],
        b"</script><h1>forged</h1>",
        b"\xff",
    ):
        (folder / name).write_bytes(evil)
        write_report([run], out, max_inside=0)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
        (folder / name).write_bytes(evil)
        write_report([run], out)
        assert not folder.exists() and "forged" not in out.read_text() and "alert(1)" not in out.read_text()
        write_report([run], out, max_inside=0)
    before = (folder / "r0_step_000000.js").stat().st_ino
    write_report([run], out, max_inside=0)
    assert (folder / "r0_step_000000.js").stat().st_ino == before


@pytest.mark.parametrize("place", ["report.html", "report_episodes", "report_episodes/r0_step_000000.js"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "link to a folder", "pipe", "folder"])
def test_a_report_follows_no_link_and_waits_for_no_pipe(run, tmp_path, capsys, place, kind):
    if (place, kind) == ("report_episodes", "folder"):
        return
    victims = tmp_path / "victims"
    victims.mkdir()
    for name in ("victim", "r9_step_000001.js"):
        (victims / name).write_text("precious")
    path = run / place
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        name = {"link": "victim", "dangling link": "nowhere", "link to a folder": "."}[kind]
        path.symlink_to(victims / name)
    for limit in (0, 1 << 30):
        with pytest.raises(AgentPeftError, match=r"report(\.html|_episodes)") as raised:
            write_report([run], run / "report.html", max_inside=limit)
        assert "\n" not in str(raised.value)
    assert {path.name: path.read_text() for path in victims.iterdir()} == {
        "victim": "precious",
        "r9_step_000001.js": "precious",
    }


def test_another_tokenizer_or_model_changes_every_file(run, tmp_path):
    out, folder = tmp_path / "report.html", tmp_path / "report_episodes"
    write_report([run], out, max_inside=0)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["policy"]["alphabet"] = config["policy"]["alphabet"][::-1]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_report([run], out, max_inside=0)
    assert all((folder / name).read_bytes() != content for name, content in before.items())


def test_text_of_strangers_is_data(disk, tmp_path):
    hostile = disk.HOSTILE
    task = Task(hostile, (hostile,))
    more = [Group(task, [disk.episode(task, hostile, [hostile], 1.0)])]
    run = disk.write_run(tmp_path / "run", steps=1, more=more)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "key": hostile}))
    out = tmp_path / "report.html"
    for limit in (0, 1 << 30):
        write_report([run], out, max_inside=limit)
        text = out.read_text(encoding="utf-8")
        assert "boom" not in re.sub(r'<script type="application/json".*?</script>', "", text)
        inside = re.findall(r'<script type="application/json"[^>]*>(.*)</script>', text)
        for data in [*inside, *(path.read_text() for path in tmp_path.glob("report_episodes/*.js"))]:
            assert "<" not in data and data.isascii()
            assert "\x00" not in data and "\x1b" not in data
    last = block(out, "r0_step_000000")["episodes"][-1]
    assert [said for _, said in last["messages"][1:]] == [hostile, hostile]


def test_the_policy_allows_the_scripts_of_the_page_alone(page):
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]*)"', page.read_text())[1]
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy


@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_a_kill_in_the_middle_of_any_write(run, tmp_path, part):
    """Whatever file is cut wherever, the report is made, and what is damaged is on it in words."""
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * part)])
        write_report([run], tmp_path / "report.html")
        (told,) = block(tmp_path / "report.html", "values")["runs"]
        if path.name != "config.yaml":
            assert told["config"]["seed"] == "0"
        if path.suffix == ".json" and path.parent.name == "evaluations":
            assert any(path.name in notice for notice in told["notices"])
            assert len(told["evaluations"]) == 1
        path.write_bytes(whole)


def test_what_is_damaged_in_the_middle_is_a_notice(run, tmp_path):
    path = run / "trajectories" / "step_000001.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0][:20], *lines[1:]]))
    (run / "trajectories" / "step_000002.jsonl").write_text('{"rewards": 3}\n[1]\n')
    write_report([run], tmp_path / "report.html")
    (told,) = block(tmp_path / "report.html", "values")["runs"]
    assert [file["step"] for file in told["episodes"]["files"] if file["evaluation"] is None] == [0, 3]
    assert len(told["notices"]) == 2 and "step_000001.jsonl:1" in told["notices"][0]


def test_numbers_that_are_none_are_left_out(run, tmp_path):
    """JSON's 1e999 is infinite, and an integer may have more digits than a float holds."""
    for path in [*(run / "trajectories").glob("*.jsonl"), *(run / "evaluations").glob("*.json")]:
        path.write_text(re.sub(r'("(?:score|value)": )[\d.]+', r"\g<1>1e999", path.read_text()))
    with open(run / "trajectories" / "step_000001.jsonl", "a") as file:
        file.write(
            json.dumps({**json.loads(first_line(run)), "rewards": "x"}).replace('"x"', "[1e999]") + "\n"
        )
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "stage": "sft", "loss": ' + "9" * 400 + "}\n")
    write_report([run], tmp_path / "report.html")
    (told,) = block(tmp_path / "report.html", "values")["runs"]
    assert told["episodes"]["files"]


def first_line(run):
    return (run / "trajectories" / "step_000001.jsonl").read_text().partition("\n")[0]


def test_a_run_that_has_only_begun(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")
    assert write_report([folder], tmp_path / "report.html").episodes == 0
    assert block(tmp_path / "report.html", "values")["runs"][0]["notices"] == []


def test_a_run_from_elsewhere(run, tmp_path):
    """Its arrays may not have been copied, and the model is not here."""
    (run / "trajectories" / "step_000001.safetensors").unlink()
    config = yaml.safe_load((run / "config.yaml").read_text())
    elsewhere = shutil.move(run, tmp_path / "copy")
    write_report([elsewhere], tmp_path / "report.html")
    second = block(tmp_path / "report.html", "r0_step_000001")
    assert "tokens" not in second["episodes"][0] and "step_000001.safetensors" in second["fault"]
    config["policy"] = {"kind": "pretrained", "model": "/nowhere/model"}
    (elsewhere / "config.yaml").write_text(yaml.safe_dump(config))
    write_report([elsewhere], tmp_path / "report.html")
    assert "tokens" not in block(tmp_path / "report.html", "r0_step_000002")["episodes"][0]
    assert "/nowhere/model" in block(tmp_path / "report.html", "values")["missing_words"]["0"]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(AgentPeftError, match="not a run directory"):
        write_report([tmp_path], tmp_path / "report.html")


def test_half_a_character_is_encoded():
    assert json.loads(embedded_json("\ud800")) == "\ud800"


def test_the_program_of_the_page_on_reports(disk, tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/reports.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "runs").mkdir()
    disk.write_run(tmp_path / "runs/quickstart", steps=1)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "reports.md", "exec"), {})
    assert block(tmp_path / "report.html", "values")["runs"][0]["name"] == "quickstart"
