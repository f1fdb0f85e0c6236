"""The heap of glibc, kept near the size of its tensors. This module imports only what every start of Python
has imported already (not even ``__future__``).

torch asks for aligned memory. glibc cuts up to 96 bytes off each such block, and keeps the cuttings in lists
whose members never join their neighbors. So the hole that a freed tensor leaves is a few bytes too small for
the next tensor of that size, and the heap grows. Without those lists (tcache, fast bins) holes join. The two
thresholds are those that glibc would reach by itself, since fresh pages for each tensor take time.
"""

import os
import sys

VARIABLE = "GLIBC_TUNABLES"  # read once, as a program starts
TUNABLES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in (
        ("tcache_count", 0),
        ("mxfast", 0),
        ("mmap_threshold", 32 << 20),
        ("trim_threshold", 1 << 30),  # give_back_memory trims between the phases of a step
    )
)


def restart_with_tight_heap() -> None:
    """Start this program again, in the same process, with ``TUNABLES``. It does nothing where the C library
    is not glibc, or where the user has set the variable. Child processes do not inherit it.
    """
    try:
        glibc = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError):  # another system
        return
    if os.environ.get(VARIABLE) == TUNABLES:  # restarted
        del os.environ[VARIABLE]
    elif glibc and sys.executable and VARIABLE not in os.environ:
        environment = {**os.environ, VARIABLE: TUNABLES}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
