"""Reads the tensors of a PyTorch checkpoint file without running any code from it.

A ``.pth`` file is a pickle, and a pickle is a program that an unpickler runs. This module does not
run it. It reads the opcodes one by one and interprets the few that a ``state_dict`` needs. They
build plain data. The four global names that occur there are not imported but kept as text. Every
other opcode or name is refused. Where the caller knows the file's SHA-256, it is compared first.

    format                 the pickle             the numbers
    old, until 1.5         the fourth of five     behind the pickles, each after its count
    zip archive, from 1.6  NAME/data.pkl          NAME/data/KEY, uncompressed
"""

from __future__ import annotations

import hashlib
import io
import math
import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.storage.paths import no_access

MAGIC = 0x1950A86A20F9469CFC6C  # of the format that torch.save wrote before PyTorch 1.6
PROTOCOL = 1001
DTYPES = {
    "torch FloatStorage": torch.float32,
    "torch LongStorage": torch.int64,
    "torch BFloat16Storage": torch.bfloat16,
}
ZIP_MAGIC = b"PK\x03\x04"  # of the format that torch.save writes since PyTorch 1.6
ORDERED_DICT = "collections OrderedDict"
REBUILD = "torch._utils _rebuild_tensor_v2"
PUSHES = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE")
"""Opcodes that push their argument onto the stack."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
"""Opcodes that push a constant."""


class RefusedFileError(UserError):
    """The file is not the expected one, or holds more than tensors."""


@dataclass(frozen=True)
class _Name:
    """A global name of the pickle, "module attribute"; it is not imported."""

    text: str


@dataclass(frozen=True)
class _Storage:
    """A block of numbers that follows the pickles in the file."""

    key: str
    dtype: torch.dtype
    size: int


@dataclass(frozen=True)
class _TensorView:
    """A tensor as a view of a storage: offset, shape and strides in numbers, not bytes."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def read_state_dict(path: str | Path, sha256: str = "") -> dict[str, Tensor]:
    """The tensors of a ``state_dict`` that ``torch.save`` wrote.

    Args:
        path: of the file.
        sha256: the expected hash of the file, in hex; empty where none is known.

    Returns:
        Name -> tensor (float32, bfloat16 or int64), each with its own memory.

    Raises:
        RefusedFileError: the hash differs, or the file holds anything but such tensors.
        FileAccessError: it cannot be read.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise no_access(error, path) from error
    if sha256 and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise RefusedFileError(
            f"{path} is not the file that is expected (SHA-256 {found[:12]}..., not "
            f"{sha256[:12]}...), so it is not read. Install its package again."
        )
    try:
        if data.startswith(ZIP_MAGIC):
            return _read_zip(data)
        return _read_old(io.BytesIO(data))
    except RefusedFileError as error:
        raise RefusedFileError(f"{path} is refused: {error}") from None
    except (
        ValueError, IndexError, KeyError, TypeError, AttributeError, RuntimeError,
        NotImplementedError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise RefusedFileError(f"{path} is refused: it is no list of tensors ({error}).") from error


def _read_old(file: io.BytesIO) -> dict[str, Tensor]:
    """The tensors of a file in PyTorch's old format: five pickles, then the storages."""
    # Pickles 1 to 3: magic number, protocol version, properties of the machine that wrote it.
    if (_interpret(file), _interpret(file)) != (MAGIC, PROTOCOL):
        raise RefusedFileError("it is not in PyTorch's file format.")
    if _interpret(file).get("little_endian") is not True:
        raise RefusedFileError("its numbers are big-endian.")
    # Pickle 4: name -> view of a storage. Pickle 5: the storages' keys, in the order of the file.
    state = _interpret(file)
    keys = _interpret(file)
    storages = {v.storage.key: v.storage for v in state.values() if isinstance(v, _TensorView)}
    # The storages: each is its size (int64), then its numbers.
    memory = {}
    for key in keys:
        size = int.from_bytes(file.read(8), "little", signed=True)
        storage = storages[key]
        if size != storage.size:
            raise RefusedFileError(f"storage {key} has {size} numbers, not {storage.size}.")
        memory[key] = _numbers(file.read(size * storage.dtype.itemsize), storage)
    if file.read(1):
        raise RefusedFileError("something follows its tensors.")
    return {name: _tensor(entry, memory[entry.storage.key]) for name, entry in state.items()}


def _read_zip(data: bytes) -> dict[str, Tensor]:
    """The tensors of a zip archive: a pickle, and a file for each storage."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # A compressed file could be much larger than the archive; torch.save compresses none.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise RefusedFileError("its files are compressed.")
        # All files lie in one folder, which has the name of the file that was saved.
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise RefusedFileError("it is not in PyTorch's file format.")
        root = pickles[0].removesuffix("/data.pkl")
        order = f"{root}/byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise RefusedFileError("its numbers are big-endian.")
        state = _interpret(io.BytesIO(archive.read(pickles[0])))
        storages = {entry.storage.key: entry.storage for entry in state.values()}
        memory = {
            key: _numbers(archive.read(f"{root}/data/{key}"), storage)
            for key, storage in storages.items()
        }
    return {name: _tensor(entry, memory[entry.storage.key]) for name, entry in state.items()}


def _numbers(data: bytes, storage: _Storage) -> Tensor:
    """The numbers of a storage, in one dimension."""
    if len(data) != storage.size * storage.dtype.itemsize:
        raise RefusedFileError(f"storage {storage.key} has not {storage.size} numbers.")
    if not data:
        return torch.empty(0, dtype=storage.dtype)
    return torch.frombuffer(bytearray(data), dtype=storage.dtype)


def _tensor(entry: _TensorView, memory: Tensor) -> Tensor:
    """The tensor of a view, after a check that it lies inside its storage."""
    # The distance from the view's first to its last number.
    extent = sum((n - 1) * step for n, step in zip(entry.shape, entry.stride, strict=True))
    beyond = entry.offset + extent >= len(memory) or math.prod(entry.shape) > len(memory)
    if beyond or min((entry.offset, *entry.shape, *entry.stride)) < 0:
        raise RefusedFileError("a tensor reaches beyond its storage.")
    return memory.as_strided(entry.shape, entry.stride, entry.offset).clone()


def _interpret(file: io.BytesIO) -> Any:
    """The value of the next pickle in ``file``, as plain data; moves ``file`` behind it.

    A pickle is a program for a stack machine with a list of marks and a memo. ``pickletools`` gives
    its opcodes, which are executed here.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    opcodes: Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(file)
    for opcode, argument, _ in opcodes:
        name = opcode.name
        # Constants, and the end of the program.
        if name in PUSHES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "PROTO":
            continue
        elif name == "STOP":
            (value,) = stack
            return value
        # The memo holds values that occur more than once.
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        # Tuples, lists and dicts, of the values behind the last mark.
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif name in ("TUPLE1", "TUPLE2"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "APPENDS":
            items = pop_to_mark()
            target: Any = stack[-1]
            target.extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = pop_to_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        # Names, storages and the two permitted calls.
        elif name == "GLOBAL":
            if argument not in (ORDERED_DICT, REBUILD, *DTYPES):
                raise RefusedFileError(
                    f"it asks for {argument.replace(' ', '.')}, and only tensors are read."
                )
            stack.append(_Name(argument))
        elif name == "BINPERSID":
            # The old format has a sixth entry, for a storage that is part of another one.
            kind, dtype, key, _, size, *view = stack.pop()
            if kind != "storage" or view not in ([], [None]):
                raise RefusedFileError("it refers to something that is no storage.")
            stack.append(_Storage(str(key), DTYPES[dtype.text], int(size)))
        elif name == "REDUCE":
            arguments = stack.pop()
            function = stack.pop()
            stack.append(_call(function, arguments))
        elif name == "BUILD":
            # A state_dict has an attribute with the versions of its modules, which is dropped.
            attributes = stack.pop()
            if not isinstance(attributes, dict) or not isinstance(stack[-1], dict):
                raise RefusedFileError("it sets the attributes of an object.")
        else:
            raise RefusedFileError(
                f"it holds the pickle opcode {name}, which no list of tensors needs."
            )
    raise RefusedFileError("it breaks off.")


def _call(function: Any, arguments: tuple[Any, ...]) -> Any:
    """The result of the two calls that a state_dict needs: an empty dict, or a tensor's view."""
    if function == _Name(ORDERED_DICT) and arguments == ():
        return {}
    if function == _Name(REBUILD):
        storage, offset, shape, stride, *_ = arguments
        if isinstance(storage, _Storage):
            sizes = tuple(map(int, shape))
            strides = tuple(map(int, stride))
            return _TensorView(storage, int(offset), sizes, strides)
    raise RefusedFileError("it calls something other than the making of a tensor.")
