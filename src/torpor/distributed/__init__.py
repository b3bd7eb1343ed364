"""Collectives in the graph, and ranks that agree before they run them.

`ops` has the collectives as ops of torpor's own; `recorders` turns what torch.distributed calls
into them; `agreement` compares what ranks are about to run; `data_parallel` keeps the buckets of
DistributedDataParallel lazy; `plain` keeps collectives on plain tensors in their turn; `sharded`
gathers and scatters parameters, and `fully_shard` lets torch's own do so on lazy ones. The engine
asks `ops` which nodes are collectives, and `agreement` before a graph with some runs. Users come in
by `torch.distributed`, and by `sharded.shard_parameters`.
"""
