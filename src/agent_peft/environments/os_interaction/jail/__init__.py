"""The program that makes machines: it runs outside our process, from the standard library alone, and imports nothing of the package.

``nursery`` is started once per process; it forks a ``keeper`` for each machine, which is process 1 there.
"""
