"""The programs that make machines: they run outside our process, from the standard library alone, and import
nothing of the package.

``fork_server`` is started once per process; it forks an ``init`` for each machine, which is process 1 there.
"""
