"""Jobs that borrow their spawners from a warm process are as those that start cold, whatever happens to that process."""
