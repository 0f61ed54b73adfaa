"""``python -m unirun.roles workload pkg.mod:Class``, as a worker's bootstrap runs it."""

from __future__ import annotations

import sys

from unirun.roles.host import main

main(sys.argv[1], sys.argv[2])
