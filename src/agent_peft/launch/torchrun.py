"""torchrun that ends with the exit code of the process that failed, where torch's own ends with 1."""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from agent_peft.supervisor import FINAL


def run() -> None:
    """Run ``sys.argv`` as torchrun does. The code of bad input or of a failed check wins: the other processes
    then fail because it has ended.
    """
    try:
        main()
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        sys.exit(next((code for code in codes if code in FINAL), 1))


if __name__ == "__main__":
    run()
