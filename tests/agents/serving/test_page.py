"""The programs of the page about serving."""

import re
import string
from pathlib import Path

import pytest

from agent_peft.policies.loading import load_policy

from .conftest import ARCHITECTURE

pytest.importorskip("openai")
PAGE = Path(__file__).parents[3] / "docs/policy_server.md"


def test_the_programs_of_the_page_run(serving, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    policy = load_policy(
        {"kind": "scratch", "alphabet": string.printable, "architecture": ARCHITECTURE, "device": "cpu"}
    )
    server = serving(quickstart=policy, max_tokens=100)
    for block in blocks:
        assert "http://127.0.0.1:8000" in block
        names = {}
        exec(block.replace("http://127.0.0.1:8000", server.url), names)
        names["client"].close()
        assert capsys.readouterr().out
