"""A script of one role runs as under torchrun, and without any launcher."""

from __future__ import annotations

import socket
import sys

from .harness import ENVIRON, TORCHRUN, Script, Unirun


class TestOneRoleIsTorchrun:
    def test_a_script_without_roles_runs_as_the_role_default(self, unirun: Unirun) -> None:
        result = unirun("--standalone", "--nproc-per-node", 2, ENVIRON, "--reduce")
        assert (result.code, [row["sum"] for row in result.rows]) == (0, [3, 3]), result.err
        assert {row["role"] for row in result.rows} == {"default"}

    def test_the_role_can_be_named_and_one_worker_has_no_prefix(self, unirun: Unirun) -> None:
        result = unirun("--role", "learner", "--no-python", "/bin/sh", "-c", "echo $ROLE_NAME")
        assert (result.code, result.out) == (0, "learner\n"), result.err

    def test_a_script_has_the_same_environment_and_result_as_under_torchrun(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, torch, torch.distributed as dist
            from torch.distributed.elastic.multiprocessing.errors import record

            @record
            def main():
                dist.init_process_group("gloo")
                torch.manual_seed(dist.get_rank())
                value = torch.randn(3)
                dist.all_reduce(value)
                rank, local = dist.get_rank(), os.environ["LOCAL_RANK"]
                ours = "UNIRUN_", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
                names = sorted(name for name in os.environ if not name.startswith(ours))
                signals = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
                print(f"result {rank} {local} {dist.get_world_size()} {value.tolist()} {signals} {names}\\n", end="", flush=True)
                dist.destroy_process_group()

            main()
            """,
            "my train é.py",
        )
        ours = unirun("--nproc-per-node", 2, train)
        assert ours.code == 0, ours.err
        torchrun = [TORCHRUN, "--standalone", "--nproc-per-node", "2", str(train)]
        theirs = unirun.start_program(torchrun).end()
        assert theirs.code == 0, theirs.err
        assert ours.lines == [line for line in theirs.lines if line.startswith("result")]

    def test_torchruns_variables_are_accepted_as_options(self, unirun: Unirun) -> None:
        result = unirun(
            *("--start-method", "exec", ENVIRON), env={"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2"}
        )
        assert (result.code, len(result.rows)) == (0, 3), result.err
        assert {row["env"]["TORCHELASTIC_MAX_RESTARTS"] for row in result.rows} == {"2"}

    def test_master_port_and_job_id_can_be_chosen(self, unirun: Unirun) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        result = unirun("--master-port", port, "--rdzv-id", "mine", "--start-method", "exec", ENVIRON)
        assert result.code == 0, result.err
        env = result.rows[0]["env"]
        assert (env["MASTER_PORT"], env["TORCHELASTIC_RUN_ID"]) == (str(port), "mine")

    def test_an_expired_torch_timer_kills_its_worker_which_restarts(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, time
            from torch.distributed.elastic import timer

            timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
            with timer.expires(after=600):
                print("in time", flush=True)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                with timer.expires(after=0.1, scope="batch"):
                    time.sleep(600)
            """
        )
        result = unirun("--max-restarts", 1, train, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
        assert result.code == 0, result.err
        assert result.lines == ["in time", "in time"]
        assert "default:0: its timer 'batch' has expired: process" in result.err
        (failure,) = unirun.status()["failures"]
        assert failure["exit"] == "killed by SIGKILL"

    def test_a_virtual_local_rank_is_0_everywhere(self, unirun: Unirun) -> None:
        result = unirun("--virtual-local-rank", "--nproc-per-node", 2, "--start-method", "exec", ENVIRON)
        assert [(row["rank"], row["env"]["LOCAL_RANK"]) for row in result.rows] == [(0, "0"), (1, "0")], (
            result.err
        )


class TestWithoutALauncher:
    def test_init_gives_one_role_with_one_rank_under_plain_python(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            "import unirun; c = unirun.init(); print(c.role, c.rank, c.world_size, dict(c.config), c.generation)"
        )
        done = unirun.start_program([sys.executable, str(train)]).end()
        assert (done.code, done.out) == (0, "default 0 1 {} 0\n"), done.err
