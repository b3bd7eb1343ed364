"""The record path as code for one signature, where Python records an op often.

`source` writes the text of such a recorder, `recorders` makes the function and puts its code in
when it was called often enough. It does what `trace.recorder.record` does, and a test compares
them.

Who may come in: `trace.dispatch` and `overrides` make their recorders here (`recorders`, layer
`trace`); `source` (layer `ops`) is text and open to all.
"""
