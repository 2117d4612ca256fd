// Stands in for CUPTI: torch's profiler finds no activity of a GPU.
#include "emulated.h"

int cuptiGetVersion(unsigned *version) {
  *version = CUDA_VERSION * 10;
  return OK;
}
int cuptiGetResultString(int status, const char **text) {
  *text = status ? "error of an emulated GPU" : "CUPTI_SUCCESS";
  return OK;
}
int cuptiActivityGetNextRecord(unsigned char *buffer, size_t bytes, void **record) { return 12; } // no more records
int cuptiActivityGetNumDroppedRecords(void *context, unsigned stream, size_t *dropped) {
  *dropped = 0;
  return OK;
}
