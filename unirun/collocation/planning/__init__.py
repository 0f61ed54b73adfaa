"""The planner: a request and an inventory give a placement, or an error that says what would fit. Pure functions.

`problem` brings a request into the form in which it is solved, cells of bundles, or says what is wrong with it. `nodes`
sorts nodes into kinds. `packer` says which cells fit on a node of a kind, and on which slots. `solve` decides how many
cells there are and which node gets which: completely for small problems, else with `fill`, which also has the score.
`plan` lays ranks out on slots. `replan` does the same after a loss. When nothing fits, `explain` says why, with
`offers` that fit.
"""

from unirun.collocation.planning.plan import plan
from unirun.collocation.planning.replan import replan

__all__ = ["plan", "replan"]
