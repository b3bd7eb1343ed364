"""Graphs as text, pictures and differences, and the invariants of every graph.

`printer` and `parser` are inverses; `torch_parser` parses graphs onto torch's ops; `canonical` is
the text that identifies a graph in any process, `dot` writes Graphviz, `difference` finds what
distinguishes two graphs; `verify` checks a graph before it is compiled.

Everything may import it. It belongs to the layer `ir`, except `torch_parser`, which belongs to
`ops`.
"""
