"""The checkpoint: equal bytes for equal content, all of a file or nothing, no fault unseen."""

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from minigen.errors import MinigenError
from minigen.training.checkpoint import (
    Checkpoint,
    fingerprint,
    load,
    locate,
    save,
)

V, K, D = 257, 2, 1
PINNED = "75d27dd3ba7c328906f9767197af287f211a654ad87605fc863a51469aa3683c"


def make(moments=("m", "v"), step=3):
    """A checkpoint of the smallest vocabulary, its numbers drawn from a fixed seed."""
    random = np.random.RandomState(0)
    shapes = {"E": (V, D), "W": (D, K, V), "b": (V,)}
    return Checkpoint(
        config={
            "corpus": {"text": "fables"},
            "model": {"context_length": K, "embedding_dim": D},
            "sampling": {"prompt": "é“\\\n", "temperature": 0.8, "top_k": None},
            "tokenizer": {"vocab_size": V},
        },
        tokenizer={"merges": []},
        step=step,
        streams={"optimizer": 192, "inference": 2**64},
        corpus_sha256="ab" * 32,
        tensors={
            f"{prefix}{name}": random.standard_normal(shape)
            for prefix in ("", *(f"{moment}." for moment in moments))
            for name, shape in shapes.items()
        },
    )


@pytest.fixture
def path(tmp_path):
    """A saved checkpoint."""
    save(tmp_path / "model.safetensors", make())
    return tmp_path / "model.safetensors"


def refusal(path, **options):
    """The one line with which a file is refused."""
    with pytest.raises(MinigenError) as caught:
        load(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"cannot load {path}: ")
    return message


def rewrite(path, change=lambda description: None, change_tensors=lambda tensors: None):
    """Change a file's content and make its hashes right again, by the library's own writer."""
    with safe_open(path, framework="numpy") as file:
        description = json.loads(file.metadata()["minigen"])
    tensors = safetensors.numpy.load_file(path)
    change_tensors(tensors)
    description["tensors"] = {
        name: {"shape": tensor.shape, "sha256": hashlib.sha256(tensor.tobytes()).hexdigest()}
        for name, tensor in tensors.items()
    }
    change(description)
    del description["checksum"]
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    description["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    safetensors.numpy.save_file(tensors, path, metadata={"minigen": text})


# ── There and back ───────────────────────────────────────────────────────────────────────────────


def assert_same(a, b):
    assert (a.config, a.tokenizer, a.step) == (b.config, b.tokenizer, b.step)
    assert (a.streams, a.corpus_sha256) == (b.streams, b.corpus_sha256)
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert b.tensors[name].shape == tensor.shape
        assert b.tensors[name].tobytes() == tensor.tobytes()


def test_a_checkpoint_loads_as_it_was_saved(path):
    assert_same(make(), load(path))
    save(path, make(moments=(), step=0))
    assert_same(make(moments=(), step=0), load(path))


def test_signed_zeros_subnormals_and_extremes_keep_their_bits(tmp_path):
    checkpoint = make()
    checkpoint.tensors["b"][:5] = -0.0, 5e-324, -2.3e-308, 1.7976931348623157e308, 0.1
    save(tmp_path / "x", checkpoint)
    assert_same(checkpoint, load(tmp_path / "x"))


def test_strided_and_big_endian_tensors_are_saved_by_value(path):
    checkpoint = make()
    checkpoint.tensors["b"] = np.repeat(checkpoint.tensors["b"], 2)[::2]
    checkpoint.tensors["W"] = np.asfortranarray(checkpoint.tensors["W"])
    checkpoint.tensors["E"] = checkpoint.tensors["E"].astype(">f8")
    plain = path.read_bytes()
    save(path, checkpoint)
    assert path.read_bytes() == plain


def test_loaded_tensors_can_be_trained_on(path):
    load(path).tensors["E"][0, 0] = 1.0


def test_the_same_content_gives_the_same_bytes_in_any_order_of_keys(path):
    checkpoint = make()
    turned = Checkpoint(
        config=dict(reversed(checkpoint.config.items())),
        tokenizer={"merges": ()},
        step=checkpoint.step,
        streams=dict(reversed(checkpoint.streams.items())),
        corpus_sha256=checkpoint.corpus_sha256,
        tensors=dict(reversed(checkpoint.tensors.items())),
    )
    plain = path.read_bytes()
    save(path, turned)
    assert path.read_bytes() == plain


def test_a_loaded_checkpoint_saves_to_the_same_bytes(path):
    plain = path.read_bytes()
    save(path, load(path))
    assert path.read_bytes() == plain


def test_keys_that_json_turns_into_strings_stay_loadable(tmp_path):
    checkpoint = make()
    checkpoint.config["sampling"]["logit_bias"] = {2: 1.0, 10: 2.0}  # 10 sorts before 2 as text
    save(tmp_path / "x", checkpoint)
    assert load(tmp_path / "x").config["sampling"]["logit_bias"] == {"2": 1.0, "10": 2.0}


def test_the_file_is_what_the_safetensors_library_writes(path):
    checkpoint = make()
    for length in range(8):  # of the header, but for what fills it up
        checkpoint.config["sampling"]["prompt"] = "x" * length
        save(path, checkpoint)
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
        assert list(metadata) == ["minigen"]
        assert safetensors.numpy.save(checkpoint.tensors, metadata=metadata) == path.read_bytes()


def test_no_path_goes_into_the_file(path):
    assert str(path.parent).encode() not in path.read_bytes()


def test_without_moments_every_byte_is_checked_all_the_same(path):
    assert sorted(load(path, moments=False).tensors) == ["E", "W", "b"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of v.b
    path.write_bytes(data)
    assert "v.b" in refusal(path, moments=False)


def test_loading_for_generation_imports_neither_pydantic_nor_scipy():
    check = (
        "import sys, minigen.training.checkpoint;"
        "print({'pydantic', 'scipy', 'numba', 'tokenizers'} & sys.modules.keys())"
    )
    output = subprocess.run([sys.executable, "-c", check], capture_output=True, check=True).stdout
    assert output.strip() == b"set()"


# ── Fingerprint ──────────────────────────────────────────────────────────────────────────────────


def test_the_fingerprint_covers_names_shapes_and_bytes_of_the_parameters_alone():
    checkpoint = make()
    expected = hashlib.sha256()
    for name, shape in (("E", b"257,1"), ("W", b"1,2,257"), ("b", b"257")):
        expected.update(name.encode() + b"\0" + shape + b"\0" + checkpoint.tensors[name].tobytes())
    assert fingerprint(checkpoint.tensors) == expected.hexdigest()


def test_the_fingerprint_of_small_parameters_is_pinned():
    tensors = {"E": np.array([[1.0]]), "W": np.array([[[2.0]]]), "b": np.array([-0.0])}
    assert fingerprint(tensors) == PINNED
    strided = {name: np.repeat(tensor, 2, axis=0)[::2] for name, tensor in tensors.items()}
    assert fingerprint(strided) == PINNED


# ── Damage ───────────────────────────────────────────────────────────────────────────────────────


def test_any_bit_flipped_in_the_header_is_refused(tmp_path):
    path = tmp_path / "x"
    save(path, make(moments=()))
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    with open(path, "r+b", buffering=0) as file:
        for bit in range(8 * header):
            at = bit // 8
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << bit % 8]))
            refusal(path)
            file.seek(at)
            file.write(data[at : at + 1])
    load(path)


def test_any_bit_flipped_in_a_tensor_is_refused(path):
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for bit in range(8 * start, 8 * len(data), 211):  # 211 is prime: meets every bit of a byte
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert "is damaged" in refusal(path)


def test_a_file_cut_short_or_grown_is_refused(path):
    data = path.read_bytes()
    for length in (8, 9, *range(0, len(data), 97), len(data) - 1):
        path.write_bytes(data[:length])
        what = "damaged or cut short (" if length > 8 else "not a .safetensors file"
        assert f": it is {what}" in refusal(path)
    path.write_bytes(data + b"\0")
    assert ": it is damaged or cut short (" in refusal(path)


def test_two_tensors_changed_places_are_refused(path):
    def swap(tensors):
        tensors["m.b"], tensors["v.b"] = tensors["v.b"], tensors["m.b"]

    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = safetensors.numpy.load_file(path)
    swap(tensors)
    safetensors.numpy.save_file(tensors, path, metadata=metadata)
    assert "m.b do not match their SHA-256" in refusal(path)


def test_metadata_that_no_checksum_covers_is_refused(path):
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(tensors, path, metadata={**metadata, "note": "hello"})
    assert "not one of minigen's" in refusal(path)


# ── Content that is not right ────────────────────────────────────────────────────────────────────


def test_rewriting_with_the_library_alone_is_no_fault(path):
    """So that the refusals below are due to their change."""
    rewrite(path)
    assert_same(make(), load(path))


def test_another_format_version_is_refused_and_says_which_one_is_read(path):
    rewrite(path, lambda description: description.update(format=3))
    assert "its format is 3 and this minigen reads 1 and 2" in refusal(path)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("format", {"format": True}),
        ("step", {"step": -1}),
        ("step", {"step": 1.5}),
        ("step", {"step": True}),
        ("streams", {"streams": [1]}),
        ("streams are missing: optimizer", {"streams": {"inference": 192}}),  # field report 7
        ("streams are missing: inference, optimizer", {"streams": {}}),
        ("optimizer", {"streams": {"optimizer": "1", "inference": 0}}),
        ("optimizer", {"streams": {"optimizer": -1, "inference": 0}}),
        ("config", {"config": {}}),
        ("config", {"config": []}),
        ("tokenizer", {"tokenizer": {}}),
        ("tensors", {"tensors": {}}),
        ("tensors", {"tensors": {"E": 5}}),
        ("corpus_sha256", {"corpus_sha256": None}),
        ("corpus_sha256", {"more": 1}),
    ],
)
def test_a_description_with_a_wrong_part_is_refused_and_the_part_named(path, part, change):
    rewrite(path, lambda description: description.update(change))
    assert part in refusal(path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("E", np.zeros((V, D + 1))),
        ("E", np.zeros((V + 1, D))),
        ("W", np.zeros((D, V, K))),
        ("W", np.zeros((D, K + 1, V))),
        ("b", np.zeros((V, 1))),
        ("b", np.zeros(V - 1)),
        ("b", np.zeros(())),
        ("m.E", np.zeros((D, V))),
        ("v.b", np.zeros(0)),
    ],
)
def test_a_wrong_shape_is_refused_with_the_tensors_name(path, name, tensor):
    rewrite(path, change_tensors=lambda tensors: tensors.update({name: tensor}))
    assert re.search(rf"tensor {name} must have shape .* \(got ", refusal(path))
    with pytest.raises(MinigenError, match="cannot save"):
        save(path, dataclasses.replace(make(), tensors={**make().tensors, name: tensor}))


def test_another_number_of_tokens_than_the_tokenizer_has_is_refused(path):
    rewrite(path, lambda description: description.update(tokenizer={"merges": [[97, 98]]}))
    assert "tensor E must have shape (258, 1) (got (257, 1))" in refusal(path)


@pytest.mark.parametrize("name", ["E", "b", "m.W"])
def test_a_wrong_dtype_is_refused_with_the_tensors_name(path, name):
    def halve(tensors):
        tensors[name] = tensors[name].astype(np.float32)

    rewrite(path, change_tensors=halve)
    assert f"tensor {name} must be F64 (got F32)" in refusal(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["W", "v.E"])
def test_a_number_that_is_not_finite_is_refused_with_the_tensors_name(path, name, value):
    def spoil(tensors):
        tensors[name].flat[-1] = value

    rewrite(path, change_tensors=spoil)
    assert f"tensor {name} must be finite" in refusal(path)
    checkpoint, older = make(), path.read_bytes()
    spoil(checkpoint.tensors)
    with pytest.raises(MinigenError, match=f"cannot save .* tensor {name} must be finite"):
        save(path, checkpoint)
    assert path.read_bytes() == older


@pytest.mark.parametrize("name", ["E", "m.W", "v.b"])
def test_a_missing_tensor_is_refused(path, name):
    rewrite(path, change_tensors=lambda tensors: tensors.pop(name))
    assert f"its tensors must be E, W, b and moments of each (see {name})" in refusal(path)


def test_a_tensor_without_a_sha256_is_refused(path):
    rewrite(path, lambda description: description["tensors"]["E"].pop("sha256"))
    assert "the bytes of E do not match their SHA-256" in refusal(path)


def state(size):
    return {name: {"bytes": size, "sha256": ""} for name in ("metrics.jsonl", "samples.jsonl")}


RANGE = "{} must be an integer from 0 to below 2^258 (got "
LOGS = "logs must hold the bytes and the sha256 of metrics.jsonl and samples.jsonl"


@pytest.mark.parametrize(
    ("part", "inside", "outside", "said"),
    [
        ("step", 0, -1, RANGE.format(": step")),
        ("step", 2**258 - 1, 2**258, RANGE.format(": step")),
        ("corpus_files", 0, -1, RANGE.format("corpus_files")),
        ("streams", {"optimizer": 0, "inference": 2**258 - 1}, {"inference": 0}, "missing: optim"),
        ("streams", {"optimizer": 0, "inference": 0, "init": 0}, {"a": 0}, "no run has: 'a'"),
        ("logs", state(0), state(-1), LOGS),
        ("logs", state(2**63), state(True), LOGS),
        ("config", {"model": make().config["model"]}, {"model": {}}, "its config, tokenizer or"),
        (
            "config",
            {**make().config, "training": {"steps": 3}},
            {**make().config, "training": {"steps": 2}},
            "it cannot be right: it is at step 3 of training.steps = 2",
        ),
    ],
)
def test_what_is_just_inside_its_range_is_read_and_what_is_beyond_refused(
    path, part, inside, outside, said
):
    rewrite(path, lambda description: description.update({part: inside}))
    load(path)
    rewrite(path, lambda description: description.update({part: outside}))
    assert said in refusal(path)


def test_a_description_may_have_a_mebibyte_more_than_the_tensors_and_no_byte_beyond(tmp_path):
    checkpoint, path = make(moments=()), tmp_path / "x"

    def described(prompt):
        checkpoint.config["sampling"]["prompt"] = prompt
        save(path, checkpoint)
        return int.from_bytes(path.read_bytes()[:8], "little")

    most = 2**20 + 8 * (V * D + D * K * V + V)
    room = most - described("")
    assert described("x" * room) == most
    assert_same(checkpoint, load(path))
    with pytest.raises(MinigenError, match=f"at most {2**20} bytes more than its tensors"):
        described("x" * (room + 8))
    path.write_bytes((2**20 + 8).to_bytes(8, "little") + b" " * (2**20 + 8))
    assert "its description must have at most" in refusal(path)


def test_a_tensor_of_another_name_is_refused(path):
    rewrite(path, change_tensors=lambda tensors: tensors.update(extra=np.zeros(3)))
    assert "see extra" in refusal(path)


# ── Files of another kind ────────────────────────────────────────────────────────────────────────


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_objects_are_refused_unread(tmp_path):
    """Field report 10."""
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    (tmp_path / "pickle").write_bytes(trap)
    assert "looks like a pickle; only .safetensors files are read" in refusal(tmp_path / "pickle")
    with zipfile.ZipFile(tmp_path / "torch", "w") as archive:
        archive.writestr("archive/data.pkl", trap)
    assert "looks like a PyTorch or zip file" in refusal(tmp_path / "torch")
    np.save(tmp_path / "x.npy", np.array([Trap(tmp_path / "sprung")], dtype=object))
    assert "looks like a numpy file" in refusal(tmp_path / "x.npy")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("data", [b"", b"hello", b"GGUF" + 99 * b"\0", 99 * b"\xff", 99 * b"{"])
def test_other_files_are_refused(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    what = "damaged or cut short (" if data.startswith(b"{") else "not a .safetensors file"
    assert f": it is {what}" in refusal(tmp_path / "x")


def test_a_safetensors_file_of_another_program_is_refused(tmp_path):
    safetensors.numpy.save_file(make().tensors, tmp_path / "x")
    assert "not one of minigen's" in refusal(tmp_path / "x")
    for text in ("", "[]", "{", "5", "NaN", '"' + "[" * 9, "[" * 100_000, "null"):
        safetensors.numpy.save_file(make().tensors, tmp_path / "x", metadata={"minigen": text})
        refusal(tmp_path / "x")


def test_a_missing_file_a_folder_and_a_device_are_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "none")
    assert "not a file" in refusal(tmp_path)
    assert "not a file" in refusal("/dev/zero")


def test_what_the_system_refuses_is_said_in_its_words(path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("minigen.training.checkpoint._check_size", refuse)
    assert refusal(path) == f"cannot load {path}: Input/output error"


# ── Saving ───────────────────────────────────────────────────────────────────────────────────────


def test_a_full_disk_leaves_the_older_file_and_no_rubbish(path):
    """Field report 9; a limit on the size of files stands in for the disk."""
    older = path.read_bytes()
    resource = pytest.importorskip("resource", reason="needs POSIX, to limit a file's size")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(older) // 2, hard))
    try:
        with pytest.raises(MinigenError, match=r"cannot save .*; nothing was changed"):
            save(path, make(step=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == older
    assert os.listdir(path.parent) == [path.name]


def test_a_disk_that_is_full_at_the_last_moment_does_too(path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    older = path.read_bytes()
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(MinigenError, match="No space left on device; nothing was changed"):
        save(path, make(step=4))
    assert path.read_bytes() == older
    assert os.listdir(path.parent) == [path.name]


def test_an_interruption_leaves_the_older_file_and_no_rubbish(path, monkeypatch):
    def fsync(descriptor):
        raise KeyboardInterrupt

    older = path.read_bytes()
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        save(path, make(step=4))
    assert path.read_bytes() == older
    assert os.listdir(path.parent) == [path.name]


def test_a_process_killed_while_it_saves_leaves_the_older_checkpoint_in_force(tmp_path):
    """Field report 8."""
    save(tmp_path / "step-000003.safetensors", make())
    kill = (
        "import os, signal\n"
        "from minigen.files import write_atomically\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"write_atomically({str(tmp_path / 'step-000004.safetensors')!r}, b'half')\n"
    )
    assert subprocess.run([sys.executable, "-c", kill]).returncode == -9
    assert len(os.listdir(tmp_path)) == 2  # the stray is there, and is not taken for a checkpoint
    assert load(locate(tmp_path)).step == 3
    save(tmp_path / "step-000003.safetensors", make())
    assert os.listdir(tmp_path) == ["step-000003.safetensors"]  # the next save removes it


def test_the_file_is_as_readable_as_any_other_file(path):
    (path.parent / "plain").write_bytes(b"")
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


def test_a_folder_that_is_missing_or_named_as_the_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MinigenError, match=r"cannot save .*No such file or directory"):
        save(tmp_path / "none" / "x", make())
    with pytest.raises(MinigenError, match=r"cannot save .*Not a directory"):
        save(tmp_path / "file" / "x", make())
    with pytest.raises(MinigenError, match=r"cannot save .*it is a folder"):
        save(tmp_path, make())
    assert os.listdir(tmp_path) == ["file"]


def test_a_description_that_json_cannot_hold_is_refused(tmp_path):
    for value in (float("nan"), {1, 2}, b"x"):
        checkpoint = make()
        checkpoint.config["odd"] = value
        with pytest.raises(MinigenError, match=r"cannot save .*must be JSON"):
            save(tmp_path / "x", checkpoint)
    assert os.listdir(tmp_path) == []


# ── MODEL ────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_folder_means_its_highest_step(tmp_path):
    for name in (
        "step-000500.safetensors",
        "step-1000000.safetensors",
        "step-999999.safetensors",
        ".step-2000000.safetensors.77.tmp",
        "step-3000000.safetensors.bak",
        "other.safetensors",
    ):
        (tmp_path / name).write_bytes(b"")
    assert locate(tmp_path) == tmp_path / "step-1000000.safetensors"


def test_a_file_means_itself(path):
    assert locate(str(path)) == path


def test_a_folder_without_checkpoints_is_an_error(tmp_path):
    with pytest.raises(MinigenError, match=r"holds no checkpoint.*: name a run folder, or a file$"):
        locate(tmp_path)
    for name in ("a.txt", "b.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(
        MinigenError, match=r"holds no checkpoint.*: name a file in it, as .*/b\.saf"
    ):
        locate(tmp_path)
