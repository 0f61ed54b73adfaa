"""Prints a worker's environment, arguments, directory, and the sum of ranks over its group."""

import json
import os
import sys

row = {
    "role": os.environ.get("ROLE_NAME", ""),
    "rank": int(os.environ.get("RANK", "0")),
    "env": dict(os.environ),
    "argv": sys.argv[1:],
    "cwd": os.getcwd(),
    "main": __name__,
    "file": os.path.basename(__file__),
    "preloaded": "torch.nn" in sys.modules,
    "cmdline": open("/proc/self/cmdline").read().split("\0"),
}
if "--reduce" in sys.argv:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    row["sum"], row["world"] = int(total), dist.get_world_size()
    dist.destroy_process_group()
print(json.dumps(row), flush=True)
