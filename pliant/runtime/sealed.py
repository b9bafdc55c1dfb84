"""Files that carry a checksum: archives of torch, safetensors and JSON. A file with a changed bit is refused."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from pliant.core.errors import first_line
from pliant.runtime.files import write_aside

_MARK = b"sha256:"
_KEY = "sha256"


def save_archive(path: str | os.PathLike[str], held: Mapping[str, Any]) -> None:
    """Write tensors and plain types as `torch.save` does, with a checksum in the comment of the zip file.

    What `load_archive` would refuse to read is refused here: a class that torch does not take for plain data.
    """
    content = io.BytesIO()
    torch.save(dict(held), content)
    content.seek(0)
    strange = torch.serialization.get_unsafe_globals_in_checkpoint(content)
    if strange:
        raise ValueError(f"{strange[0]!r} could not be read back from a file: save tensors and plain types only.")
    body = content.getbuffer()[:-2]  # without the length of the comment, which ends a zip file
    comment = _MARK + sha256(body).hexdigest().encode()
    write_aside(path, body, len(comment).to_bytes(2, "little"), comment)


def load_archive(path: str | os.PathLike[str]) -> Any:
    """What `save_archive` wrote, on the CPU; a ValueError where the file is anything else, or not whole. Runs no code."""
    content = Path(path).read_bytes()
    length = len(_MARK) + 64
    body, comment = memoryview(content)[: -length - 2], content[-length:]
    if not comment.startswith(_MARK):
        raise ValueError("it has no checksum at its end: it is cut off, of an earlier version of Pliant, or something else")
    if comment != _MARK + sha256(body).hexdigest().encode() or content[-length - 2 : -length] != length.to_bytes(2, "little"):
        raise ValueError("its checksum does not match: the file was damaged or edited")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it holds compressed entries, which PyTorch does not write")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a file with a forged checksum makes its reader stumble in any way
        raise ValueError(f"torch cannot read it: {first_line(error)}") from error


def seal_tensors(content: bytes) -> bytes:
    """A safetensors file with a checksum in its metadata. The metadata is sorted: the same tensors give the same bytes."""
    header, tensors = _header(content)
    about = {name: text for name, text in header.pop("__metadata__", {}).items() if name != _KEY}
    about[_KEY] = _digest(header, about, tensors)
    text = json.dumps({"__metadata__": dict(sorted(about.items())), **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text + bytes(tensors)


def check_tensors(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file; a ValueError where it has a checksum that does not match."""
    header, tensors = _header(content)
    about = dict(header.pop("__metadata__", {}))
    if _KEY in about and about.pop(_KEY) != _digest(header, about, tensors):
        raise ValueError("its checksum does not match: the file was damaged or edited")
    return about


def _header(content: bytes) -> tuple[dict[str, Any], memoryview]:
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), memoryview(content)[start:]


def _digest(header: Mapping[str, Any], about: Mapping[str, str], tensors: memoryview) -> str:
    found = sha256(json.dumps([header, about], sort_keys=True).encode())
    found.update(tensors)
    return found.hexdigest()


def seal_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same data with a checksum."""
    return {**data, _KEY: _json_digest(data)}


def check_json(data: Any) -> Any:
    """The same data without its checksum; a ValueError where it has one that does not match."""
    if not isinstance(data, dict) or _KEY not in data:
        return data
    rest = {name: value for name, value in data.items() if name != _KEY}
    if data[_KEY] != _json_digest(rest):
        raise ValueError("its checksum does not match: the file was damaged or edited")
    return rest


def _json_digest(data: Mapping[str, Any]) -> str:
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
