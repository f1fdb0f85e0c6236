"""OS interaction: an agent that types commands into a real shell."""

from agent_peft.environments.os_interaction.config import OSGenerateConfig, OSInteractionConfig
from agent_peft.environments.os_interaction.environment import OSInteraction
from agent_peft.environments.os_interaction.episode import OSEpisode
from agent_peft.environments.os_interaction.generator import generate
from agent_peft.environments.os_interaction.problems import SKILLS
from agent_peft.environments.os_interaction.tasks import load_tasks
from agent_peft.environments.task_files.selection import Rejection

__all__ = [
    "SKILLS",
    "OSEpisode",
    "OSGenerateConfig",
    "OSInteraction",
    "OSInteractionConfig",
    "Rejection",
    "generate",
    "load_tasks",
]
