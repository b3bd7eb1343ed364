"""What happened, when, and on which line of the user's program: for people, never for decisions.

`events`, `phases`, `history`, `gauges` and `memory` (how much a graph will need) observe the
engine; `watch` lets tools observe graphs running; `site` and `scope` find the user's line and
module, `lines` keeps those of one run.

The engine reports here; `debug`, `torpor.metrics` and the command line read.
`lines` belongs to the layer `ir`, `site` and `scope` to `trace`, the rest to `execute`.
"""
