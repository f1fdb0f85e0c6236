"""An environment of your own, with a configuration and a graded score: write a number backwards.

A small model of random weights learns it from the score alone, in about twenty seconds on one CPU core.
"""

import agent_peft as ap


class ReversalConfig(ap.EnvironmentConfig):
    digits: int = 2


class Reversal(ap.Environment):
    config_class = ReversalConfig

    @property
    def tasks(self):
        return [ap.Task(f"{number:0{self.config.digits}}") for number in range(10**self.config.digits)]

    def episode(self, task, seed):
        return Writing(task.id)


class Writing(ap.Episode):
    def __init__(self, number):
        self.number, self.answer = number, number[::-1]

    def start(self):
        return [ap.Message("user", f"{self.number}=")]

    def step(self, action):
        right = sum(a == b for a, b in zip(action, self.answer, strict=False))
        score = right / max(len(action), len(self.answer))
        outcome = ap.Outcome.CORRECT if action == self.answer else ap.Outcome.INCORRECT
        return ap.StepResult("", True, outcome, ap.StopReason.FINISHED, score=score)

    def close(self):
        pass


ap.testing.check_environment(Reversal)
tasks = ap.load_environment(Reversal, digits=2)
shape = {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": 64, "n_positions": 32}
policy = ap.load_policy({"kind": "scratch", "alphabet": "0123456789=", "architecture": shape})
keys = {"sampling": {"max_new_tokens": 3}, "rewards": {"score": 1.0}, "optimizer": {"learning_rate": 2e-3}}
for step in ap.Trainer(policy, tasks, ap.Stage(algorithm="rloo", steps=50, tasks_per_step=50, **keys)):
    print(step.number, f"{sum(t.score for t in step.trajectories) / len(step.trajectories):.2f}")
print(ap.evaluate(policy, tasks, {"sampling": keys["sampling"]}).summary)
