"""The planner: a request and an inventory give a placement, or an error that says what would fit. Pure functions.

`problem` brings a request into the form in which it is solved, cells of bundles, or says what is wrong with it; their
needs and the offers of nodes are small vectors. `packer` says which cells fit on a node of a kind, and on which slots.
`solve` has the score, and the search that decides how many cells there are and which node gets which. `plan` pins the
ranks that stay, none at first and those of the survivors after a loss, and lays the others out on slots. When nothing
fits, `offers` says why, with requests that fit.
"""

from unirun.collocation.planning.plan import plan, replan

__all__ = ["plan", "replan"]
