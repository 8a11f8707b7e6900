// Layer norm of the rows of all steps, forward and backward. Threads share out rows, and columns where rows are added up.
#pragma once
#include "batched.h"

template <class Body>
INLINE void each_row(int64_t P, int64_t N, int64_t threads, Body body) {
  by_shares(threads, P * N, P, [&](int64_t first, int64_t last, int) {
    for (int64_t p = first; p < last; p++) body(p);
  });
}

// The sum of value(j) for j < N, where value(j, count) is a vector of `count` lanes.
template <class Value>
INLINE real row_sum(int64_t N, Value value) {
  vec sums[2] = {broadcast(0), broadcast(0)};
  int64_t j = 0;
  for (; j + PANEL <= N; j += PANEL) sums[0] += value(j), sums[1] += value(j + LANES);
  for (; j + LANES <= N; j += LANES) sums[0] += value(j);
  real total = reduce_sum(sums[0] + sums[1]);
  for (; j < N; j++) total += value(j)[0];
  return total;
}

// One lane beyond the whole vectors, a whole vector before.
INLINE vec part(const real* p, int64_t j, int64_t N) { return j + LANES <= N ? load(p + j) : broadcast(p[j]); }

INLINE void put(real* p, int64_t j, int64_t N, vec value) {
  if (j + LANES <= N) store(p + j, value);
  else p[j] = value[0];
}

INLINE int64_t after(int64_t j, int64_t N) { return j + LANES <= N ? j + LANES : j + 1; }

// y = (x - mean) * scale * gain + bias, with mean and scale of each row, which are stored.
extern "C" void stretto_norm(const real* x, int64_t stride_x, const real* gain, const real* bias, real* y, real* means,
                             real* scales, int64_t P, int64_t N, double eps, int64_t threads) {
  each_row(P, N, threads, [=](int64_t p) {
    const real *row = x + p * stride_x;
    real* out = y + p * N;
    const real mean = row_sum(N, [=](int64_t j) { return part(row, j, N); }) / real(N);
    const real variance = row_sum(N, [=](int64_t j) {
      const vec off = part(row, j, N) - broadcast(mean);
      return off * off;
    }) / real(N);
    const real scale = real(1) / libm::sqrt(variance + real(eps));
    for (int64_t j = 0; j < N; j = after(j, N)) {
      vec value = (part(row, j, N) - broadcast(mean)) * broadcast(scale);
      if (gain) value = value * part(gain, j, N);
      if (bias) value = value + part(bias, j, N);
      put(out, j, N, value);
    }
    means[p] = mean, scales[p] = scale;
  });
}

extern "C" void stretto_norm_gradient(const real* x, int64_t stride_x, const real* d, int64_t stride_d, const real* gain,
                                      const real* means, const real* scales, real* d_x, int64_t P, int64_t N,
                                      int64_t threads) {
  each_row(P, N, threads, [=](int64_t p) {
    const real *row = x + p * stride_x, *from = d + p * stride_d;
    real* out = d_x + p * N;
    const vec mean = broadcast(means[p]), scale = broadcast(scales[p]);
    const auto arriving = [=](int64_t j) { return gain ? part(from, j, N) * part(gain, j, N) : part(from, j, N); };
    const auto normal = [=](int64_t j) { return (part(row, j, N) - mean) * scale; };
    const vec level = broadcast(row_sum(N, arriving) / real(N));
    const vec along = broadcast(row_sum(N, [=](int64_t j) { return arriving(j) * normal(j); }) / real(N));
    for (int64_t j = 0; j < N; j = after(j, N))
      put(out, j, N, (arriving(j) - level - normal(j) * along) * scale);
  });
}

constexpr int64_t SUMMED = 16 * PANEL;  // columns that are added up at once

// d_gain[N] = the sum over rows of d times the row's norm, d_bias[N] that of d.
extern "C" void stretto_norm_sums(const real* x, int64_t stride_x, const real* d, int64_t stride_d, const real* means,
                                  const real* scales, real* d_gain, real* d_bias, int64_t P, int64_t N,
                                  int64_t threads) {
  by_shares(threads, P * N, (N + PANEL - 1) / PANEL, [&](int64_t from, int64_t to, int) {
    const int64_t first = from * PANEL, last = to * PANEL < N ? to * PANEL : N;
    for (int64_t j = first; j < last; j++) d_gain[j] = d_bias[j] = 0;
    for (int64_t begin = first; begin < last; begin += SUMMED) {
      const int64_t end = begin + SUMMED < last ? begin + SUMMED : last;
      real gains[SUMMED], biases[SUMMED];
      for (int64_t from = 0; from < P; from += DEPTH_BLOCK) {
        for (int64_t j = begin; j < end; j++) gains[j - begin] = biases[j - begin] = 0;
        for (int64_t p = from; p < P && p < from + DEPTH_BLOCK; p++) {
          const real *row = x + p * stride_x, *came = d + p * stride_d;
          const vec mean = broadcast(means[p]), scale = broadcast(scales[p]);
          for (int64_t j = begin; j < end; j = after(j, end)) {
            const vec arriving = part(came, j, end), normal = (part(row, j, end) - mean) * scale;
            put(gains, j - begin, end - begin, part(gains, j - begin, end - begin) + arriving * normal);
            put(biases, j - begin, end - begin, part(biases, j - begin, end - begin) + arriving);
          }
        }
        for (int64_t j = begin; j < end; j++) d_gain[j] += gains[j - begin], d_bias[j] += biases[j - begin];
      }
    }
  });
}
