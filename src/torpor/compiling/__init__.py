"""From a graph to a compiled one: when, in which process, and what runs it in the meantime.

`draft` decides, `worth` estimates what pays off; `compilation` lowers and compiles one graph, or
falls back to the reference backend; `background` is the compile thread, `remote` and `worker` the
compile process, `processes` starts low-priority processes.

Imported by (layer `execute`): `execute.plan_cache`, which makes a `Draft` of each new graph.
`cache`, `observe` and `transactions` read the results of `compilation`; tools may compile a graph.
"""
