"""Try every attack of the tests' corpus as root and as ordinary users, with and without control groups.

python benchmarks/attacks.py        # as root, 20 minutes

Prints counts, and writes results/attacks.json with the result of each attack in each case: held, bounded
(the trainer ended the machine above its limits) or open; for honest work seen or refused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from smoke import no_sandbox, parse, skipped

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.environments.os_interaction.attacks import CASES, command_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=1, help="try every EACH-th attack only")
    arguments = parse(parser, each=40)
    if (lacks := no_sandbox()) or os.geteuid() != 0:
        skipped(f"all of it: {lacks or 'only root can become another user'}")
        return
    report = {}
    for case in CASES:
        command = command_of(case)
        if command is None:
            skipped(f"{case}: no Python here can be run by an ordinary user")
            continue
        done = subprocess.run([*command, str(arguments.each)], stdout=subprocess.PIPE, text=True, cwd="/")
        if done.returncode != 0:
            sys.exit(f"{case}: the attacks did not run")
        report[case] = json.loads(done.stdout)
        counts = Counter(report[case]["results"].values())
        print(f"{case} ({report[case]['case']}): {dict(counts)}", flush=True)
        for what, result in report[case]["results"].items():
            if result not in ("held", "seen"):
                print(f"    {result}: {what}")
    (arguments.results / "attacks.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
