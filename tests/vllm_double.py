"""Takes the place of vLLM and its Python: accepts the command line, and runs ``agent-peft serve-policy`` in a
fork of the warm process that ``$WARM_PROCESS`` names. ``$PROGRAM`` is the file that holds its number.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))
from warm_process import ForkedProgram

VALUES = ("served-model-name", "host", "port", "dtype", "max-model-len", "chat-template", "max-lora-rank")
MORE = ("max-loras", "max-cpu-loras", "logprobs-mode", "generation-config")


def main() -> None:
    if sys.argv[1] == "-c":  # asked for the version
        return print(os.environ.get("VLLM_VERSION", "0.33.0"))
    assert sys.argv[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"], sys.argv
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in (*VALUES, *MORE):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--enable-lora", action="store_true", required=True)
    parser.add_argument("--lora-target-modules", nargs="+", required=True)
    parser.add_argument("--fail")
    given = parser.parse_args(sys.argv[4:])
    if given.fail:
        sys.exit(given.fail)
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1" and not os.environ["PYTHONPATH"]
    assert given.max_lora_rank == "8" and Path(given.chat_template).is_file()
    options = ["--host", given.host, "--port", given.port, "--dtype", given.dtype, "--device", "cpu"]
    options += ["--token", "VLLM_API_KEY", "--adapters", "/"]
    command = ["-m", "agent_peft", "serve-policy", f"{given.served_model_name}={given.model}", *options]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    program = ForkedProgram(
        os.environ["WARM_PROCESS"], command, Path.cwd(), os.environ, sys.stdout, sys.stderr
    )
    Path(os.environ["PROGRAM"]).write_text(str(program.pid))
    signal.signal(signal.SIGTERM, lambda *_: program.send_signal(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if (code := program.wait()) < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
