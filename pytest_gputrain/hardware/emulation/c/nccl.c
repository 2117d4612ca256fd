// Stands in for NCCL: one rank whose collectives move nothing.
#include "emulated.h"
#include <string.h>

int ncclGetVersion(int *version) {
  *version = NCCL_VERSION;
  return OK;
}
const char *ncclGetErrorString(int status) { return status ? "error of an emulated GPU" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }
int ncclCommInitRankConfig(void **communicator) {
  gputrain_unknown("NCCL's buffers");
  *communicator = gputrain_handle();
  return OK;
}
int ncclCommInitRank(void **communicator) { return ncclCommInitRankConfig(communicator); }
int ncclCommInitRankScalable(void **communicator) { return ncclCommInitRankConfig(communicator); }
int ncclCommInitAll(void **communicators, int count, const int *devices) {
  for (int i = 0; i < count; i++)
    ncclCommInitRankConfig(communicators + i);
  return OK;
}
int ncclCommGetAsyncError(void *communicator, int *error) {
  *error = OK;
  return OK;
}
int ncclCommCount(void *communicator, int *ranks) {
  *ranks = 1;
  return OK;
}
int ncclCommUserRank(void *communicator, int *rank) {
  *rank = 0;
  return OK;
}
int ncclGetUniqueId(void *id) {
  memset(id, 1, 128);
  return OK;
}
