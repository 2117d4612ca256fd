// Stands in for cuDNN: one engine without a workspace serves every graph. What cuDNN's own engines take is not known.
#include "emulated.h"
#include <stdlib.h>
#include <string.h>

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
int cudnnGetProperty(int part, int *value) {
  *value = part == 0 ? CUDNN_VERSION / 10000 : part == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
  return OK;
}
const char *cudnnGetErrorString(int status) { return status ? "error of an emulated GPU" : "success"; }
void cudnnGetLastErrorString(char *text, size_t bytes) {
  if (bytes)
    text[0] = 0;
}

static int no_workspace(size_t *bytes) {
  gputrain_unknown("cuDNN's workspaces");
  *bytes = 0;
  return OK;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x, void *z,
                                                             void *y, void *parameters, void *activation, size_t *bytes) {
  return no_workspace(bytes);
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y, void *dy,
                                                      void *dz, void *dx, void *parameters, void *activation,
                                                      size_t *bytes) {
  return no_workspace(bytes);
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations, void *activation, void *x,
                                                         size_t *bytes) {
  return no_workspace(bytes);
}

// --- The graph interface: descriptors keep what is set

enum {
  ENGINEHEUR_RESULTS = 202,
  ENGINECFG_ENGINE = 300,
  ENGINECFG_WORKSPACE_SIZE = 303,
  ENGINECFG_SHARED_MEMORY_USED = 304,
  EXECUTION_PLAN_WORKSPACE_SIZE = 402,
  OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
  ENGINE_GLOBAL_INDEX = 1301,
  ATTRIBUTES = 48, // of one descriptor, at most
};

struct attribute {
  int name, type;
  int64_t count;
  void *values;
};
struct descriptor {
  int kind, used;
  struct attribute attributes[ATTRIBUTES];
};

// Bytes of a value of a cudnnBackendAttributeType_t.
static size_t size_of(int type) {
  switch (type) {
  case 0:  // handle
  case 3:  // int64
  case 5:  // double
  case 6:  // void pointer
  case 15: // descriptor
    return 8;
  case 2:  // boolean
  case 24: // char
    return 1;
  case 26: // fraction
    return 16;
  default: // an enumeration, float, int32
    return 4;
  }
}

int cudnnBackendCreateDescriptor(int kind, struct descriptor **out) {
  *out = calloc(1, sizeof **out);
  if (!*out)
    return 1; // CUDNN_STATUS_NOT_INITIALIZED
  (*out)->kind = kind;
  return OK;
}
int cudnnBackendDestroyDescriptor(struct descriptor *descriptor) {
  for (int i = 0; descriptor && i < descriptor->used; i++)
    free(descriptor->attributes[i].values);
  free(descriptor);
  return OK;
}
int cudnnBackendFinalize(void *descriptor) { return OK; }
int cudnnBackendExecute(void *handle, void *plan, void *pack) { return OK; }

static struct attribute *find(struct descriptor *descriptor, int name) {
  for (int i = 0; i < descriptor->used; i++)
    if (descriptor->attributes[i].name == name)
      return descriptor->attributes + i;
  return NULL;
}
int cudnnBackendSetAttribute(struct descriptor *descriptor, int name, int type, int64_t count, const void *values) {
  struct attribute *attribute = find(descriptor, name);
  if (!attribute && descriptor->used == ATTRIBUTES)
    return gputrain_missing("cudnnBackendSetAttribute with so many attributes", 3000); // CUDNN_STATUS_NOT_SUPPORTED
  if (!attribute)
    attribute = descriptor->attributes + descriptor->used++;
  size_t bytes = count > 0 ? size_of(type) * (size_t)count : 0;
  free(attribute->values);
  *attribute = (struct attribute){name, type, count, malloc(bytes + 8)};
  if (values && bytes && attribute->values)
    memcpy(attribute->values, values, bytes);
  return OK;
}
int cudnnBackendGetAttribute(struct descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found,
                             void *values) {
  int64_t ignored, answer = name == OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
  if (!found)
    found = &ignored;
  *found = 1;
  switch (name) {
  case ENGINEHEUR_RESULTS: // the caller made these descriptors, and there is nothing to fill in
  case ENGINECFG_ENGINE:
    return OK;
  case ENGINECFG_SHARED_MEMORY_USED:
    if (values)
      memset(values, 0, 4);
    return OK;
  case ENGINECFG_WORKSPACE_SIZE:
  case EXECUTION_PLAN_WORKSPACE_SIZE:
    gputrain_unknown("cuDNN's workspaces");
    // fall through
  case OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
  case ENGINE_GLOBAL_INDEX:
    if (values)
      memcpy(values, &answer, sizeof answer);
    return OK;
  }
  struct attribute *attribute = find(descriptor, name);
  *found = attribute ? attribute->count : 0;
  int64_t copied = wanted < *found ? wanted : *found;
  if (values && attribute && attribute->values && copied > 0)
    memcpy(values, attribute->values, (size_t)copied * size_of(type));
  return OK;
}
