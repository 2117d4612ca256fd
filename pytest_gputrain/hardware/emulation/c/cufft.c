// Stands in for cuFFT. Transforms compute nothing, and the workspace of a plan is unknown.
#include "emulated.h"

int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *in_embed, long long in_stride, long long in_distance,
                        int in_type, long long *out_embed, long long out_stride, long long out_distance, int out_type,
                        long long batch, size_t *workspace, int type) {
  gputrain_unknown("cuFFT's workspaces");
  *workspace = 0;
  return OK;
}
int cufftCreate(int *plan) {
  *plan = 1;
  return OK;
}
