"""What holds for every tracker: the run neither waits for it nor changes, and a run that continues is tracked
as one, each step once.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from pathlib import Path

import pytest

from agent_peft.configuration.load import load_config
from agent_peft.configuration.trackers import CustomTrackerConfig
from agent_peft.rollout.statistics import summarize
from agent_peft.runs.observers import Observer, RunStart
from agent_peft.runs.run import train
from agent_peft.runs.trackers import Tracker, load_tracker, load_trackers
from agent_peft.runs.trackers.base import (
    TrackerThread,
    _Record,
    evaluation_metrics,
    row_of,
    without_passwords,
)
from agent_peft.types import AgentPeftError, Group, Message, Outcome, Task, Trajectory, Turn

CONFIG = CustomTrackerConfig(kind="own:Recorder")


class Recorder(Tracker):
    """Keeps what it is told."""

    def __init__(self):
        self.calls = []

    def open(self, run):
        self.run = run
        return run.id or "run-1"

    def log(self, step, metrics):
        self.calls.append((next(iter(metrics)).partition("/")[0], step, dict(metrics)))

    def log_table(self, step, name, rows):
        self.calls.append(("table", step, rows))

    def close(self, complete):
        self.calls.append(("closed", complete, {}))

    def steps(self, series="train"):
        return [step for name, step, _ in self.calls if name == series]


def observed(tracker, **keys):
    return TrackerThread(tracker, CONFIG.model_copy(update=keys), "own")


def warnings_in(caplog):
    """But those of the small run itself, whose untrained policy never ends a reply."""
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in messages if "episodes were cut by" not in message]


class Stopping(Observer):
    """Ends a run after a step, as Ctrl-C does."""

    def __init__(self, number):
        self.number = number

    def on_step(self, step):
        if step.number == self.number:
            raise KeyboardInterrupt


# -- what a tracker is told --------------------------------------------------------------------------------


def test_a_tracker_is_told_of_steps_evaluations_tables_and_the_end(configure):
    config, tracker = configure("run"), Recorder()
    train(config, observers=[observed(tracker, trajectories=1, trajectories_every=3)])
    assert tracker.steps() == [0, 1, 2, 3] and tracker.steps("evaluation") == [0, 4]
    assert tracker.steps("table") == [0, 0, 3, 4], "of the steps 0 and 3, and of both evaluations"
    assert tracker.calls[-1] == ("closed", True, {})
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    reward = next(
        metrics["train/reward"] for name, step, metrics in tracker.calls if (name, step) == ("train", 2)
    )
    assert reward == lines[2]["reward"]
    assert tracker.run.name == "run" and tracker.run.id is None and tracker.run.config["seed"] == 0


def test_a_tracker_of_a_configuration(configure, tmp_path, monkeypatch):
    (tmp_path / "tracked.py").write_text(
        "from agent_peft import Tracker\n"
        "class Lines(Tracker):\n"
        "    def __init__(self, prefix): self.prefix = prefix\n"
        "    def open(self, run): self.folder = run.folder; run.folder.mkdir(parents=True)\n"
        "    def log(self, step, metrics):\n"
        "        with open(self.folder / 'lines', 'a') as file: print(self.prefix, step, file=file)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    train(configure("run", trackers=[{"kind": "tracked:Lines", "prefix": "at"}], evaluation=None))
    assert (tmp_path / "run/trackers/Lines/lines").read_text().splitlines() == [f"at {n}" for n in range(4)]

    with pytest.raises(AgentPeftError, match=r"tracked:Lines: TypeError: .*'suffix'"):
        train(configure("other", trackers=[{"kind": "tracked:Lines", "suffix": "at"}]))
    with pytest.raises(AgentPeftError, match="trackers: json:JSONEncoder is not a tracker"):
        load_tracker("json:JSONEncoder")
    assert not (tmp_path / "other").exists(), "the mistake is told before the run begins"


def test_the_tracker_of_the_page(configure, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/trackers.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(# my_tracker\.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_tracker.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    train(configure("run", trackers=[{"kind": "my_tracker:Csv", "metric": "evaluation/success"}]))
    lines = (tmp_path / "run/trackers/Csv/metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["0", "4"]
    rows = {row.split(" | ")[0].strip("| `") for row in page.splitlines() if row.startswith("| `train/")}
    assert {"train/policy_loss", "train/accuracy", "train/avg_reward", "train/lr"} < rows


def test_numbers_of_an_evaluation():
    def group(skill, outcome):
        trajectory = Trajectory(Task(skill, (skill,)), (Turn((1,), (2,), (0.0,)),), outcome=outcome)
        return Group(trajectory.task, [trajectory])

    report = summarize([group("a b", Outcome.CORRECT), group("ü:<", Outcome.INCORRECT)])
    metrics = evaluation_metrics(report)
    assert metrics["evaluation/success"] == 0.5 and 0 < metrics["evaluation/success_low"] < 0.5
    assert metrics["evaluation/success/a b"] == 1.0 and metrics["evaluation/success/___"] == 0.0
    assert "evaluation/reward" not in metrics, "the episodes have none"


def test_texts_of_a_table_are_text():
    hostile = "<script>\x1b[2J\0\u202ea\tb\r\nnext\ud800" + "x" * 1_000_000
    trajectory = Trajectory(Task("t\x1b"), (), messages=(Message("user", hostile),))
    row = row_of(3, Group(trajectory.task, [trajectory]))
    assert row[1] == "t\\x1b"
    assert row[-1].startswith("user: <script>\\x1b[2J\\x00\\u202ea\\tb\\r\nnext\\ud800xxx")
    assert len(row[-1]) < 20_100 and row[-1].encode()


def test_passwords_stay_here(configure, tmp_path, caplog):
    class Refused(Recorder):
        def open(self, run):
            super().open(run)
            raise OSError("http://me:se/cr@et@host refused")

    tracker = Refused()
    config = CustomTrackerConfig(kind="own:Recorder", uri="mysql://me:se/cr@et@host:1/x")
    shown = configure("run", trackers=[{"kind": "mlflow", "uri": "http://me:se/cr@et@host"}], steps=1)
    observer = TrackerThread(tracker, config, "own")
    observer.on_start(RunStart(shown))
    observer.on_end()
    assert tracker.run.config["trackers"][0]["uri"] == "http://me:***@host"
    assert ["http://me:***@host refused" in message for message in warnings_in(caplog)] == [True]


# -- a tracker that fails ----------------------------------------------------------------------------------


def test_a_tracker_that_fails_costs_a_warning_and_changes_no_byte(configure, run_contents, caplog):
    class Failing(Recorder):
        def log(self, step, metrics):
            raise OSError("no such\nhost")

    class Closed(Tracker):
        pass

    plain, tracked = configure("plain"), configure("tracked")
    train(plain)
    train(tracked, observers=[observed(Failing()), TrackerThread(Closed(), CONFIG, "closed")])
    goes_on = "; the run continues, and"
    assert sorted(warnings_in(caplog)) == [
        f"the tracker closed cannot be opened (NotImplementedError){goes_on} nothing is sent to it",
        "the tracker own did not take all: 6 of 6 records of the run were not sent",
        f"the tracker own failed (OSError: no such host){goes_on} its further failures are counted",
    ]
    ours, theirs = run_contents(plain.run_dir), run_contents(tracked.run_dir)
    del ours["config.yaml"], theirs["config.yaml"], theirs["trackers/own.json"]
    ours.pop("trackers/own.json", None)
    assert ours == theirs


def test_the_run_does_not_wait_for_a_slow_tracker(configure, run_contents, caplog):
    release = threading.Event()

    class Slow(Recorder):
        def log(self, step, metrics):
            super().log(step, metrics)
            release.wait(60)

    plain, tracked, slow = configure("plain"), configure("tracked"), Slow()
    train(plain)
    train(tracked, observers=[observed(slow, patience=0.2)])  # comes back although nothing was released
    assert slow.steps("evaluation") == [0], "its first call has not ended yet"
    assert warnings_in(caplog) == [
        "the tracker own did not end within 0.2 s: 6 of 6 records of the run were not sent"
    ]
    release.set()
    assert (plain.run_dir / "metrics.jsonl").read_bytes() == (tracked.run_dir / "metrics.jsonl").read_bytes()


def test_what_a_full_queue_drops_is_counted(configure, monkeypatch, caplog):
    monkeypatch.setattr("agent_peft.runs.trackers.base.QUEUE", 2)
    trained = threading.Event()

    class Slow(Recorder):
        def open(self, run):
            trained.wait(60)
            return super().open(run)

    class Last(Observer):
        def on_evaluation(self, name, report):
            if name == "after rloo":
                trained.set()

    slow = Slow()
    train(configure("run"), observers=[observed(slow), Last()])
    assert len(slow.steps()) + len(slow.steps("evaluation")) == 2
    assert warnings_in(caplog) == [
        "the tracker own did not take all: 4 of 6 records of the run were not sent"
    ]


def test_a_package_that_is_absent_is_told_before_the_run_begins(configure, monkeypatch):
    for kind, module in (
        ("tensorboard", "torch.utils.tensorboard"),
        ("wandb", "wandb"),
        ("trackio", "trackio"),
        ("mlflow", "mlflow"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        config = configure("run", trackers=[kind])
        with pytest.raises(AgentPeftError, match=rf"pip install '\.\[{kind}\]'"):
            train(config)
        assert not config.run_dir.exists()


# -- a run that continues ----------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_tracked_as_one_and_each_step_once(configure):
    config = configure("run", checkpoint={"every": 2})
    first, second = Recorder(), Recorder()
    with pytest.raises(KeyboardInterrupt):
        train(config, observers=[observed(first), Stopping(2)])
    assert first.steps() == [0, 1, 2] and first.calls[-1] == ("closed", False, {})
    train(config, observers=[observed(second)])  # makes step 2 again: the checkpoint is before it
    assert second.run.id == "run-1"
    assert second.steps() == [3] and second.steps("evaluation") == [4]

    again = Recorder()
    train(config, fresh=True, observers=[observed(again)])
    assert again.run.id is None and again.steps() == [0, 1, 2, 3]


def test_a_state_that_is_damaged_or_of_another_place_begins_anew(configure):
    config = configure("run", evaluation=None)
    train(config, observers=[observed(Recorder())])
    state = config.run_dir / "trackers/own.json"
    assert json.loads(state.read_text())["last"] == {"train": 3}
    elsewhere, torn = Recorder(), Recorder()
    train(config, observers=[TrackerThread(elsewhere, CONFIG.model_copy(update={"kind": "a:B"}), "own")])
    assert elsewhere.run.id is None
    state.write_text('{"id": "x", "las')
    train(config, observers=[observed(torn)])
    assert torn.run.id is None


def test_trackers_change_without_being_asked_for(configure, tmp_path, monkeypatch, caplog):
    """They decide nothing of what is learned. A run of an earlier version, whose configuration has no such
    key, continues, too.
    """
    (tmp_path / "quiet.py").write_text(
        "from agent_peft import Tracker\n"
        "class Quiet(Tracker):\n"
        "    def open(self, run): pass\n"
        "    def log(self, step, metrics): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(configure("run"), observers=[Stopping(1)])
    file = tmp_path / "run/config.yaml"
    text = file.read_text()
    assert "trackers: []\n" in text
    file.write_text(text.replace("trackers: []\n", ""))
    with pytest.raises(KeyboardInterrupt):
        train(configure("run", trackers=["quiet:Quiet"]), observers=[Stopping(2)])
    train(configure("run", trackers=[{"kind": "quiet:Quiet", "patience": 5}]))
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 4
    assert not warnings_in(caplog)


# -- configuration -----------------------------------------------------------------------------------------


def test_a_list_of_trackers_in_a_configuration(configure):
    config = configure("run", trackers=["tensorboard", {"kind": "wandb", "mode": "offline"}])
    assert [tracker.kind for tracker in config.trackers] == ["tensorboard", "wandb"]
    for tracker, message in (
        ("wanbd", "trackers.0.*: there is no kind 'wanbd'; did you mean 'wandb'?"),
        (
            {"kind": "wandb", "projekt": "x"},
            "trackers.0.projekt: unknown key; did you mean 'trackers.0.project'?",
        ),
        ({"kind": "wandb", "mode": "off"}, "mode"),
    ):
        with pytest.raises(AgentPeftError, match=message.replace("?", r"\?")):
            configure("run", trackers=[tracker])
    with pytest.raises(AgentPeftError, match="unknown key"):
        load_config("quickstart", tracker=["wandb"])
    with pytest.raises(AgentPeftError, match="did you mean 'mlflow'"):
        load_tracker("mlfow")


def test_two_trackers_of_one_kind_have_files_of_their_own(configure):
    pytest.importorskip("tensorboard")
    names = [
        tracker.name for tracker in load_trackers(configure("run", trackers=["tensorboard"] * 2).trackers)
    ]
    assert names == ["tensorboard", "tensorboard-2"]


def test_a_tracker_that_is_dead_is_not_waited_for_and_keeps_nothing(configure, caplog):
    class Closed(Recorder):
        def open(self, run):
            raise OSError("there is no server")

    tracker = observed(Closed(), patience=3600.0)
    tracker.on_start(RunStart(configure("run")))
    tracker._thread.join()
    for number in range(2000):
        tracker._put(_Record("train", number, {}))
    assert tracker._queue.empty()
    tracker.on_end()  # within the test's time
    assert len(warnings_in(caplog)) == 1


def test_an_interrupt_before_the_thread_starts_stays_one(configure, monkeypatch):
    def interrupted(thread):
        raise KeyboardInterrupt

    tracker = observed(Recorder())
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tracker.on_start(RunStart(configure("run")))
    tracker.on_end()


@pytest.mark.parametrize(
    "address",
    [
        "mysql://me:hidden@host:3306/shop?charset=utf8",
        "mysql://host/shop?user=me&password=hidden",
        "https://host/api?PASSWORD=hidden#part",
        "https://host/?db_password=hidden&page=1",
        "https://host/?x=1&access_token=hidden",
        "https://me:hidden@host/?passwd=hidden&api_key=hidden&apikey=hidden",
        "refused: https://host/?secret=hidden (status 403)",
    ],
)
def test_no_password_of_an_address_leaves_the_machine(address):
    told = without_passwords({"where": [address]})["where"][0]
    assert "hidden" not in told and "***" in told
    assert "host" in told and ("status 403" in told) == ("status 403" in address)


def test_what_is_no_password_stays():
    for text in (
        "https://host/?page=1&user=me#part",
        "how many tokens?",
        "max_new_tokens=8",
        "password=no address",
    ):
        assert without_passwords(text) == text
