"""A step is a transaction: what its results replace, what goes back when it fails.

`jobs` (what a queue runs), `transaction` (the job of a step), `donation` (which inputs it may write
over), `results` (what a backend returned, checked), `rollback` (what goes back), `closures`
(functions to call at its end).

Who may come in (layer `execute`): `execute.sync` and `execute.queue` make and run jobs; users come
by `torpor.at_step_end`.
"""
