// Stands in for the compiler of kernels at run time. Every program compiles to the same 16 bytes, which nothing runs.
#include "emulated.h"
#include <string.h>

enum { BINARY = 16 };

int nvrtcVersion(int *major, int *minor) {
  *major = CUDA_VERSION / 1000;
  *minor = CUDA_VERSION % 1000 / 10;
  return OK;
}
const char *nvrtcGetErrorString(int status) { return status ? "error of an emulated GPU" : "NVRTC_SUCCESS"; }
int nvrtcGetCUBINSize(void *program, size_t *bytes) {
  *bytes = BINARY;
  return OK;
}
int nvrtcGetPTXSize(void *program, size_t *bytes) { return nvrtcGetCUBINSize(program, bytes); }
int nvrtcGetCUBIN(void *program, char *binary) {
  memset(binary, 0, BINARY);
  return OK;
}
int nvrtcGetPTX(void *program, char *text) { return nvrtcGetCUBIN(program, text); }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) {
  *bytes = 1;
  return OK;
}
int nvrtcGetProgramLog(void *program, char *text) {
  text[0] = 0;
  return OK;
}
int nvrtcDestroyProgram(void **program) {
  enum { INVALID_PROGRAM = 4 };
  if (!program || !gputrain_drop_handle(*program))
    return INVALID_PROGRAM;
  *program = NULL;
  return OK;
}
int nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
  *name = "kernel";
  return OK;
}
