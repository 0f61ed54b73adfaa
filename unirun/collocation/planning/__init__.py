"""The planner: a request and an inventory give a placement, or an error that says what would fit.

`problem` brings a request into the form in which it is solved, `faults` finds what is wrong with it. `packing` says
what fits on a node, `merit` how good it is there; `exact` and `fill` choose for all nodes, `solve` between the two.
`runs` has the rules by which nodes are filled one after the other, `parts` packs one part of a job after the other. On
which slots of a node ranks are is a search on a `board`: `islands` are slots that are alike in what they are near
to, `pools` says how near sets of them are, and `near` chooses. `layout` gives ranks their slots. `plan` and `replan`
are what others call; `shortage` explains when they cannot, with `offers` of `changes` that would fit.
"""

from unirun.collocation.planning.plan import plan
from unirun.collocation.planning.replan import replan

__all__ = ["plan", "replan"]
