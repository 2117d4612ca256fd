// Stands in for cuBLASLt: one algorithm without a workspace serves every product.
#include "emulated.h"
#include <string.h>

struct heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

size_t cublasLtGetVersion(void) { return CUDA_VERSION / 1000 * 10000 + 100; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, struct heuristic *results, int *found) {
  memset(results, 0, sizeof *results);
  results->waves = 1;
  *found = 1;
  return OK;
}

// --- Descriptors of products and of matrices, which store what the shapes follow from

struct operation {
  int compute, transpose_a;
};
struct layout {
  int type, order, batch;
  uint64_t rows, columns;
  // The elements from the start of one column to that of the next, or from row to row if the matrix is stored by rows.
  int64_t apart, batch_apart;
};

int cublasLtMatmulDescInit_internal(struct operation *to, size_t bytes, int compute, int scale) {
  memset(to, 0, bytes);
  to->compute = compute;
  return OK;
}
int cublasLtMatrixLayoutInit_internal(struct layout *to, size_t bytes, int type, uint64_t rows, uint64_t columns,
                                      int64_t apart) {
  memset(to, 0, bytes);
  *to = (struct layout){.type = type, .batch = 1, .rows = rows, .columns = columns, .apart = apart};
  return OK;
}
int cublasLtMatmulDescCreate(struct operation **out, int compute, int scale) {
  *out = gputrain_handle();
  (*out)->compute = compute;
  return OK;
}
int cublasLtMatrixLayoutCreate(struct layout **out, int type, uint64_t rows, uint64_t columns, int64_t apart) {
  *out = gputrain_handle();
  return cublasLtMatrixLayoutInit_internal(*out, sizeof **out, type, rows, columns, apart);
}
enum { CUBLAS_INVALID_VALUE = 7, CUBLAS_EXECUTION_FAILED = 13 };
GPUTRAIN_DESTROYS(cublasLtMatmulDescDestroy, CUBLAS_INVALID_VALUE)
GPUTRAIN_DESTROYS(cublasLtMatrixLayoutDestroy, CUBLAS_INVALID_VALUE)
GPUTRAIN_DESTROYS(cublasLtMatmulPreferenceDestroy, CUBLAS_INVALID_VALUE)

static int set(void *to, size_t room, const void *value, size_t bytes) {
  memcpy(to, value, bytes < room ? bytes : room);
  return OK;
}
int cublasLtMatmulDescSetAttribute(struct operation *to, int name, const void *value, size_t bytes) {
  switch (name) {
  case 0:
    return set(&to->compute, sizeof to->compute, value, bytes);
  case 3:
    return set(&to->transpose_a, sizeof to->transpose_a, value, bytes);
  }
  return OK;
}
int cublasLtMatrixLayoutSetAttribute(struct layout *to, int name, const void *value, size_t bytes) {
  switch (name) {
  case 0:
    return set(&to->type, sizeof to->type, value, bytes);
  case 1:
    return set(&to->order, sizeof to->order, value, bytes);
  case 2:
    return set(&to->rows, sizeof to->rows, value, bytes);
  case 3:
    return set(&to->columns, sizeof to->columns, value, bytes);
  case 4:
    return set(&to->apart, sizeof to->apart, value, bytes);
  case 5:
    return set(&to->batch, sizeof to->batch, value, bytes);
  case 6:
    return set(&to->batch_apart, sizeof to->batch_apart, value, bytes);
  }
  return OK;
}

enum { BY_ROWS = 1 };

static struct matrix matrix(const void *start, const struct layout *of) {
  return (struct matrix){start, of->type, of->apart, of->batch_apart};
}
int cublasLtMatmul(void *handle, const struct operation *operation, const void *alpha, const void *a,
                   const struct layout *of_a, const void *b, const struct layout *of_b, const void *beta, const void *c,
                   const struct layout *of_c, void *d, const struct layout *of_d, const void *algorithm, void *workspace,
                   size_t bytes, void *stream) {
  int64_t m = (int64_t)of_d->rows, n = (int64_t)of_d->columns;
  int64_t k = (int64_t)(operation->transpose_a ? of_a->rows : of_a->columns);
  int rounds = gputrain_may_round(operation->compute, 0);
  int status = of_d->order == BY_ROWS ? gputrain_product(stream, "cublasLtMatmul", of_d->batch, n, m, k, matrix(b, of_b),
                                                         matrix(a, of_a), matrix(d, of_d), rounds)
                                      : gputrain_product(stream, "cublasLtMatmul", of_d->batch, m, n, k, matrix(a, of_a),
                                                         matrix(b, of_b), matrix(d, of_d), rounds);
  return status ? CUBLAS_EXECUTION_FAILED : OK;
}
