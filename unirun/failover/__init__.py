"""The reactions to the failure of a worker, its rendezvous store, a node or the master: pure functions over
`unirun.job`.

`worker_failure`, `node_loss` and `takeover` say what is lost; `policy` decides; `restart_or_end` carries the decision
out.
"""
