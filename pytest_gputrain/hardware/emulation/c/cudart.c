// Stands in for CUDA's runtime. The launch of a kernel succeeds and computes nothing.
#include "emulated.h"
#include "properties.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int gputrain_attribute(int attribute); // in cuda.c

enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 }; // of streams

static __thread int last_error;
static __thread const char *refusal = "an emulated GPU does not support this operation"; // the reason of the last error

static int check(int status) {
  if (status)
    last_error = status;
  return status;
}

// After a kernel has asserted, every further request to the GPU returns this error until the process ends.
static volatile int asserted;
void gputrain_assert(void) { asserted = ASSERTED; }
static int asked(int status) { return check(asserted ? ASSERTED : gputrain_forked() ? NOT_INITIALIZED : status); }

// --- Devices

int cudaGetDeviceCount(int *devices) {
  *devices = gputrain_visible();
  if (gputrain_forked())
    return check(NOT_INITIALIZED);
  return *devices ? OK : check(NO_DEVICE);
}
int cudaGetDevice(int *device) {
  *device = gputrain_current();
  return gputrain_visible() ? OK : check(NO_DEVICE);
}
int cudaSetDevice(int device) { return check(gputrain_use(device)); }
int cudaDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return OK;
}
int cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = gputrain_attribute(attribute);
  return gputrain_physical(device) < 0 ? check(INVALID_DEVICE) : OK;
}
int cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
  if (gputrain_physical(device) < 0)
    return check(INVALID_DEVICE);
  if (!text || bytes < 1)
    return check(INVALID_VALUE);
  snprintf(text, (size_t)bytes, "0000:%02x:00.0", gputrain_physical(device) + 1);
  return OK;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least)
    *least = LEAST_PRIORITY;
  if (greatest)
    *greatest = GREATEST_PRIORITY;
  return OK;
}
int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return gputrain_physical(device) < 0 || gputrain_physical(peer) < 0 ? check(INVALID_DEVICE) : OK;
}

static int get_properties(struct properties *to, int device) {
  const struct gpu *gpu = gputrain_gpu();
  int physical = gputrain_physical(device);
  if (physical < 0)
    return check(INVALID_DEVICE);
  memset(to, 0, sizeof *to);
  snprintf(to->name, sizeof to->name, "%s", gpu->name);
  gputrain_uuid(to->uuid.bytes, physical);
  to->totalGlobalMem = gpu->memory;
  to->sharedMemPerBlock = 48 << 10;
  to->regsPerBlock = to->regsPerMultiprocessor = REGISTERS;
  to->warpSize = WARP;
  to->memPitch = INT32_MAX;
  to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = MOST_THREADS;
  to->maxThreadsDim[2] = 64;
  to->maxGridSize[0] = INT32_MAX;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->totalConstMem = 64 << 10;
  to->major = gpu->major;
  to->minor = gpu->minor;
  to->textureAlignment = 512;
  to->texturePitchAlignment = 32;
  to->multiProcessorCount = gpu->multiprocessors;
  to->canMapHostMemory = to->concurrentKernels = to->unifiedAddressing = to->streamPrioritiesSupported = 1;
  to->globalL1CacheSupported = to->localL1CacheSupported = to->managedMemory = to->concurrentManagedAccess = 1;
  to->computePreemptionSupported = to->cooperativeLaunch = to->hostRegisterSupported = to->memoryPoolsSupported = 1;
  to->unifiedFunctionPointers = 1;
  to->pciBusID = physical + 1;
  to->asyncEngineCount = 3;
  to->l2CacheSize = gpu->l2_bytes;
  to->maxThreadsPerMultiProcessor = gpu->threads_per_multiprocessor;
  to->maxBlocksPerMultiProcessor = gpu->blocks_per_multiprocessor;
  to->sharedMemPerMultiprocessor = (size_t)gpu->shared_per_multiprocessor;
  to->sharedMemPerBlockOptin = (size_t)gpu->shared_per_block;
  to->reservedSharedMemPerBlock = (size_t)gpu->shared_reserved;
  to->clusterLaunch = gpu->major >= 9;
  return OK;
}
#if CUDA_VERSION >= 13000
int cudaGetDeviceProperties(struct properties *to, int device) { return get_properties(to, device); }
#else
// The function without a suffix returns the properties of CUDA 11, and no program for CUDA 12 calls it.
int cudaGetDeviceProperties_v2(struct properties *to, int device) { return get_properties(to, device); }
#endif

// --- Errors

int cudaGetLastError(void) {
  int error = asserted ? asserted : last_error;
  last_error = OK;
  return error;
}
int cudaPeekAtLastError(void) { return asserted ? asserted : last_error; }
const char *cudaGetErrorName(int error) {
  switch (error) {
  case OK:
    return "cudaSuccess";
  case INVALID_VALUE:
    return "cudaErrorInvalidValue";
  case OUT_OF_MEMORY:
    return "cudaErrorMemoryAllocation";
  case NOT_INITIALIZED:
    return "cudaErrorInitializationError";
  case INVALID_PITCH:
    return "cudaErrorInvalidPitchValue";
  case INVALID_HANDLE:
    return "cudaErrorInvalidResourceHandle";
  case ALREADY_REGISTERED:
    return "cudaErrorHostMemoryAlreadyRegistered";
  case NOT_REGISTERED:
    return "cudaErrorHostMemoryNotRegistered";
  case NO_DEVICE:
    return "cudaErrorNoDevice";
  case INVALID_DEVICE:
    return "cudaErrorInvalidDevice";
  case NOT_SUPPORTED:
    return "cudaErrorNotSupported";
  case ASSERTED:
    return "cudaErrorAssert";
  case ILLEGAL_STATE:
    return "cudaErrorIllegalState";
  case CAPTURE_UNSUPPORTED:
    return "cudaErrorStreamCaptureUnsupported";
  case CAPTURE_INVALIDATED:
    return "cudaErrorStreamCaptureInvalidated";
  case CAPTURE_MERGE:
    return "cudaErrorStreamCaptureMerge";
  case CAPTURE_UNMATCHED:
    return "cudaErrorStreamCaptureUnmatched";
  case CAPTURE_UNJOINED:
    return "cudaErrorStreamCaptureUnjoined";
  case CAPTURE_ISOLATION:
    return "cudaErrorStreamCaptureIsolation";
  case CAPTURE_IMPLICIT:
    return "cudaErrorStreamCaptureImplicit";
  case CAPTURED_EVENT:
    return "cudaErrorCapturedEvent";
  case CAPTURE_WRONG_THREAD:
    return "cudaErrorStreamCaptureWrongThread";
  default:
    return "cudaErrorUnknown";
  }
}
const char *cudaGetErrorString(int error) {
  static __thread char text[48];
  switch (error) {
  case OK:
    return "no error";
  case INVALID_VALUE:
    return "invalid argument";
  case OUT_OF_MEMORY:
    return "out of memory";
  case NOT_INITIALIZED:
    return "initialization error";
  case INVALID_PITCH:
    return "invalid pitch argument";
  case INVALID_HANDLE:
    return "invalid resource handle";
  case ALREADY_REGISTERED:
    return "part or all of the requested memory range is already mapped";
  case NOT_REGISTERED:
    return "pointer does not correspond to a registered memory region";
  case NO_DEVICE:
    return "no CUDA-capable device is detected";
  case INVALID_DEVICE:
    return "invalid device ordinal";
  case NOT_SUPPORTED:
    return refusal;
  case ASSERTED:
    return "device-side assert triggered";
  case ILLEGAL_STATE:
    return "the operation cannot be performed in the present state";
  case CAPTURE_UNSUPPORTED:
    return "operation not permitted when stream is capturing";
  case CAPTURE_INVALIDATED:
    return "operation failed due to a previous error during capture";
  case CAPTURE_MERGE:
    return "operation would result in a merge of separate capture sequences";
  case CAPTURE_UNMATCHED:
    return "capture was not ended in the same stream as it began";
  case CAPTURE_UNJOINED:
    return "capturing stream has unjoined work";
  case CAPTURE_ISOLATION:
    return "dependency created on uncaptured work in another stream";
  case CAPTURE_IMPLICIT:
    return "operation would make the legacy stream depend on a capturing blocking stream";
  case CAPTURED_EVENT:
    return "operation not permitted on an event last recorded in a capturing stream";
  case CAPTURE_WRONG_THREAD:
    return "attempt to terminate a thread-local capture sequence from another thread";
  default:
    snprintf(text, sizeof text, "error %d of CUDA's runtime", error);
    return text;
  }
}

// --- Memory

static int take(void **out, size_t bytes, int kind, const char *function, const void *caller) {
  gputrain_count("mallocs", function, bytes);
  if (asserted)
    return asked(OK);
  int status = gputrain_unsafe();
  if (!status)
    status = gputrain_allocate(out, bytes, kind);
  if (status == OUT_OF_MEMORY && kind == DEVICE)
    gputrain_refused(bytes, caller);
  return check(status);
}
static int give(void *start, const char *function) {
  if (start)
    gputrain_count("frees", function, 0);
  int status = gputrain_unsafe();
  return check(status ? status : gputrain_free(start));
}
#define CALLER __builtin_return_address(0)
int cudaMalloc(void **out, size_t bytes) { return take(out, bytes, DEVICE, "cudaMalloc", CALLER); }
int cudaFree(void *start) { return give(start, "cudaFree"); }
// In a capture these requests would become nodes. What the driver's pool reserves for a graph is unknown, so they are
// refused.
static int is_captured(void *stream) { return gputrain_capture_info(stream, NULL, NULL, NULL, NULL); }
static int refuse_in_graph(void) {
  refusal = "an emulated GPU captures no allocation by the driver's pools; allocate before the capture";
  return check(NOT_SUPPORTED);
}
int cudaMallocAsync(void **out, size_t bytes, void *stream) {
  return is_captured(stream) ? refuse_in_graph() : take(out, bytes, DEVICE, "cudaMalloc", CALLER);
}
int cudaMallocFromPoolAsync(void **out, size_t bytes, void *pool, void *stream) {
  return is_captured(stream) ? refuse_in_graph() : take(out, bytes, DEVICE, "cudaMalloc", CALLER);
}
int cudaFreeAsync(void *start, void *stream) { return is_captured(stream) ? refuse_in_graph() : cudaFree(start); }
int cudaMallocManaged(void **out, size_t bytes, unsigned flags) {
  return take(out, bytes, MANAGED, "cudaMallocManaged", CALLER);
}
int cudaHostAlloc(void **out, size_t bytes, unsigned flags) { return take(out, bytes, HOST, "cudaHostAlloc", CALLER); }
int cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
int cudaFreeHost(void *start) { return give(start, "cudaFreeHost"); }
int cudaHostRegister(void *start, size_t bytes, unsigned flags) { return check(gputrain_register(start, bytes)); }
int cudaHostUnregister(void *start) { return check(gputrain_unregister(start)); }
int cudaHostGetDevicePointer(void **out, void *host, unsigned flags) {
  *out = host;
  return OK;
}
int cudaMemGetInfo(size_t *left, size_t *total) {
  if (!gputrain_visible())
    return check(NO_DEVICE);
  if (gputrain_forked())
    return check(NOT_INITIALIZED);
  *total = gputrain_gpu()->memory;
  *left = gputrain_left(gputrain_physical(gputrain_current()));
  return OK;
}
// Returns the name under which a copy counts, by the kinds of memory of both sides. A copy from host to host is no work of
// the GPU.
static const char *kind_of_copy(const void *to, const void *from, size_t bytes) {
  if (!bytes || !(gputrain_counting() || __atomic_load_n(&gputrain_captures, __ATOMIC_RELAXED)))
    return NULL;
  int to_kind = gputrain_kind(to, NULL), from_kind = gputrain_kind(from, NULL);
  int to_host = to_kind == UNKNOWN || to_kind == HOST, from_host = from_kind == UNKNOWN || from_kind == HOST;
  if (!to_host)
    return !from_host ? "d2d" : from_kind == HOST ? "h2d_pinned" : "h2d_pageable";
  return from_host ? NULL : to_kind == HOST ? "d2h_pinned" : "d2h_pageable";
}
static int copy(const char *function, struct work work, void *stream) {
  int status;
  work.kind = NODE_MEMCPY;
  work.function = function;
  work.bytes = work.width * work.height;
  work.what = kind_of_copy(work.to, work.from, work.bytes);
  if (gputrain_captured(stream, &work, &status))
    return asked(status);
  return asked(gputrain_copy_rows(work.to, work.to_pitch, work.from, work.from_pitch, work.width, work.height));
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int direction, void *stream) {
  return copy("cudaMemcpyAsync", (struct work){.to = to, .from = from, bytes, bytes, bytes, 1}, stream);
}
int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream) {
  return cudaMemcpyAsync(to, from, bytes, 0, stream);
}
int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height,
                      int direction, void *stream) {
  return copy("cudaMemcpy2DAsync", (struct work){.to = to, .from = from, to_pitch, from_pitch, width, height}, stream);
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int direction) {
  int status = gputrain_unsafe();
  if (status)
    return check(status);
  gputrain_count("waits", "cudaMemcpy", 0);
  return copy("cudaMemcpy", (struct work){.to = to, .from = from, bytes, bytes, bytes, 1}, NULL);
}
static int set(void *start, int value, size_t bytes, void *stream) {
  int status;
  struct work work = {NODE_MEMSET, "memsets", "cudaMemset", .bytes = bytes, .to = start, .width = bytes, .value = value};
  if (gputrain_captured(stream, &work, &status))
    return asked(status);
  return asked(gputrain_set(start, value, bytes));
}
int cudaMemsetAsync(void *start, int value, size_t bytes, void *stream) { return set(start, value, bytes, stream); }
int cudaMemset(void *start, int value, size_t bytes) {
  int status = gputrain_unsafe();
  return status ? check(status) : set(start, value, bytes, NULL);
}

struct pointer {
  int kind, device;
  void *on_device, *on_host;
};
int cudaPointerGetAttributes(struct pointer *to, const void *address) {
  int device = -2; // cudaInvalidDeviceId
  int kind = gputrain_kind(address, &device);
  to->kind = kind;
  to->device = device;
  to->on_device = kind == UNKNOWN ? NULL : (void *)address;
  to->on_host = kind == DEVICE ? NULL : (void *)address;
  return OK;
}

int cudaGetSymbolAddress(void **out, const void *symbol) {
  *out = gputrain_scratch();
  return OK;
}
int cudaDeviceGetDefaultMemPool(void **out, int device) {
  static char pools[MAX_DEVICES];
  if (gputrain_physical(device) < 0)
    return check(INVALID_DEVICE);
  *out = pools + device;
  return OK;
}
int cudaMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
  *value = 0;
  return OK;
}
static int refuse_sharing(void) {
  refusal = "an emulated GPU shares no memory between processes; send tensors through the host, by tensor.cpu()";
  return check(NOT_SUPPORTED);
}
int cudaIpcGetMemHandle(void *handle, void *start) { return refuse_sharing(); }
int cudaIpcOpenMemHandle(void **start, ...) { return refuse_sharing(); }

// --- Streams and events

enum { NON_BLOCKING = 1 };
struct stream {
  int priority;
  unsigned flags;
};
// Every program has three streams: the default one, the legacy one that waits for all others, and one of each thread.
static int is_stream(const void *stream) { return (uintptr_t)stream <= 2 || gputrain_is_handle(stream); }

int cudaStreamCreateWithPriority(struct stream **stream, unsigned flags, int priority) {
  if (gputrain_forked())
    return check(NOT_INITIALIZED);
  *stream = gputrain_handle();
  (*stream)->flags = flags;
  priority = priority > LEAST_PRIORITY ? LEAST_PRIORITY : priority;
  (*stream)->priority = priority < GREATEST_PRIORITY ? GREATEST_PRIORITY : priority;
  return OK;
}
int cudaStreamCreateWithFlags(struct stream **stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
int cudaStreamCreate(struct stream **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
int cudaStreamDestroy(void *stream) { return check(gputrain_drop_handle(stream) ? OK : INVALID_HANDLE); }
int cudaStreamGetPriority(const struct stream *stream, int *priority) {
  if (!is_stream(stream))
    return check(INVALID_HANDLE);
  *priority = (uintptr_t)stream <= 2 ? 0 : stream->priority;
  return OK;
}
struct host_function {
  void (*function)(void *);
  void *data;
};
static int call_host(void *data, int forget) {
  const struct host_function *of = data;
  if (!forget)
    of->function(of->data);
  return OK;
}
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  int status;
  struct host_function *kept = malloc(sizeof *kept);
  if (!kept)
    return check(OUT_OF_MEMORY);
  *kept = (struct host_function){function, data};
  struct work work = {.kind = NODE_HOST, .run = call_host, .drop = free, .data = kept};
  int captured = gputrain_captured(stream, &work, &status);
  if (!captured || status)
    free(kept);
  if (!captured)
    function(data);
  return check(status);
}
int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *data, unsigned flags) {
  int status = is_captured(stream) ? gputrain_waits(stream) : OK;
  if (status)
    return check(status);
  function(stream, OK, data);
  return OK;
}

int cudaEventCreateWithFlags(struct event **event, unsigned flags) {
  if (gputrain_forked())
    return check(NOT_INITIALIZED);
  *event = gputrain_handle();
  return OK;
}
int cudaEventCreate(struct event **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(struct event *event) {
  if (gputrain_is_handle(event))
    free(event->nodes);
  return check(gputrain_drop_handle(event) ? OK : INVALID_HANDLE);
}
enum { EXTERNAL = 1 };
int cudaEventRecordWithFlags(struct event *event, void *stream, unsigned flags) {
  if (!gputrain_is_handle(event) || !is_stream(stream))
    return check(INVALID_HANDLE);
  return asked(gputrain_record(event, stream, flags & EXTERNAL));
}
int cudaEventRecord(struct event *event, void *stream) { return cudaEventRecordWithFlags(event, stream, 0); }
int cudaEventElapsedTime(float *milliseconds, const struct event *from, const struct event *to) {
  if (!gputrain_is_handle(from) || !gputrain_is_handle(to))
    return check(INVALID_HANDLE);
  if (from->capture || to->capture)
    return check(CAPTURED_EVENT);
  if (!from->time.tv_sec || !to->time.tv_sec)
    return check(INVALID_HANDLE);
  *milliseconds =
      (float)((double)(to->time.tv_sec - from->time.tv_sec) * 1e3 + (double)(to->time.tv_nsec - from->time.tv_nsec) / 1e6);
  return OK;
}

// --- What waits for the GPU

static int wait(const char *function, int status) {
  gputrain_count("waits", function, 0);
  return asked(status);
}
static int of_stream(void *stream) {
  int status = gputrain_waits(stream);
  return status ? status : gputrain_unsafe();
}
static int of_event(const struct event *event) { return gputrain_is_handle(event) ? gputrain_asks(event) : INVALID_HANDLE; }

int cudaStreamSynchronize(void *stream) { return wait("cudaStreamSynchronize", of_stream(stream)); }
int cudaDeviceSynchronize(void) { return wait("cudaDeviceSynchronize", gputrain_waits(WHOLE_DEVICE)); }
int cudaEventSynchronize(const struct event *event) { return wait("cudaEventSynchronize", of_event(event)); }
// Work is over at once, so a query answers that all of it has ended.
int cudaStreamQuery(void *stream) { return asked(of_stream(stream)); }
int cudaEventQuery(const struct event *event) { return asked(of_event(event)); }
int cudaStreamWaitEvent(void *stream, const struct event *event, unsigned flags) {
  int captured;
  if (!gputrain_is_handle(event))
    return check(INVALID_HANDLE);
  int status = gputrain_wait(stream, event, flags & EXTERNAL, &captured);
  if (!captured)
    gputrain_count("stream_waits", "cudaStreamWaitEvent", 0);
  return check(status);
}

// --- Captures and graphs

int cudaStreamIsCapturing(void *stream, int *status) {
  *status = is_captured(stream);
  return OK;
}
static int capture_info(void *stream, int *status, uint64_t *id, struct graph **graph, struct node *const **last,
                        const void **edges, size_t *count) {
  int found = gputrain_capture_info(stream, id, graph, last, count);
  if (status)
    *status = found;
  if (edges)
    *edges = NULL; // no dependency has further properties
  return OK;
}
static int begin_capture(void *stream, int mode, struct graph *into, struct node *const *before, size_t count) {
  if (!is_stream(stream))
    return check(INVALID_HANDLE);
  int blocking = (uintptr_t)stream > 2 && !(((struct stream *)stream)->flags & NON_BLOCKING);
  if (!into)
    gputrain_count("captures", "cudaStreamBeginCapture", 0);
  return asked(gputrain_begin_capture(stream, mode, blocking, into, before, count));
}
int cudaStreamBeginCapture(void *stream, int mode) { return begin_capture(stream, mode, NULL, NULL, 0); }
int cudaStreamBeginCaptureToGraph(void *stream, struct graph *graph, struct node *const *before, const void *edges,
                                  size_t count, int mode) {
  return begin_capture(stream, mode, graph, before, count);
}
int cudaStreamEndCapture(void *stream, struct graph **graph) { return check(gputrain_end_capture(stream, graph)); }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return check(gputrain_exchange_mode(mode)); }

static int update_dependencies(void *stream, struct node *const *nodes, size_t count, unsigned flags) {
  enum { SET = 1 };
  return check(gputrain_update_dependencies(stream, nodes, count, flags & SET));
}
static int dependencies(const struct node *node, struct node **to, uint64_t *edges, size_t *count) {
  size_t found = gputrain_before(node, to, to ? *count : 0);
  *count = to && *count < found ? *count : found;
  if (edges && to)
    memset(edges, 0, *count * sizeof *edges);
  return OK;
}

int cudaGraphCreate(struct graph **graph, unsigned flags) {
  *graph = gputrain_new_graph();
  return OK;
}
int cudaGraphDestroy(struct graph *graph) {
  gputrain_destroy_graph(graph);
  return OK;
}
int cudaGraphGetNodes(const struct graph *graph, struct node **nodes, size_t *count) {
  size_t found = gputrain_nodes(graph, nodes, *count);
  *count = nodes && *count < found ? *count : found;
  return OK;
}
int cudaGraphNodeGetType(const struct node *node, int *kind) {
  *kind = gputrain_kind_of_node(node);
  return OK;
}
int cudaGraphInstantiateWithFlags(struct executable **executable, const struct graph *graph, uint64_t flags) {
  *executable = gputrain_instantiate(graph);
  return OK;
}
int cudaGraphInstantiate(struct executable **executable, const struct graph *graph, uint64_t flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
int cudaGraphUpload(struct executable *executable, void *stream) { return OK; }
int cudaGraphLaunch(struct executable *executable, void *stream) {
  int status = asked(OK);
  return status ? status : asked(gputrain_launch_graph(executable, stream));
}
int cudaGraphExecDestroy(struct executable *executable) {
  gputrain_destroy_executable(executable);
  return OK;
}
int cudaGraphDebugDotPrint(const struct graph *graph, const char *path, unsigned flags) {
  size_t count = gputrain_nodes(graph, NULL, 0), edges;
  struct node **nodes = calloc(count + 1, sizeof *nodes), **before = calloc(count + 1, sizeof *before);
  FILE *file = nodes && before ? fopen(path, "w") : NULL;
  if (file) {
    fputs("digraph emulated {\n", file);
    gputrain_nodes(graph, nodes, count);
    for (size_t i = 0; i < count; i++) {
      fprintf(file, "  n%p [label=\"type %d\"];\n", (void *)nodes[i], gputrain_kind_of_node(nodes[i]));
      edges = gputrain_before(nodes[i], before, count);
      for (size_t j = 0; j < edges && j < count; j++)
        fprintf(file, "  n%p -> n%p;\n", (void *)before[j], (void *)nodes[i]);
    }
    fputs("}\n", file);
  }
  free(nodes);
  free(before);
  return file && !fclose(file) ? OK : check(INVALID_VALUE);
}

// Graphs in a conditional node are captured and never run.
struct node_parameters {
  int kind, reserved[3];
  uint64_t handle;
  int condition;
  unsigned size;
  struct graph **inside;
};
int cudaGraphConditionalHandleCreate(uint64_t *handle, struct graph *graph, unsigned value, unsigned flags) {
  static uint64_t last;
  *handle = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
  return OK;
}
static int add_node(struct node **node, struct graph *graph, struct node *const *before, size_t count,
                    struct node_parameters *parameters) {
  if (parameters->kind == NODE_CONDITIONAL)
    *node = gputrain_add_conditional(graph, parameters->size, before, count, &parameters->inside);
  else if (parameters->kind == NODE_EMPTY)
    *node = gputrain_add_node(graph, &(struct work){.kind = NODE_EMPTY}, before, count);
  else
    return check(gputrain_missing("cudaGraphAddNode of a node that does something", NOT_SUPPORTED));
  return OK;
}

// In CUDA 13 the functions without a suffix have the parameters that functions with a suffix have in CUDA 12.
#if CUDA_VERSION >= 13000
#define WITH_EDGES(name) name
#define INFO_WITH_EDGES cudaStreamGetCaptureInfo
#else
#define WITH_EDGES(name) name##_v2
#define INFO_WITH_EDGES cudaStreamGetCaptureInfo_v3
int cudaStreamGetCaptureInfo(void *stream, int *status, uint64_t *id) {
  return capture_info(stream, status, id, NULL, NULL, NULL, NULL);
}
int cudaStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, struct graph **graph, struct node *const **last,
                                size_t *count) {
  return capture_info(stream, status, id, graph, last, NULL, count);
}
int cudaStreamUpdateCaptureDependencies(void *stream, struct node **nodes, size_t count, unsigned flags) {
  return update_dependencies(stream, nodes, count, flags);
}
int cudaGraphNodeGetDependencies(const struct node *node, struct node **to, size_t *count) {
  return dependencies(node, to, NULL, count);
}
int cudaGraphAddNode(struct node **node, struct graph *graph, struct node *const *before, size_t count,
                     struct node_parameters *parameters) {
  return add_node(node, graph, before, count, parameters);
}
#endif
int INFO_WITH_EDGES(void *stream, int *status, uint64_t *id, struct graph **graph, struct node *const **last,
                    const void **edges, size_t *count) {
  return capture_info(stream, status, id, graph, last, edges, count);
}
int WITH_EDGES(cudaStreamUpdateCaptureDependencies)(void *stream, struct node **nodes, const void *edges, size_t count,
                                                    unsigned flags) {
  return update_dependencies(stream, nodes, count, flags);
}
int WITH_EDGES(cudaGraphNodeGetDependencies)(const struct node *node, struct node **to, uint64_t *edges, size_t *count) {
  return dependencies(node, to, edges, count);
}
int WITH_EDGES(cudaGraphAddNode)(struct node **node, struct graph *graph, struct node *const *before, const void *edges,
                                 size_t count, struct node_parameters *parameters) {
  return add_node(node, graph, before, count, parameters);
}

// --- Kernels

struct dim3 {
  unsigned x, y, z;
};
void __cudaRegisterFunction(void **binary, const void *function, char *device_function, const char *name) {
  gputrain_name(function, name);
  gputrain_kernel(function);
}

// A launch in the form <<<...>>> stores its configuration here, and the kernel's function on the host reads it.
static __thread struct configuration {
  struct dim3 blocks, threads;
  size_t shared;
  void *stream;
} configurations[4];
static __thread unsigned configured;

unsigned __cudaPushCallConfiguration(struct dim3 blocks, struct dim3 threads, size_t shared, void *stream) {
  configurations[configured++ & 3] = (struct configuration){blocks, threads, shared, stream};
  return OK;
}
int __cudaPopCallConfiguration(struct dim3 *blocks, struct dim3 *threads, size_t *shared, void **stream) {
  const struct configuration *last = &configurations[--configured & 3];
  *blocks = last->blocks;
  *threads = last->threads;
  *shared = last->shared;
  *stream = last->stream;
  return OK;
}
static int launch(const void *function, struct dim3 blocks, void **arguments, void *stream) {
  if (gputrain_forked())
    return check(NOT_INITIALIZED);
  uint64_t count = (uint64_t)blocks.x * blocks.y * blocks.z;
  struct work work = {NODE_KERNEL, "launches", function, .bytes = count, .data = gputrain_may_write(function, arguments)};
  if (work.data) {
    work.run = gputrain_note_written;
    work.drop = free;
  }
  int status, captured = gputrain_captured(stream, &work, &status);
  if (!captured) {
    gputrain_launched(count);
    if (work.data)
      gputrain_note_written(work.data, 0);
  }
  if (!captured || status)
    free(work.data);
  return asked(status);
}
int cudaLaunchKernel(const void *function, struct dim3 blocks, struct dim3 threads, void **arguments, size_t shared,
                     void *stream) {
  return launch(function, blocks, arguments, stream);
}
int __cudaLaunchKernel(const void *function, struct dim3 blocks, struct dim3 threads, void **arguments, size_t shared,
                       void *stream) {
  return launch(function, blocks, arguments, stream);
}
struct launch {
  struct dim3 blocks, threads;
  size_t shared;
  void *stream;
};
int cudaLaunchKernelExC(const struct launch *config, const void *function, void **arguments) {
  return launch(function, config->blocks, arguments, config->stream);
}
int cudaLaunchCooperativeKernel(const void *function, struct dim3 blocks, struct dim3 threads, void **arguments,
                                size_t shared, void *stream) {
  return launch(function, blocks, arguments, stream);
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[1];
  gputrain_registers_kernels(__builtin_return_address(0));
  return handle;
}
int __cudaGetKernel(void **kernel, const void *function) {
  *kernel = (void *)function;
  return OK;
}
int cudaGetFuncBySymbol(void **kernel, const void *function) { return __cudaGetKernel(kernel, function); }
int cudaLibraryLoadData(void **library) {
  *library = gputrain_handle();
  return OK;
}
int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  *kernel = gputrain_handle();
  gputrain_name(*kernel, strdup(name));
  return OK;
}

struct function {
  size_t shared, constant, local;
  int max_threads, registers, ptx, binary, cache, max_dynamic, carveout;
};
int cudaFuncGetAttributes(struct function *to, const void *function) {
  const struct gpu *gpu = gputrain_gpu();
  memset(to, 0, sizeof *to);
  to->max_threads = MOST_THREADS;
  to->registers = 32; // a guess, because only a compiled kernel has the number
  to->ptx = to->binary = gpu->kernels;
  to->max_dynamic = gpu->shared_per_block;
  to->carveout = -1;
  return OK;
}
// This function is in cuda.c. A kernel's registers, which may allow fewer blocks, are unknown.
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared);
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
  return check(cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared));
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared,
                                                           unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status); // in cuda.c
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags, int *status) {
  return check(cuGetProcAddress_v2(name, function, (int)version, flags, status));
}
int cudaGetDriverEntryPoint(const char *name, void **function, uint64_t flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDA_VERSION, flags, status);
}
