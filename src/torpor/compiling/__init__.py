"""From a graph to a compiled one: when, in which process, and what runs it meanwhile.

`draft` decides, `worth` says what pays; `compilation` lowers and compiles one graph, or takes the
reference backend in place of a backend that cannot; `background` is the compile thread, `remote`
and `worker` the process that compiles, `processes` starts those of low priority.

Who may come in (layer `execute`): `execute.plan_cache` makes a `Draft` of each new graph. `cache`,
`observe` and `transactions` read what `compilation` says of a graph; tools may compile one.
"""
