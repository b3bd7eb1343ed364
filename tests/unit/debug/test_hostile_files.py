"""Record files of strangers: no kernel that believes its caller, no bombs, no escape sequences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from torpor.cli import main
from torpor.debug.file_format import Reader, Writer
from torpor.debug.load import open_record
from torpor.debug.plain_text import one_line, printable
from torpor.errors import RecordFileError, StepError

ESCAPE = "\x1b]0;title\x07\x1b[31mred\u202e\x9b"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    x = torch.arange(4.0).to("lazy")
    with torpor.record(tmp_path / "plain"):
        (x * 2).tolist()
    return tmp_path / "plain"


def forged(
    path: Path,
    text: str,
    nodes: int,
    line: str = "x",
    change: Callable[[dict[str, Any]], object] = lambda manifest: None,
) -> Path:
    """A copy of a record with another graph, all its sums right."""
    with Reader(path) as reader:
        manifest = json.loads(json.dumps(reader.manifest))
        contents = [reader.blob(i, "copy") for i in range(len(manifest.pop("blobs")))]
    entry = manifest["graphs"][0]
    contents[entry["text"]] = text.encode()
    contents[entry["lines"]] = json.dumps({"lines": [line], "nodes": [0] * nodes}).encode()
    manifest.pop("facts", None)
    manifest["runs"] = manifest["runs"][:1]
    manifest["runs"][0]["outputs"] = []
    change(manifest)
    writer = Writer(path.with_name("forged"))
    for blob in contents:
        writer.add(blob)
    writer.close(manifest)
    return path.with_name("forged")


def graph(*lines: str, leaf: str = "float32[4]") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"graph(%0 = leaf 0 : {leaf} @lazy:0) {{\n{body}\n}}"


FUSED = graph(
    "%1 = aten.expand.default(%0, [50000, 4]) : float32[50000,4] stride [0,1] @lazy:0",
    "%2 = aten.clone.default(%1) : float32[50000,4] @lazy:0",
    "%3 = aten.clone.default(%0) : float32[4] @lazy:0",
    "%4 = aten.clone.default(%0) : float32[4] @lazy:0",
    "%5, %6, %7 = aten._fused_sgd_.default([%2], [%3], [%4], weight_decay=0.0, momentum=0.9, "
    "lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=True) : "
    "float32[50000,4] @lazy:0, float32[4] @lazy:0, float32[4] @lazy:0",
    "return %7",
)


def test_an_op_that_believes_its_caller_is_refused(plain: Path) -> None:
    with pytest.raises(RecordFileError, match=r"_fused_sgd_.*--trust"):
        torpor.replay(forged(plain, FUSED, 5))


@pytest.mark.parametrize(
    "op",
    [
        "aten._unsafe_index.Tensor(%0, [%1])",
        "aten.max_pool2d_with_indices_backward.default(%0, %0, [1, 1], [1, 1], [0, 0], [1, 1], "
        "False, %1)",
        "aten.nll_loss_backward.default(%0, %0, %1, None, 1, -100, %0)",
        "aten.embedding_dense_backward.default(%0, %1, 4, -1, True)",
        "aten._reshape_alias.default(%0, [4], [1])",
    ],
)
def test_backward_and_unsafe_ops_by_themselves_are_refused(plain: Path, op: str) -> None:
    text = graph(
        "%1 = aten._to_copy.default(%0, dtype=torch.int64) : int64[4] @lazy:0",
        f"%2 = {op} : float32[4] @lazy:0",
        "return %2",
    )
    with pytest.raises(RecordFileError, match="--trust"):
        torpor.replay(forged(plain, text, 2))


def test_a_backward_op_runs_with_the_forward_it_belongs_to(tmp_path: Path) -> None:
    scores = torch.randn(3, 4).to("lazy").requires_grad_()
    with torpor.record(tmp_path / "f"):
        normal = torch.nn.functional.layer_norm(scores, (4,))
        loss = torch.nn.functional.cross_entropy(normal, torch.tensor([0, 1, 3]).to("lazy"))
        loss.backward()
        scores.grad.tolist()
    assert torpor.replay(tmp_path / "f").ok


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("window", ["[1000000], [1], 0", "[2], [1], 3", "[4], [-1], 3", "[4], [1]"])
def test_a_window_stays_in_the_memory_of_its_tensor(plain: Path, window: str, trust: bool) -> None:
    size = window[1 : window.index("]")]
    text = graph(
        f"%1 = aten.as_strided.default(%0, {window}) : float32[{size}] @lazy:0",
        f"%2 = aten.add.Tensor(%1, %1) : float32[{size}] @lazy:0",
        "return %2",
    )
    path = forged(plain, text, 2)
    if window == "[4], [1]":
        assert torpor.replay(path, trust=trust).ok
    else:
        with pytest.raises(RecordFileError, match=r"memory of|below 0"):
            torpor.replay(path, trust=trust)


def test_a_window_on_a_view_may_use_the_memory_of_what_is_viewed(plain: Path) -> None:
    text = graph(
        "%1 = aten.slice.Tensor(%0, 0, 2, 4, 1) : float32[2] offset 2 @lazy:0",
        "%2 = aten.as_strided.default(%1, [4], [1], 0) : float32[4] @lazy:0",
        "%3 = aten.add.Tensor(%2, %2) : float32[4] @lazy:0",
        "return %3",
    )
    assert torpor.replay(forged(plain, text, 3)).ok


def test_a_tensor_with_a_stride_of_zero_is_no_bomb(plain: Path) -> None:
    huge = 1 << 38
    leaf = f"float32[{huge}] stride [0]"
    text = graph("%1 = aten.sum.default(%0) : float32[] @lazy:0", "return %1", leaf=leaf)

    def change(manifest: dict[str, Any]) -> None:
        manifest["runs"][0]["inputs"][0].update(shape=[huge], stride=[0])

    with pytest.raises((RecordFileError, StepError), match=r"are allowed|GiB"):
        torpor.replay(forged(plain, text, 1, change=change), data=False)


ADDED = graph("%1 = aten.add.Tensor(%0, %0) : float32[4] @lazy:0", "return %1")


def _hostile(manifest: dict[str, Any]) -> None:
    run = manifest["runs"][0]
    run["backend"], run["device"] = f"acme{ESCAPE}", f"cuda{ESCAPE}"
    manifest["versions"] = {"torch": ESCAPE, ESCAPE: "1"}


def _is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_escape_sequences_of_a_file_are_not_printed(plain: Path, capsys: Any) -> None:
    path = forged(plain, ADDED, 1, f"{ESCAPE}\nline", _hostile)
    main(["replay", str(path)])
    reported = capsys.readouterr()
    assert "acme" in reported.out
    assert _is_plain(reported.out)
    assert _is_plain(reported.err)


def test_escape_sequences_of_an_error_are_not_printed(plain: Path, capsys: Any) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["runs"][0]["inputs"] = [{"failed": f"{ESCAPE}oops"}]

    path = forged(plain, ADDED, 1, change=change)
    assert main(["replay", str(path)]) == 2
    reported = capsys.readouterr()
    assert "oops" in reported.err
    assert _is_plain(reported.out)
    assert _is_plain(reported.err)


def test_lines_of_a_file_are_shown_without_control_characters(plain: Path, tmp_path: Path) -> None:
    attack = f"{ESCAPE}\n</script><script>alert(1)</script>"
    path = forged(plain, ADDED, 1, attack, _hostile)
    with open_record(path) as record:
        (node,) = record.graphs()[0].nodes
        assert node.site == one_line(attack)
        assert node.site.isprintable()
    out = tmp_path / "page.html"
    assert main(["view", str(path), "--html", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert "\\u001b" not in page
    assert "\x1b" not in page


def test_text_keeps_what_is_printable() -> None:
    assert one_line("größer → ok") == "größer → ok"
    assert one_line("a\nb\x1b[0m") == "a\\nb\\x1b[0m"
    assert printable("a\n\tb\r\x07") == "a\n    b\\r\\x07"
