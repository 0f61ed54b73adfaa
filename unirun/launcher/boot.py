"""Where a spawner, a warm process and a fresh worker begin: ``python -u …/boot.py spawner|warm|worker ARG…``.

As a file, not by ``-P -m``: what workers find in ``sys.flags``, and hand on to interpreters that they start, is as
under torchrun, ``python -u script.py``.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # This directory, whose modules must not be found under their bare names.
        del sys.path[0]
    if sys.argv[1] == "spawner":
        from unirun.launcher.spawner import main
    elif sys.argv[1] == "warm":
        from unirun.launcher.warm.process import main
    else:
        from unirun.launcher.worker import main
    main(sys.argv[2:])
