"""Where programs and torch meet lazy tensors other than through ops.

User-facing functions (`api`, `mode`, `enable`), the device (`devices`, `device_module`), tensor
methods besides ops (`methods`, `storages`, `sharing`, `exchange`, `switching`), modules and
optimizers (`hooks`, `optimizers`), and parts of torch with machinery of their own (`foreign`,
`scripts`, `subclasses`). `install` installs all of it, once.

Imported by (layer `trace`): `torpor/__init__.py`, which defines the public API; `overrides`,
`native` and `adaptive` for single names. The engine does not import it.
"""
