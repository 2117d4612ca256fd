// Stands in for CUDA's runtime. A kernel's launch succeeds and does nothing.
#include "emulated.h"
#include "properties.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int gputrain_attribute(int attribute); // in cuda.c

enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 }; // of streams

static __thread int last_error;
static __thread const char *refusal = "an emulated GPU does not support this operation"; // the reason of the last one

static int check(int status) {
  if (status)
    last_error = status;
  return status;
}

// After a kernel has asserted, each call that asks the GPU for something gives this error, for as long as the process lives.
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
// The function without a suffix has CUDA 11's properties, and programs for CUDA 12 do not call it.
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
  case CAPTURE_UNSUPPORTED:
    return "cudaErrorStreamCaptureUnsupported";
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
  case CAPTURE_UNSUPPORTED:
    return "an emulated GPU captures no CUDA graphs; switch them off, for torch.compile by another mode than "
           "reduce-overhead "
           "and max-autotune";
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
  int status = gputrain_allocate(out, bytes, kind);
  if (status == OUT_OF_MEMORY && kind == DEVICE)
    gputrain_refused(bytes, caller);
  return check(status);
}
static int give(void *start, const char *function) {
  if (start)
    gputrain_count("frees", function, 0);
  return check(gputrain_free(start));
}
#define CALLER __builtin_return_address(0)
int cudaMalloc(void **out, size_t bytes) { return take(out, bytes, DEVICE, "cudaMalloc", CALLER); }
int cudaFree(void *start) { return give(start, "cudaFree"); }
int cudaMallocAsync(void **out, size_t bytes, void *stream) { return take(out, bytes, DEVICE, "cudaMalloc", CALLER); }
int cudaMallocFromPoolAsync(void **out, size_t bytes, void *pool, void *stream) {
  return take(out, bytes, DEVICE, "cudaMalloc", CALLER);
}
int cudaFreeAsync(void *start, void *stream) { return cudaFree(start); }
int cudaMallocManaged(void **out, size_t bytes, unsigned flags) {
  return take(out, bytes, MANAGED, "cudaMallocManaged", CALLER);
}
int cudaHostAlloc(void **out, size_t bytes, unsigned flags) { return take(out, bytes, HOST, "cudaHostAlloc", CALLER); }
int cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
int cudaFreeHost(void *start) { return give(start, "cudaFreeHost"); }
int cudaHostRegister(void *start, size_t bytes, unsigned flags) {
  return check(gputrain_register(start, bytes));
}
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
// Counts a copy by the kinds of memory of both sides; one from the host to the host is no work of the GPU.
static void count_copy(const void *to, const void *from, size_t bytes, const char *function) {
  if (!bytes || !gputrain_counting())
    return;
  int to_kind = gputrain_kind(to, NULL), from_kind = gputrain_kind(from, NULL);
  int to_host = to_kind == UNKNOWN || to_kind == HOST, from_host = from_kind == UNKNOWN || from_kind == HOST;
  if (!to_host)
    gputrain_count(!from_host ? "d2d" : from_kind == HOST ? "h2d_pinned" : "h2d_pageable", function, bytes);
  else if (!from_host)
    gputrain_count(to_kind == HOST ? "d2h_pinned" : "d2h_pageable", function, bytes);
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int direction, void *stream) {
  count_copy(to, from, bytes, "cudaMemcpyAsync");
  return asked(gputrain_copy(to, from, bytes));
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int direction) {
  gputrain_count("waits", "cudaMemcpy", 0);
  count_copy(to, from, bytes, "cudaMemcpy");
  return asked(gputrain_copy(to, from, bytes));
}
int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream) {
  return cudaMemcpyAsync(to, from, bytes, 0, stream);
}
int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height,
                      int direction, void *stream) {
  count_copy(to, from, width * height, "cudaMemcpy2DAsync");
  return asked(gputrain_copy_rows(to, to_pitch, from, from_pitch, width, height));
}
int cudaMemset(void *start, int value, size_t bytes) {
  gputrain_count("memsets", "cudaMemset", bytes);
  return asked(gputrain_set(start, value, bytes));
}
int cudaMemsetAsync(void *start, int value, size_t bytes, void *stream) { return cudaMemset(start, value, bytes); }

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

struct stream {
  int priority;
};
// Those of each program: the default one, the older one that waits for all, and one for each thread.
static int is_stream(const void *stream) { return (uintptr_t)stream <= 2 || gputrain_is_handle(stream); }

int cudaStreamCreateWithPriority(struct stream **stream, unsigned flags, int priority) {
  if (gputrain_forked())
    return check(NOT_INITIALIZED);
  *stream = gputrain_handle();
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
int cudaStreamIsCapturing(void *stream, int *status) {
  *status = 0;
  return OK;
}
// Nothing captures, so what it would capture into is left alone.
int cudaStreamGetCaptureInfo(void *stream, int *status, uint64_t *id) {
  if (status)
    *status = 0;
  if (id)
    *id = 0;
  return OK;
}
int cudaStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}
int cudaStreamGetCaptureInfo_v3(void *stream, int *status, uint64_t *id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}
int cudaStreamBeginCapture(void *stream, int mode) { return check(CAPTURE_UNSUPPORTED); }
int cudaThreadExchangeStreamCaptureMode(int *mode) {
  *mode = 0;
  return OK;
}
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  function(data);
  return OK;
}
int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *data, unsigned flags) {
  function(stream, OK, data);
  return OK;
}

int cudaEventCreateWithFlags(void **event, unsigned flags) {
  if (gputrain_forked())
    return check(NOT_INITIALIZED);
  *event = gputrain_handle();
  return OK;
}
int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(void *event) { return check(gputrain_drop_handle(event) ? OK : INVALID_HANDLE); }
int cudaEventRecord(struct timespec *event, void *stream) {
  if (!gputrain_is_handle(event) || !is_stream(stream))
    return check(INVALID_HANDLE);
  clock_gettime(CLOCK_MONOTONIC, event);
  return asked(OK);
}
int cudaEventRecordWithFlags(struct timespec *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventElapsedTime(float *milliseconds, const struct timespec *from, const struct timespec *to) {
  if (!gputrain_is_handle(from) || !gputrain_is_handle(to) || !from->tv_sec || !to->tv_sec)
    return check(INVALID_HANDLE);
  *milliseconds = (float)((double)(to->tv_sec - from->tv_sec) * 1e3 + (double)(to->tv_nsec - from->tv_nsec) / 1e6);
  return OK;
}

// --- What waits for the GPU

static int wait(const char *function) {
  gputrain_count("waits", function, 0);
  return asked(OK);
}
int cudaStreamSynchronize(void *stream) { return wait("cudaStreamSynchronize"); }
int cudaDeviceSynchronize(void) { return wait("cudaDeviceSynchronize"); }
int cudaEventSynchronize(void *event) { return wait("cudaEventSynchronize"); }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  gputrain_count("stream_waits", "cudaStreamWaitEvent", 0);
  return OK;
}

// --- Kernels

struct dim3 {
  unsigned x, y, z;
};
void __cudaRegisterFunction(void **binary, const void *function, char *device_function, const char *name) {
  gputrain_name(function, name);
  gputrain_kernel(function);
}

// A launch that is written <<<...>>> leaves its configuration here, where the kernel's own function on the host finds it.
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
static int launch(const void *function, struct dim3 blocks, void **arguments) {
  if (gputrain_forked())
    return check(NOT_INITIALIZED);
  uint64_t count = (uint64_t)blocks.x * blocks.y * blocks.z;
  gputrain_launched(count);
  gputrain_count("launches", function, count);
  gputrain_may_write(function, arguments);
  return asked(OK);
}
int cudaLaunchKernel(const void *function, struct dim3 blocks, struct dim3 threads, void **arguments) {
  return launch(function, blocks, arguments);
}
int __cudaLaunchKernel(const void *function, struct dim3 blocks, struct dim3 threads, void **arguments) {
  return launch(function, blocks, arguments);
}
int cudaLaunchKernelExC(const struct dim3 *config, const void *function, void **arguments) {
  return launch(function, *config, arguments);
}
int cudaLaunchCooperativeKernel(const void *function, struct dim3 blocks, struct dim3 threads, void **arguments) {
  return launch(function, blocks, arguments);
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
  to->registers = 32; // a guess: only a compiled kernel tells
  to->ptx = to->binary = gpu->kernels;
  to->max_dynamic = gpu->shared_per_block;
  to->carveout = -1;
  return OK;
}
// In cuda.c. Registers, which may allow fewer blocks, are not known.
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
