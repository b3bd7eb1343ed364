"""Collectives in the graph, and the check that ranks agree on them before running them.

`ops` defines collectives as torpor's own ops; `recorders` records the calls of torch.distributed
as these ops; `agreement` compares what ranks are about to run; `data_parallel` keeps the buckets of
DistributedDataParallel lazy; `plain` orders collectives on plain tensors after recorded ones;
`sharded` gathers and scatters parameters, and `fully_shard` does so for torch's own sharding. The
engine asks `ops` which nodes are collectives, and `agreement` before it runs a graph that has some.
Users call `torch.distributed` and `sharded.shard_parameters`.
"""
