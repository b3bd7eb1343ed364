"""Ops that are not recorded as their schema says, so that results match eager bit for bit.

Run immediately (`eager`, `random`); hand-written recorders (`special`, `resize`); composite ops
recorded whole or decomposed as in eager (`composites`, `whole`, `template`, `fused`, `gradients`);
recurrent layers (`rnn`, `packed`, `cudnn_weights`). torpor's own ops: `storage_ops`, `rnn_ops`,
`grad_mode`, and `draws` (random ops drawn later from a noted generator state).

Imported by: `trace.dispatch`, which looks here first; `frontend.install`, which registers them.
torpor's own ops belong to the layer `ops` and are open to backends; the rest belongs to `trace`.
"""
