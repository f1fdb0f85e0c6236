"""The trackers themselves, each read back with its own library. They skip where it is absent."""

from __future__ import annotations

import json
import logging
import math
import socket
import struct
import time

import pytest

from agent_peft.policies.engine.base import EngineStatistics
from agent_peft.rollout.collector import Collection
from agent_peft.runs.observers import RunStart, RunStep
from agent_peft.runs.run import train
from agent_peft.runs.trackers import load_trackers
from agent_peft.types import Group, Message, Task, Trajectory, Turn

HOSTILE = "<script>alert(1)</script>\n\x1b[2J\0\u202e **bold**"
SHOWN = "<script>alert(1)</script>\n\\x1b[2J\\x00\\u202e **bold**"


def step_of(config, number, **metrics):
    trajectory = Trajectory(
        Task("t"), (Turn((1,), (2,), (0.0,)),), messages=(Message("user", HOSTILE),), rewards=(1.0,)
    )
    collection = Collection([Group(trajectory.task, [trajectory])], statistics=EngineStatistics(0, 0, 1, 0))
    return RunStep(number, collection, metrics, stage=config.stages[0], started=0.0)


def track(config, *steps):
    """Track a run of some steps, each with its number as a reward, and one that continues with the last."""
    (observer,) = load_trackers(config.trackers)
    observer.on_start(RunStart(config))
    for number in steps:
        observer.on_step(step_of(config, number, reward=float(number), loss=math.nan))
    observer.on_end()


@pytest.fixture(autouse=True)
def nothing_else(tmp_path, monkeypatch, caplog):
    """its own folder for what a library writes to the current one, and no warning."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]


def test_tensorboard(configure, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = configure("run", trackers=[{"kind": "tensorboard", "trajectories_every": 2}])
    track(config, 0, 1, 2)
    track(config, 1, 2, 3)
    events = reader.EventAccumulator(str(tmp_path / "run/trackers/tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [
        (number, float(number)) for number in range(4)
    ]
    assert all(math.isnan(event.value) for event in events.Scalars("train/loss"))
    tables = events.Tensors("train/episode_0/text_summary")
    assert [event.step for event in tables] == [0, 2]
    text = tables[0].tensor_proto.string_val[0].decode()
    assert "\n".join(f"    {line}" for line in f"user: {SHOWN}".split("\n")) in text
    markdown = pytest.importorskip("tensorboard.plugin_util").markdown_to_safe_html(text)
    assert "&lt;script&gt;" in markdown and "<script>" not in markdown and "**bold**" in markdown
    assert "run_dir:" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def wandb_records(content):
    """The records of a file of W&B, which are those of a LevelDB log behind seven bytes: blocks of 32 kB
    of pieces of records, each behind its checksum (4 bytes), length (2) and type (1: whole, 4: the last one).
    """
    place, parts = 7, []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # the rest of a block is empty
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        parts.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def test_wandb_offline(configure, tmp_path):
    pytest.importorskip("wandb")
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    config = configure(
        "run", trackers=[{"kind": "wandb", "mode": "offline", "project": "x", "patience": 300}]
    )
    track(config, 0, 1)
    time.sleep(1.1)  # W&B names a folder by the second
    track(config, 1, 2)
    folders = sorted((tmp_path / "run/trackers/wandb").glob("offline-run-*"))
    number = json.loads((tmp_path / "run/trackers/wandb.json").read_text())["id"]
    assert folders and all(folder.name.endswith(f"-{number}") for folder in folders), "one id"
    history = []
    for file in sorted((tmp_path / "run/trackers/wandb").glob("offline-run-*/*.wandb")):
        for content in wandb_records(file.read_bytes()):
            record = records.Record()
            record.ParseFromString(content)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/reward" in items:
                history.append((json.loads(items["step"]), json.loads(items["train/reward"])))
    assert history == [(0, 0.0), (1, 1.0), (2, 2.0)]
    (table,) = (tmp_path / "run/trackers/wandb").glob("offline-run-*/files/media/table/**/*.json")
    assert json.loads(table.read_text())["data"][0][-1] == f"user: {SHOWN}"


def test_trackio(configure, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    for module in (storage, pytest.importorskip("trackio.utils")):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    config = configure("run", trackers=[{"kind": "trackio", "project": "test", "patience": 300}])
    track(config, 0, 1)
    track(config, 1, 2)
    logs = storage.SQLiteStorage.get_logs("test", "run")
    assert [(log["step"], log["train/reward"]) for log in logs if "train/reward" in log] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
    ]
    (table,) = [log["train/episodes"] for log in logs if "train/episodes" in log]
    assert SHOWN in json.dumps(table, ensure_ascii=False).encode().decode("unicode_escape")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's, about SQLAlchemy
def test_mlflow(configure, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="MLflow keeps a local store with SQLAlchemy")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = configure("run", trackers=[{"kind": "mlflow", "uri": uri, "experiment": "test"}])
    track(config, 0, 1)
    track(config, 1, 2)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    rewards = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(metric.step, metric.value) for metric in rewards] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.yaml", "episodes"}
    table = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/episodes/train_000000.json")
    assert table["data"][0][-1] == f"user: {SHOWN}"


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_a_server_that_is_down_costs_one_warning(configure, kind, monkeypatch, capfd, caplog):
    pytest.importorskip(kind)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # nobody listens there
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "local-" + "0" * 40)
    tracker = {"kind": kind, "patience": 1} | ({"uri": url} if kind == "mlflow" else {"mode": "online"})
    plain, tracked = configure("plain"), configure("tracked", trackers=[tracker])
    train(plain)
    train(tracked)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith(f"the tracker {kind} "), warnings
    assert "refused" not in "".join(capfd.readouterr())  # nor does a library print it
    assert (plain.run_dir / "metrics.jsonl").read_bytes() == (tracked.run_dir / "metrics.jsonl").read_bytes()
    caplog.clear()
