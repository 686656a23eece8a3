"""A checkpoint is one safetensors file with all of a run at one step: whole, or refused.

Its header carries one metadata key, ``minigen``: canonical JSON with a SHA-256 of every tensor and
a checksum over the rest. No clock, path or library version goes in, so equal runs give equal files.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from minigen.errors import MinigenError, shown
from minigen.exact.streams import MOST_WORDS
from minigen.files import explained, write_atomically
from minigen.model import memory
from minigen.model.model import PARAMETERS as PARAMETERS
from minigen.model.model import fingerprint as fingerprint
from minigen.training.logs import NO_LOG, VOUCHED

FORMAT = 2  # raised whenever a file of the old kind would be misread, or trained on otherwise
_READABLE = (1, 2)  # format 1: another gradient, so it can be used but not trained on
STREAMS = ("inference", "optimizer")  # without these positions a run cannot go on as it was
_KNOWN_STREAMS = {*STREAMS, "init"}
_MOST_DESCRIBED = 1 << 20  # bytes of description beside as many as the tensors have

_NAME = re.compile(r"step-([0-9]{1,19})\.safetensors")  # in a run folder

_FOREIGN = {  # first bytes of files that can run code when they are read the usual way
    b"PK": "a PyTorch or zip file",
    b"\x80": "a pickle",
    b"\x93NUMPY": "a numpy file",
}

Tensors = Mapping[str, NDArray[np.float64]]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on: JSON-able description and float64 tensors.

    ``config`` holds the tables of ``Config.portable()``; ``tokenizer`` the tokenizer's state;
    ``step`` the completed updates; ``streams`` name → position; ``tensors`` E (V, D), W (D, K, V),
    b (V,) and the optimizer's moments, ``m.E`` for the moment m of E, each of its parameter's
    shape; ``format`` the arithmetic that they were trained with; ``logs`` the ``bytes`` and
    ``sha256`` of each log of its run folder up to its step, None where it was saved without one;
    ``corpus_files`` of how many files an external text was, None where that was not yet told.
    """

    config: dict[str, Any]
    tokenizer: dict[str, Any]
    step: int
    streams: dict[str, int]
    corpus_sha256: str
    tensors: dict[str, NDArray[np.float64]]
    format: int = FORMAT
    logs: dict[str, dict[str, Any]] | None = None
    corpus_files: int | None = None

    def has_text(self, sha256: str) -> bool:
        """Whether a text of this hash is the one that it was trained on."""
        return is_text(sha256, self.corpus_sha256, self.corpus_files)


def is_text(sha256: str, recorded: str, files: int | None) -> bool:
    """Whether a text of this hash is the one that was recorded.

    Before files were counted (None), the hash of several stood without their number behind it.
    """
    return recorded == sha256 or (files is None and recorded == sha256.partition("-")[0])


def require_trainable(source: str | Path, number: int) -> None:
    """Refuse to train on from weights of an older format, since no older run would have gone so."""
    if number != FORMAT:
        raise MinigenError(
            f"{source} is of format {number}, whose gradient was rounded otherwise than that of "
            f"format {FORMAT}, so training would not give its weights: train its config anew, or "
            "use the version of minigen that wrote it"
        )


def save(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint so that a reader sees all of the old file or all of the new.

    Raises MinigenError for content that ``load`` would refuse, and where writing fails; the older
    file is untouched then.
    """
    tensors = dict(sorted(checkpoint.tensors.items()))
    contents = [_bytes(tensor) for tensor in tensors.values()]
    description = {key: value for key, value in vars(checkpoint).items() if value is not None}
    description["tensors"] = {
        name: {"shape": tensor.shape, "sha256": _sha256(tensor)} for name, tensor in tensors.items()
    }
    try:
        description = json.loads(_canonical(description))  # keys and tuples as JSON spells them
        _check_description(description)
        _check_shapes({name: tensor.shape for name, tensor in tensors.items()}, description)
        _check_finite(tensors)
        if not _is_named_rightly(Path(path), checkpoint.step):
            raise MinigenError(f"its name is that of another step, and it is of {checkpoint.step}")
        text = _canonical({**description, "checksum": _checksum(description)})
        header = _header(tensors, text)
        _check_described(len(header) - 8, sum(one.nbytes for one in contents))
    except MinigenError as error:
        raise MinigenError(f"cannot save {path}: {error}") from None
    write_atomically(path, header, *contents)


def load(path: str | Path, *, moments: bool = True) -> Checkpoint:
    """Read a checkpoint and check all that is read; no byte of it is ever executed.

    With ``moments=False`` only E, W and b are returned, though every byte is checked. Raises
    MinigenError, one line that names the file and the fault.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise MinigenError("it is not a file" if path.exists() else "there is no such file")
        _check_size(path)
        with safe_open(path, framework="numpy") as file:
            description = _unseal(file.metadata() or {})
            step, training = description["step"], description["config"].get("training", {})
            if step > (steps := training.get("steps", step)):
                raise MinigenError(
                    f"it cannot be right: it is at step {step} of training.steps = {steps}"
                )
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            for name, header in headers.items():
                if header.get_dtype() != "F64":
                    raise MinigenError(f"tensor {name} must be F64 (got {header.get_dtype()})")
            shapes = {name: tuple(header.get_shape()) for name, header in headers.items()}
            _check_shapes(shapes, description)
            tensors = {}
            for name in shapes:
                tensor = file.get_tensor(name)
                if _sha256(tensor) != description["tensors"][name].get("sha256"):
                    raise MinigenError(
                        f"it is damaged: the bytes of {name} do not match their SHA-256"
                    )
                _check_finite({name: tensor})
                if moments or name in PARAMETERS:
                    tensors[name] = tensor
    except (SafetensorError, OSError, MinigenError) as error:
        raise MinigenError(f"cannot load {path}: {_reason(path, error)}") from None
    if not _is_named_rightly(path, step):
        raise MinigenError(
            f"{path} is of step {step}, whatever its name says: remove it, or name it so"
        )
    return Checkpoint(**{**description, "tensors": tensors})


def _is_named_rightly(path: Path, step: int) -> bool:
    named = _NAME.fullmatch(path.name)  # as in a run folder; any other name says nothing
    return named is None or int(named[1]) == step


def locate(model_path: str | Path) -> Path:
    """Return the checkpoint file that MODEL means: itself, or a run folder's highest step.

    Raises MinigenError where there is none.
    """
    path = Path(model_path)
    if not os.path.isdir(path):  # whatever else it is, ``load`` says so
        return path
    steps = by_step(path)
    if not steps:
        others = sorted(path.glob("*.safetensors"))
        cure = f"name a file in it, as {others[0]}" if others else "name a run folder, or a file"
        raise MinigenError(
            f"folder {path} holds no checkpoint of a run (step-NNNNNN.safetensors): {cure}"
        )
    return steps[max(steps)]


def by_step(folder: Path) -> dict[int, Path]:
    """Map the steps of a run folder's checkpoints, as they are named, to their files."""
    with explained(f"cannot read folder {folder}"):
        names = os.listdir(folder)
    return {int(match[1]): folder / name for name in names if (match := _NAME.fullmatch(name))}


def _header(tensors: Tensors, text: str) -> bytes:
    """Return the head of a safetensors file, byte for byte what the library writes.

    Its own writer is not used: by version it leaves other file modes and other strays when killed.
    """
    table: dict[str, Any] = {"__metadata__": {"minigen": text}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        table[name] = {"dtype": "F64", "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _bytes(tensor: NDArray[np.float64]) -> memoryview:
    """Return little-endian bytes in C order: of an array that holds them so, a view."""
    return np.ascontiguousarray(tensor, dtype="<f8").reshape(-1).data


def _sha256(tensor: NDArray[np.float64]) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _canonical(description: object) -> str:
    """One spelling for one content, so that no altered byte can hide in the spelling."""
    try:
        return json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MinigenError(f"its description must be JSON: {error}") from None


def _checksum(description: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(description).encode()).hexdigest()


def _unseal(metadata: dict[str, str]) -> dict[str, Any]:
    if list(metadata) != ["minigen"]:
        raise MinigenError("it is a safetensors file, but not one of minigen's")
    try:
        description = json.loads(metadata["minigen"])
        canonical = _canonical(description)
    except (ValueError, RecursionError):
        raise MinigenError("it is damaged: its description is not JSON") from None
    if not isinstance(description, dict):
        raise MinigenError("it is damaged: its description is not a JSON object")
    if description.get("format") not in _READABLE:
        raise MinigenError(
            f"its format is {shown(description.get('format'))} and this minigen reads "
            f"{' and '.join(map(str, _READABLE))}: "
            "use the version of minigen that wrote it"
        )
    checksum = description.pop("checksum", None)
    if canonical != metadata["minigen"] or checksum != _checksum(description):
        raise MinigenError("it is damaged: its description does not match its checksum")
    _check_description(description)
    return description


def _check_size(path: Path) -> None:
    """Refuse what would take more time or memory to read than a real file of its size."""
    with open(path, "rb") as file:
        described = int.from_bytes(file.read(8), "little")
        rest = os.fstat(file.fileno()).st_size - 8 - described
    if rest >= 0:  # else it is no safetensors file, as the library will say
        _check_described(described, rest)
        memory.require(rest, "it", "use a machine with more memory")


def _check_described(described: int, rest: int) -> None:
    """Refuse a description, in bytes, that a file with so many of tensors has no use for."""
    if described > _MOST_DESCRIBED + rest:
        raise MinigenError(
            f"its description must have at most {_MOST_DESCRIBED} bytes more than its tensors "
            f"(it has {described}, they {rest}): shorten sampling.prompt"
        )


def _check_config(config: dict[str, Any]) -> None:
    """Check what is used of a config before, or without, ``Config.from_dict``."""
    for name, table in config.items():
        if not isinstance(table, dict):
            raise MinigenError(f"its config is damaged: {name[:80]} must be a table")
    text = config.get("corpus", {}).get("text", "external")
    if text not in ("fables", "external"):  # no path from a checkpoint is ever opened
        raise MinigenError('corpus.text in it must be "fables" or "external", never a path')
    if type(config.get("training", {}).get("steps", 0)) is not int:
        raise MinigenError("training.steps in it must be an integer")


def _check_description(description: dict[str, Any]) -> None:
    kinds: dict[str, type] = {"format": int, "step": int, "corpus_sha256": str}
    kinds |= dict.fromkeys(("config", "tokenizer", "streams", "tensors"), dict)
    logs = description.get("logs", dict.fromkeys(VOUCHED, NO_LOG))  # not in every file
    files = description.get("corpus_files", 1)
    if description.keys() - {"logs", "corpus_files"} != kinds.keys():
        raise MinigenError(f"its description must hold {', '.join(kinds)}")
    for key, kind in kinds.items():
        if type(description[key]) is not kind:
            raise MinigenError(f"{key} must be of type {kind.__name__}")
    _check_config(description["config"])
    streams = description["streams"]
    if odd := sorted(streams.keys() - _KNOWN_STREAMS):
        raise MinigenError(f"it holds a stream that no run has: {odd[0][:80]!r}")
    if missing := [name for name in STREAMS if name not in streams]:
        raise MinigenError(f"the positions of these streams are missing: {', '.join(missing)}")
    is_whole = isinstance(logs, dict) and logs.keys() == set(VOUCHED)
    if not (is_whole and all(map(_is_state, logs.values()))):
        raise MinigenError(f"logs must hold the bytes and the sha256 of {' and '.join(VOUCHED)}")
    counts = {"step": description["step"], "corpus_files": files, **streams}
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count < MOST_WORDS:
            got = shown(count)
            raise MinigenError(f"{name} must be an integer from 0 to below 2^258 (got {got})")


def _is_state(state: object) -> bool:
    match state:
        case {"bytes": size, "sha256": str(), **more}:
            return type(size) is int and size >= 0 and not more
    return False


def _check_shapes(shapes: Shapes, description: dict[str, Any]) -> None:
    """Check names and shapes against each other, the config and the description."""
    try:
        K = description["config"]["model"]["context_length"]
        D = description["config"]["model"]["embedding_dim"]
        V = 257 + len(description["tokenizer"]["merges"])  # bytes, <|endoftext|>, merges
        for name, size in {"model.context_length": K, "model.embedding_dim": D}.items():
            if type(size) is not int or size < 1:
                raise MinigenError(f"{name} must be an integer of at least 1 (got {size!r:.80})")
        described = {name: tuple(entry["shape"]) for name, entry in description["tensors"].items()}
    except (KeyError, TypeError):
        raise MinigenError("its config, tokenizer or list of tensors is not complete") from None
    if described != shapes:
        raise MinigenError("it is damaged: its tensors are not those that its description lists")
    expected = {"E": (V, D), "W": (D, K, V), "b": (V,)}
    moments = {name.rpartition(".")[0] for name in shapes} - {""}
    names = {*PARAMETERS, *(f"{moment}.{name}" for moment in moments for name in PARAMETERS)}
    if odd := sorted(names ^ shapes.keys()):
        raise MinigenError(f"its tensors must be E, W, b and moments of each (see {odd[0]})")
    for name, shape in shapes.items():
        right = expected[name.rpartition(".")[2]]
        if shape != right:
            raise MinigenError(f"tensor {name} must have shape {right} (got {shape})")


def _check_finite(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise MinigenError(f"tensor {name} must be finite (it holds NaN or infinity)")


def _reason(path: Path, error: Exception) -> str:
    """Say why a file cannot be loaded; where the library refuses it, from its first bytes alone."""
    if not isinstance(error, SafetensorError):
        return str(getattr(error, "strerror", None) or error)
    with suppress(OSError), open(path, "rb") as file:
        head = file.read(9)
        if head[8:] != b"{":
            for magic, kind in _FOREIGN.items():
                if head.startswith(magic):
                    return f"it looks like {kind}; only .safetensors files are read"
            return "it is not a .safetensors file"
    return f"it is damaged or cut short ({error})"
