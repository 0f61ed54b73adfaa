"""Jobs on several hosts."""
