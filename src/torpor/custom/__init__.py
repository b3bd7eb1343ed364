"""User-defined ops: their type rules and lowerings.

`registration` implements `torpor.ops.register` and `unregister`. The pass `expand` decomposes ops
that have a lowering.

Imported by (layer `ops`): users through `torpor.ops`, packages of `torpor codegen` through
`registration.define`, `passes.expand`.
"""
