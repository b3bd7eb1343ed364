"""The library is looked for when the first op is recorded, whichever that is and wherever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIRST = {
    "tensor": 'torch.tensor([1.0, 1.0], device="lazy")',
    "moved": 'torch.ones(2).to("lazy")',
    "layer": 'torch.nn.Linear(2, 2, device="lazy").weight[0] * 0 + 1',
    "loaded": "torch.load(saved, map_location='lazy')",
    "inference": 'torch.inference_mode()(torch.tensor)([1.0, 1.0], device="lazy")',
}

PROGRAM = """
import io, torch, torpor
from torpor.native.attach import NATIVE_RECORDER
saved = io.BytesIO()
torch.save(torch.ones(2), saved)
saved.seek(0)
x = {first}
assert (x + 1).tolist() == [2.0, 2.0]
assert NATIVE_RECORDER.library is not None
"""


@pytest.mark.parametrize("name", FIRST)
def test_any_op_may_be_the_first(name: str, library_path: Path) -> None:
    cache = str(library_path.parents[1])
    settings = {"TORPOR_NATIVE": "on", "TORPOR_BACKEND": "reference", "TORPOR_CACHE_DIR": cache}
    program = PROGRAM.format(first=FIRST[name])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | settings | {"TORPOR_CACHE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
