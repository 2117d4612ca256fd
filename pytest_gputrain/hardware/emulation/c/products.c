// Counts products of matrices, and finds those that a GPU computes slower than others of the same shape.
#include "emulated.h"
#include <stdio.h>

enum { SLICE = 16 }; // bytes that tensor cores load at once

static const struct {
  const char *name;
  int bytes, since; // the first major compute capability with tensor cores for the type; 0 for a type without classes
} types[] = {
    [REAL_32] = {"fp32", 4, 8},         [REAL_64] = {"fp64", 8, 0},           [REAL_16] = {"fp16", 2, 7},
    [COMPLEX_32] = {"complex64", 8, 8}, [COMPLEX_64] = {"complex128", 16, 0}, [BFLOAT_16] = {"bf16", 2, 8},
};

static int known(int type) { return type >= 0 && type < (int)(sizeof types / sizeof *types) && types[type].name; }
const char *gputrain_type(int type, int rounds) {
  return !known(type) ? "" : type == REAL_32 && rounds ? "tf32" : types[type].name;
}
int gputrain_is_single(int type) { return type == REAL_32 || type == COMPLEX_32; }
int gputrain_tensor_cores(int type) {
  return known(type) && types[type].since && gputrain_gpu()->major >= types[type].since;
}
int gputrain_is_aligned(uint64_t bytes) { return bytes % SLICE == 0; }

// Types of computation, with the numbers of cublasComputeType_t, and modes of cuBLAS. All other types and modes allow tensor
// cores for FP32. The other bits of a mode concern sums and FP64.
enum {
  SINGLE_BEFORE_CUDA_11 = 0,
  COMPUTE_32F = 68,
  COMPUTE_32F_PEDANTIC = 69,
  MODES = 7,
  DEFAULT_MATH = 0,
  PEDANTIC_MATH = 2
};

int gputrain_may_round(int compute, int mode) {
  if (compute == COMPUTE_32F || compute == SINGLE_BEFORE_CUDA_11)
    return (mode & MODES) != DEFAULT_MATH && (mode & MODES) != PEDANTIC_MATH;
  return compute != COMPUTE_32F_PEDANTIC;
}

static int starts_aligned(const struct matrix *of, int64_t batch) {
  int64_t bytes = known(of->type) ? types[of->type].bytes : SLICE;
  return gputrain_is_aligned((uintptr_t)of->start) && gputrain_is_aligned((uint64_t)(of->apart * bytes)) &&
         (batch <= 1 || gputrain_is_aligned((uint64_t)(of->batch_apart * bytes)));
}

// A product with a vector takes as long as reading the matrix, with tensor cores or without. A product that is computed in
// FP32 has this class even if its rows are not aligned, because only tensor cores need alignment.
static const char *class_of(int64_t batch, int64_t m, int64_t n, int64_t k, const struct matrix *a, const struct matrix *b,
                            const struct matrix *c, int rounds) {
  if (m <= 1 || n <= 1 || k <= 1 || !gputrain_tensor_cores(a->type))
    return "";
  if (gputrain_is_single(a->type) && !rounds)
    return "fp32";
  return starts_aligned(a, batch) && starts_aligned(b, batch) && starts_aligned(c, batch) ? "" : "unaligned";
}

int gputrain_product(void *stream, const char *function, int64_t batch, int64_t m, int64_t n, int64_t k, struct matrix a,
                     struct matrix b, struct matrix c, int rounds) {
  if (!gputrain_counting() && !__atomic_load_n(&gputrain_captures, __ATOMIC_RELAXED))
    return OK;
  char shape[128] = "";
  const char *slow = class_of(batch, m, n, k, &a, &b, &c, rounds);
  if (*slow) {
    int used = batch <= 1 ? 0 : snprintf(shape, sizeof shape, "%lld x ", (long long)batch);
    // cuBLAS stores matrices by columns, and torch by rows. So for torch this is a product of n rows.
    snprintf(shape + used, sizeof shape - (size_t)used, "%lld x %lld x %lld %s", (long long)n, (long long)m, (long long)k,
             gputrain_type(a.type, rounds));
  }
  return gputrain_ask_product(stream, function, slow, shape, 2 * (uint64_t)batch * (uint64_t)m * (uint64_t)n * (uint64_t)k);
}
