"""Teach a small model one-digit addition: first from demonstrations, then from its own attempts.

It takes about fifteen seconds on one CPU core. Name a language model to train a LoRA adapter on it instead:
python examples/train_in_python.py smollm2-135m
"""

import sys

import agent_peft as ap

SMALL = {  # random weights, of any architecture that Transformers has
    "kind": "scratch",
    "alphabet": "0123456789+*-= ^$",
    "architecture": {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": 64, "n_positions": 64}
    | {"initializer_range": 0.1, "tie_word_embeddings": False},
}
policy = ap.load_policy(sys.argv[1] if sys.argv[1:] else SMALL)
tasks = ap.load_environment("arithmetic", digits=1)
short = {"max_new_tokens": 3}
keys = {"tasks_per_step": 40, "sampling": short}
for stage in (
    ap.Stage(algorithm="sft", steps=25, optimizer={"learning_rate": 5e-3}, **keys),
    ap.Stage(algorithm="rloo", steps=20, optimizer={"learning_rate": 1e-3}, **keys),
):
    for step in ap.Trainer(policy, tasks, stage):
        print(stage.name, step.number, step.summary)
    print(f"after {stage.name}:", ap.evaluate(policy, tasks, {"sampling": short}).summary)
print("3+4 =", *ap.generate(policy, "3+4=", short))
