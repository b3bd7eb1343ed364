"""Regions: what TorchDynamo has captured is recorded once, and found again by one look-up.

`captured_program` turns a captured graph into calls of ops, `region` interns its calls, `frames`
lets TorchDynamo capture frames that meet lazy tensors, `modules` captures calls of modules without
being asked (`config.capture`). `frontend` alone comes in: it installs `frames` and calls modules.
Nothing of the engine knows of regions.
"""
