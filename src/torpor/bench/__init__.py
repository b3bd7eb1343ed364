"""Whole steps measured against eager, torch.compile and torch._lazy: what `torpor bench` runs.

For someone who adds a workload or a runner. `workloads` says what is run, `runners` by whom;
`worker` is one runner in a process of its own, `race` lets the workers take turns, `report` and
`plot` show what came out. `script` does the same for a program of the user's, in `script_worker`;
`growth` looks at cost as work grows, in `growth_worker`.

What a worker loads imports torch alone: a process that measures eager must not load torpor, which
hooks into torch (see `bare`).
"""
