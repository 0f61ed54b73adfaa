"""The planner: a request and an inventory give a placement, or an error that says what would fit. Pure functions.

`problem` brings a request into the form in which it is solved, cells of bundles, or says what is wrong with it. `nodes`
sorts nodes into kinds. `packer` says which cells fit on a node of a kind, and on which slots. `solve` decides how many
cells there are and which node gets which: completely for small problems, else by filling; it has the score too.
`plan` lays ranks out on slots. `replan` does the same after a loss. When nothing fits, `offers` says why, with requests
that fit.
"""

from unirun.collocation.planning.plan import plan, replan

__all__ = ["plan", "replan"]
