"""Hooks on imports of torch's modules, and replacement of functions in all modules.

Uses Python's import machinery and every loaded module of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class _Imports:
    """A meta path finder that calls functions with modules right after they are imported."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec from the other finders, if there is a hook for `name`."""
        if name not in self.hooks:
            return None
        others = (f for f in sys.meta_path if f is not self)
        spec = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.hooks.pop(name))  # type: ignore[assignment]  # used like one
        return spec


class _Loader:
    """A loader that calls functions with the module it has loaded."""

    def __init__(self, loader: Any, hooks: list[Callable[[Any], None]]) -> None:
        self.loader = loader
        self.hooks = hooks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: Any) -> None:
        """Execute the module, then call the hooks."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for hook in self.hooks:
            hook(module)


_imports = _Imports()


def after_import(name: str, hook: Callable[[Any], None]) -> None:
    """Call `hook` with a module of torch: now, or when it is imported."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    _imports.hooks.setdefault(name, []).append(hook)
    if _imports not in sys.meta_path:
        sys.meta_path.insert(0, _imports)


def replace_function(name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace torch's function `module.function` by the result of `around`.

    It is replaced in all torch modules that have it under that name; no-op if there is none.
    """
    module_name, _, attribute = name.rpartition(".")

    def replace(module: Any) -> None:
        original = getattr(module, attribute, None)
        if original is None:
            return
        made = around(original)
        # a copy is one step; a list of items may run the garbage collector, and so other threads
        for key, other in sys.modules.copy().items():
            shown = vars(other).get(attribute) if _is_torchs(key) else None
            shown = getattr(shown, "_torchdynamo_orig_callable", shown)  # hidden from TorchDynamo
            if shown is original:
                setattr(other, attribute, made)

    after_import(module_name, replace)


def _is_torchs(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")
