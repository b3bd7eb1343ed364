"""Named passes between a recorded graph and a compiled one: a graph in, a graph out.

A pass rewrites nodes, or writes down what it found in the graph itself (blocks, what they leave
behind, which inputs are overwritten), so that every pass reads and makes text. `torpor graph FILE
--after PASS` shows it. Which passes run, and in which order, is up to a backend
(`torpor.backend.Backend.passes`).
"""

from torpor.passes.pipeline import Pass, run_passes, stages

__all__ = ["Pass", "run_passes", "stages"]
