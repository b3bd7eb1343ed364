"""Serializes tensors for record files: as bytes, or as statistics."""

from __future__ import annotations

import ctypes
import hashlib
import math
import sys
from typing import Any

import torch

from torpor import _torch
from torpor.debug.file_format import Reader
from torpor.ir.types import TensorType
from torpor.overrides.storage_ops import window

PROBES = 256
"""The most means to store of a result besides its checksum, each over equally many elements."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "quint" not in str(dtype) and "qint" not in str(dtype)
}

Json = dict[str, Any]


# -- layout ------------------------------------------------------------------------------------


def layout(tensor: torch.Tensor) -> Json:
    """Sizes, strides and dtype of a tensor as JSON."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": int(tensor.storage_offset()) if tensor.numel() else 0,
        "conj": tensor.is_conj(),
        "neg": tensor.is_neg(),
    }


def read_layout(reader: Reader, entry: Any, where: str) -> TensorType:
    """Parse a layout, checking every number."""
    name = reader.field("dtype", str, entry, where)
    if name not in DTYPES:
        reader.fail(f"{where}: this torch knows no dtype {name[:60]!r}")
    shape = reader.integers(entry.get("shape"), f"{where}: shape")
    stride = reader.integers(entry.get("stride"), f"{where}: stride")
    if len(shape) != len(stride):
        reader.fail(f"{where}: {len(shape)} sizes and {len(stride)} strides")
    offset = reader.integer(entry.get("offset"), f"{where}: offset")
    conj, neg = (reader.field(bit, bool, entry, where) for bit in ("conj", "neg"))
    return TensorType.of(shape, stride, DTYPES[name], torch.device("cpu"), offset, conj, neg)


# -- bytes -------------------------------------------------------------------------------------


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The memory of a tensor from the start of its storage to its last element, little-endian."""
    flat = _flat(tensor.detach()).cpu()  # before copying, which may change the layout
    return ctypes.string_at(flat.data_ptr(), flat.numel()) if flat.numel() else b""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's memory as a tensor."""
    type_ = TensorType.of_tensor(tensor)
    memory = window(tensor, torch.uint8, (type_.nbytes if type_.numel else 0,), (1,), 0)
    return _little(memory, tensor.dtype)


def _little(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert between native and little-endian byte order."""
    if sys.byteorder == "little":
        return memory
    size = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    return memory.view(-1, size).flip(1).reshape(-1)


def from_bytes(contents: bytes, type_: TensorType) -> torch.Tensor:
    """A CPU tensor of that type, in its own memory with these `contents`."""
    memory = torch.empty(len(contents), dtype=torch.uint8)
    if contents:
        memory.copy_(_little(torch.frombuffer(bytearray(contents), dtype=torch.uint8), type_.dtype))
    made = window(memory, type_.dtype, type_.shape, type_.stride, type_.offset)
    if type_.conj:
        _torch.set_conj(made, True)
    if type_.neg:
        _torch.set_neg(made, True)
    return made


def byte_length(type_: TensorType) -> int:
    """The length of `to_bytes` for a tensor of this type."""
    return type_.nbytes if type_.numel else 0


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of the elements in index order, independent of strides."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    dense = dense if dense.storage_offset() == 0 else dense.clone()
    return hashlib.sha256(to_bytes(dense)).hexdigest()


# -- numbers -----------------------------------------------------------------------------------


def number_entry(number: Any) -> list[str]:
    """A Python number as JSON that preserves its type and every bit."""
    if isinstance(number, complex):
        return ["complex", repr(number.real), repr(number.imag)]
    return [type(number).__name__, repr(number)]


def read_number(reader: Reader, entry: Any, where: str) -> Any:
    """Parse the result of `number_entry`."""
    if not isinstance(entry, list) or not all(isinstance(item, str) for item in entry):
        reader.fail(f"{where}: expected a number")
    try:
        match entry:
            case ["bool", ("True" | "False") as word]:
                return word == "True"
            case ["int", digits] if len(digits) < 100:
                return int(digits)
            case ["float", digits]:
                return float(digits)
            case ["complex", real, imaginary]:
                return complex(float(real), float(imaginary))
    except ValueError:
        reader.fail(f"{where}: {entry!r} is no number")
    reader.fail(f"{where}: expected a number")


# -- statistics --------------------------------------------------------------------------------


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A plain CPU copy in the widest dtype of its kind; integers and booleans as doubles."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def statistics(tensor: torch.Tensor) -> Json:
    """Range, mean, deviation, and counts of NaN and infinities, as JSON; of complex parts."""
    numbers = wide(tensor).reshape(-1)
    parts = torch.view_as_real(numbers).reshape(-1) if numbers.is_complex() else numbers
    finite = parts[parts.isfinite()]
    entry: Json = {
        "nan": int(parts.isnan().sum()),
        "inf": int(parts.isinf().sum()),
        "count": parts.numel(),
    }
    summary = (finite.min(), finite.max(), finite.mean()) if finite.numel() else (0.0,) * 3
    deviation = finite.std(correction=0) if finite.numel() else 0.0
    for name, number in zip(("min", "max", "mean", "std"), (*summary, deviation), strict=True):
        entry[name] = repr(float(number))
    return entry


def read_statistics(reader: Reader, entry: Any, where: str) -> dict[str, float]:
    """Parse and check statistics."""
    found = {name: float(reader.integer(entry.get(name), where)) for name in ("nan", "inf")}
    for name in ("min", "max", "mean", "std"):
        word = reader.field(name, str, entry, where)
        try:
            found[name] = float(word)
        except ValueError:
            reader.fail(f"{where}: {name} is {word[:60]!r}, not a number")
        if not math.isfinite(found[name]):
            reader.fail(f"{where}: {name} is not finite")
    return found


def synthetic(type_: TensorType, facts: dict[str, float], seed: int) -> torch.Tensor:
    """A random tensor of that type with these statistics, determined by the seed."""
    generator = torch.Generator().manual_seed(seed)
    memory = byte_length(type_) // type_.dtype.itemsize
    parts = 2 * memory if type_.dtype.is_complex else memory
    low, high = facts["min"], facts["max"]
    if type_.dtype == torch.bool:
        numbers = torch.rand(parts, generator=generator, dtype=torch.float64) < facts["mean"]
    elif type_.dtype.is_floating_point or type_.dtype.is_complex:
        numbers = torch.randn(parts, generator=generator, dtype=torch.float64)
        numbers = (numbers * facts["std"] + facts["mean"]).clamp(low, high)
        _spoil(numbers, facts, generator)
    else:
        span = high - low + 1
        numbers = torch.rand(parts, generator=generator, dtype=torch.float64) * span + low
        numbers = numbers.floor().clamp(low, high)
    if type_.dtype.is_complex:
        numbers = torch.view_as_complex(numbers.view(-1, 2))
    flat = numbers.to(type_.dtype)
    made = flat.as_strided(type_.shape, type_.stride, type_.offset)
    if type_.conj:
        _torch.set_conj(made, True)
    if type_.neg:
        _torch.set_neg(made, True)
    return made


def _spoil(numbers: torch.Tensor, facts: dict[str, float], generator: torch.Generator) -> None:
    """Put NaN and infinities at random positions."""
    odd = min(int(facts["nan"] + facts["inf"]), numbers.numel())
    places = torch.randperm(numbers.numel(), generator=generator)[:odd]
    nans = int(facts["nan"])
    numbers[places[:nans]] = math.nan
    numbers[places[nans:]] = math.inf


def probes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a small tensor in double precision, or means over parts of a large one."""
    numbers = wide(tensor).reshape(-1)
    length = _neighbours(numbers.numel())
    if length == 1:
        return numbers
    whole = numbers.numel() // length * length
    means, rest = numbers[:whole].view(-1, length).mean(1), numbers[whole:]
    return torch.cat([means, rest.mean().reshape(1)]) if rest.numel() else means


def _neighbours(count: int) -> int:
    """Elements per mean, such that there are at most `PROBES` means."""
    return max(1, -(-count // PROBES))


def probes_type(type_: TensorType) -> TensorType:
    """The type of `probes` for a tensor of this type."""
    count = -(-type_.numel // _neighbours(type_.numel))
    kind = torch.complex128 if type_.dtype.is_complex else torch.float64
    return TensorType.contiguous((count,), kind, torch.device("cpu"))
