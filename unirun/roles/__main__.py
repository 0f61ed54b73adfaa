"""``python -m unirun.roles KIND pkg.mod:name [ARG…]``, as a worker's bootstrap runs it."""

from __future__ import annotations

import sys

from unirun.roles.worker_main import main

main(sys.argv[1], sys.argv[2], tuple(sys.argv[3:]))
