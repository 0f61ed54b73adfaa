"""What runs inside a worker: who it is, who the others are, and groups with them."""

from unirun.roles.context import Context, Member, init

__all__ = ["Context", "Member", "init"]
