// Stands in for cuBLAS. Products of matrices succeed and compute nothing, and torch itself allocates cuBLAS' workspace.
#include "emulated.h"

int cublasGetVersion_v2(void *handle, int *version) {
  *version = CUDA_VERSION / 1000 * 10000 + 100;
  return OK;
}
int cublasGetProperty(int part, int *value) {
  *value = part == 0 ? CUDA_VERSION / 1000 : part == 1 ? 1 : 0;
  return OK;
}
// A handle is a block of zeros that begins with these fields. The products read only the first one.
struct handle {
  int math, pointers;
};
int cublasSetMathMode(struct handle *handle, int mode) {
  handle->math = mode;
  return OK;
}
int cublasGetMathMode(const struct handle *handle, int *mode) {
  *mode = handle->math;
  return OK;
}
int cublasSetPointerMode_v2(struct handle *handle, int mode) {
  handle->pointers = mode;
  return OK;
}
int cublasGetPointerMode_v2(const struct handle *handle, int *mode) {
  *mode = handle->pointers;
  return OK;
}
const char *cublasGetStatusString(int status) { return status ? "error of an emulated GPU" : "success"; }

enum { CUBLAS_INVALID_VALUE = 7, CUBLAS_EXECUTION_FAILED = 13 };
GPUTRAIN_DESTROYS(cublasDestroy_v2, CUBLAS_INVALID_VALUE)

// --- Products

static int multiply(const void *handle, const char *function, int64_t batch, int64_t m, int64_t n, int64_t k,
                    struct matrix a, struct matrix b, struct matrix c, int rounds) {
  void *stream = gputrain_stream_of(handle);
  return gputrain_product(stream, function, batch, m, n, k, a, b, c, rounds) ? CUBLAS_EXECUTION_FAILED : OK;
}

#define OPERANDS const int *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha
#define MATRIX(name, type, between) ((struct matrix){name, type, ld##name, between})

#define PRODUCTS(letter, type)                                                                                              \
  int cublas##letter##gemm_v2(OPERANDS, const void *a, int lda, const void *b, int ldb, const void *beta, void *c,          \
                              int ldc) {                                                                                    \
    return multiply(handle, "cublas" #letter "gemm_v2", 1, m, n, k, MATRIX(a, type, 0), MATRIX(b, type, 0),                 \
                    MATRIX(c, type, 0), gputrain_may_round(0, *handle));                                                    \
  }                                                                                                                         \
  int cublas##letter##gemmStridedBatched(OPERANDS, const void *a, int lda, long long between_a, const void *b, int ldb,     \
                                         long long between_b, const void *beta, void *c, int ldc, long long between_c,      \
                                         int batch) {                                                                       \
    return multiply(handle, "cublas" #letter "gemmStridedBatched", batch, m, n, k, MATRIX(a, type, between_a),              \
                    MATRIX(b, type, between_b), MATRIX(c, type, between_c), gputrain_may_round(0, *handle));                \
  }                                                                                                                         \
  int cublas##letter##gemmBatched(OPERANDS, const void *as, int lda, const void *bs, int ldb, const void *beta, void *cs,   \
                                  int ldc, int batch) {                                                                     \
    const void *a = NULL, *b = NULL, *c = NULL;                                                                             \
    return multiply(handle, "cublas" #letter "gemmBatched", batch, m, n, k, MATRIX(a, type, 0), MATRIX(b, type, 0),         \
                    MATRIX(c, type, 0), gputrain_may_round(0, *handle));                                                    \
  }                                                                                                                         \
  int cublas##letter##gemv_v2(int *handle, int transpose, int m, int n, const void *alpha, const void *a, int lda,          \
                              const void *x, int between_x, const void *beta, void *y, int between_y) {                     \
    return multiply(handle, "cublas" #letter "gemv_v2", 1, m, 1, n, MATRIX(a, type, 0), (struct matrix){x, type, n, 0},     \
                    (struct matrix){y, type, m, 0}, 0);                                                                     \
  }
PRODUCTS(S, REAL_32)
PRODUCTS(D, REAL_64)
PRODUCTS(C, COMPLEX_32)
PRODUCTS(Z, COMPLEX_64)

int cublasSgemmEx(OPERANDS, const void *a, int type_a, int lda, const void *b, int type_b, int ldb, const void *beta,
                  void *c, int type_c, int ldc) {
  return multiply(handle, "cublasSgemmEx", 1, m, n, k, MATRIX(a, type_a, 0), MATRIX(b, type_b, 0), MATRIX(c, type_c, 0),
                  gputrain_may_round(0, *handle));
}
int cublasGemmEx(OPERANDS, const void *a, int type_a, int lda, const void *b, int type_b, int ldb, const void *beta, void *c,
                 int type_c, int ldc, int compute, int algorithm) {
  return multiply(handle, "cublasGemmEx", 1, m, n, k, MATRIX(a, type_a, 0), MATRIX(b, type_b, 0), MATRIX(c, type_c, 0),
                  gputrain_may_round(compute, *handle));
}
int cublasGemmStridedBatchedEx(OPERANDS, const void *a, int type_a, int lda, long long between_a, const void *b, int type_b,
                               int ldb, long long between_b, const void *beta, void *c, int type_c, int ldc,
                               long long between_c, int batch, int compute, int algorithm) {
  return multiply(handle, "cublasGemmStridedBatchedEx", batch, m, n, k, MATRIX(a, type_a, between_a),
                  MATRIX(b, type_b, between_b), MATRIX(c, type_c, between_c), gputrain_may_round(compute, *handle));
}
int cublasGemmBatchedEx(OPERANDS, const void *as, int type_a, int lda, const void *bs, int type_b, int ldb, const void *beta,
                        void *cs, int type_c, int ldc, int batch, int compute, int algorithm) {
  const void *a = NULL, *b = NULL, *c = NULL;
  return multiply(handle, "cublasGemmBatchedEx", batch, m, n, k, MATRIX(a, type_a, 0), MATRIX(b, type_b, 0),
                  MATRIX(c, type_c, 0), gputrain_may_round(compute, *handle));
}
