"""The choice of a batch: the least predicted time, from measured times alone, and refusal where nothing is gained."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.large_batch import ThroughputTable, choose_batch

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def _linear(start: float, each: float) -> ThroughputTable:
    return ThroughputTable.of({size: start + each * size for size in SIZES})


@settings(max_examples=150, deadline=None)
@given(
    times=st.dictionaries(st.integers(1, 300), st.floats(0.01, 10.0), min_size=1, max_size=8),
    base=st.integers(1, 200),
    phi=st.floats(0.0, 1e5),
    min_gain=st.floats(0.0, 0.5),
    world_size=st.integers(1, 5),
    exchange=st.floats(0.0, 3.0),
    update=st.floats(0.0, 0.01),
    min_batch_size=st.one_of(st.none(), st.integers(1, 100)),
    max_batch_size=st.one_of(st.none(), st.integers(1, 5000)),
)
def test_the_choice_is_the_least_of_all(
    *,
    times: dict[int, float],
    base: int,
    phi: float,
    min_gain: float,
    world_size: int,
    exchange: float,
    update: float,
    min_batch_size: int | None,
    max_batch_size: int | None,
) -> None:
    """Against brute force that knows nothing of how batches are enumerated or split."""
    table = ThroughputTable.of(times, update_seconds=update)
    choice = choose_batch(
        table,
        noise_scale=phi,
        base_batch_size=base,
        min_gain=min_gain,
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
        world_size=world_size,
        exchange_seconds=exchange,
    )

    def seconds(batch_size: int) -> float:
        share = -(-batch_size // world_size)
        ways = [
            -(-share // size) * each - (-(-share // size) - 1) * update for size, each in times.items() if size < share
        ]
        above = [size for size in times if size >= share]
        return min([*ways, *([times[min(above)]] if above else [])]) + exchange

    def predicted(batch_size: int) -> float:
        return (1 + phi / batch_size) * seconds(batch_size)

    low, high = min_batch_size or base, max_batch_size or max(base, 16 * world_size * max(times))
    wanted = {base} | {size * world_size for size in times if low <= size * world_size <= high}
    for power in range(-20, 21):
        size = base * 2.0**power
        if size == int(size) and low <= size <= high:
            wanted.add(int(size))
    assert {each.batch_size for each in choice.candidates} == wanted
    least = min(map(predicted, wanted))
    gain = predicted(base) / least - 1
    for each in choice.candidates:
        assert each.relative_time == pytest.approx(predicted(each.batch_size) / predicted(base), rel=1e-9)
        assert each.micro_batch * each.accumulate * world_size >= each.batch_size
        assert each.micro_batch <= max(times)
    if gain > min_gain + 1e-9:
        assert predicted(choice.batch_size) == pytest.approx(least, rel=1e-9)
        assert choice.predicted_gain == pytest.approx(gain, rel=1e-6)
        assert choice.reason.startswith(f"changes to {choice.batch_size}")
    elif gain < min_gain - 1e-9:
        assert choice.batch_size == base
        assert choice.predicted_gain == 0.0
        assert choice.reason.startswith(f"stays at {base}")
    assert choice.extra_data == pytest.approx((choice.batch_size + phi) / (base + phi) - 1, abs=1e-9)


def test_a_gain_below_the_threshold_is_declined_with_its_numbers() -> None:
    choice = choose_batch(_linear(8.0, 1.0), noise_scale=300.0, base_batch_size=32)
    assert choice.batch_size == 32
    assert choice.reason.startswith("stays at 32: 64 is predicted to be 1.3% faster than 32 (noise scale 300: 0.548 of")
    assert "less than the 5% that a change must bring" in choice.reason
    eager = choose_batch(_linear(8.0, 1.0), noise_scale=300.0, base_batch_size=32, min_gain=0.01)
    assert eager.batch_size == 64


def test_without_noise_or_without_knowing_it_the_batch_stays() -> None:
    flat = ThroughputTable.of({16: 1.0, 1024: 1.0})
    assert choose_batch(flat, noise_scale=0.0, base_batch_size=16).batch_size == 16
    unknown = choose_batch(flat, noise_scale=None, base_batch_size=16)
    assert (unknown.batch_size, unknown.reason) == (16, "stays at 16: the noise scale is not known")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"noise_scale": -1.0}, "noise_scale=-1.0"),
        ({"noise_scale": math.nan}, "noise_scale=nan"),
        ({"noise_scale": math.inf}, "noise_scale=inf"),
        ({"base_batch_size": 0}, "base_batch_size=0"),
        ({"world_size": 0}, "world_size=0"),
        ({"min_gain": -0.1}, "min_gain=-0.1"),
        ({"exchange_seconds": math.nan}, "exchange_seconds=nan"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, object], said: str) -> None:
    given = {"noise_scale": 10.0, "base_batch_size": 8} | changed
    with pytest.raises(StrettoError, match=said):
        choose_batch(_linear(1.0, 1.0), **given)  # type: ignore[arg-type]
