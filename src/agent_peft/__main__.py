"""``python -m agent_peft`` is ``agent-peft``."""

from agent_peft.search_path import search_current_folder_last

if __name__ == "__main__":
    search_current_folder_last()  # before anything else is imported
    from agent_peft.cli import main

    main()
