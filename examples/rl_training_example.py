"""An agent's tool for training: SmolLM2 learns sums from solutions, then from its own attempts (3 minutes).

With an endpoint of OpenAI's protocol in OPENAI_BASE_URL, an agent then reads the report and says how it went.
"""

import json
import os

from agent_peft import LLMConfig, RLTrainingTool, SimpleAgent

tool = RLTrainingTool()  # it reads and writes below the current folder only
sums = {"dataset": "arithmetic", "max_samples": 40, "max_new_tokens": 8, "batch_size": 8, "eval_samples": 20}

sft = {"algorithm": "sft", "model_name": "smollm2-135m", "learning_rate": 5e-4, "output_dir": "output/sft"}
taught = json.loads(tool.run(sft | sums))

# it continues from the folder of the first training, with 8 attempts at each sum
grpo = {"algorithm": "grpo", "model_name": "output/sft", "learning_rate": 2e-4, "output_dir": "output/grpo"}
trained = json.loads(tool.run(grpo | sums | {"num_generations": 8}))
accuracies = taught["accuracy_before"], taught["accuracy"], trained["accuracy"]
print("accuracy: {:.0%} at first, {:.0%} after SFT, {:.0%} after GRPO".format(*accuracies))

if "OPENAI_BASE_URL" in os.environ:
    agent = SimpleAgent("TrainingAgent", LLMConfig(model="gpt-4o-mini"), tools=[tool])
    print(agent.run("Read the report of the training in output/grpo. How high is its accuracy?"))
