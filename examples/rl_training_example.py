"""An agent's tool for training: SmolLM2 learns sums from solutions, then from its own attempts.

With an endpoint of OpenAI's protocol in OPENAI_BASE_URL, an agent then reads the report and says how it went.
"""

import json
import os

from agent_peft import LLMConfig, RLTrainingTool, SimpleAgent

tool = RLTrainingTool()  # it reads and writes below the current folder only
numbers = {"dataset": "arithmetic", "max_new_tokens": 8, "batch_size": 8, "eval_samples": 20}

sft = {"algorithm": "sft", "model_name": "smollm2-135m", "max_samples": 40, "output_dir": "output/sft"}
print(tool.run(sft | numbers))

# it goes on from the folder of the first training
grpo = {"algorithm": "grpo", "model_name": "output/sft", "max_samples": 8, "output_dir": "output/grpo"}
result = json.loads(tool.run(grpo | numbers))
print(f"accuracy: {result['accuracy_before']:.0%} after SFT, {result['accuracy']:.0%} after GRPO")

if "OPENAI_BASE_URL" in os.environ:
    agent = SimpleAgent("TrainingAgent", LLMConfig(model="gpt-4o-mini"), tools=[tool])
    print(agent.run("Read the report of the training in output/grpo. How high is its accuracy?"))
