"""What each op is: schema, types, flags. Ops of somebody's own are told of here."""

from torpor.ops.custom import WHOLE, register, unregister

__all__ = ["WHOLE", "register", "unregister"]
