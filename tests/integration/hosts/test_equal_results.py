"""The same job on one host and on three: its results are equal to the last bit."""

from __future__ import annotations

import pytest

from tests.testbed.hosts import REPOSITORY

from .cluster import UnirunOnHosts

TRAINING = """
    # A small model, trained by all ranks of a role together, each on data of its own. Without DDP, whose import takes seconds.
    import hashlib, json, os, socket
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(len(os.environ["ROLE_NAME"]))
    network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    samples = torch.Generator().manual_seed(rank)
    for _ in range(20):
        batch = torch.randn(32, 16, generator=samples)
        loss = (network(batch) - batch[:, :4]).square().mean()
        network.zero_grad()
        loss.backward()
        flat = torch.cat([each.grad.flatten() for each in network.parameters()])
        dist.all_reduce(flat)
        with torch.no_grad():
            at = 0
            for each in network.parameters():
                each -= 0.01 * flat[at : at + each.numel()].view_as(each)
                at += each.numel()
    parameters = b"".join(each.detach().numpy().tobytes() for each in network.parameters())
    found = {"role": os.environ["ROLE_NAME"], "rank": rank, "host": socket.gethostname()}
    print(json.dumps({**found, "hash": hashlib.sha256(parameters).hexdigest()}), flush=True)
    dist.destroy_process_group()
"""


def results(cluster: UnirunOnHosts, hosts: str) -> tuple[dict[str, str], set[str]]:
    """The hash of the parameters of all ranks, by rank, and the hosts on which they were."""
    train = cluster.work / "train.py"
    end = cluster("--hosts", hosts, "--roles", "actor=6,rollout=6", train, within=180.0, cwd=cluster.work)
    assert end.code == 0, end.err
    rows = end.rows
    return {f"{row['role']}:{row['rank']}": row["hash"] for row in rows}, {row["host"] for row in rows}


@pytest.mark.timeout(300)
@pytest.mark.chaos
def test_twelve_ranks_compute_the_same_on_one_host_and_on_three(cluster: UnirunOnHosts) -> None:
    cluster.place("train.py", TRAINING)
    one, where = results(cluster, "h1:12")
    assert where == {"h1"}
    three, where = results(cluster, "h1:4,h2:4,h3:4")
    assert where == {"h1", "h2", "h3"}
    assert one == three
    assert len(one) == 12
    assert len(set(one.values())) == 2, "all ranks of a role have the same parameters"


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_ddp_on_digits_ends_with_the_same_loss_on_one_host_and_on_three(cluster: UnirunOnHosts) -> None:
    train = REPOSITORY / "examples" / "ddp_digits" / "train.py"
    losses = []
    for hosts in ("h1:12", "h1:4,h2:4,h3:4"):
        end = cluster("--hosts", hosts, "--roles", "train=12", train, within=180.0, cwd=REPOSITORY)
        assert end.code == 0, end.err
        losses += [line for line in end.lines if line.startswith("final loss")]
    assert len(losses) == 2
    assert losses[0] == losses[1]
