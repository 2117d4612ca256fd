// Stands in for CUDA's driver.
#include "emulated.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int give(void **out) {
  *out = gputrain_handle();
  return OK;
}

// --- Devices

int gputrain_attribute(int attribute) {
  const struct gpu *gpu = gputrain_gpu();
  switch (attribute) {
  case 1: // threads of a block: in total and in each dimension
  case 2:
  case 3:
    return 1024;
  case 4:
    return 64;
  case 5:  // blocks of a grid in each dimension
  case 11: // pitch
    return INT32_MAX;
  case 6:
  case 7:
    return 65535;
  case 8: // shared memory of a block, unless it asks for more
    return 48 << 10;
  case 9: // constant memory
    return 64 << 10;
  case 10:
    return WARP;
  case 12:
  case 82:
    return REGISTERS;
  case 14: // alignment of textures
    return 512;
  case 16:
    return gpu->multiprocessors;
  case 15: // what every GPU since Volta has: overlapped copies,
  case 19: // mapped host memory,
  case 31: // concurrent kernels,
  case 41: // unified addresses,
  case 78: // priorities of streams,
  case 79: // caches,
  case 80:
  case 83: // managed memory,
  case 89:
  case 90:
  case 91:
  case 95:  // cooperative launches,
  case 99:  // registered host memory,
  case 102: // virtual memory management, its handles,
  case 103:
  case 115: // pools
    return 1;
  case 38:
    return gpu->l2_bytes;
  case 39:
    return gpu->threads_per_multiprocessor;
  case 40: // number of copy engines
    return 3;
  case 75:
    return gpu->major;
  case 76:
    return gpu->minor;
  case 81:
    return gpu->shared_per_multiprocessor;
  case 97:
    return gpu->shared_per_block;
  case 106:
    return gpu->blocks_per_multiprocessor;
  case 111:
    return gpu->shared_reserved;
  case 120: // clusters of blocks
    return gpu->major >= 9;
  default:
    return 0;
  }
}

int cuInit(unsigned flags) { return gputrain_visible() ? OK : NO_DEVICE; }
int cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return OK;
}
int cuDeviceGetCount(int *devices) {
  *devices = gputrain_visible();
  return OK;
}
int cuDeviceGet(int *device, int index) {
  *device = index;
  return gputrain_physical(index) < 0 ? INVALID_DEVICE : OK;
}
int cuDeviceGetName(char *name, int bytes, int device) {
  if (gputrain_physical(device) < 0 || bytes < 1)
    return INVALID_DEVICE;
  snprintf(name, (size_t)bytes, "%s", gputrain_gpu()->name);
  return OK;
}
int cuDeviceGetUuid(unsigned char *uuid, int device) {
  if (gputrain_physical(device) < 0)
    return INVALID_DEVICE;
  gputrain_uuid(uuid, gputrain_physical(device));
  return OK;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = gputrain_gpu()->memory;
  return gputrain_physical(device) < 0 ? INVALID_DEVICE : OK;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = gputrain_attribute(attribute);
  return gputrain_physical(device) < 0 ? INVALID_DEVICE : OK;
}

// --- Contexts: each device has only its primary context

static char contexts[MAX_DEVICES];

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags)
    *flags = 0;
  *active = 1;
  return gputrain_physical(device) < 0 ? INVALID_DEVICE : OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  if (gputrain_physical(device) < 0)
    return INVALID_DEVICE;
  *context = contexts + device;
  return OK;
}
int cuCtxGetCurrent(void **context) { return cuDevicePrimaryCtxRetain(context, gputrain_current()); }
int cuCtxSetCurrent(char *context) {
  if (!context)
    return OK;
  uintptr_t device = (uintptr_t)context - (uintptr_t)contexts;
  return device < MAX_DEVICES && gputrain_use((int)device) == OK ? OK : INVALID_CONTEXT;
}
int cuCtxGetDevice(int *device) {
  *device = gputrain_current();
  return OK;
}
int cuCtxGetLimit(size_t *value, int limit) {
  *value = 1 << 20;
  return OK;
}

static const struct {
  int error;
  const char *name, *text;
} errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "an emulated GPU does not support this operation"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
};
static int text_of(int error, const char **text, int of_name) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].error == error) {
      *text = of_name ? errors[i].name : errors[i].text;
      return OK;
    }
  *text = of_name ? "CUDA_ERROR_UNKNOWN" : "error of an emulated GPU";
  return OK;
}
int cuGetErrorString(int error, const char **text) { return text_of(error, text, 0); }
int cuGetErrorName(int error, const char **text) { return text_of(error, text, 1); }

// --- Memory

int cuMemGetInfo_v2(size_t *left, size_t *total) {
  if (!gputrain_visible())
    return NO_DEVICE;
  if (gputrain_forked())
    return NOT_INITIALIZED;
  *total = gputrain_gpu()->memory;
  *left = gputrain_left(gputrain_physical(gputrain_current()));
  return OK;
}
int cuMemGetAddressRange_v2(void **start, size_t *bytes, void *address) {
  void *first = NULL;
  size_t extent = gputrain_extent(address, &first);
  if (start)
    *start = first;
  if (bytes)
    *bytes = extent;
  return extent ? OK : INVALID_VALUE;
}
int cuMemAlloc_v2(void **out, size_t bytes) {
  gputrain_count("mallocs", "cuMemAlloc", bytes);
  int status = gputrain_unsafe();
  if (!status)
    status = gputrain_allocate(out, bytes, DEVICE);
  if (status == OUT_OF_MEMORY)
    gputrain_refused(bytes, __builtin_return_address(0));
  return status;
}
int cuMemFree_v2(void *start) {
  gputrain_count("frees", "cuMemFree", 0);
  int status = gputrain_unsafe();
  return status ? status : gputrain_free(start);
}
int cuPointerGetAttribute(void *value, int attribute, void *address) {
  int device = 0, kind = gputrain_kind(address, &device);
  void *start = NULL;
  switch (attribute) {
  case 2: // CU_MEMORYTYPE_HOST or _DEVICE
    *(unsigned *)value = kind == DEVICE || kind == MANAGED ? 2 : 1;
    break;
  case 9: // the number of the device
    *(int *)value = device;
    break;
  case 11: // CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    gputrain_extent(address, &start);
    *(void **)value = start;
    break;
  case 12: // CU_POINTER_ATTRIBUTE_RANGE_SIZE
    *(size_t *)value = gputrain_extent(address, &start);
    break;
  default:
    *(void **)value = address;
  }
  return kind == UNKNOWN ? INVALID_VALUE : OK;
}

// Virtual memory management, which expandable segments use. An allocation is counted when it is made, and gets its addresses
// later.
struct physical_properties {
  int type, handles, location, device;
};
enum { PINNED = 1, ON_DEVICE = 1 };

int cuMemGetAllocationGranularity(size_t *bytes) {
  *bytes = PAGE;
  return OK;
}
int cuMemAddressReserve(void **start, size_t bytes, size_t alignment, void *wanted, uint64_t flags) {
  return gputrain_reserve(start, gputrain_physical(gputrain_current()), bytes);
}
int cuMemAddressFree(void *start, size_t bytes) { return gputrain_unreserve(start, bytes); }
int cuMemCreate(void **handle, size_t bytes, const struct physical_properties *properties, uint64_t flags) {
  if (!properties || properties->type != PINNED || properties->location != ON_DEVICE)
    return INVALID_VALUE;
  gputrain_count("mallocs", "cuMemCreate", bytes);
  return gputrain_create(handle, gputrain_physical(properties->device), bytes);
}
int cuMemRetainAllocationHandle(void **handle, void *address) { return gputrain_retain(handle, address); }
int cuMemGetAllocationPropertiesFromHandle(struct physical_properties *to, const void *handle) {
  int device = gputrain_device_of(handle);
  if (device < 0)
    return INVALID_VALUE;
  memset(to, 0, 32);
  *to = (struct physical_properties){PINNED, 0, ON_DEVICE, gputrain_visible_number(device)};
  return OK;
}
int cuMemRelease(void *handle) {
  gputrain_count("frees", "cuMemRelease", 0);
  return gputrain_release(handle);
}
int cuMemMap(void *start, size_t bytes, size_t offset, void *handle, uint64_t flags) {
  return gputrain_map(start, bytes, offset, handle);
}
int cuMemUnmap(void *start, size_t bytes) { return gputrain_unmap(start, bytes); }
// Another process would get memory without contents, so sharing is refused.
int cuMemExportToShareableHandle(void) { return gputrain_missing("cuMemExportToShareableHandle", NOT_SUPPORTED); }
int cuMemImportFromShareableHandle(void) { return gputrain_missing("cuMemImportFromShareableHandle", NOT_SUPPORTED); }
int cuMemSetAccess(const void *start, size_t bytes) { return bytes && gputrain_holds(start, bytes) ? OK : INVALID_VALUE; }

// --- Kernels

int cuModuleLoad(void **module) { return give(module); }
int cuModuleLoadData(void **module) { return give(module); }
int cuModuleLoadDataEx(void **module) { return give(module); }
int cuModuleUnload(void *module) { return OK; } // Triton calls it from 3.9 on, and asks for its functions no more
static int give_named(void **out, const char *name) {
  give(out);
  gputrain_name(*out, strdup(name));
  return OK;
}
int cuModuleGetFunction(void **function, void *module, const char *name) { return give_named(function, name); }
int cuLibraryLoadData(void **library) { return give(library); }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return give_named(kernel, name); }
int cuKernelGetFunction(void **function, void *kernel) {
  *function = kernel;
  return OK;
}
int cuFuncGetModule(void **module, void *function) {
  *module = function;
  return OK;
}
int cuModuleGetGlobal_v2(void **start, size_t *bytes) {
  if (start)
    *start = gputrain_scratch();
  if (bytes)
    *bytes = PAGE;
  return OK;
}
int cuLinkCreate_v2(unsigned options, void *names, void *values, void **state) { return give(state); }
int cuLinkComplete(void *state, void **binary, size_t *bytes) {
  *bytes = 64;
  *binary = state;
  return OK;
}
GPUTRAIN_DESTROYS(cuLinkDestroy, INVALID_HANDLE)
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; // most threads of a block; registers, which is a guess
  return OK;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return OK; }
int cuFuncSetCacheConfig(void *function, int config) { return OK; }
int cuCtxSetLimit(int limit, size_t value) { return OK; }
static int launch(const void *function, const unsigned *blocks, void *stream) {
  return gputrain_forked() ? NOT_INITIALIZED
                           : gputrain_ask(stream, "launches", function, (uint64_t)blocks[0] * blocks[1] * blocks[2]);
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void *stream) {
  return launch(function, (unsigned[]){x, y, z}, stream);
}
int cuLaunchCooperativeKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                              unsigned threads_z, unsigned shared, void *stream) {
  return launch(function, (unsigned[]){x, y, z}, stream);
}
struct launch {
  unsigned blocks[3], threads[3], shared;
  void *stream;
};
int cuLaunchKernelEx(const struct launch *config, void *function) {
  return launch(function, config->blocks, config->stream);
}

GPUTRAIN_DESTROYS(cuStreamDestroy_v2, INVALID_HANDLE)
GPUTRAIN_DESTROYS(cuEventDestroy_v2, INVALID_HANDLE)
GPUTRAIN_DESTROYS(cuGreenCtxDestroy, INVALID_HANDLE)

// --- What waits for the GPU

static int wait(const char *function, int status) {
  gputrain_count("waits", function, 0);
  return gputrain_forked() ? NOT_INITIALIZED : status;
}
int cuStreamSynchronize(void *stream) {
  int status = gputrain_waits(stream);
  return wait("cuStreamSynchronize", status ? status : gputrain_unsafe());
}
int cuStreamIsCapturing(void *stream, int *status) { // Triton calls this from 3.9 on
  *status = gputrain_capture_info(stream, NULL, NULL, NULL, NULL);
  return OK;
}
int cuCtxSynchronize(void) { return wait("cuCtxSynchronize", gputrain_waits(WHOLE_DEVICE)); }
int cuEventSynchronize(void *event) {
  return wait("cuEventSynchronize", gputrain_is_handle(event) ? gputrain_asks(event) : INVALID_HANDLE);
}

// --- Further functions

// After pushing a context and popping it again, a program is on the same device as before.
enum { MOST_PUSHED = 64 };
static __thread int pushed[MOST_PUSHED], pushed_count;

int cuCtxPushCurrent(char *context) {
  int before = gputrain_current();
  if (!context || pushed_count == MOST_PUSHED)
    return INVALID_VALUE;
  int status = gputrain_use((int)(context - contexts));
  if (!status)
    pushed[pushed_count++] = before;
  return status;
}
int cuCtxPopCurrent(void **context) {
  if (!pushed_count)
    return gputrain_missing("cuCtxPopCurrent of what nobody pushed", NOT_SUPPORTED);
  if (context)
    *context = contexts + gputrain_current();
  return gputrain_use(pushed[--pushed_count]);
}

int cuTensorMapEncodeTiled(void) { return OK; }
int cuTensorMapEncodeIm2col(void) { return OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
  const struct gpu *gpu = gputrain_gpu();
  if (threads < 1)
    return INVALID_VALUE;
  size_t most = (size_t)gpu->blocks_per_multiprocessor, by_threads = (size_t)(gpu->threads_per_multiprocessor / threads);
  size_t by_shared = shared ? (size_t)gpu->shared_per_multiprocessor / (shared + (size_t)gpu->shared_reserved) : most;
  most = most < by_threads ? most : by_threads;
  most = most < by_shared ? most : by_shared;
  *blocks = threads > MOST_THREADS || shared > (size_t)gpu->shared_per_block ? 0 : (int)most;
  return OK;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) {
  *clusters = 1;
  return OK;
}

// --- Functions by name

static pthread_once_t self_once = PTHREAD_ONCE_INIT;
static void *self;
static void open_self(void) { self = dlopen("libcuda.so.1", RTLD_NOW); }

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  char second[160];
  snprintf(second, sizeof second, "%s_v2", name);
  pthread_once(&self_once, open_self);
  *function = dlsym(self, second);
  if (!*function)
    *function = dlsym(self, name);
  if (!*function && gputrain_traces())
    fprintf(stderr, "gputrain: the driver has no function %s\n", name);
  if (status)
    *status = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
