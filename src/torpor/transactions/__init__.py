"""A step is a transaction: what its results replace, what is rolled back when it fails.

`jobs` (what a queue runs), `transaction` (the job of a step), `donation` (which inputs it may
overwrite), `results` (checks what a backend returned), `rollback` (what is restored), `closures`
(step-end callbacks), `finalizers` (what they use stays in the trace).

Imported by (layer `execute`): `execute.sync` and `execute.queue`, which make and run jobs; users
reach it through `torpor.at_step_end`.
"""
