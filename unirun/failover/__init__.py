"""The brain of a job: its state, the events that change it, and the decisions; pure functions, no input or output.

`step` takes an event to the function for it. `worker_failure`, `node_loss` and `takeover` say what is lost; `policy`
decides; `restart_or_end` carries the decision out. All of them change a `draft` of the job, and no phase but as the
tables of `phases` allow. `context` is the form of the state in the store.
"""
