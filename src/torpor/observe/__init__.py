"""What happened, when, and on which line of the user's: for people, never for decisions.

`events`, `phases`, `history`, `gauges` and `memory` (what a graph will need) watch the engine at
work; `watch` lets tools see graphs run; `site` and `scope` find the user's line and module, `lines`
keeps those of one run.

Who may come in: the engine reports here; `debug`, `torpor.metrics` and the command line read.
`lines` is of the layer `ir`, `site` and `scope` of `trace`, the rest of `execute`.
"""
