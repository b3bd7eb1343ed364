"""Compiled graphs on disk: the third look-up, after nodes and plans.

`store` keeps bytes under keys for every process of one user; `graphs` says which entry is a graph's
and has a backend load it; `archive` puts a store into one file and back.

Who may come in (layer `execute`): `compiling`, `native` (its library lies in the same store),
`torpor cache`. The engine knows of it through `compiling.draft` alone.
"""
