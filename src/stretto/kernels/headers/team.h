// Who does what: threads take rows of their own through the whole sequence, or share the columns of few rows.
#pragma once
#include <atomic>
#include <utility>
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

struct Call {
  int64_t num_steps, num_rows, keep;
  const int64_t *rows, *starts, *lengths, *strides, *weight_strides;
  real **buffers, **weights;
  real *packed, *scratch, *own, *room;
};

struct Barrier {
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> phase{0};
  void wait(int size) {
    const int now = phase.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++) {
      PAUSE();
      if (spins > 20000) sched_yield();  // somebody else has the other core
    }
  }
};

// Whole vectors are shared out; what is left at the end goes to the last thread.
template <int64_t N, bool TEAM, class Body>
INLINE void sweep(Body body, int rank, int size) {
  constexpr int64_t WHOLE = N / LANES;
  const int64_t from = TEAM ? WHOLE * rank / size : 0, to = TEAM ? WHOLE * (rank + 1) / size : WHOLE;
  for (int64_t i = from; i < to; i++) body(std::integral_constant<int, LANES>{}, i * LANES);
  if constexpr (N % LANES != 0)
    if (!TEAM || rank == size - 1) body(std::integral_constant<int, N % LANES>{}, WHOLE * LANES);
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
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  {
#if defined(_OPENMP)
    const int rank = omp_get_thread_num(), size = omp_get_num_threads();
#else
    const int rank = 0, size = 1;
#endif
    for (int64_t i = rank; i < count; i += size) jobs[i].pack(jobs[i].call);
    if (size > 1) barrier.wait(size);
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
  }
}
