"""The `op_db` sweep: one entry, run eagerly and lazily in every variant, compared leaf by leaf.

`check_entry` is the library; `test_opdb.py` runs it under pytest. For quick runs on a part of it:

    python -m tests.ops.sweep --mode lazy --op add --op "nn_functional_conv*" --json out.json
"""

from __future__ import annotations

import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.ops import variants
from tests.ops.compare import Difference, distance, leaf_difference
from tests.ops.exclusions import EXCLUSIONS
from tests.ops.results import Failure, Result
from tests.ops.samples import (
    SEED,
    dtypes_of,
    enter,
    error_samples_of,
    samples_of,
    tensors_in,
    walk,
)
from tests.ops.subjects import SUBJECTS, Subject
from tests.ops.variants import Variant

UNINITIALISED = frozenset(
    (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    )
)
"""Entries whose result is whatever the memory held: all but the values is compared."""

EAGER_RERUNS = 400
"""How often eager is asked again where a value differs; a tenth if it agrees with itself."""

PATIENCE = 10
"""After so many failures an entry is wrong: its next ones are no longer looked into."""

EAGER = Subject()


@dataclass(frozen=True)
class Raised:
    """What is kept of an exception: its traceback would keep the tensors of its frames alive."""

    type: type[Exception]
    text: str


@dataclass
class Outcome:
    """One run: what it returned, leaf by leaf, or what it raised."""

    leaves: list[tuple[str, Any]] = field(default_factory=list)
    error: Raised | None = None

    def tensors(self) -> list[Tensor]:
        return [leaf for _, leaf in self.leaves if isinstance(leaf, Tensor)]


@cache
def entries() -> dict[str, OpInfo]:
    """Every entry of `op_db` by its name."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.formatted_name: op for op in op_db}


def check_entry(op: OpInfo, subject: Subject | str) -> Result:
    """Run every sample of an entry in every variant, eagerly and on the subject, and compare."""
    if isinstance(subject, str):
        subject = SUBJECTS[subject]()
    with warnings.catch_warnings(), subject.session():
        warnings.simplefilter("ignore")
        return _Check(op, subject).run()


class _Check:
    """The sweep of one entry on one subject."""

    def __init__(self, op: OpInfo, subject: Subject) -> None:
        self.op, self.subject = op, subject
        self.compare_values = op.name not in UNINITIALISED
        self.counts: Counter[str] = Counter()
        self.result = Result(op.formatted_name, subject.name)
        self.result.excluded = EXCLUSIONS.get(op.formatted_name)

    def run(self) -> Result:
        if self.result.excluded:
            return self.result
        for dtype in dtypes_of(self.op):
            for index, sample in enumerate(samples_of(self.op, dtype)):
                self.check_sample(_Place(str(dtype).removeprefix("torch."), index), sample)
        for index, error in enumerate(error_samples_of(self.op)):
            self.check_error_input(_Place("error input", index), error.sample_input)
        counts = {name: n for name, n in sorted(self.counts.items()) if n > 0}
        self.result.fallbacks = _under("aten::", counts)
        self.result.syncs = _under("Sync::", counts)
        return self.result

    def check_sample(self, place: _Place, sample: SampleInput) -> None:
        """Record every variant, compute them all with one sync, then compare."""
        self.result.samples += 1
        reference = self.run_variant(variants.FORWARD, sample, EAGER, None)
        output = _subtree(reference, "output")
        together: list[tuple[Variant, Outcome, Outcome]] = []
        for variant in self.variants_of(sample, place, reference):
            expected = (
                reference
                if variant is variants.FORWARD
                else self.run_variant(variant, sample, EAGER, output)
            )
            if variant is variants.OUT_STRIDED and variants.broken_out(expected.leaves):
                self.result.eager_faults += 1
                continue
            actual = self.run_variant(variant, sample, self.subject, output)
            self.result.runs += 1
            if expected.error is None and actual.error is None:
                together.append((variant, expected, actual))
            else:
                self.check_errors(place, variant.name, expected, actual)
        self.check_together(place, sample, output, together)

    def variants_of(
        self, sample: SampleInput, place: _Place, reference: Outcome
    ) -> Iterator[Variant]:
        yield variants.FORWARD
        differentiable = any(t.requires_grad for t in tensors_in((sample.input, sample.args)))
        if differentiable:
            yield variants.BACKWARD
        if self.op.inplace_variant is not None and isinstance(sample.input, Tensor):
            yield from variants.IN_PLACE
            if differentiable and self.op.supports_inplace_autograd:
                yield variants.IN_PLACE_BACKWARD
        if reference.error is not None or not reference.tensors():
            return
        if self.op.supports_out:
            yield from variants.OUT
            if place.sample == 0:
                yield variants.OUT_CAST
        if place.sample == 0 or _shares_memory(reference):
            yield from variants.WRITES

    def run_variant(
        self, variant: Variant, sample: SampleInput, subject: Subject, output: Any
    ) -> Outcome:
        before = subject.counters()
        try:
            entered = enter(sample, subject, grad=variant.grad)
            # torch.manual_seed would format the whole stack, for CUDA's sake, each time.
            torch.default_generator.manual_seed(SEED)
            observed = variant.run(self.op, entered, output)
            outcome = Outcome(list(walk(observed, "")))
        except Exception as error:
            outcome = Outcome(error=_raised(error))
        # Fallbacks on the way to an error eager raises too are nobody's loss.
        if outcome.error is None:
            self.counts.update(subject.counters())
            self.counts.subtract(before)
        return outcome

    def check_together(
        self,
        place: _Place,
        sample: SampleInput,
        output: Any,
        runs: list[tuple[Variant, Outcome, Outcome]],
    ) -> None:
        try:
            self.subject.sync([t for _, _, actual in runs for t in actual.tensors()])
        except Exception:
            self.subject.settle()
            self.check_alone(place, sample, output, [variant for variant, _, _ in runs])
            return
        for variant, expected, actual in runs:
            for difference in self.differences(expected, actual, sample, variant, output):
                alone = self.fails_alone(sample, variant, output, difference)
                self.fail(place, variant.name, difference, alone)

    def check_alone(
        self, place: _Place, sample: SampleInput, output: Any, todo: Sequence[Variant]
    ) -> None:
        """Computing all variants at once failed: sync them one by one to see whose fault it was."""
        found = False
        for variant in todo:
            expected = self.run_variant(variant, sample, EAGER, output)
            actual = self.run_and_sync(variant, sample, output)
            if actual.error is not None:
                found = True
                self.check_errors(place, variant.name, expected, actual)
                continue
            for difference in self.differences(expected, actual, sample, variant, output):
                found = True
                self.fail(place, variant.name, difference)
        if not found:
            names = ", ".join(variant.name for variant in todo)
            error = Difference("sync", "raises", f"only when synced together: {names}")
            self.fail(place, "all variants", error, alone=False)

    def run_and_sync(self, variant: Variant, sample: SampleInput, output: Any) -> Outcome:
        outcome = self.run_variant(variant, sample, self.subject, output)
        try:
            self.subject.sync(outcome.tensors())
        except Exception as error:
            self.subject.settle()
            return Outcome(error=_raised(error))
        return outcome

    def fails_alone(
        self, sample: SampleInput, variant: Variant, output: Any, difference: Difference
    ) -> bool | None:
        if len(self.result.failures) >= PATIENCE or difference.kind != "values":
            return None
        expected = self.run_variant(variant, sample, EAGER, output)
        actual = self.run_and_sync(variant, sample, output)
        return actual.error is not None or bool(
            list(self.differences(expected, actual, sample, variant, output))
        )

    def differences(
        self, expected: Outcome, actual: Outcome, sample: SampleInput, variant: Variant, output: Any
    ) -> Iterator[Difference]:
        if _wheres(expected) != _wheres(actual):
            text = f"{_wheres(expected)} became {_wheres(actual)}"
            yield Difference("result", "structure", text)
        for (where, want), (place, got) in zip(expected.leaves, actual.leaves, strict=False):
            if where != place:
                return
            try:
                found = leaf_difference(where, want, got, self.subject, values=self.compare_values)
            except Exception as error:
                found = Difference(where, "raises", "when read: " + _raised(error).text)
            if found is None:
                continue
            if found.kind == "values" and self.is_noise(sample, variant, output, where, want, got):
                self.result.noisy.append(f"{variant.name} {where}")
                continue
            yield found

    def is_noise(
        self, sample: SampleInput, variant: Variant, output: Any, where: str, want: Any, got: Any
    ) -> bool:
        """Whether eager, asked again, differs from itself as much as the subject does from it."""
        if len(self.result.failures) >= PATIENCE and not self.result.noisy:
            return False
        gap = distance(want.detach(), self.subject.plain(got))
        seen = [want.detach()]
        bound = 0.0
        for attempt in range(EAGER_RERUNS):
            stir_the_allocator(want, attempt)
            again = dict(self.rerun(attempt, variant, sample, output).leaves).get(where)
            if not isinstance(again, Tensor):
                return False
            gaps = [distance(one, again.detach()) for one in seen]
            if min(gaps) > 0:
                seen.append(again.detach())
                bound = max(bound, *gaps)
            if gap <= bound:
                return True
            if bound == 0 and attempt >= EAGER_RERUNS // 10 and not self.result.noisy:
                return False
        return False

    def rerun(self, attempt: int, variant: Variant, sample: SampleInput, output: Any) -> Outcome:
        """Eager once more; every second time on a thread of its own, and so in other memory."""
        if attempt % 2 == 0:
            return self.run_variant(variant, sample, EAGER, output)
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(self.run_variant, variant, sample, EAGER, output).result()

    def check_errors(self, place: _Place, variant: str, expected: Outcome, actual: Outcome) -> None:
        """One of the two raised: so must the other, and the same type, if only when read."""
        if expected.error is not None and actual.error is None:
            try:
                self.subject.sync(actual.tensors())
                for tensor in actual.tensors():
                    self.subject.plain(tensor)
            except Exception as error:
                actual = Outcome(error=_raised(error))
                self.subject.settle()
                self.result.late.append(f"{place.dtype} {place.sample} {variant}")
        difference = _error_difference(expected.error, actual.error)
        if difference is not None:
            self.fail(place, variant, difference)

    def check_error_input(self, place: _Place, sample: SampleInput) -> None:
        expected, actual = (
            self.run_variant(_ERROR, sample, subject, None) for subject in (EAGER, self.subject)
        )
        self.result.runs += 1
        self.check_errors(place, "forward", expected, actual)

    def fail(
        self, place: _Place, variant: str, difference: Difference, alone: bool | None = None
    ) -> None:
        self.result.failures.append(
            Failure(
                op=self.op.formatted_name,
                mode=self.subject.name,
                dtype=place.dtype,
                sample=place.sample,
                variant=variant,
                where=difference.where,
                kind=difference.kind,
                detail=difference.detail,
                alone=alone,
            )
        )


_ERROR = Variant("error input", variants.forward, grad=True)


@dataclass(frozen=True)
class _Place:
    dtype: str
    sample: int


def _error_difference(expected: Raised | None, actual: Raised | None) -> Difference | None:
    if expected is None and actual is None:
        return None
    if actual is None:
        return Difference("call", "does not raise", f"eager raises {expected and expected.text}")
    if expected is None:
        return Difference("call", "raises", actual.text)
    if _same_exception(expected.type, actual.type):
        return None
    return Difference("call", "exception type", f"{expected.text} became {actual.text}")


def _same_exception(expected: type[Exception], actual: type[Exception]) -> bool:
    """Equal, or a subclass that torpor itself defines to say more."""
    own = actual.__module__.split(".")[0] == "torpor" and issubclass(actual, expected)
    return actual is expected or own


def _raised(error: Exception) -> Raised:
    """Type, first line, and where in torpor (or the last place at all) it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/torpor/" in f.filename] or list(frames)
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0][:300]}"
    if ours:
        name = re.sub(r".*/(torpor|tests|site-packages)/", r"\1/", ours[-1].filename)
        text += f" (at {name}:{ours[-1].lineno} in {ours[-1].name})"
    return Raised(type(error), text)


def _under(prefix: str, counts: dict[str, int]) -> dict[str, int]:
    return {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}


def _wheres(outcome: Outcome) -> list[str]:
    return [where for where, _ in outcome.leaves]


def _subtree(outcome: Outcome, name: str) -> Any:
    """The output tensors of a run: one tensor, or a tuple where the op returned several."""
    leaves = [(w, leaf) for w, leaf in outcome.leaves if w.startswith(f".{name}")]
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    single = len(leaves) == 1 and len(tensors) == 1
    return tensors[0] if single else tuple(tensors)


def _shares_memory(outcome: Outcome) -> bool:
    """Whether some output lies in the memory of some input."""

    def storages(name: str) -> set[int]:
        return {
            leaf.untyped_storage()._cdata
            for where, leaf in outcome.leaves
            if where.startswith(name) and isinstance(leaf, Tensor) and leaf.layout == torch.strided
        }

    return bool(storages(".output") & storages(".input"))


def stir_the_allocator(like: Tensor, attempt: int) -> None:
    """Where eager differs from itself, it does so by where its memory lies or what that held.

    Kernels that read memory before they write it (LAPACK's gelsy its pivots) mostly ask which
    of its numbers are zero: the blocks hold every mix.
    """
    draw = random.Random(attempt)
    torch.full(like.shape, 77, dtype=like.dtype)
    blocks = [
        torch.tensor([draw.choice((0, 3)) for _ in range(1 + i % 16)], dtype=torch.int32)
        for i in range(8 * (attempt % 9))
    ]
    del blocks[:: 1 + attempt % 3]


if __name__ == "__main__":
    from tests.ops.cli import main

    raise SystemExit(main())
