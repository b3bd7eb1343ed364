"""Whole steps measured against eager, torch.compile and torch._lazy: what `torpor bench` runs.

For someone who adds a workload or a runner. `workloads` defines what is run, `runners` by which
system; `worker` is one runner in a process of its own, `race` interleaves the workers, `report` and
`plot` show the results. `script` does the same for a user's program, in `script_worker`; `growth`
measures how cost grows with the amount of work, in `growth_worker`.

A worker imports nothing but torch: a process that measures eager must not load torpor, which
hooks into torch (see `bare`).
"""
