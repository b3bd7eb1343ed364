"""Sizes, offsets and numbers that change from step to step: symbols and run-time inputs.

`expressions` (symbols, expressions of them, conditions), `solve` (fits an expression to the
numbers seen) and `serialize` (as data for another process) belong to the layer `ir`; `arguments`
(size arguments of ops) and `symbolic_types` (types with symbols) to `ops`; `leaves` (which sizes of
a trace are symbols) to `execute`; `symbolic_nodes`, `offsets` and `scalars` to `trace`.

Imported by: each layer of the engine, the modules of its own layer and below; backends read
`expressions`.
"""
