"""Choices made while the program runs: recorded or eager, here and now or on the queue.

`bound` and `choice` measure each place of a program and let it run the faster way, so that none is
slower than eager for long; `cycles` finds reads that end a step, `at_once` computes small reads on
the thread that asks.

Who may come in: `execute.sync` asks `cycles` and `at_once` (layer `execute`); `frontend` asks
`bound` (layer `trace`). Nobody else needs to know.
"""
