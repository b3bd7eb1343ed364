"""``torpor codegen FILE --out DIR``: generates the package of a backend from its YAML file.

``torpor codegen --stubs``: generates the stub of `torpor.ops.nodes` for type checkers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torpor.cli import terminal
from torpor.codegen import backend_package, coverage, own_ops, stubs
from torpor.codegen.backend_package import ForeignFiles
from torpor.codegen.coverage import Coverage, OwnCoverage
from torpor.codegen.torch_schemas import TorchgenMissing, schemas
from torpor.codegen.yaml_file import BackendFile, PyYamlMissing, YamlErrors, read

NAME = "codegen"
HELP = "generate a backend package from a YAML file, or stubs; show torpor's coverage of ATen"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE",
        help="the backend's YAML file; without --out, check it and show its coverage",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the package torpor_NAME")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if files are stale"
    )
    parser.add_argument("--diff", action="store_true", help="write nothing; show what would change")
    parser.add_argument("--coverage", action="store_true", help="show torpor's coverage of ATen")
    parser.add_argument("--markdown", action="store_true", help="--coverage as in docs/coverage.md")
    parser.add_argument("--own", action="store_true", help="torpor's own files, as `make codegen`")
    parser.add_argument(
        "--stubs", nargs="?", type=Path, const=stubs.site_packages(), metavar="DIR",
        help="write the types of torpor.ops.nodes for type checkers, as DIR/torpor-stubs; "
        "default DIR: site-packages",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    problem = _problem_with(arguments)
    if problem is not None:
        print(f"torpor codegen: {problem}", file=sys.stderr)
        return 2
    try:
        if arguments.stubs is not None:
            return _stubs(arguments)
        _read_ops()
        if arguments.coverage:
            return _show_own_coverage(arguments)
        if arguments.own:
            return _own_files(arguments)
        return _backend(arguments)
    except YamlErrors as errors:
        return _print_errors(errors, arguments.json)
    except (PyYamlMissing, TorchgenMissing) as missing:
        print(f"torpor codegen: {missing}", file=sys.stderr)
        return 2
    except (OSError, UnicodeDecodeError, ForeignFiles) as error:
        print(f"torpor codegen: {error}", file=sys.stderr)
        return 1


def _read_ops() -> None:
    """Read torch's list of ops, which takes seconds, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        return
    with terminal.progress("codegen", 1) as advance:
        advance(f"{len(schemas()):,} ops of torch")


def _problem_with(arguments: argparse.Namespace) -> str | None:
    """Why these arguments cannot be combined; None if they can."""
    given = arguments.file is not None, arguments.stubs is not None
    if sum([*given, arguments.coverage, arguments.own]) != 1:
        return "give a backend's YAML file, or --coverage, or --stubs, or --own"
    if arguments.out is not None and arguments.file is None:
        return "--out is for a backend's file"
    if (arguments.check or arguments.diff) and arguments.file is not None and arguments.out is None:
        return "--check and --diff compare with what is in --out DIR"
    if arguments.markdown and not arguments.coverage:
        return "--markdown is for --coverage"
    if arguments.file is not None and not arguments.file.is_file():
        return f"there is no file {arguments.file}"
    folder = arguments.stubs if arguments.out is None else arguments.out
    if folder is not None and folder.exists() and not folder.is_dir():
        return f"{folder} is a file"
    return None


def _print_errors(errors: YamlErrors, as_json: bool) -> int:
    number = len(errors.problems)
    print(errors, file=sys.stderr)
    print(f"{number} error{'s' if number > 1 else ''}; nothing was written", file=sys.stderr)
    if as_json:
        print(json.dumps({"file": errors.path, "errors": errors.to_json()}, indent=2))
    return 1


# -- a backend ---------------------------------------------------------------------------------


def _backend(arguments: argparse.Namespace) -> int:
    file = read(arguments.file)
    if arguments.diff:
        sys.stdout.write(backend_package.diff(file, arguments.out))
    if arguments.check or arguments.diff:
        return _print_stale(file, arguments)
    written = backend_package.write(file, arguments.out) if arguments.out is not None else []
    covered = coverage.of_backend(file)
    if arguments.json:
        print(json.dumps(_summary(file, arguments, covered, written), indent=2))
    else:
        _show(file, arguments, covered, written)
    return 0


def _print_stale(file: BackendFile, arguments: argparse.Namespace) -> int:
    stale = list(backend_package.stale(file, arguments.out))
    if not arguments.check:
        return 0
    if arguments.json:
        print(json.dumps({"backend": file.name, "stale": stale}, indent=2))
    elif not arguments.diff:
        for path in stale:
            print(f"stale: {arguments.out / path}")
        print(f"{len(stale)} files are stale" if stale else "up to date")
    return 1 if stale else 0


def _summary(
    file: BackendFile, arguments: argparse.Namespace, covered: Coverage, written: list[str]
) -> dict[str, Any]:
    return {
        **covered.to_json(),
        "package": file.package,
        "out": None if arguments.out is None else str(arguments.out),
        "written": written,
        "declared": {
            key: [op.name for op in getattr(file, key)]
            for key in ("full_codegen", "ir_gen", "supported", "autograd", "symint", "non_native")
        },
        "ignored": list(file.ignored),
    }


def _show(
    file: BackendFile, arguments: argparse.Namespace, covered: Coverage, written: list[str]
) -> None:
    terminal.heading(f"backend {file.name}")
    terminal.table(("covers", "declared", "of", "share"), [s.row() for s in covered.shares])
    if file.ignored:
        print(f"of no meaning here: {', '.join(file.ignored)}")
    if arguments.out is None:
        print("nothing was written: there is no --out DIR")
        return
    print(f"{len(written)} files written to {arguments.out}" if written else "nothing has changed")
    for path in written:
        print(f"  {path}")
    where = arguments.out / file.package
    print("\nnext:")
    print(f"  override the methods of {where / '_generated' / 'lowering.py'}")
    print(f"  in {where / 'lowering.py'}, then")
    print(f"  PYTHONPATH={arguments.out} pytest --import-mode=importlib {where}")


# -- torpor itself -----------------------------------------------------------------------------


def _show_own_coverage(arguments: argparse.Namespace) -> int:
    covered = coverage.of_torpor()
    if arguments.json:
        print(json.dumps(covered.to_json(), indent=2))
    elif arguments.markdown:
        print(coverage.page(covered), end="")
    else:
        _show_tables(covered)
    return 0


def _show_tables(covered: OwnCoverage) -> None:
    terminal.heading(f"ATen of torch {covered.torch}: {covered.overloads:,} overloads")
    terminal.table(*coverage.family_table(covered))
    terminal.table(*coverage.rule_table(covered))
    print(
        f"{covered.constructors:,} have a node constructor, {covered.typed:,} of these a type rule"
    )


def _own_files(arguments: argparse.Namespace) -> int:
    is_asked = arguments.check or arguments.diff
    return _print_files(own_ops.stale() if is_asked else own_ops.write(), arguments)


def _stubs(arguments: argparse.Namespace) -> int:
    folder, is_asked = arguments.stubs, arguments.check or arguments.diff
    changed = stubs.stale(folder) if is_asked else stubs.write(folder)
    return _print_files([str(folder / path) for path in changed], arguments)


def _print_files(changed: list[str], arguments: argparse.Namespace) -> int:
    is_asked = arguments.check or arguments.diff
    if arguments.json:
        print(json.dumps({"files": changed, "written": not is_asked}))
    else:
        for path in changed:
            print(f"{'stale' if is_asked else 'written'}: {path}")
        print(f"{len(changed)} files" if changed else "up to date")
    return 1 if changed and arguments.check else 0
