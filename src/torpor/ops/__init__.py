"""What each op is: schema, rules, keys, views. Custom ops are registered here.

`register`, `unregister` and `WHOLE` live in `custom.registration`, which builds on this package;
they are imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torpor.custom.registration import WHOLE, register, unregister

__all__ = ["WHOLE", "register", "unregister"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torpor.custom import registration

    return globals().setdefault(name, getattr(registration, name))
