"""From values to data: where a trace is cut, how its plan is found or compiled, who runs it.

Built on `backend`; uses `compiling`, `transactions` and `observe`. `native`, `trace`, the command
line and tools (`debug`, `compat`, `testing`, `bench`) may import it; `ir`, `ops`, `backend` and
backends may not.
"""
