"""``agent-peft chat``: with a policy, and in its place."""

from __future__ import annotations

import io

import pytest

from agent_peft.agents.chat import ChatSettings, converse
from agent_peft.cli import run as command
from agent_peft.environments import load_environment
from agent_peft.policies.generation import generate
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.seeding import derive
from agent_peft.types import Message

ARCHITECTURE = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 2, initializer_range: 0.3}"
)
CONFIG = f"""\
run_dir: run
policy:
  kind: scratch
  alphabet: "0123456789+*-= "
  device: cpu
  architecture: {ARCHITECTURE}
environment: {{kind: arithmetic, num_tasks: 10, digits: 1}}
sampling: {{max_new_tokens: 4}}
rewards: {{invalid_action: -0.5}}
steps: 2
algorithm: rloo
"""


@pytest.fixture
def typed(monkeypatch, capsys):
    """``typed(text, *arguments)``: the code, the output and the errors of ``agent-peft chat``."""

    def run(text, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = command(["chat", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def tiny(tmp_path):
    """The folder of a model."""
    architecture = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    architecture |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3}
    scratch = {"kind": "scratch", "alphabet": "0123456789+*-= ", "architecture": architecture}
    load_policy(scratch, device="cpu").save(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_replies_are_those_of_the_policy_and_remember_what_was_said(tiny):
    policy = load_policy(tiny, device="cpu", lora=None)
    said, warned = [], []
    settings = ChatSettings(temperature=0.0, max_new_tokens=8, max_tokens=60)
    lines = ["1+1=", "2+2=", "/clear", "2+2=", "é", "1" * 80, "/exit", "3+3="]
    converse(policy, settings, lines, said.append, warned.append)
    first, second, fresh, *nothing = "".join(said).split("\n")
    assert nothing == ["", "", ""]  # of what the tokenizer refuses, of what is too long, and the end
    assert first == generate(policy, "1+1=", {"max_new_tokens": 8})[0]
    assert fresh == generate(policy, "2+2=", {"max_new_tokens": 8})[0]
    history = [Message("user", "1+1="), Message("assistant", first), Message("user", "2+2=")]
    assert second == generate(policy, [history], {"max_new_tokens": 8})[0] != fresh
    assert "alphabet" in warned[0] and "/clear" in warned[1] and len(warned) == 2


def test_a_model_is_spoken_to_through_a_pipe(typed, tiny):
    code, out, err = typed("1+1=\n", tiny, "--temperature", "0", "--max-new-tokens", "8", "--device", "cpu")
    policy = load_policy(tiny, device="cpu", lora=None)
    assert (code, err) == (0, "")
    assert out == generate(policy, "1+1=", {"max_new_tokens": 8})[0] + "\n"


def test_a_person_reads_what_the_policy_reads_and_gets_its_reward(typed, tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    environment = load_environment({"kind": "arithmetic", "num_tasks": 10, "digits": 1})
    task = environment.tasks[3]
    (gold,) = environment.demonstration(task)
    chat = ChatTokenizer(character_tokenizer("0123456789+*-= "))
    opening = environment.episode(task, derive(0, "x")).start()
    terms = "outcome 1, invalid_action 0"
    code, out, err = typed(f"{gold}\n", tmp_path / "c.yaml", "--play", "--task", task.id)
    assert (code, err) == (0, "")
    assert out == f"{chat.tokenizer.decode(chat.opening(opening))}\ncorrect, finished\nreward 1 = {terms}\n"
    code, out, err = typed("é\n+++++++++\n", tmp_path / "c.yaml", "--play", "--task", task.id)
    assert code == 0 and "write something else" in err and "cut after 4" in err
    assert out.endswith("incorrect, finished\nreward -0.6 = outcome -0.1, invalid_action -0.5\n")
    code, out, err = typed("", tmp_path / "c.yaml", "--play")
    assert code == 2 and "input ended" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{folder}/c.yaml", "--play", "--task", "nothing"), "there is no 'nothing'"),
        (("{folder}/c.yaml", "--play", "--temperature", "1"), "no effect with --play"),
        (("{folder}/nothing", "--task", "x"), "--play"),
        (("{folder}/nothing",), "there is no run directory"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(typed, tmp_path, arguments, words):
    (tmp_path / "c.yaml").write_text(CONFIG)
    code, _, err = typed("", *(text.format(folder=tmp_path) for text in arguments))
    assert code == 2 and words in err and err.count("\n") == 1


@pytest.fixture
def no_network(monkeypatch):
    """The requests for the hub that the code would make; each fails."""
    asked = []

    class Client:  # of httpx
        def head(self, url, **keys):
            asked.append(url)
            raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.get_session", Client)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return asked


@pytest.mark.parametrize("name", ["runs/typo", "./nothere", "../x", "~/x", "/a/b", "mine/x", "runs/lok"])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(typed, no_network, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "runs/look"):
        (tmp_path / folder).mkdir(parents=True)
    code, _, errors = typed("", name)
    assert code == 2 and not no_network
    assert "there is no run" in errors and errors.count("\n") == 1
    assert ("did you mean 'runs/look'?" in errors) is (name == "runs/lok")


def test_a_model_of_the_hub_without_network_is_one_short_line(
    typed, no_network, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    code, _, errors = typed("", "nobody/nothing-at-all")
    assert code == 2 and 0 < len(no_network) <= 2
    assert "the hub is not reached; check the network" in errors and errors.count("\n") == 1
    assert "smollm2-135m'?" in typed("", "smolm2-135m")[2]
    assert not caplog.messages  # no retries of the hub's client


def test_the_end_of_a_conversation_is_no_failure(typed, tiny, caplog):
    assert typed("1+1=\n", tiny, "--max-new-tokens", 3)[0] == 0
    assert not caplog.messages
