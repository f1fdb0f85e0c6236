"""DB Bench: an agent that works on a real database in SQL."""

from agent_peft.environments.db_bench.config import DBBenchConfig, GenerateConfig
from agent_peft.environments.db_bench.environment import DBBench
from agent_peft.environments.db_bench.episode import DBBenchEpisode
from agent_peft.environments.db_bench.generator import generate
from agent_peft.environments.db_bench.syntax import primary_skill, skills_of
from agent_peft.environments.db_bench.tasks import load_tasks
from agent_peft.environments.task_files.selection import Rejection

__all__ = [
    "DBBench",
    "DBBenchConfig",
    "DBBenchEpisode",
    "GenerateConfig",
    "Rejection",
    "generate",
    "load_tasks",
    "primary_skill",
    "skills_of",
]
