"""Real hosts on one machine: network namespaces with sshd, and a Slurm of three nodes. See README.md."""
