"""Whether the page of `torpor view` is what its sources say: ``python scripts/page.py [--write]``.

`make page` builds `src/torpor/debug/view/page` from `web/`, which needs node and npm; its last step
writes down the sums of both here. The check compares them and needs neither.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "web"
PAGE = ROOT / "src" / "torpor" / "debug" / "view" / "page"
SUMS = "sums.json"


def sums(web: Path = WEB, page: Path = PAGE) -> dict[str, str]:
    """The sum of the sources, and of each file that is built from them."""
    sources = sorted(p for p in web.rglob("*") if p.is_file() and "node_modules" not in p.parts)
    built = sorted(p for p in page.iterdir() if p.is_file() and p.name != SUMS)
    return {"web/": _sum(sources, web), **{p.name: _sum([p], page) for p in built}}


def _sum(files: Iterable[Path], root: Path) -> str:
    found = hashlib.sha256()
    for file in files:
        contents = file.read_bytes()
        found.update(f"{file.relative_to(root).as_posix()} {len(contents)}\n".encode())
        found.update(contents)
    return found.hexdigest()


def stale(web: Path = WEB, page: Path = PAGE) -> list[str]:
    """What is not as it was when the page was built."""
    noted = json.loads((page / SUMS).read_text(encoding="utf-8"))
    now = sums(web, page)
    return sorted(name for name in {*noted, *now} if noted.get(name) != now.get(name))


def main(argv: list[str]) -> int:
    if argv == ["--write"]:
        (PAGE / SUMS).write_text(json.dumps(sums(), indent=2) + "\n", encoding="utf-8")
        return 0
    changed = stale()
    for name in changed:
        print(f"{name} has changed since the page was built; run: make page")
    if not changed:
        print(f"{PAGE.relative_to(ROOT)} is built from web/")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
