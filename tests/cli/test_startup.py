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


def test_the_first_line_of_a_run_comes_before_torch(tmp_path):
    program = (
        "import sys; import agent_peft.cli; runs = sys.modules['agent_peft.cli.runs']\n"
        "runs._note_loading = lambda: sys.exit(len({'torch', 'transformers'} & sys.modules.keys()))\n"
        "runs.train('quickstart', ['run_dir=run'])"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path).returncode == 0
    assert not list(tmp_path.iterdir())
