"""Ops from outside torch: what their authors say of them.

`registration` is behind `torpor.ops.register` and `unregister`. The pass `expand` takes apart those
that have a lowering.

Who may come in (layer `ops`): users through `torpor.ops`, packages of `torpor codegen` through
`registration.define`, `passes.expand`.
"""
