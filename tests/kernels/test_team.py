"""Threads that lose their core at any moment, or are not there at all, leave every bit as it is.

A program of its own around `team.h`: each step mixes all elements of a state, so that one that is read too early or
written too late changes the result. Threads sleep at random steps, as if another process had their core.
"""

import ctypes
import os
import threading
from functools import lru_cache

import pytest

from stretto.kernels.backends.cpp.compiler import load
from stretto.kernels.backends.cpp.generate import HEADERS, header_text

SIZE = 96
PROGRAM = """
#include <chrono>
#include <thread>
#include <vector>
constexpr int64_t SIZE = 96, MUCH = int64_t(1) << 40;

static void maybe_sleep(int64_t seed, int64_t step, int rank) {
  uint64_t hash = uint64_t(seed * 1000003 + step * 61 + rank) * 0x9E3779B97F4A7C15u;
  if (seed && (hash >> 40) % 48 == 0) std::this_thread::sleep_for(std::chrono::microseconds((hash >> 20) % 1500));
}

template <bool TEAM>
static void mix(const Call& call, int64_t, int64_t, int64_t from, int64_t to, int rank, int size, Barrier* barrier) {
  uint64_t* const states = reinterpret_cast<uint64_t*>(call.buffers[0]);
  for (int64_t i = from; i < to; i++) {
    const uint64_t* before = states + i % 2 * SIZE;
    uint64_t* after = states + (i + 1) % 2 * SIZE;
    maybe_sleep(call.keep, i, TEAM ? rank : 0);
    for (int64_t j = TEAM ? SIZE * rank / size : 0; j < (TEAM ? SIZE * (rank + 1) / size : SIZE); j++)
      after[j] = before[j] * 6364136223846793005u + before[(j + 7) % SIZE] + i;
    if (TEAM) barrier->wait(rank, size);
  }
}

// Returns how many threads there were.
extern "C" int64_t run_loop(uint64_t* states, int64_t steps, int64_t seed, int64_t threads) {
  real* buffers[] = {reinterpret_cast<real*>(states)};
  Call call{};
  call.num_steps = steps, call.keep = seed, call.buffers = buffers;
  static Loop loop{1, true};
  Barrier barrier(loop.is_trial());
  std::atomic<int64_t> count{0};
  by_threads(threads, MUCH, [&](int rank, int size) {
    count++;
    maybe_sleep(seed, -1, rank);
    if (size == 1) mix<false>(call, 0, 1, 0, steps, 0, 1, &barrier);
    else if (rank > 0) follow(call, 0, 1, rank, size, &barrier, mix<true>);
    else lead(call, 0, 1, size, &barrier, mix<true>, mix<false>, &loop);
    return int64_t(0);
  });
  return count;
}

// Counts how often each step of each row is done; a step that comes before its turn counts many times.
static Loop* count_steps(const Call* call, int64_t first, int64_t last, int64_t from, int64_t to, int, int size,
                         Barrier*) {
  static Loop loop{Pieces::STRETCH / 5, false};
  if (size == 0) return &loop;
  uint64_t* const counts = reinterpret_cast<uint64_t*>(call->buffers[0]);
  for (int64_t i = from; i < to; i++) {
    maybe_sleep(call->keep, i, int(first));
    for (int64_t b = first; b < last; b++)
      counts[b * call->num_steps + i] += i == 0 || counts[b * call->num_steps + i - 1] == 1 ? 1 : 1000;
  }
  return &loop;
}

extern "C" int64_t run_pieces(uint64_t* counts, int64_t rows, int64_t seed, int64_t threads) {
  real* buffers[] = {reinterpret_cast<real*>(counts)};
  Call call{};
  call.num_steps = 40, call.num_rows = rows, call.keep = seed, call.buffers = buffers;
  int64_t bounds[] = {0, rows / 3, rows / 3, rows / 2, rows};
  const Job job{[](const Call*) {}, count_steps, &call, bounds, 4};
  stretto_run(&job, 1, threads);
  return 0;
}

// Counts how often each item is done, and how often two threads had the same rank at once.
extern "C" int64_t run_shares(uint64_t* counts, int64_t items, int64_t seed, int64_t threads) {
  std::vector<std::atomic<int>> in_use(threads);
  std::atomic<int64_t> clashes{0};
  by_shares(threads, MUCH, items, [&](int64_t first, int64_t last, int rank) {
    if (rank >= threads || in_use[rank].exchange(1)) clashes++;
    for (int64_t i = first; i < last; i++) maybe_sleep(seed, i, 0), counts[i]++;
    if (rank < threads) in_use[rank].store(0);
  });
  return clashes;
}

// Runs for so many milliseconds: in a wait for others that the body tells of, or asleep, as if there were no core.
// Returns for how many milliseconds threads rest.
extern "C" int64_t lose(int64_t waited, int64_t slept, int64_t work) {
  load_of_machine.rest_until.store(0), load_of_machine.rest.store(0);
  load_of_machine.time.store(0), load_of_machine.lost.store(0);
  by_threads(2, work, [&](int rank, int) {
    const int64_t begin = nanoseconds();
    while (nanoseconds() - begin < waited * MILLISECOND) PAUSE();
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(slept));
    return waited * MILLISECOND;
  });
  return load_of_machine.rest.load() / MILLISECOND;  // which may be over by now
}

// Returns for how many milliseconds threads rest after an attempt that took so long and lost all of it, so long after
// the last rest was over.
extern "C" int64_t rest_after(int64_t took, int64_t later) {
  const int64_t now = load_of_machine.rest_until.load() + (took + later) * MILLISECOND;
  load_of_machine.record(now, 2, took * MILLISECOND, took * MILLISECOND);
  return load_of_machine.rest.load() / MILLISECOND;
}

extern "C" void forget_rest() { load_of_machine.rest_until.store(0); }
extern "C" void rest(int64_t milliseconds) { load_of_machine.record(nanoseconds(), 2, 0, milliseconds * MILLISECOND); }
"""


@lru_cache(maxsize=1)
def _program() -> ctypes.CDLL:
    source = "\n".join(["#define REAL float", header_text(*HEADERS), PROGRAM])
    library = load(source, torch_version="")
    for function in (library.run_loop, library.run_pieces, library.run_shares):
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        function.restype = ctypes.c_int64
    library.rest.argtypes = (ctypes.c_int64,)
    library.lose.argtypes = (ctypes.c_int64,) * 3
    library.rest_after.argtypes = (ctypes.c_int64,) * 2
    library.lose.restype = library.rest_after.restype = ctypes.c_int64
    return library


def _loop(*, steps: int, seed: int, threads: int, is_rested: bool = True) -> tuple[list[int], int]:
    """The states at the end, and how many threads there were: all, if none has to rest from an earlier loss."""
    if is_rested:
        _program().forget_rest()
    states = (ctypes.c_uint64 * (2 * SIZE))(*range(2 * SIZE))
    count = _program().run_loop(states, steps, seed, threads)
    return list(states), count


def _expected(steps: int) -> list[int]:
    states = [list(range(SIZE)), list(range(SIZE, 2 * SIZE))]
    for i in range(steps):
        before = states[i % 2]
        states[(i + 1) % 2] = [
            (before[j] * 6364136223846793005 + before[(j + 7) % SIZE] + i) % 2**64 for j in range(SIZE)
        ]
    return states[0] + states[1]


@pytest.mark.parametrize("steps", [0, 1, 9, 300, 1201])
@pytest.mark.parametrize("threads", [2, 3, 7, 18])
def test_a_team_whose_threads_come_and_go_makes_the_same_bits(steps: int, threads: int) -> None:
    expected = _expected(steps)
    assert _loop(steps=steps, seed=0, threads=1) == (expected, 1)
    for seed in range(3):  # 0: nobody sleeps
        assert _loop(steps=steps, seed=seed, threads=threads) == (expected, threads)


@pytest.mark.parametrize("threads", [1, 2, 5, 20])
@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@pytest.mark.parametrize("seed", [0, 5, 6])
@pytest.mark.parametrize("is_resting", [False, True])
def test_every_step_of_every_piece_is_done_once_and_in_order(
    rows: int, threads: int, seed: int, is_resting: bool
) -> None:
    """While the machine is busy, by those threads that come."""
    counts = (ctypes.c_uint64 * (rows * 40 + 1))()
    _program().forget_rest()
    if is_resting:
        _program().rest(1000)
    _program().run_pieces(counts, rows, seed, threads)
    assert list(counts) == [1] * rows * 40 + [0]


@pytest.mark.parametrize("threads", [1, 2, 5, 20])
@pytest.mark.parametrize("items", [0, 1, 7, 1000])
@pytest.mark.parametrize("is_resting", [False, True])
def test_every_item_is_done_once_and_no_two_threads_share_a_rank(items: int, threads: int, is_resting: bool) -> None:
    for seed in range(20):
        counts = (ctypes.c_uint64 * (items + 1))()
        _program().forget_rest()
        if is_resting:
            _program().rest(1000)
        assert _program().run_shares(counts, items, seed, threads) == 0
        assert list(counts) == [1] * items + [0]


def test_shares_of_several_threads_at_once_on_a_busy_machine() -> None:
    _program().rest(1000)
    found: list[tuple[int, list[int]]] = []

    def run(seed: int) -> None:
        for _ in range(50):
            counts = (ctypes.c_uint64 * 90)()
            found.append((_program().run_shares(counts, 90, seed, 4), list(counts)))

    callers = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [(0, [1] * 90)] * 200


@pytest.mark.parametrize("work", [1 << 18, 1 << 30])
def test_time_that_a_thread_waits_or_has_no_core_is_noticed(work: int) -> None:
    """Threads rest then, however little there was to do."""
    assert _program().lose(40, 0, work) > 0
    assert _program().lose(0, 40, work) > 0


def test_rests_grow_while_attempts_fail_however_long_these_take() -> None:
    assert _program().rest_after(20, 10_000) == 5
    assert [_program().rest_after(took, 0) for took in (20, 80, 80, 400, 20, 20, 20)] == [10, 20, 40, 80, 160, 320, 640]
    assert _program().rest_after(20, 0) == 640
    assert _program().rest_after(20, 2000) == 5


@pytest.mark.parametrize("milliseconds", [0, 1, 20])
def test_a_loss_of_time_changes_no_bit(milliseconds: int) -> None:
    """Threads rest after a loss."""
    expected = _expected(700)
    for _ in range(3):
        _program().rest(milliseconds)
        assert _loop(steps=700, seed=0, threads=2, is_rested=False)[0] == expected


def test_loops_of_several_threads_at_once() -> None:
    expected = _expected(400)
    found: list[list[int]] = []
    callers = [threading.Thread(target=lambda: found.append(_loop(steps=400, seed=1, threads=3)[0])) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [expected] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_no_threads_and_runs_alone() -> None:
    expected = _expected(50)
    assert _loop(steps=50, seed=0, threads=2) == (expected, 2)
    child = os.fork()
    if child == 0:
        os._exit(0 if _loop(steps=50, seed=0, threads=2) == (expected, 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _loop(steps=50, seed=0, threads=2) == (expected, 2)
