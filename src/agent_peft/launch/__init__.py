"""One trainer, its servers of policies and of environments, started together and kept running."""
