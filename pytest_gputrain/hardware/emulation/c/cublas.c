// Stands in for cuBLAS: products of matrices succeed and compute nothing. torch allocates cuBLAS' workspace itself.
#include "emulated.h"

int cublasGetVersion_v2(void *handle, int *version) {
  *version = CUDA_VERSION / 1000 * 10000 + 100;
  return OK;
}
int cublasGetProperty(int part, int *value) {
  *value = part == 0 ? CUDA_VERSION / 1000 : part == 1 ? 1 : 0;
  return OK;
}
int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return OK;
}
int cublasGetPointerMode_v2(void *handle, int *mode) {
  *mode = 0;
  return OK;
}
int cublasGetStream_v2(void *handle, void **stream) {
  *stream = NULL;
  return OK;
}
const char *cublasGetStatusString(int status) { return status ? "error of an emulated GPU" : "success"; }
