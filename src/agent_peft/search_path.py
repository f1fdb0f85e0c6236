"""Where Python looks for modules. This one imports only what every start of Python has imported already
(not even ``__future__``).
"""

import os
import sys


def search_current_folder_last() -> None:
    """A user's own modules are found in the current folder, but a file there never takes the place of a
    module that is installed.

    ``python -m`` puts the current folder first, and so does an empty part of PYTHONPATH.
    """
    try:
        here = os.path.realpath(os.curdir)
        kept = [place for place in sys.path if place and os.path.realpath(place) != here]
    except OSError:  # the current folder is gone
        kept = [place for place in sys.path if place]
    sys.path[:] = [*kept, ""]
