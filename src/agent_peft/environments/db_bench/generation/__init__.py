"""Tasks made up for DB Bench: tables (`schemas`), statements (`plan`, `sampler`), whether each part of a
statement matters (`mutation`), and how a person asks for it (`grammar`, `phrasing`).
"""
