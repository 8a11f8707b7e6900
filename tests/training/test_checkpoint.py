"""Checkpoints: bit for bit there and back, complete or absent."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from training_runs import full_disk

from stretto.errors import StrettoError
from stretto.training import CHECKPOINT_FOLDER
from stretto.training.checkpoint import STATE_FILE, TENSORS_FILE, Checkpoint, load_newest, save_checkpoint


def _checkpoint(update: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(update)
    return Checkpoint(
        tensors={
            "model.weight": torch.randn(3, 5, generator=generator),
            "model.bias": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
            "optimizer.0.step": torch.tensor(float(update)),
            "random.cpu": torch.get_rng_state(),
            "wide": torch.randn(2, 2, dtype=torch.float64, generator=generator),
            "turned": torch.randn(4, 3, generator=generator).T,
            "empty": torch.zeros(0, 3),
        },
        state={"position": {"update": update, "seconds": 0.1 + 0.2}, "groups": [{"lr": 1 / 3}], "words": "ä\u2028"},
    )


def _assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.state == expected.state
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert found.tensors[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes()


def _names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / CHECKPOINT_FOLDER).iterdir())


def _saved(run: Path, *updates: int, keep: int = 9) -> None:
    for update in updates:
        save_checkpoint(run, _checkpoint(update), update=update, keep=keep)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, _checkpoint(7), update=7, keep=2)
    found = load_newest(tmp_path)
    assert (found.path, found.refused) == (path, ())
    _assert_same(found.checkpoint, _checkpoint(7))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    _saved(tmp_path, 3, 20, 100, 1000, keep=keep)
    assert _names(tmp_path) == [f"update-{update:08d}" for update in (3, 20, 100, 1000)][-keep:]
    _assert_same(load_newest(tmp_path).checkpoint, _checkpoint(1000))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x95 something else")


@pytest.mark.parametrize("name", [TENSORS_FILE, STATE_FILE])
@pytest.mark.parametrize("damage", [_truncate, _empty, _foreign, Path.unlink])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_taken(
    tmp_path: Path, name: str, damage: Any
) -> None:
    _saved(tmp_path, 1, 2)
    damage(tmp_path / CHECKPOINT_FOLDER / "update-00000002" / name)
    found = load_newest(tmp_path)
    _assert_same(found.checkpoint, _checkpoint(1))
    assert len(found.refused) == 1
    assert str(tmp_path / CHECKPOINT_FOLDER / "update-00000002") in found.refused[0]


@pytest.mark.parametrize("name", [TENSORS_FILE, STATE_FILE])
def test_a_flipped_bit_anywhere_is_noticed_or_changes_nothing(tmp_path: Path, name: str) -> None:
    _saved(tmp_path, 1, 2)
    path = tmp_path / CHECKPOINT_FOLDER / "update-00000002" / name
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 7)
        path.write_bytes(bytes(damaged))
        found = load_newest(tmp_path)
        _assert_same(found.checkpoint, _checkpoint(1 if found.refused else 2))
        if name == TENSORS_FILE:
            assert len(found.refused) == 1


def test_with_none_left_the_run_and_all_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="has no checkpoint to resume from"):
        load_newest(tmp_path)
    _saved(tmp_path, 1, 2)
    for name in _names(tmp_path):
        _empty(tmp_path / CHECKPOINT_FOLDER / name / STATE_FILE)
    with pytest.raises(StrettoError, match=r"update-00000002.*update-00000001") as info:
        load_newest(tmp_path)
    assert str(tmp_path) in str(info.value)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    path = tmp_path / CHECKPOINT_FOLDER / "update-00000001" / STATE_FILE
    state = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(state | {"version": 3}), encoding="utf-8")
    path.parent.rename(path.parent.with_name("step-00000001"))
    with pytest.raises(StrettoError, match="written by another version"):
        load_newest(tmp_path)


def test_saving_an_update_again_keeps_it_and_mends_a_torn_one(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2, 2)
    assert _names(tmp_path) == ["update-00000001", "update-00000002"]
    _truncate(tmp_path / CHECKPOINT_FOLDER / "update-00000002" / TENSORS_FILE)
    _saved(tmp_path, 2)
    _assert_same(load_newest(tmp_path).checkpoint, _checkpoint(2))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_torn_later_one_never_crowds_out_those_that_are_whole(tmp_path: Path, keep: int) -> None:
    _saved(tmp_path, 10, 30)
    _truncate(tmp_path / CHECKPOINT_FOLDER / "update-00000030" / TENSORS_FILE)
    for update in (11, 12, 13):
        _saved(tmp_path, update, keep=keep)
        found = load_newest(tmp_path)
        assert found.path.name == f"update-{update:08d}"
        _assert_same(found.checkpoint, _checkpoint(update))
    assert _names(tmp_path) == ["update-00000012", "update-00000013"][-keep:]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), safetensors.SafetensorError("I/O")]
)
def test_a_failure_while_writing_leaves_the_earlier_ones_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    _saved(tmp_path, 1, 2)

    def fail(tensors: dict[str, torch.Tensor], path: Path) -> None:
        Path(path).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(StrettoError, match="could not write the checkpoint") as info:
        save_checkpoint(tmp_path, _checkpoint(3), update=3, keep=1)
    assert "update-00000003" in str(info.value)
    assert _names(tmp_path) == ["update-00000001", "update-00000002"]
    assert load_newest(tmp_path).refused == ()


@pytest.mark.parametrize("sizes", [(100_000, 0), (3, 50_000)], ids=["tensors", "state"])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_rest(tmp_path: Path, sizes: tuple[int, int]) -> None:
    _saved(tmp_path, 1)
    too_large = Checkpoint(tensors={"w": torch.zeros(sizes[0])}, state={"filler": "x" * sizes[1]})
    with full_disk(20_000), pytest.raises(StrettoError, match=r"could not write the checkpoint .*update-00000002"):
        save_checkpoint(tmp_path, too_large, update=2, keep=2)
    assert _names(tmp_path) == ["update-00000001"]
    _assert_same(load_newest(tmp_path).checkpoint, _checkpoint(1))


def test_what_a_crash_left_behind_is_cleared_away(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    shutil.copytree(
        tmp_path / CHECKPOINT_FOLDER / "update-00000001", tmp_path / CHECKPOINT_FOLDER / ".update-00000002.abcd.part"
    )
    assert load_newest(tmp_path).path.name == "update-00000001"
    _saved(tmp_path, 3)
    assert _names(tmp_path) == ["update-00000001", "update-00000003"]


def test_a_number_that_json_does_not_have_is_not_saved(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, Checkpoint(state={"loss": float("nan")}), update=2, keep=2)
    assert _names(tmp_path) == ["update-00000001"]


def test_what_is_read_lies_in_memory_as_what_was_saved(tmp_path: Path) -> None:
    """Products of a BLAS depend on that in their last digits, and a resumed run must not."""
    odd = {name: torch.randn(size, dtype=torch.float64) for name, size in (("a", 3), ("b", 5), ("c", 40), ("d", 7))}
    save_checkpoint(tmp_path, Checkpoint(tensors=odd), update=1, keep=1)
    found = load_newest(tmp_path).checkpoint.tensors
    assert {name: tensor.data_ptr() % 64 for name, tensor in found.items()} == dict.fromkeys(odd, 0)
