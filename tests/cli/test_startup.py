"""A mistake in a configuration is answered before torch is imported, which takes seconds."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from agent_peft.cli import run
code = run(sys.argv[1:])
loaded = {"torch", "transformers", "peft"} & sys.modules.keys()
sys.exit(f"{sorted(loaded)} are loaded" if loaded else code)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "quickstart", "environmnt.x=1"], "unknown key; did you mean 'environment'?"),
        (["train", "quickstart", "environment.generate.num_taks=1"], "did you mean"),
        (["train", "quickstart", "engine.rows=many"], "must be a whole number"),
        (["train", "quickstart", "policy.device=cud"], "is not a supported device"),
        (["train", "quickstart", "stages.1.algorithm.kind=grop"], "there is no kind 'grop'"),
        (["train", "quickstrt"], "did you mean 'quickstart'?"),
        (["explain", "quickstart", "evaluation.evry=1"], "did you mean 'evaluation.every'?"),
        (["explain", "--keys", "optimizr"], "did you mean 'optimizer'?"),
        (["serve", "quickstart", "seed=x"], "must be a whole number"),
    ],
    ids=str,
)
def test_a_mistake_is_answered_without_torch(arguments, message, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert message in ended.stderr and ended.stdout == "", ended.stderr
    assert ended.returncode == 2, ended.stderr
