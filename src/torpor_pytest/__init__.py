"""Lets pytest find the options of torpor's conformance kit, where it is asked for.

`pytest --pyargs torpor.testing --backend acme` names a package, and pytest reads the options of a
package's tests too late. This module is what every pytest run loads: it imports nothing of
torpor's unless the command line names the kit, so no other test run pays for it or meets its
options.
"""

from __future__ import annotations

from typing import Any

KIT = "torpor.testing"
PLUGIN = "torpor.testing.plugin"


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Load the kit's plugin if its package, or a module of it, is among the arguments."""
    if any(_names_the_kit(arg) for arg in args) and not early_config.pluginmanager.has_plugin(
        PLUGIN
    ):
        early_config.pluginmanager.import_plugin(PLUGIN)


def _names_the_kit(arg: str) -> bool:
    name = arg.partition("::")[0]
    return name == KIT or name.startswith(f"{KIT}.")
