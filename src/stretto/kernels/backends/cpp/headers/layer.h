// A pass over whole layers in one call: products over the rows of all steps, the loops of all layers at once, and products
// and sums over what they leave.
//
//   code of a layer    count, operations | the loop | count, operations
//
// Python writes the code once for each size of batch. It holds numbers and addresses, and an address is the index of a
// tensor with an offset into its memory: only the list of tensors is new in each call.
#pragma once
#include <vector>
#include "batched.h"

constexpr int OFFSET_BITS = 40;
enum Operation { PRODUCT, WEIGHT_GRADIENT, COLUMN_SUMS, COPY, ADD, SPREAD };

struct Reader {
  const int64_t* at;
  char* const* tensors;

  int64_t number() { return *at++; }
  template <class T = real> T* address() {
    const int64_t value = number();
    return value < 0 ? nullptr : (T*)(tensors[value >> OFFSET_BITS] + (value & ((int64_t(1) << OFFSET_BITS) - 1)));
  }
};

// out[N, K] = in[K, N] transposed, or added to what is there; blocks of both stay in the cache.
template <bool ADDS>
static void transpose(const real* in, real* out, int64_t K, int64_t N, int64_t threads) {
  constexpr int64_t BLOCK = 16;
  const int64_t blocks = K == 1 ? N : (N + BLOCK - 1) / BLOCK;
  by_shares(threads, K * N, blocks, [&](int64_t first, int64_t last, int) {
    if (K == 1) {
      for (int64_t n = first; n < last; n++) out[n] = ADDS ? out[n] + in[n] : in[n];
      return;
    }
    for (int64_t block = first; block < last; block++)
      for (int64_t k0 = 0; k0 < K; k0 += BLOCK)
        for (int64_t n = block * BLOCK; n < N && n < (block + 1) * BLOCK; n++)
          for (int64_t k = k0; k < K && k < k0 + BLOCK; k++)
            out[n * K + k] = ADDS ? out[n * K + k] + in[k * N + n] : in[k * N + n];
  });
}

static void run_operation(Reader& code) {
  switch (code.number()) {
    case PRODUCT: {
      const real* const x = code.address();
      const int64_t stride_x = code.number();
      const real* const w = code.address();
      const int64_t stride_k = code.number(), stride_n = code.number();
      const real* const bias = code.address();
      real* const y = code.address();
      const int64_t P = code.number(), K = code.number(), N = code.number();
      real* const memory = code.address();
      return stretto_product(x, stride_x, w, stride_k, stride_n, bias, y, P, K, N, memory, code.number());
    }
    case WEIGHT_GRADIENT: {
      const real* const head = code.address();
      const int64_t stride_head = code.number(), head_rows = code.number();
      const real* const x = code.address();
      const int64_t stride_x = code.number();
      const real* const d = code.address();
      const int64_t stride_d = code.number();
      real* const out = code.address();
      const int64_t P = code.number(), K = code.number(), N = code.number();
      real* const memory = code.address();
      return stretto_weight_gradient(head, stride_head, head_rows, x, stride_x, d, stride_d, out, P, K, N, memory,
                                     code.number());
    }
    case COLUMN_SUMS: {
      const real* const d = code.address();
      real* const out = code.address();
      const int64_t P = code.number(), N = code.number();
      return stretto_column_sums(d, N, nullptr, 0, out, P, N, code.number());
    }
    case COPY: {
      const real* const in = code.address();
      real* const out = code.address();
      const int64_t K = code.number(), N = code.number();
      return transpose<false>(in, out, K, N, code.number());
    }
    case ADD: {
      const real* const in = code.address();
      real* const out = code.address();
      const int64_t K = code.number(), N = code.number();
      return transpose<true>(in, out, K, N, code.number());
    }
    case SPREAD: {  // two copies of one thing, or of zeros
      const real* const in = code.address();
      real* const out = code.address();
      const int64_t size = code.number();
      if (!in) return (void)__builtin_memset(out, 0, 2 * size * sizeof(real));
      __builtin_memcpy(out, in, size * sizeof(real));
      __builtin_memcpy(out + size, in, size * sizeof(real));
    }
  }
}

static void run_operations(Reader& code) {
  for (int64_t left = code.number(); left > 0; left--) run_operation(code);
}

static Job read_loop(Reader& code, Call& call, std::vector<real*>& pointers) {
  Job job;
  job.pack = (Pack)code.number();
  job.work = (Work)code.number();
  job.call = &call;
  job.pieces = code.number();
  job.bounds = code.address<int64_t>();
  call.num_steps = code.number();
  call.num_rows = code.number();
  call.keep = code.number();
  call.rows = code.address<int64_t>();
  call.starts = code.address<int64_t>();
  call.lengths = code.address<int64_t>();
  call.packed = code.address();
  call.scratch = code.address();
  call.own = code.address();
  call.room = code.address();
  const int64_t strides = code.number(), weight_strides = code.number();
  call.strides = code.at;
  call.weight_strides = code.at + strides;
  code.at += strides + weight_strides;
  const int64_t buffers = code.number(), weights = code.number();
  for (int64_t i = 0; i < buffers + weights; i++) pointers.push_back(code.address());
  call.buffers = pointers.data();
  call.weights = pointers.data() + buffers;
  return job;
}

extern "C" void stretto_layers(const int64_t* const* codes, char* const* const* tensors, int64_t count, int64_t threads) {
  std::vector<Reader> readers;
  std::vector<Job> jobs;
  std::vector<Call> calls(count);
  std::vector<std::vector<real*>> pointers(count);
  for (int64_t i = 0; i < count; i++) {
    readers.push_back({codes[i], tensors[i]});
    run_operations(readers[i]);
    jobs.push_back(read_loop(readers[i], calls[i], pointers[i]));
  }
  stretto_run(jobs.data(), count, threads);
  for (Reader& reader : readers) run_operations(reader);
}
