"""Events of a small run, as a trainer records them."""

from typing import Any

Event = dict[str, Any]


def started(**changes: Any) -> Event:
    return {
        "event": "started",
        "time": 1_700_000_000.0,
        "task": "handwriting",
        "settings": {
            "epochs": 2,
            "batch_size": 4,
            "learning_rate": 0.005,
            "max_padded_steps": None,
            "num_buckets": "auto",
        },
        "data": {
            "name": "ink",
            "sequences": {"train": 4321, "valid": 432, "test": 431},
            "steps": 987_654,
            "features": 3,
            "notes": ["a split was drawn"],
        },
        "edges": [20, 40],
        "histogram": {"bounds": [1, 11, 21, 31, 41], "counts": [1, 20, 30, 4]},
        "report": {"batches": 5, "num_buckets": 2, "shapes": 7, "padding": 0.061, "largest_batch": 160, "most_rows": 4},
        "shuffled_padding": 0.437,
        "padded_steps_ratio": 1.83,
        "parameters": 123_456,
        "versions": {"stretto": "0.1.0", "torch": "9.8.7"},
        "threads": 2,
        "epochs": 2,
    } | changes


def update(number: int, **changes: Any) -> Event:
    rows, length = 4, 20 if number % 2 else 40
    return {
        "event": "update",
        "time": 1_700_000_000.0 + number,
        "update": number,
        "epoch": (number - 1) // 5,
        "loss": 4.0 / number,
        "rows": rows,
        "length": length,
        "steps_real": rows * length - number,
        "padded_steps": rows * length,
        "seconds": number * 0.5,
        "rate": 0.005,
        "gradient_norm": 1.0,
    } | changes


def epoch(number: int, **changes: Any) -> Event:
    return {
        "event": "epoch",
        "time": 1_700_000_100.0,
        "epoch": number,
        "update": number * 5,
        "train_loss": 1.25 / number,
        "valid_loss": 1.5 / number,
        "metric": "cer",
        "value": 0.3217 / number,
        "seconds": 2.5,
        "steps_per_second": 1111.0 * number,
        "padding": 0.0789,
    } | changes


def solving(**changes: Any) -> Event:
    return {
        "solver": "warm_start",
        "exact": False,
        "batches": 7,
        "residual_mean": 0.0123,
        "residual_max": 0.456,
        "iterations": 1.0,
        "backward_residual_mean": 0.789,
        "backward_residual_max": 1.0,
        "fell_back": 0,
        "reason": "4 chunks of 50 steps",
        "cache_bytes": 3 << 20,
    } | changes


def finished(**changes: Any) -> Event:
    return {
        "event": "finished",
        "time": 0.0,
        "metrics": {"cer": 0.0432, "cer_beam": 0.0411, "loss": 0.2345},
        "epochs": 2,
        "seconds": 754.6,
        "padding": 0.0519,
        "steps_per_second": 41_234.5,
        "padded_steps_ratio": 1.83,
    } | changes
