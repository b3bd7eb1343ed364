"""Graphs as text, pictures and differences, and the rules that every graph keeps.

`printer` and `parser` are inverse; `torch_parser` reads graphs on torch's ops; `canonical` is the
text that identifies a graph in any process, `dot` a picture, `difference` what makes two graphs
two; `verify` checks a graph before it is compiled.

Who may come in: anybody. All of it is of the layer `ir`, but `torch_parser`, which is of `ops`.
"""
