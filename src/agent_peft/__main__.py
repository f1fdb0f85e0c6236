"""``agent-peft`` and ``python -m agent_peft``."""

from agent_peft.heap import restart_with_tight_heap
from agent_peft.search_path import search_current_folder_last


def main() -> None:
    restart_with_tight_heap()
    search_current_folder_last()  # before anything else is imported
    from agent_peft.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
