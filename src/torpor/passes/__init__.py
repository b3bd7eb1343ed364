"""Named passes between a recorded graph and a compiled one: a graph in, a graph out.

A pass rewrites nodes, or stores its analysis in the graph itself (blocks, their outputs, which
inputs are overwritten), so that every pass can be shown as text in, text out: `torpor graph FILE
--after PASS`. Which passes run, and in which order, is up to a backend
(`torpor.backend.Backend.passes`).
"""

from torpor.passes.pipeline import Pass, run_passes, stages

__all__ = ["Pass", "run_passes", "stages"]
