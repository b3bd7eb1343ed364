"""Regions: code that TorchDynamo has captured is recorded once, then each call is one cache lookup.

`captured_program` turns a captured graph into calls of ops, `region` interns its calls, `frames`
lets TorchDynamo capture frames that see lazy tensors, `modules` captures module calls
automatically (`config.capture`). Imported by `frontend` only, which installs `frames` and calls
modules. The engine does not know about regions.
"""
