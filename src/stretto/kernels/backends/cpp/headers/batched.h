// Products and sums over the rows of all steps. Threads share out columns or rows, never a sum: the result does not
// depend on how many there are.
#pragma once
#include "team.h"

constexpr int64_t ROW_BLOCK = 96;    // rows that pass over the weights together
constexpr int64_t DEPTH_BLOCK = 256;  // rows that are added up before their sum is added to the others: digits are kept

// Rows [first, last) of y[P, N] = x[P, K] w[K, N] + bias[N], w packed.
static void product_rows(const real* x, int64_t stride_x, const real* w, const real* bias, real* y, int64_t P, int64_t K,
                         int64_t N, int64_t first, int64_t last, real* room, real* wide) {
  const int count = panels_of(N);
  for (int64_t from = first; from < last; from += ROW_BLOCK) {
    const int64_t rows = last - from < ROW_BLOCK ? last - from : ROW_BLOCK;
    product_of(x + from * stride_x, stride_x, w, wide, int64_t(count) * PANEL, rows, K, N, 0, count, room);
    for (int64_t r = 0; r < rows; r++) {
      const real* source = wide + r * count * PANEL;
      real* target = y + (from + r) * N;
      int64_t j = 0;
      for (; j + LANES <= N; j += LANES) store(target + j, bias ? load(source + j) + load(bias + j) : load(source + j));
      for (; j < N; j++) target[j] = bias ? source[j] + bias[j] : source[j];
    }
  }
}

extern "C" void stretto_product(const real* x, int64_t stride_x, const real* w, int64_t stride_k, int64_t stride_n,
                                const real* bias, real* y, int64_t P, int64_t K, int64_t N, real* memory,
                                int64_t threads) {
  const int64_t width = int64_t(panels_of(N)) * PANEL;
  real* const packed = memory;
  real* const rooms = memory + K * width;
  const int64_t panels = panels_of(N), blocks = (P + ROW_BLOCK - 1) / ROW_BLOCK;
  std::atomic<int64_t> next_panel{0}, next_block{0};
  Counter done;
  static Habit habit;
  by_portions(habit, habit.way(threads, P * K * N), threads, P * K * N, [&](int rank, int) {
    for (int64_t p; (p = next_panel.fetch_add(1)) < panels; done.add())
      pack(w + p * PANEL * stride_n, stride_k, stride_n, K, N - p * PANEL < PANEL ? N - p * PANEL : PANEL,
           packed + p * K * PANEL);
    const int64_t waited = done.wait(int(panels), QUIET.at_end);
    real* const room = rooms + rank * ROW_BLOCK * (K + width);
    for (int64_t block; (block = next_block.fetch_add(1)) < blocks;) {
      const int64_t first = block * ROW_BLOCK, last = first + ROW_BLOCK < P ? first + ROW_BLOCK : P;
      product_rows(x, stride_x, packed, bias, y, P, K, N, first, last, room, room + ROW_BLOCK * K);
    }
    return waited;
  });
}

// out[K, N] = the sum over rows p of x[p, K] d[p, N]. The first rows of x may lie elsewhere: a state before each step is
// the initial state, then the states after all steps but the last.
extern "C" void stretto_weight_gradient(const real* head, int64_t stride_head, int64_t head_rows, const real* x,
                                        int64_t stride_x, const real* d, int64_t stride_d, real* out, int64_t P,
                                        int64_t K, int64_t N, real* memory, int64_t threads) {
  const auto row = [=](int64_t p) { return p < head_rows ? head + p * stride_head : x + (p - head_rows) * stride_x; };
  const int64_t all_panels = panels_of(N), width = all_panels * PANEL, blocks = (K + 5) / 6;
  by_shares(threads, P * K * N, all_panels, [&](int64_t first, int64_t last, int rank) {
    real* const sums = memory + first * PANEL * blocks * 6;  // panel after panel, each with all rows of the result
    real* const sides = memory + width * blocks * 6 + rank * DEPTH_BLOCK * (blocks * 6 + PANEL);
    real* const panel = sides + DEPTH_BLOCK * blocks * 6;
    for (int64_t i = 0; i < (last - first) * PANEL * blocks * 6; i++) sums[i] = 0;
    for (int64_t from = 0; from < P && first < last; from += DEPTH_BLOCK) {
      const int64_t depth = P - from < DEPTH_BLOCK ? P - from : DEPTH_BLOCK;
      for (int64_t i = 0; i < K / 6; i++)
        for (int64_t p = 0; p < depth; p++)
          __builtin_memcpy(sides + (i * DEPTH_BLOCK + p) * 6, row(from + p) + i * 6, 6 * sizeof(real));
      for (int64_t i = K / 6; i < blocks; i++)
        for (int64_t p = 0; p < depth; p++)
          for (int r = 0; r < 6; r++)
            sides[(i * DEPTH_BLOCK + p) * 6 + r] = i * 6 + r < K ? row(from + p)[i * 6 + r] : real(0);
      for (int64_t n = first; n < last; n++) {
        pack(d + from * stride_d + n * PANEL, stride_d, 1, depth, N - n * PANEL < PANEL ? N - n * PANEL : PANEL, panel);
        for (int64_t i = 0; i < blocks; i++)
          tile<6, 1, 1, true>(sides + i * DEPTH_BLOCK * 6, 1, 6, panel, depth,
                              sums + ((n - first) * blocks + i) * 6 * PANEL, PANEL);
      }
    }
    for (int64_t n = first; n < last; n++)
      for (int64_t k = 0; k < K; k++)
        for (int64_t j = 0; j < PANEL && n * PANEL + j < N; j++)
          out[k * N + n * PANEL + j] = sums[((n - first) * blocks + k / 6) * 6 * PANEL + (k % 6) * PANEL + j];
  });
}

// The sums of VECTORS vectors of columns of d, each row times that of e if there is one.
template <int VECTORS, bool TIMES>
static void column_sums_of(const real* d, int64_t stride_d, const real* e, int64_t stride_e, int64_t P, real* out) {
  for (int v = 0; v < VECTORS; v++) store(out + v * LANES, broadcast(0));
  for (int64_t from = 0; from < P; from += DEPTH_BLOCK) {
    vec sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) sum[v] = broadcast(0);
    for (int64_t p = from; p < P && p < from + DEPTH_BLOCK; p++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        const vec value = load(d + p * stride_d + v * LANES);
        sum[v] += TIMES ? value * load(e + p * stride_e + v * LANES) : value;
      }
    for (int v = 0; v < VECTORS; v++) store(out + v * LANES, load(out + v * LANES) + sum[v]);
  }
}

template <bool TIMES>
static void column_sums_between(const real* d, int64_t stride_d, const real* e, int64_t stride_e, real* out, int64_t P,
                                int64_t first, int64_t last) {
  for (int64_t j = first; j < last;) {
    const int64_t left = (last - j) / LANES;
    const real* ej = TIMES ? e + j : e;
    if (left >= 8) column_sums_of<8, TIMES>(d + j, stride_d, ej, stride_e, P, out + j), j += 8 * LANES;
    else if (left >= 3) column_sums_of<3, TIMES>(d + j, stride_d, ej, stride_e, P, out + j), j += 3 * LANES;
    else if (left >= 1) column_sums_of<1, TIMES>(d + j, stride_d, ej, stride_e, P, out + j), j += LANES;
    else {
      real total = 0;
      for (int64_t from = 0; from < P; from += DEPTH_BLOCK) {
        real sum = 0;
        for (int64_t p = from; p < P && p < from + DEPTH_BLOCK; p++)
          sum += TIMES ? d[p * stride_d + j] * ej[p * stride_e] : d[p * stride_d + j];
        total += sum;
      }
      out[j++] = total;
    }
  }
}

// out[N] = the sum over rows p of d[p, N], or of d[p, N] e[p, N].
extern "C" void stretto_column_sums(const real* d, int64_t stride_d, const real* e, int64_t stride_e, real* out, int64_t P,
                                    int64_t N, int64_t threads) {
  by_shares(threads, P * N, (N + LANES - 1) / LANES, [&](int64_t from, int64_t to, int) {
    const int64_t first = from * LANES, last = to * LANES < N ? to * LANES : N;
    if (e) column_sums_between<true>(d, stride_d, e, stride_e, out, P, first, last);
    else column_sums_between<false>(d, stride_d, e, stride_e, out, P, first, last);
  });
}
