// Vectors of REAL in the compiler's own vector types, and functions over them. The compiler maps them to whatever the
// processor has, AVX-512, AVX, NEON or SSE2; only the width is chosen here.
#pragma once
#include <stdint.h>

typedef REAL real;
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int LANES = VECTOR_BYTES / sizeof(real);
template <int BYTES> struct Word { typedef int64_t type; };
template <> struct Word<4> { typedef int32_t type; };
typedef Word<sizeof(real)>::type word;
typedef real vec __attribute__((vector_size(VECTOR_BYTES)));
typedef word wordvec __attribute__((vector_size(VECTOR_BYTES)));
#define INLINE static inline __attribute__((always_inline))
constexpr real INFINITE = __builtin_inf(), NOT_A_NUMBER = __builtin_nan("");

// The C library's functions, by name alone: reading its headers takes longer than compiling a small kernel.
namespace libm {
#define ONE_ARGUMENT(name)                                          \
  INLINE float name(float a) { return __builtin_##name##f(a); }     \
  INLINE double name(double a) { return __builtin_##name(a); }
#define TWO_ARGUMENTS(name)                                                    \
  INLINE float name(float a, float b) { return __builtin_##name##f(a, b); }    \
  INLINE double name(double a, double b) { return __builtin_##name(a, b); }
ONE_ARGUMENT(sqrt) ONE_ARGUMENT(log) ONE_ARGUMENT(log1p) ONE_ARGUMENT(expm1) ONE_ARGUMENT(erf) ONE_ARGUMENT(sin)
ONE_ARGUMENT(exp2) ONE_ARGUMENT(log2) ONE_ARGUMENT(log10) ONE_ARGUMENT(erfc) ONE_ARGUMENT(tan) ONE_ARGUMENT(asin)
ONE_ARGUMENT(acos) ONE_ARGUMENT(sinh) ONE_ARGUMENT(cosh) ONE_ARGUMENT(asinh) ONE_ARGUMENT(acosh) ONE_ARGUMENT(atanh)
ONE_ARGUMENT(lgamma) ONE_ARGUMENT(fabs) TWO_ARGUMENTS(atan2) TWO_ARGUMENTS(hypot)
ONE_ARGUMENT(cos) ONE_ARGUMENT(atan) ONE_ARGUMENT(floor) ONE_ARGUMENT(ceil) ONE_ARGUMENT(trunc) ONE_ARGUMENT(nearbyint)
ONE_ARGUMENT(exp) TWO_ARGUMENTS(pow) TWO_ARGUMENTS(fmod)
// By its recurrence up to where the asymptotic series is exact; below a half by its reflection.
INLINE real digamma(real x) {
  constexpr real pi = 3.14159265358979323846;
  constexpr real series[] = {-1. / 12, 691. / 32760, -1. / 132, 1. / 240, -1. / 252, 1. / 120, -1. / 12};
  real found = 0, sum = 0;
  if (x == 0) return -INFINITE;
  if (x < real(0.5)) {
    real part = x - nearbyint(x);
    if (part == 0) return NOT_A_NUMBER;
    found = -pi / tan(pi * part);
    x = 1 - x;
  }
  for (; x < 8; x += 1) found -= 1 / x;
  for (real factor : series) sum = (sum + factor) / (x * x);
  return found + log(x) - real(0.5) / x + sum;
}
// Rational functions, and two of Newton's steps.
INLINE real erfinv(real y) {
  real size = fabs(y), z = y * y, x;
  if (!(size <= 1)) return NOT_A_NUMBER;
  if (size == 1) return y * INFINITE;
  if (size <= real(0.7)) {
    x = y * (((real(-0.140543331) * z + real(0.914624893)) * z + real(-1.645349621)) * z + real(0.886226899)) /
        ((((real(0.012229801) * z + real(-0.329097515)) * z + real(1.442710462)) * z + real(-2.118377725)) * z + 1);
  } else {
    z = sqrt(-log((1 - size) / 2));
    x = (((real(1.641345311) * z + real(3.429567803)) * z + real(-1.62490649)) * z + real(-1.970840454)) /
        ((real(1.637067800) * z + real(3.543889200)) * z + 1);
    x = y < 0 ? -x : x;
  }
  for (int i = 0; i < 2; i++) x -= (erf(x) - y) / (real(1.12837916709551257390) * exp(-x * x));
  return x;
}
}  // namespace libm

INLINE vec broadcast(real x) { return x - vec{}; }  // x - 0 is x to the last bit, and compilers know it

template <int N = LANES>
INLINE vec load(const real* p) {
  vec v = {};
  if constexpr (N == LANES) {
    __builtin_memcpy(&v, p, sizeof v);
  } else {
    for (int i = 0; i < N; i++) v[i] = p[i];
  }
  return v;
}
template <int N = LANES>
INLINE void store(real* p, vec v) {
  if constexpr (N == LANES) {
    __builtin_memcpy(p, &v, sizeof v);
  } else {
    for (int i = 0; i < N; i++) p[i] = v[i];
  }
}
template <int N = LANES>
INLINE vec load_strided(const real* p, int64_t stride) {
  vec v = {};
  for (int i = 0; i < N; i++) v[i] = p[i * stride];
  return v;
}
template <int N = LANES>
INLINE void store_strided(real* p, int64_t stride, vec v) {
  for (int i = 0; i < N; i++) p[i * stride] = v[i];
}
template <int N>
INLINE vec keep(vec v, real filler) {  // lanes from N on do not count in a reduction
  for (int i = N; i < LANES; i++) v[i] = filler;
  return v;
}

INLINE vec select(wordvec m, vec a, vec b) { return m ? a : b; }
INLINE vec flag(wordvec m) { return m ? broadcast(1) : broadcast(0); }
INLINE vec where(vec c, vec a, vec b) { return (c != broadcast(0)) ? a : b; }
// Comparisons are written so that NaN passes through, as torch's minimum and maximum do.
INLINE vec maximum(vec a, vec b) { return select((a > b) | (a != a), a, b); }
INLINE vec minimum(vec a, vec b) { return select((a < b) | (a != a), a, b); }
INLINE vec abs(vec x) { return select(x < broadcast(0), -x, select(x == broadcast(0), broadcast(0), x)); }
INLINE vec sign(vec x) { return flag(x > broadcast(0)) - flag(x < broadcast(0)); }
INLINE vec sqrt(vec x) {
  vec r;
  for (int i = 0; i < LANES; i++) r[i] = libm::sqrt(x[i]);
  return r;
}
// Converted as a whole: g++ 12 leaves out a loop over lanes that converts to float and back.
typedef float floatvec __attribute__((vector_size(LANES * 4)));
INLINE vec round_single(vec x) { return __builtin_convertvector(__builtin_convertvector(x, floatvec), vec); }
INLINE vec relu(vec x) { return select(x < broadcast(0), broadcast(0), x); }

// e^r - 1 for |r| <= ln 2 / 2 by Taylor's series, whose rest is below half a unit in the last place.
INLINE vec expm1_near_zero(vec r) {
  vec p;
  if constexpr (sizeof(real) == 4) {
    p = broadcast(1.f / 5040);
    p = p * r + broadcast(1.f / 720);
  } else {
    p = broadcast(1. / 6227020800.);
    p = p * r + broadcast(1. / 479001600.);
    p = p * r + broadcast(1. / 39916800.);
    p = p * r + broadcast(1. / 3628800.);
    p = p * r + broadcast(1. / 362880.);
    p = p * r + broadcast(1. / 40320.);
    p = p * r + broadcast(1. / 5040.);
    p = p * r + broadcast(1. / 720.);
  }
  p = p * r + broadcast(real(1) / 120);
  p = p * r + broadcast(real(1) / 24);
  p = p * r + broadcast(real(1) / 6);
  p = p * r + broadcast(real(0.5));
  return p * (r * r) + r;
}
struct PowerOfTwo {
  vec low, high, rest;  // e^x = low * high * e^rest; two factors, for one would overflow just below the limit
};
INLINE PowerOfTwo split_exponent(vec x) {
  constexpr bool single = sizeof(real) == 4;
  constexpr real shift = single ? real(12582912.) : real(6755399441055744.);  // 1.5 * 2^mantissa: rounds to nearest
  constexpr real ln2_high = single ? real(0.693359375) : real(6.93145751953125e-1);
  constexpr real ln2_low = single ? real(-2.12194440e-4) : real(1.42860682030941723212e-6);
  constexpr int mantissa = single ? 23 : 52, bias = single ? 127 : 1023;
  vec n = (x * broadcast(real(1.44269504088896340736)) + broadcast(shift)) - broadcast(shift);
  wordvec k = __builtin_convertvector(n, wordvec), half = k >> 1;
  wordvec low = (half + bias) << mantissa, high = (k - half + bias) << mantissa;
  PowerOfTwo out;
  __builtin_memcpy(&out.low, &low, sizeof low);
  __builtin_memcpy(&out.high, &high, sizeof high);
  out.rest = (x - n * broadcast(ln2_high)) - n * broadcast(ln2_low);
  return out;
}
constexpr real EXP_LOW = sizeof(real) == 4 ? real(-104) : real(-746);
constexpr real EXP_HIGH = sizeof(real) == 4 ? real(89) : real(710);
INLINE vec clamp(vec x, real low, real high) {  // NaN stays
  x = select(x < broadcast(low), broadcast(low), x);
  return select(x > broadcast(high), broadcast(high), x);
}
INLINE vec exp(vec x) {
  PowerOfTwo p = split_exponent(clamp(x, EXP_LOW, EXP_HIGH));
  return (expm1_near_zero(p.rest) + broadcast(1)) * p.low * p.high;
}
INLINE vec sigmoid(vec x) {
  // Within these bounds one power of two is enough, and beyond them the result is 0 or 1 to the last place anyway.
  PowerOfTwo p = split_exponent(clamp(-x, sizeof(real) == 4 ? real(-80) : real(-700), EXP_HIGH - real(1.5)));
  return broadcast(1) / (broadcast(1) + (expm1_near_zero(p.rest) + broadcast(1)) * (p.low * p.high));
}
INLINE vec tanh(vec x) {
  // e^2x - 1 = scale * (e^r - 1) + (scale - 1): right to the last places for small x as well.
  constexpr real far = sizeof(real) == 4 ? real(20) : real(44);
  PowerOfTwo p = split_exponent(clamp(x + x, -far, far));
  vec scale = p.low * p.high, m = scale * expm1_near_zero(p.rest) + (scale - broadcast(1));
  return m / (m + broadcast(2));
}
#define LANE_BY_LANE(name, expression)               \
  INLINE vec name(vec x) {                           \
    vec r;                                           \
    for (int i = 0; i < LANES; i++) {                \
      real a = x[i];                                 \
      r[i] = expression;                             \
    }                                                \
    return r;                                        \
  }
LANE_BY_LANE(log, libm::log(a))
LANE_BY_LANE(log1p, libm::log1p(a))
LANE_BY_LANE(expm1, libm::expm1(a))
LANE_BY_LANE(erf, libm::erf(a))
LANE_BY_LANE(sin, libm::sin(a))
LANE_BY_LANE(cos, libm::cos(a))
LANE_BY_LANE(atan, libm::atan(a))
LANE_BY_LANE(exp2, libm::exp2(a))
LANE_BY_LANE(log2, libm::log2(a))
LANE_BY_LANE(log10, libm::log10(a))
LANE_BY_LANE(erfc, libm::erfc(a))
LANE_BY_LANE(erfinv, libm::erfinv(a))
LANE_BY_LANE(lgamma, libm::lgamma(a))
LANE_BY_LANE(digamma, libm::digamma(a))
LANE_BY_LANE(tan, libm::tan(a))
LANE_BY_LANE(asin, libm::asin(a))
LANE_BY_LANE(acos, libm::acos(a))
LANE_BY_LANE(sinh, libm::sinh(a))
LANE_BY_LANE(cosh, libm::cosh(a))
LANE_BY_LANE(asinh, libm::asinh(a))
LANE_BY_LANE(acosh, libm::acosh(a))
LANE_BY_LANE(atanh, libm::atanh(a))
LANE_BY_LANE(floor, libm::floor(a))
LANE_BY_LANE(ceil, libm::ceil(a))
LANE_BY_LANE(trunc, libm::trunc(a))
LANE_BY_LANE(round, libm::nearbyint(a))
INLINE vec pow(vec x, vec y) {
  vec r;
  for (int i = 0; i < LANES; i++) r[i] = libm::pow(x[i], y[i]);
  return r;
}
INLINE vec atan2(vec x, vec y) {
  vec r;
  for (int i = 0; i < LANES; i++) r[i] = libm::atan2(x[i], y[i]);
  return r;
}
INLINE vec hypot(vec x, vec y) {
  vec r;
  for (int i = 0; i < LANES; i++) r[i] = libm::hypot(x[i], y[i]);
  return r;
}
INLINE vec remainder(vec x, vec y) {  // of the divisor's sign, as Python's %
  vec r;
  for (int i = 0; i < LANES; i++) {
    real m = libm::fmod(x[i], y[i]);
    r[i] = (m != 0 && (m < 0) != (y[i] < 0)) ? m + y[i] : m;
  }
  return r;
}
INLINE vec fmod(vec x, vec y) {
  vec r;
  for (int i = 0; i < LANES; i++) r[i] = libm::fmod(x[i], y[i]);
  return r;
}
INLINE vec floor_divide(vec x, vec y) {  // rounded once: the quotient of what fmod leaves is whole up to rounding
  vec r;
  for (int i = 0; i < LANES; i++) {
    const real a = x[i], b = y[i], m = libm::fmod(a, b);
    const real q = (a - m) / b - ((m != 0 && (m < 0) != (b < 0)) ? 1 : 0), low = libm::floor(q);
    r[i] = b == 0 ? a / b : q == 0 ? a / b * 0 : q - low > real(0.5) ? low + 1 : low;
  }
  return r;
}
INLINE real reduce_sum(vec v) {  // halves added pairwise: one fixed order
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}
INLINE real reduce_max(vec v) {
  real m = v[0];
  for (int i = 1; i < LANES; i++) m = (v[i] > m || v[i] != v[i]) ? v[i] : m;
  return m;
}
INLINE real reduce_min(vec v) {
  real m = v[0];
  for (int i = 1; i < LANES; i++) m = (v[i] < m || v[i] != v[i]) ? v[i] : m;
  return m;
}
