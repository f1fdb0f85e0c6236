"""``python -m agent_peft`` is ``agent-peft``."""

from agent_peft.cli import main

if __name__ == "__main__":
    main()
