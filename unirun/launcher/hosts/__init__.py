"""Jobs on several hosts: how a command and the agents of other hosts meet, over ssh or by TLS."""
