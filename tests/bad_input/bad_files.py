"""A folder of good files beside many that cannot be used, for the command lines of `cases.toml`."""

import gzip
import io
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

import stretto
from small_data import write_signs

INK = "<ink>{}<trace>0 0, 1 2, 3 1</trace></ink>"
LAUGHS = '<!DOCTYPE ink [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]><ink><trace>&b;</trace></ink>'
OUTSIDE = '<!DOCTYPE ink [<!ENTITY a SYSTEM "file:///etc/hostname">]><ink><trace>&a;</trace></ink>'
SMALL = {"epochs": 1, "batch_size": 6, "hidden_size": 4, "num_buckets": 2, "backend": "torch", "threads": 1}
CELLS = """
import torch
import stretto
from stretto.tasks import Classify
from stretto.training import AbstractTask

class Good(stretto.Cell):
    def __init__(self, input_size=3, hidden_size=4):
        super().__init__()
        self.input_size = input_size
        self.linear = torch.nn.Linear(input_size + hidden_size, hidden_size)
        self.size = hidden_size
    def initial_state(self, batch_size):
        return torch.zeros(batch_size, self.size)
    def forward(self, x, h):
        h = torch.tanh(self.linear(torch.cat([x, h], 1)))
        return h, h

class Fails(Good):
    def forward(self, x, h):
        raise RuntimeError("it is broken")

class OneOutput(Good):
    def forward(self, x, h):
        return h

class GrowingState(Good):
    def forward(self, x, h):
        return h, torch.cat([h, h], 1)

class NoState(torch.nn.Module):
    def forward(self, x, h):
        return h, h

class NeedsMore(Good):
    def __init__(self, input_size, hidden_size, secret):
        super().__init__(input_size, hidden_size)

class TextState(Good):
    def initial_state(self, batch_size):
        return "zero"

class NoTask:
    name = "no-task"

class Half(stretto.Cell):
    def initial_state(self, batch_size):
        return self.zeros(batch_size, 3)

class Picky(Good):
    def __init__(self, input_size=3, hidden_size=4, rate=0.1):
        if rate > 1:
            raise RuntimeError("too fast")
        super().__init__(input_size, hidden_size)

class Nameless(Classify):
    name = None

class Unfinished(AbstractTask):
    pass

class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(5, 4)
    def forward(self, x):
        return self.gru(x)[0].detach()

class Leaves(Good):
    def forward(self, x, h):
        raise SystemExit(7)

class WithoutNumbers(Good):
    def __init__(self, input_size=3, hidden_size=4):
        super().__init__(input_size, hidden_size)
        self.to("meta")

class Mute(torch.nn.Module):
    def forward(self, x):
        return None

number = 3
ready = Good(5, 7)
both = torch.nn.GRU(3, 4, bidirectional=True)
tagger = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.LSTM(4, 6, batch_first=True))
mute = Mute()
hollow = torch.nn.LSTM(3, 4, batch_first=True)
torch.nn.init.constant_(hollow.bias_ih_l0, float("nan"))
net = torch.nn.LSTM(3, 4, batch_first=True)
def make_nothing():
    return None
def needy(secret):
    return secret
"""


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trapped",)


def write_files(folder: Path) -> None:
    """Fill the folder, which is the working directory."""
    write_signs(folder / "signs.npz", count=36)
    good = dict(np.load(folder / "signs.npz"))
    count, steps = len(good["y"]), len(good["x"])

    def npz(name: str, **changes: Any) -> None:
        kept = {key: value for key, value in (good | changes).items() if value is not None}
        np.savez(folder / f"{name}.npz", **kept)

    changed = good["x"].copy()
    for name, value in (("nan", np.nan), ("inf", np.inf)):
        changed[good["offsets"][3]] = value
        npz(name, x=changed)
    offsets = good["offsets"]
    npz("bare", y=None, class_names=None)
    npz("no-offsets", offsets=None)
    npz("flat-offsets", offsets=offsets[:, None])
    npz("float-offsets", offsets=offsets.astype(float))
    npz("falling", offsets=np.concatenate([offsets[:3], offsets[1:2], offsets[4:]]))
    npz("late", offsets=offsets + 1)
    npz("short-offsets", offsets=offsets[:-1])
    npz("hollow", offsets=np.concatenate([offsets[:2], offsets[1:]]), y=None, split=None, class_names=None)
    npz("one-offset", offsets=offsets[:1], y=None, split=None)
    npz("complex", x=good["x"].astype(np.complex64))
    npz("cube", x=good["x"][:, None])
    npz("no-features", x=np.zeros((steps, 0), dtype=np.float32))
    npz("words", x=np.full((steps, 1), "word"))
    npz("times", x=np.zeros((steps, 1), dtype="m8[s]"))
    npz("unsigned", x=np.full((steps, 1), 2**63, dtype=np.uint64))
    npz("far-label", y=np.where(np.arange(count) == 5, 2**40, 0), class_names=None)
    npz("named-label", y=np.where(np.arange(count) == 5, 7, 0))
    npz("negative-label", y=np.where(np.arange(count) == 5, -1, 0))
    npz("float-label", y=np.linspace(0, 1, count))
    npz("few-labels", y=good["y"][:-1])
    npz("flat-names", class_names=np.array([["still", "moving"]]))
    npz("float-names", class_names=np.array([0.5, 1.5]))
    npz("twins", class_names=np.array(["still", "still"]))
    npz("huge", x=np.full((steps, 2), 1e300))
    npz("split-9", split=np.full(count, 9))
    npz("split-short", split=good["split"][:-1])
    npz("all-test", split=np.full(count, 2))
    npz("all-train", split=np.zeros(count, dtype=int))
    npz("text-offsets", y=None, class_names=None, text=np.arange(9), text_offsets=np.array([0, 5]))
    npz("no-text-offsets", y=None, class_names=None, text=np.arange(9))
    npz("no-code-points", y=None, class_names=None, text=np.full(9, 0x110000), text_offsets=np.arange(10))
    npz("alphabet", alphabet=np.array([-1]))
    npz("vocabulary", vocabulary=np.array([1, 2]))
    npz("scale", scale=np.ones(5))
    npz("scale-words", scale=np.array(["a", "b"]))
    npz("pen-flags", x=None, xy=good["x"], pen_down=np.ones(3))
    npz("pen-both", x=None, xy=good["x"], pen_down=np.ones(steps), pen_up=np.ones(steps))
    npz("pen-wide", x=None, xy=np.zeros((steps, 3)))
    np.savez_compressed(folder / "bomb.npz", x=np.zeros((4_000_000, 2), dtype=np.float32), offsets=[0, 4])
    np.savez(folder / "object.npz", x=np.array([Trap()], dtype=object), offsets=np.array([0, 1]))
    np.savez(folder / "images.npz", x_train=np.zeros((4, 3, 3)), y_train=np.zeros(4, dtype=int))
    np.savez(folder / "one-image.npz", x_train=np.zeros((3, 3)), y_train=[0], x_test=np.zeros((3, 3)), y_test=[0])
    np.savez(folder / "nothing.npz")
    raw = (folder / "signs.npz").read_bytes()
    (folder / "empty.npz").touch()
    (folder / "short.npz").write_bytes(raw[:500])
    (folder / "half.npz").write_bytes(raw[: len(raw) // 2])
    (folder / "noise.npz").write_bytes(bytes(range(256)) * 8)
    (folder / "text.npz").write_text("not an archive", encoding="utf-8")
    with zipfile.ZipFile(folder / "lying.npz", "w") as archive:
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 9)})
        archive.writestr("x.npy", stream.getvalue())
        stream = io.BytesIO()
        np.save(stream, np.array([0, 10**12]))
        archive.writestr("offsets.npy", stream.getvalue())
    with zipfile.ZipFile(folder / "other.npz", "w") as archive:
        archive.writestr("x.npy", b"no header")
        archive.writestr("offsets.npy", b"no header")
    os.mkfifo(folder / "pipe.npz")
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "pipe.toml")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "dangling.npz").symlink_to("nowhere.npz")
    (folder / "loop.npz").symlink_to("loop.npz")
    (folder / "folder.npz").mkdir()
    (folder / "odd.xyz").touch()
    _write_text(folder)
    _write_ink(folder)
    _write_tables(folder)
    _write_folders(folder)
    _write_settings(folder)
    (folder / "cells.py").write_text(CELLS, encoding="utf-8")
    (folder / "syntax.py").write_text("def broken(:\n", encoding="utf-8")
    (folder / "raises.py").write_text("raise RuntimeError('while it was imported')\n", encoding="utf-8")
    (folder / "absent.py").write_text("import not_to_be_had\n", encoding="utf-8")
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    _write_runs(folder)


def _write_text(folder: Path) -> None:
    (folder / "good.txt").write_text("one passage\n\nanother passage\n\nthe third\n" * 9, encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text("\n\n \n\n", encoding="utf-8")
    (folder / "letters.txt").write_text("a\n\nb\n\nc\n", encoding="utf-8")
    (folder / "latin.txt").write_bytes("grün".encode("latin-1"))
    (folder / "utf16.txt").write_bytes("text".encode("utf-16"))
    (folder / "bad.txt.gz").write_bytes(b"not compressed")
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"a passage of text" * 90)[:-12])
    (folder / "empty.txt.gz").touch()


def _write_ink(folder: Path) -> None:
    inks = {
        "good": INK.format(""),
        "laughs": LAUGHS,
        "outside": OUTSIDE,
        "empty": "",
        "words": "not XML",
        "open": "<ink><trace>0 0",
        "root": "<svg></svg>",
        "strokeless": "<ink></ink>",
        "differences": "<ink><trace>'1 2</trace></ink>",
        "one-value": "<ink><trace>1, 2</trace></ink>",
        "letters": "<ink><trace>a b</trace></ink>",
        "nan": "<ink><trace>nan nan, 1 2</trace></ink>",
        "far": "<ink><trace>0 0, 1e300 2, -1e300 9</trace></ink>",
        "digits": f"<ink><trace>{'1' * 300_000}x 2</trace></ink>",
        "pen-up": '<ink><trace type="penUp">0 0</trace></ink>',
        "channels": INK.format('<traceFormat><channel name="F"/></traceFormat>'),
        "formats": INK.format(
            '<traceFormat><channel name="X"/><channel name="Y"/></traceFormat>'
            '<traceFormat><channel name="Y"/><channel name="X"/></traceFormat>'
        ),
        "encoding": '<?xml version="1.0" encoding="no-such"?><ink/>',
    }
    for name, text in inks.items():
        (folder / f"{name}.inkml").write_text(text, encoding="utf-8")


def _write_tables(folder: Path) -> None:
    rows = [[[0.5, 1.0], [1.0, 2.0]], [[2.0, 3.0]], [[1.0, 1.0]]]
    tables: dict[str, dict[str, Any]] = {
        "good": {"x": rows, "y": [0, 1, 0]},
        "columns": {"input_values": rows, "label": [0, 1, 0]},
        "rowless": {"x": pa.array([], type=pa.list_(pa.list_(pa.float32())))},
        "numbers": {"x": [1.0, 2.0, 3.0]},
        "ragged": {"x": [[[1.0, 2.0], [3.0]], [[1.0, 1.0]], [[2.0, 2.0]]]},
        "null": {"x": [rows[0], None, rows[2]]},
        "hollow": {"x": [rows[0], [], rows[2]]},
        "strings": {"x": [["a"], ["b"], ["c"]]},
        "nan": {"x": [[[float("nan"), 1.0]], *rows[1:]]},
        "float-label": {"x": rows, "y": [0.5, 1.5, 0.0]},
        "null-label": {"x": rows, "y": [0, None, 1]},
        "split": {"x": rows, "split": ["train", "nope", "test"]},
        "both": {"x": rows, "y": [0, 1, 0], "text": ["a", "b", "c"]},
        "far-label": {"x": rows, "y": [0, 2**40, 0]},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    raw = (folder / "good.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(raw[: len(raw) // 2])
    (folder / "empty.parquet").touch()
    (folder / "noise.arrow").write_bytes(b"noise" * 99)
    (folder / "empty.feather").touch()


def _write_folders(folder: Path) -> None:
    (folder / "nothing").mkdir()
    for name in ("two/a.npz", "two/b.npz", "words/ptb.train.txt", "parallel/train.en", "parallel/train.de"):
        (folder / name).parent.mkdir(exist_ok=True)
    for name in ("a.npz", "b.npz"):
        shutil.copy(folder / "signs.npz", folder / "two" / name)
    (folder / "words/ptb.train.txt").write_text("the cat\nthe dog\n", encoding="utf-8")
    (folder / "words/ptb.valid.txt").write_text("the bird\n", encoding="utf-8")
    (folder / "words/ptb.test.txt").write_text("the cat\n", encoding="utf-8")
    (folder / "parallel/train.en").write_text("one\ntwo\n", encoding="utf-8")
    (folder / "parallel/train.de").write_text("eins\n", encoding="utf-8")
    (folder / "iam").mkdir()
    (folder / "iam/a01-000u-01.xml").write_text("<WhiteboardCaptureSession/>", encoding="utf-8")
    for name, content in (("clips/one/a.npy", b"no array"), ("clips/two/b.npy", b"")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(content)
    (folder / "frames/one/a").mkdir(parents=True)
    (folder / "frames/one/a/1.jpg").write_bytes(b"no picture")


def _write_settings(folder: Path) -> None:
    texts = {
        "good": 'data = "signs.npz"\nepochs = 1\n',
        "syntax": "epochs =",
        "unknown": 'data = "signs.npz"\nepoch = 3\n',
        "several": 'epoch = 3\nbatch-size = "big"\ndata = "signs.npz"\n',
        "word": 'data = "signs.npz"\nbatch-size = "big"\n',
        "truth": 'data = "signs.npz"\nbatch-size = true\n',
        "list": 'data = "signs.npz"\nepochs = [1, 2]\n',
        "table": "[epochs]\nx = 1\n",
        "date": "epochs = 2020-01-01\n",
        "twice": "epochs = 1\nepochs = 2\n",
        "spelt-twice": "batch-size = 1\nbatch_size = 2\n",
        "digits": f"epochs = {'9' * 5000}\n",
        "deep": f"epochs = {'[' * 9000}\n",
        "nan": "learning-rate = nan\n",
        "infinite": "learning-rate = inf\n",
        "negative": "epochs = -3\n",
        "number-path": "data = 3\n",
        "sweep-word": 'task = "classify"\nseeds = "all"\n',
        "sweep-task": 'task = "dance"\n',
        "sweep-none": "",
        "sweep-grid": 'task = "classify"\ngrid = 3\n',
        "sweep-empty": 'task = "classify"\n[grid]\nepochs = []\n',
        "sweep-many": 'task = "classify"\n[grid]\nepochs = [1, "many"]\n',
        "sweep-unknown": 'task = "classify"\n[grid]\nepoch = [1]\n',
        "sweep-out": 'task = "classify"\n[settings]\nout = "x"\n',
        "sweep-number": 'task = "classify"\nout = 3\n',
        "sweep-twice": 'task = "classify"\nseeds = [1, 1]\n',
        "sweep-both": 'task = "classify"\n[settings]\nepochs = 1\n[grid]\nepochs = [1]\n',
        "sweep-large": f'task = "classify"\n[grid]\nseed = {[1] * 200}\nepochs = {[1] * 200}\n',
        "sweep-value": 'task = "classify"\nseeds = [0]\n[settings]\ndata = "signs.npz"\nepochs = 0\n',
    }
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    (folder / "latin.toml").write_bytes(b'data = "gr\xfcn"\n')
    (folder / "binary.toml").write_bytes(bytes(range(256)))


def _write_runs(folder: Path) -> None:
    stretto.train("classify", data="signs.npz", out="run", **SMALL)
    events = (folder / "run/events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    damaged = {
        "no-events": {"events.jsonl": ""},
        "binary-events": {"events.jsonl": "\x00\x01\x02"},
        "list-events": {"events.jsonl": "[1, 2]\n3\n"},
        "deep-events": {"events.jsonl": "[" * 99_999},
        "bare-events": {"events.jsonl": '{"event": "started"}\n{"event": "epoch"}\n'},
        "odd-events": {"events.jsonl": '{"event": "started", "task": 3}\n{"event": "finished", "metrics": 5}\n'},
        "odd-resumed": {"events.jsonl": '{"event": "resumed", "update": "x"}\n'},
        "odd-numbers": {"events.jsonl": '{"event": "update", "update": "x", "loss": []}\n'},
        "cut-events": {"events.jsonl": "".join(events[:2]) + events[2][:40]},
        "no-card": {"model.json": None},
        "empty-card": {"model.json": ""},
        "list-card": {"model.json": "[]"},
        "deep-card": {"model.json": "[" * 99_999},
        "old-card": {"model.json": '{"version": 0}'},
        "bare-card": {"model.json": '{"version": 1}'},
        "no-weights": {"model.safetensors": None},
        "empty-weights": {"model.safetensors": ""},
        "text-weights": {"model.safetensors": "not weights at all, but text"},
    }
    for name, files in damaged.items():
        shutil.copytree(folder / "run", folder / name)
        for file, text in files.items():
            (folder / name / file).unlink()
            if text is not None:
                (folder / name / file).write_text(text, encoding="utf-8")
    card = json.loads((folder / "run/model.json").read_text(encoding="utf-8"))
    cards: dict[str, dict[str, Any]] = {
        "other-task-card": {"task": "dance"},
        "number-task-card": {"task": 3},
        "wide-card": {"settings": card["settings"] | {"hidden_size": 9}},
        "odd-settings-card": {"settings": card["settings"] | {"epochs": "many"}},
        "unknown-setting-card": {"settings": card["settings"] | {"x": 1}},
        "later-card": {"version": 9},
        "no-settings-card": {"settings": 3},
        "no-data-card": {"data": {}},
        "odd-data-card": {"data": card["data"] | {"num_features": "two"}},
        "vast-card": {"settings": card["settings"] | {"hidden_size": 2**30}},
    }
    for name, changes in cards.items():
        shutil.copytree(folder / "run", folder / name)
        (folder / name / "model.json").write_text(json.dumps(card | changes), encoding="utf-8")
    forms = {
        "object-card": {"dtype": "object"},
        "complex-card": {"dtype": "complex64"},
        "twin-card": {"class_names": ["still", "still"]},
        "number-names-card": {"class_names": [1, 2]},
        "text-names-card": {"class_names": "ab"},
        "featureless-card": {"num_features": 0},
        "dance-card": {"targets": "dance"},
    }
    for name, changes in forms.items():
        shutil.copytree(folder / "run", folder / name)
        text = json.dumps(card | {"data": card["data"] | changes})
        (folder / name / "model.json").write_text(text, encoding="utf-8")
    for name, file in (("pipe-card", "model.json"), ("pipe-weights", "model.safetensors"), ("zero-card", "model.json")):
        shutil.copytree(folder / "run", folder / name)
        (folder / name / file).unlink()
        if name == "zero-card":
            (folder / name / file).symlink_to("/dev/zero")
        else:
            os.mkfifo(folder / name / file)
    (folder / "pipe-lock").mkdir()
    os.mkfifo(folder / "pipe-lock/.lock")
    weights = safetensors.torch.load_file(folder / "run/model.safetensors")
    for name, value in (("nan-weights", float("nan")), ("whole-weights", 1)):
        shutil.copytree(folder / "run", folder / name)
        changed = {key: torch.full(tensor.shape, value) for key, tensor in weights.items()}
        safetensors.torch.save_file(changed, folder / name / "model.safetensors")
    # Folders of the user's, whose files have the names that a run's files have; and a run of an earlier version.
    for file in ("project/checkpoints/mine.pt", "project/settings.toml", "settings/settings.toml"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("of the user's", encoding="utf-8")
    for file in ("player.h", "filter.c"):
        (folder / file).write_text("/* by hand */", encoding="utf-8")
    (folder / "old-run/checkpoints/step-00000001").mkdir(parents=True)
    shutil.copy(folder / "run/model.json", folder / "old-run/model.json")
    (folder / "old-run/events.jsonl").write_text("".join(events[:3]), encoding="utf-8")
    # A run that was stopped, whose only checkpoint is damaged.
    shutil.copytree(folder / "run", folder / "bad-checkpoint")
    (folder / "bad-checkpoint/events.jsonl").write_text("".join(events[:3]), encoding="utf-8")
    for path in (folder / "bad-checkpoint/checkpoints").glob("*/*.safetensors"):
        path.write_bytes(b"damaged")
