"""An observer of your own: write the success of every step and evaluation to a CSV file.

A run tells it of each step, on rank 0 only. If it raises, the run logs a warning and continues. A small model
of random weights learns one-digit addition meanwhile, in about ten seconds on one CPU core.
"""

import csv
from pathlib import Path

import agent_peft as ap


class CsvFile(ap.Observer):
    def __init__(self, path):
        self.path = Path(path)

    def write(self, *row):
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(row)

    def on_step(self, step):
        self.write(step.number, step.stage.name, step.metrics.get("success"))

    def on_evaluation(self, name, report):
        self.write(name, report.success.value)

    def on_end(self):
        print(self.path.read_text())


shape = {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": 64, "n_positions": 32}
shape |= {"initializer_range": 0.1, "tie_word_embeddings": False}
tasks = {"kind": "arithmetic", "digits": 1}
keys = {"sampling": {"max_new_tokens": 3}, "tasks_per_step": 40}
stages = [
    {"algorithm": "sft", "steps": 25, "optimizer": {"learning_rate": 5e-3}, **keys},
    {"algorithm": "rloo", "steps": 10, "optimizer": {"learning_rate": 1e-3}, **keys},
]
policy = {"kind": "scratch", "alphabet": "0123456789+*-= ^$", "architecture": shape}
run = {"run_dir": "runs/observed", "policy": policy, "environment": tasks, "stages": stages}
config = ap.load_config({**run, "evaluation": {"environment": tasks}})
ap.train(config, fresh=True, observers=[CsvFile("success.csv")])
