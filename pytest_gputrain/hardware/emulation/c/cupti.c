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
// The last number that was pushed is not kept: torch's profiler does not ask for it.
int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) {
  enum { NOT_SUPPORTED_BY_CUPTI = 27 };
  return last ? gputrain_missing("cuptiActivityPopExternalCorrelationId", NOT_SUPPORTED_BY_CUPTI) : OK;
}
int cuptiActivityGetNumDroppedRecords(void *context, unsigned stream, size_t *dropped) {
  *dropped = 0;
  return OK;
}
