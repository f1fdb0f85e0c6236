"""A model of your own: any module from token ids (B, T) to logits (B, T, V) that never looks ahead.

A recurrent network of random weights learns one-digit addition, in about ten seconds on one CPU core.
"""

from torch import nn

import agent_peft as ap


class Recurrent(nn.Module):
    def __init__(self, vocab_size, width=128):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.cells = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.out(self.cells(self.embedding(tokens))[0])


architecture = {"model_type": f"{__name__}:Recurrent", "width": 128}
policy = ap.load_policy({"kind": "scratch", "alphabet": "0123456789+-*= ^$", "architecture": architecture})
tasks = ap.load_environment("arithmetic", digits=1)
keys = {"steps": 60, "tasks_per_step": 40, "sampling": {"max_new_tokens": 3}}
for step in ap.Trainer(policy, tasks, ap.Stage(algorithm="sft", optimizer={"learning_rate": 1e-2}, **keys)):
    print(step.number, f"loss {step.metrics['loss']:.3f}")
print(ap.evaluate(policy, tasks, {"sampling": keys["sampling"]}).summary)
policy.save("adder")
