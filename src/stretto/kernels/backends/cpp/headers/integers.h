// Vectors of 64-bit integers, as many as there are lanes of REAL, for kernels that have integers.
#pragma once
#include "vector.h"

typedef int64_t intvec __attribute__((vector_size(LANES * 8)));
static bool out_of_range = false, divided_by_zero = false;  // what torch raises an error for

INLINE intvec broadcast_integer(int64_t x) { return x - intvec{}; }
template <int N = LANES>
INLINE intvec load(const int64_t* p) {
  intvec v = {};
  for (int i = 0; i < N; i++) v[i] = p[i];
  return v;
}
template <int N = LANES>
INLINE void store(int64_t* p, intvec v) {
  for (int i = 0; i < N; i++) p[i] = v[i];
}
template <int N = LANES>
INLINE intvec load_strided(const int64_t* p, int64_t stride) {
  intvec v = {};
  for (int i = 0; i < N; i++) v[i] = p[i * stride];
  return v;
}
template <int N = LANES>
INLINE void store_strided(int64_t* p, int64_t stride, intvec v) {
  for (int i = 0; i < N; i++) p[i * stride] = v[i];
}
template <int N>
INLINE intvec keep(intvec v, int64_t filler) {
  for (int i = N; i < LANES; i++) v[i] = filler;
  return v;
}
template <int FACTOR>
INLINE intvec lane_numbers() {
  intvec v;
  for (int i = 0; i < LANES; i++) v[i] = int64_t(FACTOR) * i;
  return v;
}

// Indices that may be read from memory of `size` elements; the first N lanes count.
template <int N>
INLINE intvec in_range(intvec index, int64_t size) {
  intvec r;
  for (int i = 0; i < LANES; i++) {
    const bool fits = index[i] >= 0 && index[i] < size;
    if (i < N && !fits) out_of_range = true;
    r[i] = fits ? index[i] : 0;
  }
  return r;
}
template <int N>
INLINE vec gather(const real* p, int64_t factor, intvec index, int64_t stride) {
  vec v = {};
  for (int i = 0; i < N; i++) v[i] = p[factor * i + stride * index[i]];
  return v;
}
template <int N>
INLINE intvec gather(const int64_t* p, int64_t factor, intvec index, int64_t stride) {
  intvec v = {};
  for (int i = 0; i < N; i++) v[i] = p[factor * i + stride * index[i]];
  return v;
}

template <class Mask> INLINE vec flag(Mask m) { return flag(wordvec(__builtin_convertvector(m, wordvec))); }
INLINE intvec choose(intvec m, intvec a, intvec b) { return m ? a : b; }
INLINE intvec where(vec c, intvec a, intvec b) {
  return choose(__builtin_convertvector(wordvec(c != broadcast(0)), intvec), a, b);
}
INLINE vec to_real(intvec x) { return __builtin_convertvector(x, vec); }
INLINE intvec to_integer(vec x) { return __builtin_convertvector(x, intvec); }
// A narrower integer of torch's, which wraps around.
template <int BITS, bool SIGNED>
INLINE intvec wrap(intvec x) {
  return SIGNED ? (x << (64 - BITS)) >> (64 - BITS) : x & ((int64_t(1) << BITS) - 1);
}
INLINE intvec maximum(intvec a, intvec b) { return choose(a > b, a, b); }
INLINE intvec minimum(intvec a, intvec b) { return choose(a < b, a, b); }
INLINE intvec abs(intvec x) { return choose(x < 0, -x, x); }
INLINE intvec sign(intvec x) { return (x < 0) - (x > 0); }
INLINE intvec relu(intvec x) { return choose(x > 0, x, broadcast_integer(0)); }

INLINE int64_t quotient(int64_t a, int64_t b) { return b == -1 ? int64_t(-uint64_t(a)) : a / b; }
#define INTEGER_BY_INTEGER(name, expression)                                                 \
  template <int N>                                                                           \
  INLINE intvec name(intvec x, intvec y) {                                                   \
    intvec r = {};                                                                           \
    for (int i = 0; i < N; i++) {                                                            \
      if (y[i] == 0) { divided_by_zero = true; continue; }                                   \
      const int64_t a = x[i], b = y[i], q = quotient(a, b), rest = b == -1 ? 0 : a % b;      \
      const bool below = rest != 0 && (rest < 0) != (b < 0);                                 \
      (void)q, (void)below;                                                                  \
      r[i] = expression;                                                                     \
    }                                                                                        \
    return r;                                                                                \
  }
INTEGER_BY_INTEGER(integer_remainder, below ? rest + b : rest)
INTEGER_BY_INTEGER(integer_fmod, rest)
INTEGER_BY_INTEGER(integer_floor_divide, q - below)
INTEGER_BY_INTEGER(integer_trunc_divide, q)
INLINE intvec pow(intvec x, intvec y) {
  intvec r;
  for (int i = 0; i < LANES; i++) {
    uint64_t power = 1, base = x[i];
    for (int64_t n = y[i]; n > 0; n >>= 1, base *= base) power *= n & 1 ? base : 1;
    r[i] = y[i] >= 0 ? int64_t(power) : x[i] == 1 ? 1 : x[i] == -1 ? (y[i] & 1 ? -1 : 1) : 0;
  }
  return r;
}
INLINE int64_t reduce_sum(intvec v) {
  int64_t sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
INLINE int64_t reduce_max(intvec v) {
  int64_t m = v[0];
  for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
  return m;
}
INLINE int64_t reduce_min(intvec v) {
  int64_t m = v[0];
  for (int i = 1; i < LANES; i++) m = v[i] < m ? v[i] : m;
  return m;
}
extern "C" int stretto_errors() {
  const int found = out_of_range + 2 * divided_by_zero;
  out_of_range = divided_by_zero = false;
  return found;
}
