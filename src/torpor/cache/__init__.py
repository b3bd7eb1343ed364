"""Compiled graphs on disk: the third cache, after nodes and plans.

`store` keeps bytes under keys for all processes of one user; `graphs` finds the entry of a graph
and has a backend load it; `archive` exports a store to one file and imports it.

Imported by (layer `execute`): `compiling`, `native` (its library is kept in the same store),
`torpor cache`. The engine uses it through `compiling.draft` only.
"""
