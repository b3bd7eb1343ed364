"""Ordinary programs under eager, `torpor.enable()` and torch.compile: `torpor bench --wild`.

For someone who adds a program or wants to know how they are measured. `images`, `generative`,
`text` and `control` hold the programs, written as people write them and tuned for no system;
`programs` lists them; `loop` is the only measuring hook in a program. `worker` is one program with
one runner in a process of its own, `measure` starts the processes, `outcome` holds the numbers,
`report` shows them; `soak` is a program whose graphs never repeat.

As everywhere in this package, a worker imports nothing but torch (see `torpor.bench.bare`).
"""
