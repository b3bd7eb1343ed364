"""From values to numbers: where a trace is cut, how its plan is found or compiled, who runs it.

Built on `backend`, with `compiling`, `transactions` and `observe` at its side. `native`, `trace`,
the command line and tools (`debug`, `compat`, `testing`,
`bench`) may import it; `ir`, `ops`, `backend` and backends may not.
"""
