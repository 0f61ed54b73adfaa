"""The rows of the matrix in docs/failover.md that are proved with real processes, and the test of each.

The simulation has all rows (`tests/sim/test_matrix.py`). Those here differ in what the policy decides, or in what the
operating system has to do for it.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = runpy.run_path(str(TESTS.parent / "docs/failover.py"))

REAL: dict[tuple[str, str, str], str] = {
    ("worker", "SIGKILL", "starting"): "test_cells_of_the_matrix.py a_rank_that_starts_or_saves_fails",
    ("worker", "SIGKILL", "running"): "test_injected_faults.py ranks_that_are_killed_by_a_schedule",
    ("worker", "SIGKILL", "in a call"): "test_how_jobs_end.py the_root_cause_is_the_killed_worker",
    ("worker", "SIGKILL", "saving"): "test_trainer.py each_step_is_reported_and_saved_once",
    ("worker", "SIGKILL", "stopping"): "test_cells_of_the_matrix.py a_rank_that_fails_as_the_job_ends",
    ("worker", "SIGSTOP", "starting"): "test_hangs.py a_rank_that_is_stopped_before_it_has_begun",
    ("worker", "SIGSTOP", "forming"): "test_cells_of_the_matrix.py a_rank_that_hangs_or_leaves_as_its_role",
    ("worker", "SIGSTOP", "running"): "test_hangs.py a_rank_that_reports_no_more_is_found",
    ("worker", "SIGSTOP", "in a call"): "test_hangs.py the_rank_for_which_the_others_wait",
    ("worker", "SIGSTOP", "saving"): "test_hangs.py a_slow_save_with_an_allowance_is_no_hang",
    ("worker", "SIGSTOP", "stopping"): "test_cells_of_the_matrix.py a_rank_that_fails_as_the_job_ends",
    ("worker", "SIGTERM ignored", "stopping"): "test_signals.py a_signal_is_followed_by_sigkill",
    ("worker", "exit 1", "starting"): "test_cells_of_the_matrix.py a_rank_that_starts_or_saves_fails",
    ("worker", "exit 1", "running"): "test_restarting_a_role.py a_restart_starts_every_rank_of_the_role",
    ("worker", "exit 1", "stopping"): "test_cells_of_the_matrix.py a_rank_that_fails_as_the_job_ends",
    ("worker", "exit 0", "forming"): "test_cells_of_the_matrix.py a_rank_that_hangs_or_leaves_as_its_role",
    (
        "worker",
        "exit 0",
        "in a call",
    ): "test_how_jobs_end.py the_root_cause_is_a_rank_that_its_peers_wait_for",
    ("worker", "exit 0", "stopping"): "test_stopping_together.py all_ranks_save_at_one_step",
    ("worker", "GIL held", "in a call"): "test_hangs.py the_rank_for_which_the_others_wait",
    ("worker", "GIL held", "stopping"): "test_cells_of_the_matrix.py a_rank_that_fails_as_the_job_ends",
    ("worker", "disk full", "running"): "test_durability_full_disk.py workers_that_print_on_a_full_disk",
    ("worker", "disk full", "saving"): "test_cells_of_the_matrix.py a_rank_that_starts_or_saves_fails",
    ("resilient worker", "SIGKILL", "in a call"): "test_resilient.py survivors_leave_collectives",
    ("resilient worker", "SIGKILL", "running"): "test_resilient.py the_example_ends_with_the_loss",
    ("survivor in a collective", "SIGKILL", "in a call"): "test_two_deaths_in_a_moment.py workloads_are_up",
    ("agent", "SIGKILL", "running"): "test_losing_a_node.py ranks_of_a_lost_node_restart_on_a_free_one",
    (
        "agent",
        "SIGSTOP",
        "running",
    ): "hosts/test_silent_hosts.py the_ranks_of_a_host_that_hangs_run_elsewhere",
    ("agent", "SIGSTOP", "stopping"): "test_stopped_processes.py a_job_with_a_stopped_process_ends",
    ("spawner", "SIGKILL", "starting"): "test_orphans.py no_process_survives_a_kill_during_the_start",
    (
        "spawner",
        "SIGKILL",
        "running",
    ): "test_restarting_a_role.py a_role_restarts_when_the_spawner_was_killed",
    (
        "spawner",
        "SIGSTOP",
        "starting",
    ): "test_stopped_processes.py a_spawner_that_is_stopped_while_it_imports",
    ("spawner", "SIGSTOP", "running"): "test_stopped_processes.py the_end_of_a_rank_is_noticed",
    ("spawner", "SIGSTOP", "stopping"): "test_stopped_processes.py a_job_with_a_stopped_process_ends",
    ("master", "SIGKILL", "starting"): "test_durability_crash_points.py a_master_may_crash_before_and_after",
    (
        "master",
        "SIGKILL",
        "running",
    ): "test_durability_commands.py a_job_in_the_background_survives_its_masters",
    (
        "master",
        "SIGKILL",
        "in a call",
    ): "test_durability_kills.py repeated_deaths_of_the_master_cost_no_worker",
    ("master", "SIGKILL", "stopping"): "test_durability_commands.py a_stop_outlives_the_master",
    ("master", "SIGSTOP", "running"): "test_durability_hangs.py a_master_that_hangs_longer_than_its_lease",
    ("master", "disk full", "running"): "test_durability_full_disk.py decisions_during_a_full_disk",
    ("master", "disk full", "stopping"): "test_durability_full_disk.py a_job_can_be_stopped_though_the_disk",
    ("trainer", "SIGKILL", "in a call"): "test_calls.py a_trainer_that_is_not_recoverable_ends_the_job",
    ("trainer", "exit 1", "running"): "test_calls.py an_error_of_the_trainer_is_the_root_cause",
    ("trainer", "exit 0", "running"): "test_calls.py a_trainer_calls_its_workloads",
    ("rendezvous store", "SIGKILL", "in a call"): "test_calls.py a_rendezvous_store_that_is_killed_costs_no",
    (
        "store member",
        "SIGKILL",
        "running",
    ): "test_durability_etcd.py a_job_survives_the_death_of_an_etcd_member",
    ("store member", "SIGSTOP", "stopping"): "test_durability_etcd.py ctrl_c_while_the_store_is_away",
    ("service", "SIGKILL", "running"): "test_services.py a_rank_restarts_alone_and_the_addresses_tell_it",
    ("service", "SIGSTOP", "starting"): "test_services.py a_server_that_is_never_ready_ends_the_job",
    ("service", "SIGSTOP", "running"): "test_services.py a_server_that_answers_no_more_is_restarted",
    (
        "service",
        "SIGTERM ignored",
        "stopping",
    ): "test_services.py nothing_stays_of_a_server_that_ignores_term",
    ("service", "exit 1", "starting"): "test_services.py a_server_that_dies_before_it_is_ready",
    ("service", "exit 0", "running"): "test_services.py a_service_that_ends_with_0_has_failed",
    ("service", "port taken", "starting"): "test_services.py a_port_stays_over_a_restart",
}
"""The file below tests/integration, and the beginning of the name of the test."""


@pytest.mark.parametrize(("row", "test"), REAL.items(), ids=lambda each: str(each))
def test_a_row_of_the_matrix_has_a_test_with_real_processes(row: tuple[str, str, str], test: str) -> None:
    part, fault, moment = row
    outcome = PAGE["MATRIX"][part, fault][PAGE["MOMENTS"].index(moment)]
    assert outcome not in PAGE["NEVER"]
    name, _, begins = test.partition(" ")
    assert re.search(
        rf"^ *(async )?def test_{begins}", (TESTS / "integration" / name).read_text(), re.MULTILINE
    )
