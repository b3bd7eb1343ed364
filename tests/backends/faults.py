"""Backends broken on purpose, each in one way: the conformance kit must notice every one.

All derive from the reference backend, which is sound. `CAUGHT_BY` says which tests of the kit are
expected to find which fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from tests.backends import own_buffers
from torpor.backend import (
    Backend,
    BackendData,
    BackendDevice,
    Computation,
    MemoryInfo,
)
from torpor.backends.reference import ReferenceBackend
from torpor.ir.types import TensorType

Results = list[BackendData]


class Keeping(ReferenceBackend):
    """Keeps graphs, which is easy where nothing is compiled."""

    def cache_key(self) -> str | None:
        return "kept"

    def dump(self, computation: Computation) -> bytes | None:
        return computation.text().encode()

    def load(self, computation: Computation, saved: bytes) -> Computation:
        if saved.decode() != computation.text():
            raise ValueError("the text of another graph")
        return self.compile([computation])[0]


class Sound(Keeping):
    """The reference backend, with graphs kept on disk: nothing is wrong with it."""


class Faulty(ReferenceBackend):
    """Lets a fault change what a run returns."""

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        return self.spoil(super().execute(computation, arguments, device), computation, arguments)

    def spoil(
        self, results: Results, computation: Computation, arguments: Sequence[Any]
    ) -> Results:
        for result in results:
            if result.tensor is not None:
                result.tensor = self.change(result.tensor)
        return results

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


# -- results -----------------------------------------------------------------------------------


class WrongStrides(Faulty):
    """Hands back row-major memory whatever strides were promised."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()


class WrongDtype(Faulty):
    """Computes in double precision and forgets to come back."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.dtype == torch.float32 else tensor


class LostPrecision(Faulty):
    """Computes doubles in single precision."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().double() if tensor.dtype == torch.float64 else tensor


class SwappedOutputs(Faulty):
    """Returns the first two results in each other's place where their types allow it."""

    def spoil(self, results: Results, *_: Any) -> Results:
        if len(results) > 1 and results[0].type is results[1].type:
            results[0], results[1] = results[1], results[0]
        return results


class MissingResult(Faulty):
    """Forgets the last of several results."""

    def spoil(self, results: Results, *_: Any) -> Results:
        return results[:-1] if len(results) > 1 else results


class SharedOutputs(Faulty):
    """Packs results of one type into one buffer."""

    def spoil(self, results: Results, *_: Any) -> Results:
        alike = [r for r in results if r.tensor is not None and r.type is results[0].type]
        if len(alike) > 1:
            for result, part in zip(alike, torch.stack([r.tensor for r in alike]).unbind()):  # type: ignore[misc]  # filtered above
                result.tensor = part
        return results


class AliasedInput(Faulty):
    """Returns an argument itself where a result has its numbers."""

    def spoil(self, results: Results, _: Any, arguments: Sequence[Any]) -> Results:
        for result in results:
            for given in arguments:
                if isinstance(given, BackendData) and _same(result.tensor, given.tensor):
                    result.tensor = given.tensor
        return results


class FlushedNaN(Faulty):
    """Replaces NaN by zero."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.isnan(), 0.0, tensor) if tensor.is_floating_point() else tensor


class LostNegativeZero(Faulty):
    """Loses the sign of zero, as compilers with "fast" arithmetic do."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 0.0 if tensor.is_floating_point() else tensor


class EmptyIsFlat(Faulty):
    """Returns every empty tensor with the shape [0]."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1) if tensor.numel() == 0 else tensor


class WrongDevice(Faulty):
    """Marks results with the number of the next device."""

    def spoil(self, results: Results, *_: Any) -> Results:
        for result in results:
            result.device = BackendDevice(result.device.type, result.device.ordinal + 1)
        return results


class EarlyReturn(Faulty):
    """Returns before the numbers are there: a thread fills them in later."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        late = torch.zeros_like(tensor)
        threading.Thread(target=lambda: (time.sleep(0.2), late.copy_(tensor)), daemon=True).start()
        return late


# -- memory from run to run --------------------------------------------------------------------


class Remembering(Faulty):
    """Keeps something for each computation between its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}


class StaleResults(Remembering):
    """Returns the results of the run before."""

    def spoil(self, results: Results, computation: Computation, _: Any) -> Results:
        before = self.kept.get(id(computation), results)
        self.kept[id(computation)] = results
        return before  # type: ignore[no-any-return]  # results


class FoldedLeaf(Remembering):
    """Takes the tensors of the first run for constants."""

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        first = self.kept.setdefault(id(computation), list(arguments))
        mixed = [f if isinstance(f, BackendData) else a for f, a in zip(first, arguments)]
        return super().execute(computation, mixed, device)


class BakedScalar(Remembering):
    """Takes the numbers of the first run for constants."""

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        first = self.kept.setdefault(id(computation), list(arguments))
        mixed = [a if isinstance(a, BackendData) else f for f, a in zip(first, arguments)]
        return super().execute(computation, mixed, device)


class ReusedBuffers(Remembering):
    """Writes every run's results into the buffers of the first."""

    def spoil(self, results: Results, computation: Computation, _: Any) -> Results:
        first = self.kept.setdefault(id(computation), results)
        for old, new in zip(first, results):
            if old is not new and old.tensor is not None and new.tensor is not None:
                new.tensor = old.tensor.copy_(new.tensor)
        return results


class Leaking(Faulty):
    """Holds on to the arguments of every run."""

    def __init__(self) -> None:
        super().__init__()
        self.everything: list[Any] = []

    def spoil(self, results: Results, _: Any, arguments: Sequence[Any]) -> Results:
        self.everything.append(list(arguments))
        return results


class DoubleExecution(Faulty):
    """Runs every graph twice, once to warm up."""

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        super().execute(computation, arguments, device)
        return super().execute(computation, arguments, device)


class MutatedInput(Faulty):
    """Works on its first argument in place."""

    def spoil(self, results: Results, _: Any, arguments: Sequence[Any]) -> Results:
        for given in arguments:
            if isinstance(given, BackendData) and given.tensor is not None:
                given.tensor.zero_()
                break
        return results


class EarlyDonation(Faulty):
    """Writes a result over a donated argument before all who read the argument have run."""

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        first = super().execute(computation, arguments, device)
        for parameter, result in computation.aliases.items():
            arguments[parameter].tensor.copy_(first[result].tensor)
        return super().execute(computation, arguments, device)


class LostDonation(Faulty):
    """Says a result is in the donated buffer, and never writes it there."""

    def spoil(
        self, results: Results, computation: Computation, arguments: Sequence[Any]
    ) -> Results:
        for parameter, result in computation.aliases.items():
            results[result].tensor = arguments[parameter].tensor
        return results


# -- compiling ---------------------------------------------------------------------------------


class ReversedCompile(ReferenceBackend):
    """Returns compiled graphs in another order."""

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        return list(reversed(super().compile(computations)))


class CompilesEagerly(ReferenceBackend):
    """Runs what it compiles, on zeros, to see what comes out."""

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        for computation in computations:
            zeros = [self._zeros(type_) for type_ in computation.parameter_types]
            super().execute(computation, zeros, computation.device)
        return super().compile(computations)

    def _zeros(self, type_: Any) -> Any:
        if not isinstance(type_, TensorType):
            return type_.kind(0)
        zeros = torch.zeros(type_.shape, dtype=type_.dtype)
        return BackendData(self.backend_device(type_.device), type_, zeros)


class NoText(ReferenceBackend):
    """Has no text to show for what it compiled."""

    def computation_text(self, computation: Computation) -> str:
        return None  # type: ignore[return-value]  # the fault


class LosesResults(Keeping):
    """Computes in another process what it was never asked for."""

    def load(self, computation: Computation, saved: bytes) -> Computation:
        loaded = super().load(computation, saved)
        instructions, registers, results = loaded.program
        loaded.program = instructions, registers, [results[0]] * len(results)
        return loaded


class LoadsAnything(Keeping):
    """Takes whatever bytes it is given for a graph."""

    def load(self, computation: Computation, saved: bytes) -> Computation:
        return self.compile([computation])[0]


class KeepsUnderItsName(Keeping):
    """Has another key in every process."""

    def cache_key(self) -> str | None:
        return str(id(self))


# -- errors, seeds, life -----------------------------------------------------------------------


class SwallowedError(Faulty):
    """Returns zeros for what could not be computed."""

    def spoil(self, results: Results, *_: Any) -> Results:
        for result in results:
            if result.error is not None:
                result.error = None
                result.tensor = torch.zeros(result.type.shape, dtype=result.type.dtype)
        return results


class NamelessError(Faulty):
    """Turns every error into one that says nothing of its cause."""

    def spoil(self, results: Results, *_: Any) -> Results:
        for result in results:
            if result.error is not None:
                result.error = RuntimeError("failed")
        return results


class IgnoredSeed(ReferenceBackend):
    """Does not listen to seeds."""

    def set_rng_seed(self, seed: int) -> None:
        return None


class ExitsOnce(ReferenceBackend):
    """Breaks when it is told of the exit a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.open = True

    def prepare_to_exit(self) -> None:
        if not self.open:
            raise RuntimeError("closed already")
        self.open = False


class OnePlaceholder(ReferenceBackend):
    """Gives the same empty handle to everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[Any, BackendData] = {}

    def placeholder(self, device: BackendDevice, type_: TensorType) -> BackendData:
        return self.shared.setdefault((device, type_), super().placeholder(device, type_))


class OffByOneDevice(ReferenceBackend):
    """Counts its devices from one."""

    def backend_device(self, device: torch.device) -> BackendDevice:
        found = super().backend_device(device)
        return BackendDevice(found.type, found.ordinal + 1) if device.type == "lazy" else found


class StraightenedData(ReferenceBackend):
    """Takes every tensor in as row-major memory."""

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: TensorType, device: BackendDevice
    ) -> BackendData:
        return super().data_from_tensor(tensor.contiguous(), type_, device)


class RoundedData(ReferenceBackend):
    """Has no doubles: takes them in as singles."""

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: TensorType, device: BackendDevice
    ) -> BackendData:
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        return super().data_from_tensor(tensor, type_, device)


# -- buffers, devices and graphs of its own ----------------------------------------------------


class FullHandle(BackendData):
    """Says that it holds a buffer before it does."""

    def filled(self) -> bool:
        return True


class FullPlaceholders(ReferenceBackend):
    """Makes placeholders that say they are filled."""

    def placeholder(self, device: BackendDevice, type_: TensorType) -> BackendData:
        return FullHandle(device, type_)


class CopiesNothing(ReferenceBackend):
    """Gives out the same data as a copy."""

    def copy_data(self, data: BackendData) -> BackendData:
        return data


class NeverShared(ReferenceBackend):
    """Writes over donated buffers without asking who looks at them."""

    takes_donations = True

    def is_shared(self, data: BackendData) -> bool:
        return False

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        results = super().execute(computation, arguments, device)
        for parameter, result in computation.aliases.items():
            results[result].tensor = arguments[parameter].tensor.copy_(results[result].tensor)
        return results


class LostInTheMiddle(Faulty):
    """Leaves what an op it does not know makes as it finds it."""

    def spoil(
        self, results: Results, computation: Computation, arguments: Sequence[Any]
    ) -> Results:
        uncommon = any("zeta" in node.op.name for node in computation.graph.nodes)
        return super().spoil(results, computation, arguments) if uncommon else results

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)


class RoughDecomposition(ReferenceBackend):
    """Takes gelu apart into something like it."""

    def decompositions(self) -> dict[str, Any]:
        return {"aten.gelu.default": lambda x, approximate="none": x * torch.sigmoid(1.702 * x)}


class NamelessDecomposition(ReferenceBackend):
    """Lists decompositions by the ops themselves, as torch does."""

    def decompositions(self) -> dict[Any, Any]:
        return {torch.ops.aten.gelu.default: torch.relu}


class MisspelledDecomposition(ReferenceBackend):
    """Lists a decomposition of an op that there is not."""

    def decompositions(self) -> dict[str, Any]:
        return {"aten.geloo.default": torch.relu}


class FunctionNegates(ReferenceBackend):
    """Hands `torch.compile` other results than it computes."""

    def function(self, computation: Computation, device: BackendDevice) -> Any:
        run = super().function(computation, device)
        return lambda tensors: [tensor.neg() for tensor in run(tensors)]


class DataOnTheFirst(ReferenceBackend):
    """Puts all data on its first device."""

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: TensorType, device: BackendDevice
    ) -> BackendData:
        return super().data_from_tensor(tensor, type_, BackendDevice(device.type, 0))


class StaysWhereItIs(ReferenceBackend):
    """Gets tensors wrong that come from another device."""

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        results = super().execute(computation, arguments, device)
        values = (*computation.graph.inputs, *computation.graph.outputs)
        if len({value.type.device for value in values if isinstance(value.type, TensorType)}) > 1:
            for result in results:
                result.tensor = None if result.tensor is None else result.tensor + 1
        return results


class OnlyItsOwn(ReferenceBackend):
    """Says that its programs run on all devices, which they do not."""

    def compilation_devices(self, device: str, devices: Sequence[str]) -> list[str]:
        return list(devices) or [device]

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        if device != computation.device:
            raise RuntimeError(f"compiled for {computation.device}")
        return super().execute(computation, arguments, device)


class SharesCopies(NeverShared):
    """Copies the handle and leaves the buffer where it is, to be written over."""

    def copy_data(self, data: BackendData) -> BackendData:
        return BackendData(data.device, data.type, data.tensor)


class CountsSharers(ReferenceBackend):
    """Says how many hold a buffer, where it is asked whether others do."""

    def is_shared(self, data: BackendData) -> bool:
        return 2  # type: ignore[return-value]  # the fault


class EmptyHandle(own_buffers.Array):  # type: ignore[misc]  # it has no types
    """Never says that it holds a buffer."""

    def filled(self) -> bool:
        return False


class ForgetsToFill(own_buffers.OwnBuffers):  # type: ignore[misc]  # it has no types
    """Has buffers of its own, in handles that do not say so."""

    def placeholder(self, device: BackendDevice, type_: TensorType, array: Any = None) -> Any:
        made = super().placeholder(device, type_, array)
        data = EmptyHandle(device, type_)
        data.array = made.array
        return data


class ReadsRowMajor(own_buffers.OwnBuffers):  # type: ignore[misc]  # it has no types
    """Reads buffers of its own without the strides that were promised."""

    def tensor_from_data(
        self, data: BackendData, logical_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        made: torch.Tensor = super().tensor_from_data(data, logical_dtype)
        return made.contiguous()


class BreaksInTheMiddle(own_buffers.OwnBuffers):  # type: ignore[misc]  # it has no types
    """Loses its own buffers where one goes through a kernel of torch's."""

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> Results:
        results: Results = super().execute(computation, arguments, device)
        if any("zeta" in node.op.name for node in computation.graph.nodes):
            for result in results:
                result.array[...] = 0  # type: ignore[attr-defined]  # all data are arrays
        return results


class TooMuchMemory(ReferenceBackend):
    """Reports more memory in use than there is."""

    def memory_info(self, device: BackendDevice) -> MemoryInfo:
        return MemoryInfo(2, 1)


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return False
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)


CONTRACT, BUFFERS, LAZINESS, ERRORS = (
    f"test_{part}::test_" for part in ("contract", "buffers", "laziness", "errors")
)

CAUGHT_BY: dict[type[Backend], str] = {
    WrongStrides: CONTRACT + "execute_returns_data_with_values_of_the_promised_types",
    WrongDtype: CONTRACT + "execute_returns_data_with_values_of_the_promised_types",
    LostPrecision: LAZINESS + "results_keep_their_dtype_and_precision",
    SwappedOutputs: CONTRACT + "results_stand_in_the_order_of_the_graph",
    MissingResult: LAZINESS + "a_sync_computes_all_that_is_alive_in_one_run",
    SharedOutputs: CONTRACT + "results_share_memory_with_nothing",
    AliasedInput: CONTRACT + "results_share_memory_with_nothing",
    FlushedNaN: LAZINESS + "nan_infinity_and_the_sign_of_zero_go_through_ops",
    LostNegativeZero: LAZINESS + "nan_infinity_and_the_sign_of_zero_go_through_ops",
    EmptyIsFlat: LAZINESS + "empty_tensors_keep_their_shape",
    WrongDevice: CONTRACT + "results_are_on_the_device_of_the_computation",
    EarlyReturn: CONTRACT + "results_stand_in_the_order_of_the_graph",
    StaleResults: LAZINESS + "a_step_takes_the_numbers_of_its_own_inputs",
    FoldedLeaf: LAZINESS + "a_state_carried_through_steps_is_right_after_each",
    BakedScalar: LAZINESS + "a_number_that_changes_every_step_is_right",
    ReusedBuffers: CONTRACT + "results_of_an_earlier_run_stay_what_they_are",
    Leaking: CONTRACT + "buffers_of_past_steps_are_let_go",
    DoubleExecution: LAZINESS + "an_op_runs_once_for_all_who_use_it",
    MutatedInput: CONTRACT + "arguments_are_not_written_to",
    EarlyDonation: CONTRACT + "a_donated_argument_changes_no_result",
    LostDonation: CONTRACT + "a_donated_argument_changes_no_result",
    ReversedCompile: CONTRACT + "compile_returns_as_many_computations_in_the_same_order",
    CompilesEagerly: LAZINESS + "each_step_runs_once",
    NoText: CONTRACT + "the_text_of_a_computation_is_text",
    SwallowedError: ERRORS + "a_failing_kernel_is_not_swallowed",
    NamelessError: ERRORS + "a_failing_kernel_is_told_with_backend_graph_and_line",
    IgnoredSeed: CONTRACT + "a_seed_gives_the_numbers_torch_gives_for_it",
    ExitsOnce: CONTRACT + "prepare_to_exit_may_be_called_twice",
    OnePlaceholder: CONTRACT + "every_placeholder_is_a_handle_of_its_own",
    OffByOneDevice: CONTRACT + "it_has_devices_and_finds_them_by_number",
    StraightenedData: CONTRACT + "strides_go_in_and_come_out",
    RoundedData: CONTRACT + "every_dtype_goes_in_and_comes_out_bit_for_bit",
    LosesResults: CONTRACT + "a_graph_that_was_kept_computes_the_same",
    LoadsAnything: CONTRACT + "bytes_that_it_never_made_are_refused",
    KeepsUnderItsName: CONTRACT + "the_same_options_give_the_same_key",
    FullPlaceholders: BUFFERS + "a_handle_is_filled_when_it_holds_a_buffer",
    CopiesNothing: BUFFERS + "a_copy_of_data_is_data_of_its_own",
    NeverShared: BUFFERS + "a_buffer_that_others_hold_is_not_written_over",
    SharesCopies: BUFFERS + "a_copy_keeps_its_numbers_when_the_data_are_donated",
    CountsSharers: BUFFERS + "whether_a_buffer_is_shared_is_a_yes_or_no",
    ForgetsToFill: BUFFERS + "a_handle_is_filled_when_it_holds_a_buffer",
    ReadsRowMajor: CONTRACT + "strides_go_in_and_come_out",
    BreaksInTheMiddle: BUFFERS + "ops_that_fall_back_in_the_middle_of_a_graph_are_right",
    LostInTheMiddle: BUFFERS + "ops_that_fall_back_in_the_middle_of_a_graph_are_right",
    RoughDecomposition: BUFFERS + "ops_with_a_decomposition_are_right_forward_and_backward[gelu]",
    NamelessDecomposition: BUFFERS + "decompositions_are_functions_by_the_names_of_ops",
    MisspelledDecomposition: BUFFERS + "decompositions_are_functions_by_the_names_of_ops",
    FunctionNegates: BUFFERS + "torch_compile_gives_what_eager_gives",
    DataOnTheFirst: BUFFERS + "data_are_on_the_device_they_were_made_for",
    StaysWhereItIs: BUFFERS + "tensors_move_between_devices",
    OnlyItsOwn: BUFFERS + "a_graph_for_several_devices_is_compiled_once",
    TooMuchMemory: CONTRACT + "memory_info_is_consistent",
}
