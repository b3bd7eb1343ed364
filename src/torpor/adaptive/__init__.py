"""Choices made while the program runs: recorded or eager, on the reading thread or on the queue.

`bound` and `choice` measure each group of models and run it in the faster mode, so that none
stays slower than eager; `cycles` finds reads that end a step, `at_once` computes small reads on the
reading thread.

Imported by: `execute.sync`, which uses `cycles` and `at_once` (layer `execute`), and `frontend`,
which uses `bound` (layer `trace`).
"""
