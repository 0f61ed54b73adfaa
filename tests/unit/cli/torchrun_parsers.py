"""The options of torchrun's parser, by the version of torch that brought them: only one version is installed here.

`tests.unit.cli.test_torchrun_options` compares the installed version with its record; `make soak` installs the oldest
and the newest one.
"""

from __future__ import annotations

BROUGHT: dict[tuple[int, int], tuple[str, ...]] = {
    (2, 11): (
        *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
        *(
            "max_restarts",
            "monitor_interval",
            "start_method",
            "event_log_handler",
            "role",
            "module",
            "no_python",
        ),
        *("run_path", "log_dir", "redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters"),
        *("duplicate_stderr_filters", "node_rank", "master_addr", "master_port", "local_addr", "logs_specs"),
        *("numa_binding", "signals_to_handle", "virtual_local_rank"),
    ),
    (2, 12): ("shutdown_timeout",),
    (2, 14): ("log_line_prefix_template", "print_completion"),
}
NEWEST = (2, 15)


def options_of(version: tuple[int, int]) -> set[str]:
    """The names (``dest``) of all options that torchrun of torch `version` has, without ``--help``."""
    return {dest for brought, dests in BROUGHT.items() if brought <= version for dest in dests}
