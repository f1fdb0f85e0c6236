"""Libraries of games and puzzles: Reasoning Gym, Gymnasium and TextArena."""
