"""Sizes, offsets and numbers that change from step to step: symbols and run-time inputs.

`expressions` (symbols, what is computed from them, conditions), `solve` (the expression that gives
the numbers seen) and `serialize` (as data for another process) are of the layer `ir`. `arguments`
(sizes among an op's arguments) and `infer` (types with symbols) are of `ops`, `leaves` (which sizes
of a trace are symbols) of `execute`, `record`, `offsets` and `scalars` of `trace`.

Who may come in: each layer of the engine at the modules of its own layer and below; backends read
`expressions`.
"""
