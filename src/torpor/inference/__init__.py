"""Output types of ops, without running them.

`infer` answers from a rule (`type_rules`), from arithmetic on sizes and strides (`elementwise`,
`strides`), or from torch's fake tensors, and memoizes; `indexing` finds index errors that fake
tensors miss. `_generated` is written by `make codegen`.

Imported by (layer `ops`): all code that makes nodes calls `infer.infer`; `custom` and backends add
rules.
"""
