"""A reward of your own, from Python: short answers are worth more.

It is a function of a trajectory. In a YAML file, name it under rewards.terms as "package.module:function".
It takes about ten seconds on one CPU core.
"""

import agent_peft as ap


def brevity(trajectory: ap.Trajectory) -> float:
    """1 for an empty answer, 0 for eight tokens or more."""
    return max(0.0, 1 - trajectory.num_action_tokens / 8)


if __name__ == "__main__":
    tasks = ap.load_environment("arithmetic", digits=1)
    shape = {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": 64, "n_positions": 32}
    policy = ap.load_policy({"kind": "scratch", "alphabet": "0123456789+*-= ^$", "architecture": shape})
    stage = ap.Stage(
        algorithm="rloo",
        steps=20,
        tasks_per_step=20,
        sampling={"max_new_tokens": 8},
        optimizer={"learning_rate": 3e-3},
        rewards={"terms": [{"kind": "custom_reward:brevity", "weight": 0.5}]},
    )
    for step in ap.Trainer(policy, tasks, stage):
        print(step.number, f"{step.metrics['reward']:.2f}, {step.metrics['action_tokens']:.1f} tokens")
