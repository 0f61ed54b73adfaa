"""Jobs that borrow spawners from a warm process behave as cold ones, whatever happens to that process."""
