"""Generates text from torch's list of ops: stubs, elementwise types, backend packages.

`model` is what an op is, read from `native_functions.yaml` (in the torch wheel, with torchgen);
everything else turns it into text. Nothing here is loaded by `import torpor`.
"""
