"""Sizes, offsets and numbers that change from step to step: symbols and run-time inputs.

`expressions` (symbols, expressions of them, conditions), `solve` (fits an expression to observed
numbers) and `serialize` (for other processes) belong to the layer `ir`; `arguments` (size arguments
of ops) and `symbolic_types` (symbolic inference) to `ops`; `leaves` (which sizes of a trace are
symbols) to `execute`; `symbolic_nodes`, `offsets` and `scalars` to `trace`.

Imported by: each layer of the engine, the modules of its own layer and below; by backends,
`expressions`.
"""
