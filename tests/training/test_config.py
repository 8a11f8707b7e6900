"""Settings: every fault at once, by name, from a call, a file or flags."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.errors import StrettoError
from stretto.tasks.classify import ClassifyConfig
from stretto.tasks.handwriting import HandwritingConfig
from stretto.tasks.language_model import LanguageModelConfig
from stretto.training import TrainConfig, read_toml, validate

CONFIGS = [HandwritingConfig, ClassifyConfig, LanguageModelConfig]
NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "handwriting": {
        "epochs": [0, -1, 2.5, "many", None],
        "batch_size": [0, "large"],
        "base_batch_size": [0],
        "rule": ["cubic"],
        "optimizer": ["adagrad"],
        "warmup_epochs": [-0.1, INF],
        "warmup_cap": [1.0, -0.1],
        "decay_factor": [0.0, 1.5],
        "flat_epochs": [-1],
        "gates": ["some"],
        "adam_share": [0.0, -1.0, INF, NAN],
        "max_padded_steps": [0],
        "num_buckets": [0, "some"],
        "hidden_size": [0],
        "num_layers": [0],
        "dropout": [1.0, -0.1, NAN],
        "learning_rate": [0.0, INF, NAN],
        "schedule": ["triangle"],
        "weight_decay": [-1.0, NAN],
        "clip_norm": [0.0],
        "seed": [-1, 2**70],
        "threads": [0],
        "checkpoint_minutes": [0.0],
        "keep_checkpoints": [0],
        "stack": [0],
        "decoder": ["magic"],
        "beam_width": [0, 1001],
        "data": [5],
        "resume": ["perhaps"],
    },
    "label-steps": {
        "solver": ["magic"],
        "chunks": [0, "many"],
        "tolerance": [0.0, NAN],
        "exact_epochs": [-1],
        "cache_megabytes": [0.0, INF],
        "unlabelled": [-1],
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_defaults_pass_their_own_checks(kind: type[TrainConfig]) -> None:
    assert validate(kind, {}, source="here") == kind()
    values = {field.name: getattr(kind(), field.name) for field in dataclasses.fields(kind)}
    assert validate(kind, values, source="here") == kind()


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_recorded_comes_back_through_json(kind: type[TrainConfig]) -> None:
    config = kind(
        data=Path("some/ink.npz"), out=Path("runs/x"), epochs=3, num_buckets=4, dropout=0.25, max_padded_steps=700
    )
    recorded = json.loads(json.dumps(config.recorded()))
    assert "out" not in recorded
    assert "resume" not in recorded
    assert dataclasses.replace(validate(kind, recorded, source="here"), out=config.out) == config


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [
        (task, name, value)
        for task, settings in OUT_OF_RANGE.items()
        for name, values in settings.items()
        for value in values
    ],
)
def test_a_value_out_of_range_is_named_and_quoted(task: str, name: str, value: Any) -> None:
    with pytest.raises(StrettoError) as info:
        stretto.train(task, **{name: value})
    text = str(info.value)
    assert "stretto.train()" in text
    assert f"\n  {name}: " in text
    assert repr(value) in text


def test_an_unknown_task_and_an_unknown_setting_are_named() -> None:
    with pytest.raises(StrettoError, match=r"there is no task 'dancing'.*handwriting, classify, language-model"):
        stretto.train("dancing")
    with pytest.raises(StrettoError, match=r"batchsize: there is no such setting[\s\S]*batch_size") as info:
        stretto.train("classify", batchsize=3)
    assert "stack" not in str(info.value)


def test_all_faults_of_a_file_are_shown_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'epochs = 0\nbatch-size = "big"\ndropout = 1.5\nlearning_rate = -1\nnum-buckets = "few"\n'
        "layers = 2\n[table]\na = 1\n",
        encoding="utf-8",
    )
    with pytest.raises(StrettoError) as info:
        validate(HandwritingConfig, read_toml(path), source=str(path))
    lines = str(info.value).splitlines()
    assert str(path) in lines[0]
    named = [line.strip().partition(":")[0] for line in lines[1:] if line.startswith("  ")]
    assert sorted(named) == ["batch_size", "dropout", "epochs", "layers", "learning_rate", "num_buckets", "table"]
    assert sum("there is no such setting" in line for line in lines) == 2


def test_keys_may_have_dashes_or_underscores(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('batch-size = 7\nhidden_size = 9\ndata = "ink.npz"\nnum-buckets = "auto"\n', encoding="utf-8")
    config = validate(ClassifyConfig, read_toml(path), source=str(path))
    assert (config.batch_size, config.hidden_size, config.data) == (7, 9, Path("ink.npz"))


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({}, 32),
        ({"batch_size": 7, "base_batch_size": 5}, 7),
        ({"batch_size": "auto"}, 32),
        ({"batch_size": "auto", "base_batch_size": 5}, 5),
    ],
)
def test_the_first_batch_is_a_number_even_if_it_is_to_be_found(values: dict[str, Any], rows: int) -> None:
    config = validate(ClassifyConfig, values, source="here")
    assert config.first_batch_size == rows
    assert validate(ClassifyConfig, json.loads(json.dumps(config.recorded())), source="here") == config
