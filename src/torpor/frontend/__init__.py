"""Where programs and torch meet lazy tensors other than by ops.

What users call (`api`, `mode`, `enable`), the device (`devices`, `device_module`), what a tensor
does besides ops (`methods`, `storages`, `sharing`, `exchange`, `switching`), modules and optimizers
(`hooks`, `optimizers`), and parts of torch with machinery of their own (`foreign`, `scripts`,
`subclasses`). `install` puts all of it in its place, once.

Who may come in (layer `trace`): `torpor/__init__.py`, which says what is public; `overrides`,
`native` and `adaptive` for single names. The engine asks nothing of it.
"""
