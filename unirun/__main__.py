"""``python -m unirun``: the command, for where it is not on the PATH."""

from __future__ import annotations

from unirun.cli import main

main()
