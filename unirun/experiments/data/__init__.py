"""What sequences are, how they are split, and where they come from."""
