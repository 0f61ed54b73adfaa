"""Jobs under Slurm."""
