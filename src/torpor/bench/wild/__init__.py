"""Ordinary programs under eager, `torpor.enable()` and torch.compile: `torpor bench --wild`.

For someone who adds a program or asks how they are measured. `images`, `generative`, `text` and
`control` hold the programs, written as people write them and tuned for nobody; `programs` lists
them; `loop` is all that a program knows of being measured. `worker` is one program with one runner
in a process of its own, `measure` starts the processes, `outcome` holds the numbers, `report` shows
them; `soak` is a program whose graphs never come back.

As everywhere in this package, what a worker loads imports torch alone (see `torpor.bench.bare`).
"""
