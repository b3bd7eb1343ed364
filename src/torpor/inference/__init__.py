"""Output types of ops, without running them.

`infer` answers, from a rule (`type_rules`), from arithmetic on sizes and strides (`elementwise`,
`strides`), or from torch's fake tensors, and remembers; `indexing` finds mistakes that fake tensors
let pass. `_generated` is written by `make codegen`.

Who may come in (layer `ops`): whoever makes a node asks `infer.infer`; `custom` and backends add
rules.
"""
