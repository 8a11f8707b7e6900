// Who does what: threads take rows of their own through the whole sequence, or form a team that shares the columns of
// few rows.
//
//   many rows                          few rows, large weights: a team
//
//   thread 0   rows 0..k,  all steps   step 0   thread 0: columns 0..n/2 of each gate   thread 1: columns n/2..n
//   thread 1   rows k..B,  all steps            -------- barrier: the next product reads all columns --------
//   no waiting at all                  step 1   ...
#pragma once
#include <atomic>
#include <time.h>
#include "product.h"
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() asm volatile("yield")
#else
#define PAUSE()
#endif
#include <sched.h>

// A number that the compiler knows, as an argument.
template <int N> struct Known { static constexpr int value = N; };

INLINE int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// Run body(rank, size) on each of so many threads.
template <class Body>
INLINE void by_threads(int64_t threads, Body body) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  body(omp_get_thread_num(), omp_get_num_threads());
#else
  body(0, 1);
#endif
}

struct Call {
  int64_t num_steps, num_rows, keep;
  const int64_t *rows, *starts, *lengths, *strides, *weight_strides;
  real **buffers, **weights;
  real *packed, *scratch, *own, *room;
};

// Each thread counts its arrivals in a cache line of its own, and reads those of the others:
//
//   line 0 [ 7 ]  line 1 [ 6 ]        thread 0 has arrived for the 7th time and spins until line 1 holds 7
//
// A wait costs one line's travel from core to core, where a common counter would travel to and fro. Counts only grow, so
// nothing is ever reset. The store is a release and the load an acquire: whatever a thread wrote before it arrived is
// visible to whoever saw it arrive. More threads than lines fall back to a common counter with a phase.
struct Barrier {
  static constexpr int MAX_LINES = 16;
  struct alignas(64) Line { std::atomic<int> value{0}; };
  Line arrived[MAX_LINES], together, phase;
  bool team_is_faster = false;  // written by the first thread, read behind a barrier

  static void wait_until(const std::atomic<int>& value, int wanted) {
    for (int spins = 0; value.load(std::memory_order_acquire) - wanted < 0; spins++) {
      if (spins > 64) PAUSE();
      if (spins > 20000) sched_yield();  // somebody else has the other core
    }
  }

  void wait(int rank, int size) {
    if (size <= MAX_LINES) {
      const int mine = arrived[rank].value.load(std::memory_order_relaxed) + 1;
      arrived[rank].value.store(mine, std::memory_order_release);
      for (int other = 0; other < size; other++)
        if (other != rank) wait_until(arrived[other].value, mine);
      return;
    }
    const int now = phase.value.load(std::memory_order_relaxed);
    if (together.value.fetch_add(1, std::memory_order_acq_rel) + 1 < size) return wait_until(phase.value, now + 1);
    together.value.store(0, std::memory_order_relaxed);
    phase.value.store(now + 1, std::memory_order_release);
  }
};

// Whole panels are shared out, as those of products are, or whole vectors; what is left goes to the last thread.
template <int64_t N, bool TEAM, class Body>
INLINE void sweep(Body body, int rank, int size) {
  constexpr int64_t WHOLE = N / LANES, UNIT = N % 32 == 0 ? PANEL / LANES : 1;
  const int64_t from = TEAM ? WHOLE / UNIT * rank / size * UNIT : 0;
  const int64_t to = TEAM ? WHOLE / UNIT * (rank + 1) / size * UNIT : WHOLE;
  for (int64_t i = from; i < to; i++) body(Known<LANES>{}, i * LANES);
  if constexpr (N % LANES != 0)
    if (!TEAM || rank == size - 1) body(Known<int(N % LANES)>{}, WHOLE * LANES);
}

// Runs steps [from, to), counted in the order in which they run.
typedef void (*Steps)(const Call& call, int64_t first, int64_t last, int64_t from, int64_t to, int rank, int size,
                      Barrier* barrier);

// How long a barrier takes depends on where the threads' cores lie, which is not ours to choose and changes. So a long
// loop begins with a stretch by the team and one by the first thread alone, and continues in the way that took less
// time. The results are the same to the last digit.
//
//   steps   | team, cold | team, timed | alone, cold | alone, timed | whichever was faster ...
//           0           32            64            96            128
static void run_steps(const Call& call, int64_t first, int64_t last, int rank, int size, Barrier* barrier, Steps team,
                 Steps alone, bool usually_team) {
  constexpr int64_t TRIAL = 64;
  const int64_t steps = call.num_steps;
  if (size == 1) return alone(call, first, last, 0, steps, 0, 1, barrier);
  bool use_team = usually_team;
  int64_t done = 0;
  if (steps >= 8 * TRIAL) {
    int64_t times[4];
    // The first half of each stretch brings the weights into the cache.
    for (int half = 0; half < 2; half++, done += TRIAL / 2) {
      times[half] = nanoseconds();
      team(call, first, last, done, done + TRIAL / 2, rank, size, barrier);
      barrier->wait(rank, size);
    }
    times[2] = nanoseconds();
    const int64_t by_team = times[2] - times[1];
    for (int half = 0; half < 2; half++, done += TRIAL / 2) {
      times[2 + half] = nanoseconds();
      if (rank == 0) alone(call, first, last, done, done + TRIAL / 2, 0, 1, barrier);
    }
    if (rank == 0) barrier->team_is_faster = by_team < nanoseconds() - times[3];
    barrier->wait(rank, size);
    use_team = barrier->team_is_faster;
  }
  if (use_team) team(call, first, last, done, steps, rank, size, barrier);
  else if (rank == 0) alone(call, first, last, done, steps, 0, 1, barrier);
}

typedef void (*Work)(const Call*, int64_t first, int64_t last, int rank, int size, Barrier*);
typedef void (*Pack)(const Call*);
struct Job {
  Pack pack;
  Work work;
  const Call* call;
  const int64_t* bounds;  // rows of each piece
  int64_t pieces;         // none: all threads share all rows
};

extern "C" void stretto_run(const Job* jobs, int64_t count, int64_t threads) {
  std::atomic<int64_t> next{0};
  Barrier barrier;
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += jobs[i].pieces;
  by_threads(threads, [&](int rank, int size) {
    for (int64_t i = rank; i < count; i += size) jobs[i].pack(jobs[i].call);
    if (size > 1) barrier.wait(rank, size);
    if (total == 0) {
      for (int64_t i = 0; i < count; i++) jobs[i].work(jobs[i].call, 0, jobs[i].call->num_rows, rank, size, &barrier);
    } else {
      for (int64_t mine; (mine = next.fetch_add(1)) < total;) {
        int64_t i = 0;
        for (; mine >= jobs[i].pieces; i++) mine -= jobs[i].pieces;
        const int64_t first = jobs[i].bounds[mine], last = jobs[i].bounds[mine + 1];
        if (first < last) jobs[i].work(jobs[i].call, first, last, 0, 1, &barrier);
      }
    }
  });
}
