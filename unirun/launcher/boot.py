"""Entry point of a spawner, a warm process and a fresh worker: ``python -u …/boot.py spawner|warm|worker ARG…``.

Run as a file, not by ``-P -m``, so that ``sys.flags`` of workers, and of interpreters that they start, are as under
torchrun: ``python -u script.py``.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # This directory: its modules must not be importable as top-level modules.
        del sys.path[0]
    if sys.argv[1] == "spawner":
        from unirun.launcher.spawner import main
    elif sys.argv[1] == "warm":
        from unirun.launcher.warm.process import main
    else:
        from unirun.launcher.worker import main
    main(sys.argv[2:])
