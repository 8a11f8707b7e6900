// Rows times a weight matrix that was packed once for all steps.
//
// A packed matrix of K rows and N columns is a run of panels; a panel holds PANEL columns, row after row, zero beyond N:
//
//   w[K, N]   | panel 0 | panel 1 | pa 0 |        packed   panel 0: row 0, row 1, ... row K-1 | panel 1: row 0, ...
//
// A tile computes ROWS rows of PANELS panels in registers: each vector of w that is loaded serves all of its rows.
// An output element is always the same sequence of additions, whatever the number of rows, threads or panels at work.
#pragma once
#include "vector.h"

constexpr int PANEL = 2 * LANES;
constexpr int panels_of(int64_t N) { return int((N + PANEL - 1) / PANEL); }
// Few columns give few independent sums: then K is summed in interleaved chains, so that additions overlap.
constexpr int chains_of(int64_t N) { return panels_of(N) == 1 ? 4 : panels_of(N) == 2 ? 2 : 1; }

static void pack(const real* w, int64_t stride_k, int64_t stride_n, int64_t K, int64_t N, real* packed) {
  for (int64_t n = 0; n < N; n += PANEL, packed += K * PANEL) {
    const int64_t count = N - n < PANEL ? N - n : PANEL;
    const real* from = w + n * stride_n;
    if (count == PANEL && stride_n == 1) {
      for (int64_t k = 0; k < K; k++)
        store(packed + k * PANEL, load(from + k * stride_k)),
            store(packed + k * PANEL + LANES, load(from + k * stride_k + LANES));
      continue;
    }
    // Of a transposed matrix a few rows at a time, so that what one cache line holds is used while it is there.
    for (int64_t k0 = 0; k0 < K; k0 += LANES) {
      const int64_t end = K - k0 < LANES ? K : k0 + LANES;
      for (int64_t j = 0; j < count; j++)
        for (int64_t k = k0; k < end; k++) packed[k * PANEL + j] = from[k * stride_k + j * stride_n];
      for (int64_t k = k0; k < end; k++)
        for (int64_t j = count; j < PANEL; j++) packed[k * PANEL + j] = 0;
    }
  }
}

// The panels of BLOCKS blocks of equal size, such as gates, alternate; each is a whole number of panels. A thread's share
// of all gates then lies in one piece:  i0 f0 g0 o0 | i1 f1 g1 o1 | ...  instead of  i0 i1 ... f0 f1 ... g0 g1 ... o0 o1
template <int BLOCKS>
static void pack_blocks(const real* w, int64_t stride_k, int64_t stride_n, int64_t K, int64_t N, real* packed) {
  const int64_t block = N / BLOCKS;
  if (BLOCKS == 1) return pack(w, stride_k, stride_n, K, N, packed);
  for (int64_t n = 0; n < block; n += PANEL)
    for (int b = 0; b < BLOCKS; b++, packed += K * PANEL)
      pack(w + (b * block + n) * stride_n, stride_k, stride_n, K, PANEL, packed);
}
// Where element j of the first block lies; those of the others follow at multiples of PANEL.
template <int BLOCKS>
constexpr int64_t interleaved(int64_t j) { return j / PANEL * (BLOCKS * PANEL) + j % PANEL; }

// Element k of row r is a[r * row + k * step].
// With ADD the result is added to what is there.
template <int ROWS, int PANELS, int CHAINS, bool ADD = false>
INLINE void tile(const real* a, int64_t row, int64_t step, const real* w, int64_t K, real* c, int64_t stride_c) {
  vec sum[CHAINS][ROWS][PANELS][2];
  for (int s = 0; s < CHAINS; s++)
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++)
        for (int v = 0; v < 2; v++)
          sum[s][r][p][v] = broadcast(0);
  const int64_t panel = K * PANEL;
  int64_t k = 0;
  for (; k + CHAINS <= K; k += CHAINS)
#pragma GCC unroll 4
    for (int s = 0; s < CHAINS; s++)
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++) {
        vec w0 = load(w + p * panel + (k + s) * PANEL), w1 = load(w + p * panel + (k + s) * PANEL + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          vec x = broadcast(a[r * row + (k + s) * step]);
          sum[s][r][p][0] += x * w0;
          sum[s][r][p][1] += x * w1;
        }
      }
  for (; k < K; k++)
    for (int p = 0; p < PANELS; p++)
      for (int r = 0; r < ROWS; r++) {
        vec x = broadcast(a[r * row + k * step]);
        sum[0][r][p][0] += x * load(w + p * panel + k * PANEL);
        sum[0][r][p][1] += x * load(w + p * panel + k * PANEL + LANES);
      }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++)
      for (int v = 0; v < 2; v++) {
        vec total = sum[0][r][p][v];
        for (int s = 1; s < CHAINS; s++) total += sum[s][r][p][v];
        // Added to the rest at the end: sums of sums lose fewer digits than one long sum.
        if (ADD) total += load(c + r * stride_c + p * PANEL + v * LANES);
        store(c + r * stride_c + p * PANEL + v * LANES, total);
      }
}

// As many panels at once as there are registers for their sums, and equally many each time: a product of few columns
// waits for each addition, so that one panel alone takes as long as four.
template <int ROWS, int CHAINS>
INLINE void few_rows(const real* a, int64_t row, const real* w, int64_t K, real* c, int64_t stride_c, int first, int last) {
  constexpr int AT_ONCE = ROWS * CHAINS == 1 ? 6 : ROWS * CHAINS == 2 ? 3 : ROWS * CHAINS == 3 ? 2 : 1;
  const int rounds = (last - first + AT_ONCE - 1) / AT_ONCE;
  for (int i = 0; i < rounds; i++) {
    const int64_t p = first + (last - first) * i / rounds;
    const int count = int(first + (last - first) * (i + 1) / rounds - p);
    const real* wp = w + p * K * PANEL;
    real* cp = c + p * PANEL;
    if (count == AT_ONCE) { tile<ROWS, AT_ONCE, CHAINS>(a, row, 1, wp, K, cp, stride_c); continue; }
    if constexpr (AT_ONCE > 5)
      if (count == 5) { tile<ROWS, 5, CHAINS>(a, row, 1, wp, K, cp, stride_c); continue; }
    if constexpr (AT_ONCE > 4)
      if (count == 4) { tile<ROWS, 4, CHAINS>(a, row, 1, wp, K, cp, stride_c); continue; }
    if constexpr (AT_ONCE > 3)
      if (count == 3) { tile<ROWS, 3, CHAINS>(a, row, 1, wp, K, cp, stride_c); continue; }
    if constexpr (AT_ONCE > 2)
      if (count == 2) { tile<ROWS, 2, CHAINS>(a, row, 1, wp, K, cp, stride_c); continue; }
    tile<ROWS, 1, CHAINS>(a, row, 1, wp, K, cp, stride_c);
  }
}

template <int ROWS>
static void interleave(const real* a, int64_t row, int64_t K, real* to) {
  for (int64_t k = 0; k < K; k++)
    for (int r = 0; r < ROWS; r++) to[k * ROWS + r] = a[r * row + k];
}

// c[rows, N] = a[rows, K] w[K, N] for the panels [first, last); c has room for whole panels, `room` for rows * K elements.
template <int CHAINS>
INLINE void product_with(const real* a, int64_t row, const real* w, real* c, int64_t stride_c, int64_t rows, int64_t K,
                         int first, int last, real* room) {
  constexpr int FEW = CHAINS == 4 ? 1 : 3;
  if (CHAINS > 1 || rows <= FEW) {
    for (; rows > 0;) {
      const int64_t count = rows <= FEW ? rows : rows == FEW + 1 && FEW > 1 ? 2 : FEW;
      if (count == 1) few_rows<1, CHAINS>(a, row, w, K, c, stride_c, first, last);
      if constexpr (FEW > 1) {
        if (count == 2) few_rows<2, CHAINS>(a, row, w, K, c, stride_c, first, last);
        if (count == 3) few_rows<3, CHAINS>(a, row, w, K, c, stride_c, first, last);
      }
      a += count * row, c += count * stride_c, rows -= count;
    }
    return;
  }
  // Rows far apart by a power of two collide in the cache: blocks of up to six are laid side by side first.
  // Then a panel stays in the innermost cache while all blocks pass over it.
  const int64_t blocks = (rows + 5) / 6;
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t from = rows * i / blocks, count = rows * (i + 1) / blocks - from;
    const real* ai = a + from * row;
    real* to = room + from * K;
    if (count == 6) interleave<6>(ai, row, K, to);
    else if (count == 5) interleave<5>(ai, row, K, to);
    else if (count == 4) interleave<4>(ai, row, K, to);
    else interleave<3>(ai, row, K, to);
  }
  for (int64_t p = first; p < last; p++)
    for (int64_t i = 0; i < blocks; i++) {
      const int64_t from = rows * i / blocks, count = rows * (i + 1) / blocks - from;
      const real *ai = room + from * K, *wp = w + p * K * PANEL;
      real* ci = c + from * stride_c + p * PANEL;
      if (count == 6) tile<6, 1, 1>(ai, 1, 6, wp, K, ci, stride_c);
      else if (count == 5) tile<5, 1, 1>(ai, 1, 5, wp, K, ci, stride_c);
      else if (count == 4) tile<4, 1, 1>(ai, 1, 4, wp, K, ci, stride_c);
      else tile<3, 1, 1>(ai, 1, 3, wp, K, ci, stride_c);
    }
}

// The sizes known when the code is compiled.
template <int64_t K, int64_t N>
static void product(const real* a, int64_t row, const real* w, real* c, int64_t stride_c, int64_t rows, int first, int last,
                    real* room) {
  product_with<chains_of(N)>(a, row, w, c, stride_c, rows, K, first, last, room);
}

// The sizes known when it runs.
static void product_of(const real* a, int64_t row, const real* w, real* c, int64_t stride_c, int64_t rows, int64_t K,
                       int64_t N, int first, int last, real* room) {
  const int chains = chains_of(N);
  if (chains == 4) product_with<4>(a, row, w, c, stride_c, rows, K, first, last, room);
  else if (chains == 2) product_with<2>(a, row, w, c, stride_c, rows, K, first, last, room);
  else product_with<1>(a, row, w, c, stride_c, rows, K, first, last, room);
}
