"""What `_torch.import_hooks` takes from inside torch still is what torpor takes it for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torpor import _torch


def test_after_import_now_or_when_a_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text("value = 1")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from torpor import _torch\n"
        "met = []\n"
        "_torch.after_import('later', met.append)\n"
        "assert 'later' not in sys.modules and not met\n"
        "import later\n"
        "assert met == [later] and later.__loader__ is later.__spec__.loader\n"
        "_torch.after_import('later', met.append)\n"
        "assert met == [later, later]\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_replace_function_wherever_torch_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> int:
        return 1

    for module in (torch, torch.jit):
        monkeypatch.setattr(module, "shown", shown, raising=False)
    monkeypatch.setitem(sys.modules, "blocked", None)  # how programs forbid an import
    _torch.replace_function("torch.jit.shown", lambda original: lambda: original() + 1)
    assert torch.shown() == torch.jit.shown() == 2
    _torch.replace_function("torch.jit.there_is_none", lambda original: original)
    assert not hasattr(torch.jit, "there_is_none")
