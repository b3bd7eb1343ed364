"""The built-in backends, one package each, and what they share; callable.

`torpor.backends() -> dict[str, str]`: every known backend, including those of other packages, by
name: "available", or why it is not.

Built on `torpor.backend`. No layer imports this package: layers find a backend by name, so that
`import torpor` loads none of them. Tools (`debug`, `testing`, `compat`, `bench`) and authors of
other backends may import the shared modules: `kernels`, `declared`, `layout`, `equality` and
`provenance`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from torpor.backend import registry


class CallablePackage(ModuleType):
    """The class of this package: `torpor.backends` is a package and a public function at once."""

    def __call__(self) -> dict[str, str]:
        """Every known backend: "available", or the reason why it is not."""
        return registry.backends()

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        # Functions can be pickled and copied, modules cannot.
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = CallablePackage
