"""Every test here makes nodes of its own, as those of `tests/unit/ir` do."""

from tests.unit.ir.conftest import fresh_table  # noqa: F401  # every test uses it
