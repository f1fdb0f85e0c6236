"""The benchmark for a GPU that is lent for minutes must work there at the first try: so it runs here, on
shapes of nothing.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.conftest import case

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are not here"),
    pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda', but CUDA is not available"),
]


@pytest.fixture
def gpu_benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("gpu_benchmark", "measuring", "training"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("device", "model"), [case("cpu", "0.5B", fast=True), case("cuda", "7B", fast=False)]
)
def test_it_measures_every_part(device, model, gpu_benchmark, pretended_gpu, tmp_path, monkeypatch, capsys):
    pretending = device == "cuda" and not torch.cuda.is_available()
    if pretending:
        for name, found in {
            "synchronize": None,
            "reset_peak_memory_stats": None,
            "max_memory_allocated": 1,
            "get_device_name": "none",
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
        # a graph cannot be pretended
        monkeypatch.setattr(gpu_benchmark, "captured_step", lambda bench, policy: {"way": "lean"})
    with pretended_gpu() if pretending else nullcontext():
        gpu_benchmark.main(
            ["--tiny", "--device", device, "--only", model, "--output", str(tmp_path / "gpu.json")]
        )
    parts = json.loads((tmp_path / "gpu.json").read_text())[model]
    assert "error" not in parts, parts.get("traceback")
    assert parts["model"]["device"] == ("cpu" if device == "cpu" else "cuda:0") and parts["model"]["packs"]
    assert parts["decoding"]["rows"] == 32 and 0 < parts["decoding"]["tokens_per_second"] < math.inf
    assert 0 <= parts["decoding"]["mismatch_mean"] < 0.1
    assert parts["captured step"]["way"] == "lean"
    assert parts["packed"]["packed"] and not parts["padded"]["packed"]
    assert parts["padded"]["positions"] == 8 * 16 and parts["packed"]["positions"] == 12 + 8 * 4
    assert (parts["packed"]["allocated_bytes"] is None) == (device == "cpu")
    assert 0 < parts["packed"]["predicted_bytes"] < parts["padded"]["predicted_bytes"]
    assert "tokens/s" in capsys.readouterr().out


def test_it_ends_in_time_and_goes_on_after_what_fails(gpu_benchmark, tmp_path):
    def slow() -> dict[str, object]:
        time.sleep(30)
        return {}

    def broken() -> Iterator[tuple[str, dict[str, object]]]:
        yield "first", {"x": 1}
        raise ValueError("a bug")

    bench = gpu_benchmark.Bench(torch.device("cpu"), gpu_benchmark.Size())
    session = gpu_benchmark.Session(bench, seconds=1.0, output=tmp_path / "gpu.json")
    gpu_benchmark.run(session, {"broken": broken, "slow": slow, "late": dict})
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["broken"]["first"] == {"x": 1} and found["broken"]["error"] == "ValueError: a bug"
    assert found["slow"]["error"] == "the time was up" and found["slow"]["section_seconds"] < 20


@pytest.mark.slow
def test_it_runs_the_tests_that_need_a_gpu(gpu_benchmark, tmp_path):
    (tmp_path / "test_x.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n@pytest.mark.gpu\ndef test_b(): assert 0\n"
        "def test_c(): assert 0\n"
    )
    bench = gpu_benchmark.Bench(torch.device("cpu"), gpu_benchmark.Size())
    found = gpu_benchmark.run_tests(
        gpu_benchmark.Session(bench, 100.0, tmp_path / "gpu.json"), [str(tmp_path / "test_x.py")]
    )
    assert (found["passed"], found["failed"], found["skipped"]) == (1, ["test_b"], 0) and "assert 0" in found[
        "output"
    ]
    assert "tests/devices/test_devices.py" in gpu_benchmark.marked_tests()
