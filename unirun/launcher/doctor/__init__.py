"""``unirun doctor``: what is wrong with hosts before a job runs on them."""
