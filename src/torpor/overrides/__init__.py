"""Ops that are not recorded as their schema says, so that results are eager's bit for bit.

Run at once (`eager`, `random`); recorded by hand (`special`, `resize`); composite ops kept whole or
taken apart as eager does (`composites`, `whole`, `template`, `fused`, `gradients`); recurrent
layers (`rnn`, `packed`, `cudnn_weights`). Ops of torpor's own: `storage_ops`, `rnn_ops`,
`grad_mode`, and `draws` (random ops that draw in their turn).

Who may come in: `trace.dispatch` looks here first; `frontend.install` registers. The ops of
torpor's own are of the layer `ops` and open to backends; the rest is of the layer `trace`.
"""
