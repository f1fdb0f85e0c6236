"""Faults of Reasoning Gym's datasets, in its version 0.1.25. Such a dataset is taken only on request."""

RUNS = "its scorer runs the agent's answer as Python code"  # with eval, or with sympy's parse_expr
HASHES = "its problems change with PYTHONHASHSEED, so a run that is resumed would have others"

FAULTS = {
    "binary_matrix": RUNS,
    "countdown": RUNS,
    "intermediate_integration": RUNS,
    "n_queens": RUNS,
    "polynomial_multiplication": RUNS,
    "puzzle24": RUNS,
    "simple_integration": RUNS,
    "spiral_matrix": RUNS,
    "string_insertion": RUNS,
    "isomorphic_strings": HASHES,
    "knight_swap": HASHES,
    "ransom_note": HASHES,
    "word_ladder": HASHES,
    "list_functions": "its problems change from load to load",
    "coin_flip": "its scorer takes 0 for every probability below 1",
    "complex_arithmetic": "its scorer takes nan for every number",
    "game_of_life_halting": "its scorer takes every answer for the right one",
}
