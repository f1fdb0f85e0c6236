"""The programs that make machines. They run in separate processes, use only the standard library, and import
nothing of the package outside this folder.

``fork_server_main`` is started once per process. It forks an ``init`` for each machine; the init becomes
process 1 there.
"""
