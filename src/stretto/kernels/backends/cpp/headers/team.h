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
#include <climits>
#include <pthread.h>
#include <time.h>
#include "product.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
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

// A number that the compiler knows, as an argument.
template <int N> struct Known { static constexpr int value = N; };

INLINE int64_t nanoseconds(clockid_t clock = CLOCK_MONOTONIC) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

constexpr int64_t MICROSECOND = 1000, MILLISECOND = 1000000;
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// How long to spin for other threads. On a quiet machine for longer than any wait for a thread that has a core: shares
// are never quite equal, and waking up takes a while. On a busy one just for the usual time of a barrier.
struct Patience { int64_t at_barrier, at_end, when_idle; };
constexpr Patience QUIET{100 * MICROSECOND, 500 * MICROSECOND, MILLISECOND};
constexpr Patience BUSY{20 * MICROSECOND, 20 * MICROSECOND, 100 * MICROSECOND};

// A number that only grows, and that threads wait for. They spin at first, for the others are about to come. Then they
// sleep: whoever they wait for has lost its core to another process, and an idle core is what the system gives it next.
struct alignas(64) Counter {
  std::atomic<int> value{0}, sleepers{0};

  bool has_reached(int wanted) const { return value.load(std::memory_order_acquire) - wanted >= 0; }

  // A sleeper that comes between the store and the load is not woken: it wakes up by itself a little later. A fence
  // would prevent that, at every step of every loop.
  void set(int now) {
    value.store(now, std::memory_order_release);
    if (sleepers.load(std::memory_order_relaxed)) wake();
  }

  void add() {
    value.fetch_add(1);
    if (sleepers.load()) wake();
  }

  // Whether it comes within a time.
  bool comes(int wanted, int64_t spin, int64_t most) {
    for (const int64_t begin = nanoseconds(); !has_reached(wanted);) {
      const int64_t waited = nanoseconds() - begin;
      if (waited > most) return false;
      if (waited > spin) sleep(wanted);
      else PAUSE();
    }
    return true;
  }

  // Returns the time if it had to sleep, else 0.
  int64_t wait(int wanted, int64_t spin) {
    for (int spins = 0; spins < 64; spins++)
      if (has_reached(wanted)) return 0;
    bool slept = false;
    int64_t begin = 0;  // the clock is not read before it matters: that takes as long as many waits do
    for (int spins = 1; !has_reached(wanted); spins++) {
      PAUSE();
      if (spins % 64 != 0) continue;
      const int64_t now = nanoseconds();
      if (begin == 0) begin = now;
      if (now - begin > spin) sleep(wanted), slept = true;
    }
    return slept ? nanoseconds() - begin : 0;
  }

 private:
  void sleep(int wanted) {
#if defined(__linux__)
    sleepers.fetch_add(1);
    const timespec most{0, 5 * MILLISECOND};
    const int seen = value.load();
    if (seen - wanted < 0) syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, &most, nullptr, 0);
    sleepers.fetch_sub(1);
#else
    const timespec nap{0, 50 * MICROSECOND};
    nanosleep(&nap, nullptr);
#endif
  }

  void wake() {
#if defined(__linux__)
    syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
  }
};

// What was learned about other work on this machine. Once threads have lost more than a quarter of their time lately,
// because one of them had no core, two are no faster than one, and this one works alone for a while: at first for a
// moment, and for longer and longer if the next attempt fares no better. Attempts are then a small share of the whole.
struct Load {
  static constexpr int64_t NOTICED = 150 * MICROSECOND;  // a thread that was asleep takes about as long to come
  static constexpr int64_t LATELY = 50 * MILLISECOND, CREDIT = 4 * MILLISECOND;
  static constexpr int64_t MIN_REST = 5 * MILLISECOND, MAX_REST = 640 * MILLISECOND;
  std::atomic<int64_t> rest_until{0}, rest{0}, time{0}, lost{0};
  std::atomic<bool> has_run{false}, has_forked{false}, is_throttled{false};

  bool is_resting() const {
    const int64_t until = rest_until.load(std::memory_order_relaxed);
    return until != 0 && nanoseconds() < until;
  }

  bool is_busy() const {
    const int64_t until = rest_until.load(std::memory_order_relaxed);
    return until != 0 && nanoseconds() < until + 2 * rest.load(std::memory_order_relaxed);
  }

  Patience patience() const { return is_busy() ? BUSY : QUIET; }

  // Threads ran for a time, and lost some of it. Several may do so at once: then what is known is a little off.
  void record(int64_t now, int64_t threads, int64_t ran, int64_t of_it_lost) {
    int64_t all = time.load(std::memory_order_relaxed) + ran;
    int64_t gone = lost.load(std::memory_order_relaxed) + (of_it_lost < NOTICED ? 0 : of_it_lost);
    if (4 * gone > all + CREDIT) {
      const int64_t last = rest.load(std::memory_order_relaxed);
      // Soon after the last rest began what was lost now; it may have taken much longer than that rest.
      const bool is_soon = now - ran - rest_until.load(std::memory_order_relaxed) < 2 * last;
      const int64_t next = is_soon ? least(2 * last, MAX_REST) : MIN_REST;
      rest.store(next, std::memory_order_relaxed);
      rest_until.store(now + next, std::memory_order_relaxed);
      all = gone = 0;
      throttle(threads);
    } else if (all > LATELY) {
      all /= 2, gone /= 2;
    }
    time.store(all, std::memory_order_relaxed);
    lost.store(gone, std::memory_order_relaxed);
  }

  // The threads of a process that forked are not in its child, which has to do without.
  bool can_run_threads() {
    if (!has_run.load(std::memory_order_relaxed) && !has_run.exchange(true))
      pthread_atfork(nullptr, nullptr, forget_threads);
    return !has_forked.load(std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t MAX_IDLE = 16;
  static void forget_threads();
  static void* keep_idle(void* threads);

  // libgomp's threads, which are torch's too, spin for milliseconds before and after a parallel region, on cores that
  // others could use, even the one that they wait for. While it has more threads than processors it spins only for a
  // moment (see GOMP_SPINCOUNT in its manual). So as long as the machine is busy, a thread of ours has as many as are
  // missing, asleep; they end with it.
  void throttle(int64_t threads) {
#if defined(_OPENMP) && !defined(__clang__)
    const int64_t missing = omp_get_num_procs() - threads + 2;
    if (missing > MAX_IDLE || is_throttled.exchange(true)) return;
    pthread_t thread;
    if (pthread_create(&thread, nullptr, keep_idle, reinterpret_cast<void*>(missing < 2 ? 2 : missing)) == 0)
      pthread_detach(thread);
    else
      is_throttled.store(false);
#endif
  }
};
inline Load load_of_machine;  // one for all kernels of the process, where the linker merges inline variables

inline void Load::forget_threads() { load_of_machine.has_forked.store(true); }

inline void* Load::keep_idle(void* threads) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(int(reinterpret_cast<intptr_t>(threads)))
  omp_get_thread_num();
#endif
  while (load_of_machine.is_busy()) {
    const timespec pause{0, 5 * MILLISECOND};
    nanosleep(&pause, nullptr);
  }
  load_of_machine.is_throttled.store(false);
  return nullptr;
}

// Threads of our own for a busy machine. OpenMP's must all have come, and have left, before a parallel region is over,
// though they may have no core. These join if they have one, and nobody waits for those who have not begun:
//
//   this thread   posts the work | portion | portion | portion | closes it
//   volunteer          (no core)           | portion | done
//
// They sleep while there is nothing to do, and end after a while.
struct Volunteers {
  typedef void (*Run)(void* body, int rank, int size);
  static constexpr int CLOSED = 1 << 30;
  static constexpr int64_t LEAVES_AFTER = 1000 * MILLISECOND;
  std::atomic<int> state{CLOSED}, ranks{0}, count{0};  // state: how many are at work, and whether nobody may begin
  std::atomic<bool> is_taken{false};
  Counter posted, left;
  Run run = nullptr;
  void* body = nullptr;
  int size = 0;

  // Returns false if another thread has them.
  bool share(int threads, void* of, Run how) {
    if (is_taken.exchange(true)) return false;
    for (pthread_t thread; count.load() < threads - 1; count.fetch_add(1)) {
      if (pthread_create(&thread, nullptr, volunteer, this)) break;
      pthread_detach(thread);
    }
    run = how, body = of, size = threads;
    ranks.store(1);
    state.fetch_and(~CLOSED);
    posted.add();
    how(of, 0, threads);
    state.fetch_or(CLOSED);
    for (int seen; seen = left.value.load(), state.load() != CLOSED;) left.wait(seen + 1, BUSY.at_end);
    is_taken.store(false);
    return true;
  }

 private:
  static void* volunteer(void* of) {
    Volunteers& all = *static_cast<Volunteers*>(of);
    for (int seen = all.posted.value.load() - 1; all.posted.comes(seen + 1, BUSY.when_idle, LEAVES_AFTER);) {
      seen = all.posted.value.load();
      if (!(all.state.fetch_add(1) & CLOSED)) {
        const int rank = all.ranks.fetch_add(1);
        if (rank < all.size) all.run(all.body, rank, all.size);
      }
      if (all.state.fetch_sub(1) & CLOSED) all.left.add();
    }
    all.count.fetch_sub(1);
    return nullptr;
  }
};
inline Volunteers volunteers;  // of the process, as the load is

// Multiplications above which it is worth asking the system how long a thread had a core, and those that take a
// nanosecond at worst.
constexpr int64_t LONG = int64_t(1) << 21, AT_WORST = 2;

// Run body(rank, size) on so many threads, or on this one if others have no core to run on. `work` is about the number
// of multiplications. The body returns how long it waited for others.
template <class Body>
INLINE void by_threads(int64_t threads, int64_t work, Body body) {
#if defined(_OPENMP)
  if (threads > 1 && !load_of_machine.is_resting() && load_of_machine.can_run_threads()) {
    const int64_t begin = nanoseconds(), begin_on_core = work >= LONG ? nanoseconds(CLOCK_THREAD_CPUTIME_ID) : 0;
    int64_t own = 0, waited = 0;
    Counter finished;
#pragma omp parallel num_threads(int(threads))
    {
      const int rank = omp_get_thread_num(), size = omp_get_num_threads();
      const int64_t of_it = body(rank, size);
      if (rank > 0) {
        finished.add();
      } else {
        own = nanoseconds(), waited = of_it;
        // OpenMP would spin, and keep the core from those it waits for.
        finished.wait(size - 1, load_of_machine.patience().at_end);
      }
    }
    const int64_t end = nanoseconds(), useful = own - begin - waited;
    int64_t lost = end - begin - useful - useful / 4;
    // A thread that waits for others in OpenMP's way may do so on the core that this one needs.
    int64_t without_core = end - begin - work / AT_WORST - MILLISECOND;
    if (work >= LONG) without_core = end - begin - (nanoseconds(CLOCK_THREAD_CPUTIME_ID) - begin_on_core);
    if (without_core > lost) lost = without_core;
    load_of_machine.record(end, threads, end - begin, lost);
    return;
  }
#endif
  body(0, 1);
}

// How to run work in portions that any number of threads may take: by all threads together, or on a busy machine by
// this one alone or with volunteers.
enum class Way { ALL, ALONE, VOLUNTEERS };

// Which of the last two was faster lately, for one kind of work: a volunteer that loses its core with a portion in its
// hands is waited for, so that those who come do not always help. Every eighth time the other is tried.
struct Habit {
  static constexpr int64_t WORTHWHILE = int64_t(1) << 24;  // multiplications, below which nobody could come in time
  static constexpr int64_t BETWEEN_TRIALS = 8;
  std::atomic<int64_t> alone{0}, together{0}, calls{0};  // picoseconds per multiplication

  Way way(int64_t threads, int64_t work) {
    if (threads <= 1 || !load_of_machine.is_resting() || !load_of_machine.can_run_threads()) return Way::ALL;
    if (work < WORTHWHILE) return Way::ALONE;
    const int64_t one = alone.load(std::memory_order_relaxed), several = together.load(std::memory_order_relaxed);
    const bool is_trial = calls.fetch_add(1, std::memory_order_relaxed) % BETWEEN_TRIALS == 0;
    return (several <= one) != (is_trial && several != 0) ? Way::VOLUNTEERS : Way::ALONE;
  }

  void record(Way way, int64_t work, int64_t time) {
    std::atomic<int64_t>& of = way == Way::ALONE ? alone : together;
    const int64_t before = of.load(std::memory_order_relaxed), now = 1000 * time / work + 1;
    of.store(before ? (7 * before + now) / 8 : now, std::memory_order_relaxed);
  }
};

template <class Body>
INLINE void by_portions(Habit& habit, Way way, int64_t threads, int64_t work, Body body) {
  if (way == Way::ALL) return by_threads(threads, work, body);
  const int64_t begin = nanoseconds();
  const Volunteers::Run run = [](void* of, int rank, int size) { (*static_cast<Body*>(of))(rank, size); };
  if (way == Way::ALONE || !volunteers.share(int(threads), &body, run)) body(0, 1), way = Way::ALONE;
  if (work >= Habit::WORTHWHILE) habit.record(way, work, nanoseconds() - begin);
}

// Run body(first, last, rank) for shares of `count` items: one for each thread, or smaller ones for volunteers.
template <class Body>
INLINE void by_shares(int64_t threads, int64_t work, int64_t count, Body body) {
  static Habit habit;
  const Way way = habit.way(threads, work);
  const int64_t shares = way == Way::VOLUNTEERS ? 3 * threads : threads;
  std::atomic<int64_t> next{0};
  by_portions(habit, way, threads, work, [&](int rank, int size) {
    const int64_t all = size == 1 ? 1 : shares;
    for (int64_t share; (share = next.fetch_add(1)) < all;) body(count * share / all, count * (share + 1) / all, rank);
    return int64_t(0);
  });
}

struct Call {
  int64_t num_steps, num_rows, keep;
  const int64_t *rows, *starts, *lengths, *strides, *weight_strides;
  real **buffers, **weights;
  real *packed, *scratch, *own, *room;
};

// Each thread counts its arrivals in a cache line of its own, and reads those of the others:
//
//   line 0 [ 7 ]  line 1 [ 6 ]        thread 0 has arrived for the 7th time and waits until line 1 holds 7
//
// A wait costs one line's travel from core to core, where a common counter would travel to and fro. Counts only grow, so
// nothing is ever reset. The store is a release and the load an acquire: whatever a thread wrote before it arrived is
// visible to whoever saw it arrive. More threads than lines fall back to a common counter with a phase.
struct Barrier {
  static constexpr int MAX_LINES = 16;
  Counter arrived[MAX_LINES], phase, called;
  std::atomic<int> together{0};
  const Patience patience = load_of_machine.patience();
  std::atomic<int64_t> spin{patience.at_barrier};
  // Time of waits in which the first thread, or another, slept, as it does if one of them has lost its core.
  std::atomic<int64_t> first_slept{0}, other_slept{0};
  // Written by the first thread before it arrives, read by the others after. Two, since it may write the next one while
  // another still reads this one.
  struct Stretch { int64_t from, to; } stretches[2];
  bool is_over = false;
  const bool is_trial;

  explicit Barrier(bool is_trial) : is_trial(is_trial) {}

  void wait_for(Counter& counter, int wanted, int rank, bool is_counted) {
    const int64_t time = counter.wait(wanted, spin.load(std::memory_order_relaxed));
    if (time && is_counted) (rank == 0 ? first_slept : other_slept).fetch_add(time);
  }

  int64_t take_slept() {
    const int64_t first = first_slept.exchange(0), other = other_slept.exchange(0);
    return first > other ? first : other;
  }

  void wait(int rank, int size, bool is_counted = true) {
    if (size <= MAX_LINES) {
      const int mine = arrived[rank].value.load(std::memory_order_relaxed) + 1;
      arrived[rank].set(mine);
      for (int other = 0; other < size; other++)
        if (other != rank) wait_for(arrived[other], mine, rank, is_counted);
      return;
    }
    const int now = phase.value.load(std::memory_order_relaxed);
    if (together.fetch_add(1, std::memory_order_acq_rel) + 1 < size) return wait_for(phase, now + 1, rank, is_counted);
    together.store(0, std::memory_order_relaxed);
    phase.set(now + 1);
  }

  // Whether all but the first have arrived, so that it need not wait for them.
  bool others_wait(int size) const {
    if (size > MAX_LINES) return together.load(std::memory_order_acquire) == size - 1;
    const int next = arrived[0].value.load(std::memory_order_relaxed) + 1;
    for (int other = 1; other < size; other++)
      if (!arrived[other].has_reached(next)) return false;
    return true;
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

// What is known of a loop: the multiplications of a row's step, whether its weights are so large that a team is faster
// as a rule, and nanoseconds of a step of so many rows, alone and by a team, from earlier calls.
struct Loop {
  static constexpr int64_t CALLS_BETWEEN_TRIALS = 16;
  const int64_t work;
  const bool is_large;
  std::atomic<int64_t> rows{0}, alone{0}, team{0}, calls{0};

  bool is_known(int64_t number) const { return rows.load(std::memory_order_relaxed) == number; }
  bool is_trial() { return calls.fetch_add(1, std::memory_order_relaxed) % CALLS_BETWEEN_TRIALS == 0; }
  bool is_faster_alone(int64_t number) const { return is_known(number) && 16 * team.load() > 15 * alone.load(); }
};

// Runs steps [from, to), counted in the order in which they run.
typedef void (*Steps)(const Call& call, int64_t first, int64_t last, int64_t from, int64_t to, int rank, int size,
                      Barrier* barrier);

// How long a barrier takes depends on where the threads' cores lie, and on whether each has one, which is not ours to
// choose and changes. So a loop runs in stretches, by the team or by the first thread alone, whichever took less time per
// step; the results are the same to the last digit. A team that was slower rests for many times as long as it lost.
//
//   thread 0   alone | team  team  team | alone  alone  ... | team  team ...
//   thread 1         | team  team  team |      asleep       | team  team ...
//                                  ^ lost its core          ^ is called, and thread 0 goes on alone until it has come
static void follow(const Call& call, int64_t first, int64_t last, int rank, int size, Barrier* barrier, Steps team) {
  int turn = 0;
  for (int calls = 1;; calls++) {
    barrier->called.wait(calls, load_of_machine.patience().when_idle);
    if (barrier->is_over) return;
    for (;;) {
      barrier->wait(rank, size, false);  // the first thread may have worked alone
      const Barrier::Stretch now = barrier->stretches[turn++ % 2];
      if (now.from == now.to) break;
      team(call, first, last, now.from, now.to, rank, size, barrier);
    }
  }
}

static void lead(const Call& call, int64_t first, int64_t last, int size, Barrier* barrier, Steps team, Steps alone,
                 Loop* loop) {
  constexpr int64_t TRIAL = 32, COLD = 8, STRETCH = 200 * MICROSECOND, REST = 16;
  const int64_t steps = call.num_steps;
  const bool is_short = steps < 16 * TRIAL;  // too short for trials
  int64_t best = loop->is_known(last - first) && !barrier->is_trial ? loop->alone.load() : 0;  // alone; at first unknown
  const bool stays_alone = is_short && !best && !loop->is_large;
  int64_t done = 0, now = nanoseconds(), rest_until = load_of_machine.rest_until.load();
  int64_t length = best ? STRETCH / best + 4 : is_short ? COLD : TRIAL;
  int64_t team_time = 0, team_steps = 0;
  int calls = 0, turn = 0;
  bool has_called = false;
  const auto announce = [&](int64_t count) {
    barrier->stretches[turn++ % 2] = {done, done + count};
    barrier->wait(0, size);
  };
  while (done < steps) {
    if (now >= rest_until && !has_called && !stays_alone) barrier->called.set(++calls), has_called = true;
    if (has_called && is_short)
      while (!barrier->others_wait(size) && nanoseconds() - now < barrier->patience.at_end) PAUSE();
    if (has_called && barrier->others_wait(size) && (best || is_short)) {
      barrier->take_slept();
      int slow = 0;  // stretches in a row
      for (bool is_cold = true; done < steps; is_cold = false) {
        const int64_t count = least(is_cold ? COLD : length, steps - done), begin = nanoseconds();
        announce(count);
        team(call, first, last, done, done + count, 0, size, barrier);
        done += count;
        now = nanoseconds();
        const int64_t slept = barrier->take_slept(), of_step = (now - begin - least(slept, now - begin)) / count;
        // Whoever waits for longer than a step takes waits for somebody without a core.
        if (of_step > barrier->patience.at_barrier) barrier->spin.store(of_step);
        if (is_cold && !slept) continue;  // the weights were not in the cache
        team_time += of_step * count, team_steps += count;
        const int64_t lost = best ? now - begin - best * count : slept;
        load_of_machine.record(now, size, now - begin, slept ? lost : 0);
        rest_until = load_of_machine.rest_until.load(std::memory_order_relaxed);
        if (now < rest_until) break;
        slow = lost > 0 && !slept ? slow + 1 : 0;
        if (slow < 3) continue;
        rest_until = now + least(REST * lost, Load::MIN_REST);
        break;
      }
      announce(0);
      has_called = false;
      continue;
    }
    for (int half = best ? 1 : 0; half < 2 && done < steps; half++) {  // the first time is cold
      const int64_t count = least(length, steps - done), begin = nanoseconds();
      alone(call, first, last, done, done + count, 0, 1, barrier);
      done += count;
      now = nanoseconds();
      const int64_t of_step = (now - begin) / count + 1;
      // Averaged, as the team's is; what an interruption took does not count.
      if (half) best = best ? (3 * best + least(of_step, 2 * best)) / 4 : of_step;
    }
    if (best) length = least(STRETCH / best + 4, 256);
  }
  if (has_called) announce(0);
  barrier->is_over = true;
  barrier->called.set(++calls);
  if (best && team_steps) loop->rows.store(last - first), loop->alone.store(best), loop->team.store(team_time / team_steps);
}

// Steps [from, to) of some rows, by one thread, or all steps by a team. Returns what is known of the loop, and does nothing
// else if the size is 0.
typedef Loop* (*Work)(const Call*, int64_t first, int64_t last, int64_t from, int64_t to, int rank, int size, Barrier*);
typedef void (*Pack)(const Call*);
struct Job {
  Pack pack;
  Work work;
  const Call* call;
  const int64_t* bounds;  // rows of each piece
  int64_t pieces;         // none: all threads share all rows
};
INLINE Loop* loop_of(const Job& job) { return job.work(job.call, 0, 0, 0, 0, 0, 0, nullptr); }

// Rows that go through time by themselves. A thread that has lost its core for a while, and so may lose it again, offers
// its piece to one that has nothing left to do:
//
//   thread 0   piece 0 ------------------ done, waits   takes on piece 1 ------->
//   thread 1   piece 1 -------  (no core)  ------------ offers it, waits
struct Pieces {
  static constexpr int64_t STRETCH = int64_t(1) << 21;  // multiplications after which the clock is read
  static constexpr int64_t LOST_CORE = 500 * MICROSECOND;
  struct Piece { const Job* job; int64_t first, last, done; };
  Piece* pieces;
  int64_t count;
  std::atomic<int64_t> next{0}, unfinished, offered{-1};
  std::atomic<int> idle{0};
  Counter changed;

  // Returns how long there was nothing to do.
  int64_t run() {
    for (int64_t piece; (piece = next.fetch_add(1)) < count;) run(piece);
    if (unfinished.load() == 0) return 0;
    idle.fetch_add(1);
    int64_t begin = nanoseconds(), waited = 0;
    for (;;) {
      const int seen = changed.value.load();
      const int64_t piece = offered.exchange(-1);
      if (piece >= 0) {
        idle.fetch_sub(1);
        waited += nanoseconds() - begin;
        run(piece);
        begin = nanoseconds();
        idle.fetch_add(1);
      } else if (unfinished.load() == 0) {
        return waited + nanoseconds() - begin;
      } else {
        changed.wait(seen + 1, load_of_machine.patience().at_end);
      }
    }
  }

 private:
  void run(int64_t number) {
    Piece& piece = pieces[number];
    const Call* call = piece.job->call;
    const int64_t rows = piece.last - piece.first, steps = call->num_steps;
    const int64_t work = loop_of(*piece.job)->work * rows;
    const int64_t stretch = work >= STRETCH ? 1 : STRETCH / (work + 1) + 1;
    int64_t best = 0;  // nanoseconds of a stretch
    while (piece.done < steps || steps == 0) {
      const int64_t from = piece.done, to = least(from + stretch, steps), begin = nanoseconds();
      piece.job->work(call, piece.first, piece.last, from, to, 0, 1, nullptr);
      piece.done = to;
      if (to == steps) break;
      const int64_t time = nanoseconds() - begin;
      best = best ? least(best, time) : time;
      if (time < 2 * best + LOST_CORE || idle.load(std::memory_order_relaxed) == 0) continue;
      int64_t nobody = -1;
      if (!offered.compare_exchange_strong(nobody, number)) continue;
      changed.add();
      for (int spins = 0; spins < 256; spins++) PAUSE();  // a moment for others to take it
      return;
    }
    if (unfinished.fetch_sub(1) == 1) changed.add();
  }
};

extern "C" void stretto_run(const Job* jobs, int64_t count, int64_t threads) {
  int64_t total = 0, work = 0;
  for (int64_t i = 0; i < count; i++) {
    const Call& call = *jobs[i].call;
    total += jobs[i].pieces;
    work += loop_of(jobs[i])->work * call.num_rows * call.num_steps;
  }
  if (total == 0) {
    Loop* const loop = loop_of(jobs[0]);
    Barrier barrier(loop->is_trial());
    const bool is_alone = !barrier.is_trial && loop->is_faster_alone(jobs[0].call->num_rows);
    return by_threads(is_alone ? 1 : threads, work, [&](int rank, int size) {
      const Call& call = *jobs[0].call;
      if (rank == 0) jobs[0].pack(&call);
      jobs[0].work(&call, 0, call.num_rows, 0, call.num_steps, rank, size, &barrier);
      return int64_t(0);  // the team itself takes note of what it loses
    });
  }
  // For volunteers there are more pieces than threads: one that is held by a thread without a core is the only one that
  // stops. For one thread alone there is one: it passes over the weights once for all rows.
  constexpr int64_t FEW = 4;  // rows, below which the weights are read too often for too little
  static Habit habit;
  const Way way = habit.way(threads, work);
  const int64_t parts = way == Way::VOLUNTEERS ? 3 : 1;
  Pieces::Piece* const list = new Pieces::Piece[parts * total];
  Pieces pieces{list, 0};
  for (int64_t i = 0; i < count; i++) {
    const int64_t step = way == Way::ALONE ? jobs[i].pieces : 1;
    for (int64_t p = 0; p < jobs[i].pieces; p += step) {
      const int64_t first = jobs[i].bounds[p], rows = jobs[i].bounds[p + step] - first;
      const int64_t cuts = parts == 1 ? rows > 0 : rows < FEW * parts ? (rows + FEW - 1) / FEW : parts;
      for (int64_t c = 0; c < cuts; c++)
        list[pieces.count++] = {jobs + i, first + rows * c / cuts, first + rows * (c + 1) / cuts, 0};
    }
  }
  pieces.unfinished = pieces.count;
  std::atomic<int64_t> next{0};
  Counter packed;
  by_portions(habit, way, threads, work, [&](int, int) {
    for (int64_t i; (i = next.fetch_add(1)) < count; packed.add()) jobs[i].pack(jobs[i].call);
    const int64_t waited = packed.wait(int(count), QUIET.at_end);
    return waited + pieces.run();
  });
  delete[] list;
}
