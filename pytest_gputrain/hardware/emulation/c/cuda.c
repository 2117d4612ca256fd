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
  case 1: // threads of a block, in all and by dimension
  case 2:
  case 3:
    return 1024;
  case 4:
    return 64;
  case 5:  // blocks of a grid by dimension
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
  case 15: // has what every GPU since Volta has: overlapped copies,
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
  case 40: // copy engines
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
  return OK;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = gputrain_attribute(attribute);
  return OK;
}

// --- Contexts: each device has the primary one

static char contexts[MAX_DEVICES];

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags)
    *flags = 0;
  *active = 1;
  return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  if (gputrain_physical(device) < 0)
    return INVALID_DEVICE;
  *context = contexts + device;
  return OK;
}
int cuCtxGetCurrent(void **context) { return cuDevicePrimaryCtxRetain(context, gputrain_current()); }
int cuCtxSetCurrent(char *context) { return context ? gputrain_use((int)(context - contexts)) : OK; }
int cuCtxGetDevice(int *device) {
  *device = gputrain_current();
  return OK;
}
int cuCtxGetLimit(size_t *value, int limit) {
  *value = 1 << 20;
  return OK;
}
int cuGetErrorString(int error, const char **text) {
  *text = error == OK ? "no error" : error == OUT_OF_MEMORY ? "out of memory" : "error of an emulated GPU";
  return OK;
}
int cuGetErrorName(int error, const char **text) {
  *text = error == OK ? "CUDA_SUCCESS" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return OK;
}

// --- Memory

int cuMemGetInfo_v2(size_t *left, size_t *total) {
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
  return gputrain_allocate(out, bytes, DEVICE);
}
int cuMemFree_v2(void *start) {
  gputrain_count("frees", "cuMemFree", 0);
  return gputrain_free(start);
}
int cuPointerGetAttribute(void *value, int attribute, void *address) {
  int device = 0, kind = gputrain_kind(address, &device);
  void *start = NULL;
  switch (attribute) {
  case 2: // CU_MEMORYTYPE_HOST or _DEVICE
    *(unsigned *)value = kind == DEVICE || kind == MANAGED ? 2 : 1;
    break;
  case 9: // the device's number
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

// Virtual memory management, for expandable segments: an allocation is counted when it is made, and gets its addresses
// later.
struct physical {
  size_t bytes;
  int device;
};
struct physical_properties {
  int type, handles, location, device;
};
int cuMemGetAllocationGranularity(size_t *bytes) {
  *bytes = PAGE;
  return OK;
}
int cuMemAddressReserve(void **start, size_t bytes, size_t alignment, void *wanted, uint64_t flags) {
  *start = gputrain_reserve(gputrain_physical(gputrain_current()), bytes);
  return *start ? OK : OUT_OF_MEMORY;
}
int cuMemAddressFree(void *start, size_t bytes) { return gputrain_release(start); }
int cuMemCreate(struct physical **handle, size_t bytes, const struct physical_properties *properties, uint64_t flags) {
  int device = gputrain_physical(properties->device);
  gputrain_count("mallocs", "cuMemCreate", bytes);
  int status = gputrain_take(device, bytes);
  if (status)
    return status;
  *handle = gputrain_handle();
  **handle = (struct physical){bytes, device};
  return OK;
}
int cuMemRelease(struct physical *handle) {
  gputrain_count("frees", "cuMemRelease", 0);
  gputrain_give(handle->device, handle->bytes);
  free(handle);
  return OK;
}
int cuMemMap(void *start, size_t bytes, size_t offset, void *handle, uint64_t flags) { return gputrain_map(start, bytes); }
int cuMemUnmap(void *start, size_t bytes) { return gputrain_unmap(start, bytes); }

// --- Kernels

int cuModuleLoad(void **module) { return give(module); }
int cuModuleLoadData(void **module) { return give(module); }
int cuModuleLoadDataEx(void **module) { return give(module); }
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
int cuFuncGetModule(void **module, void *function) { return give(module); }
int cuModuleGetGlobal_v2(void **start, size_t *bytes) {
  static void *block;
  if (!block)
    gputrain_allocate(&block, PAGE, MANAGED);
  if (start)
    *start = block;
  if (bytes)
    *bytes = PAGE;
  return OK;
}
int cuLinkCreate_v2(unsigned options, void *names, void *values, void **state) { return give(state); }
int cuLinkComplete(void *state, void **binary, size_t *bytes) {
  *bytes = 64;
  return give(binary);
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; // most threads of a block; registers, a guess
  return OK;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return OK; }
int cuFuncSetCacheConfig(void *function, int config) { return OK; }
int cuCtxSetLimit(int limit, size_t value) { return OK; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z) {
  gputrain_count("launches", function, (uint64_t)x * y * z);
  return OK;
}
int cuLaunchCooperativeKernel(void *function, unsigned x, unsigned y, unsigned z) { return cuLaunchKernel(function, x, y, z); }
int cuLaunchKernelEx(const unsigned *config, void *function, void **parameters, void **extra) {
  return cuLaunchKernel(function, config[0], config[1], config[2]);
}

// --- What waits for the GPU

static int wait(const char *function) {
  gputrain_count("waits", function, 0);
  return OK;
}
int cuStreamSynchronize(void *stream) { return wait("cuStreamSynchronize"); }
int cuCtxSynchronize(void) { return wait("cuCtxSynchronize"); }
int cuEventSynchronize(void *event) { return wait("cuEventSynchronize"); }

// --- Further functions

// A program that pushes a context and pops it again is on the same device as before.
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
  *blocks = threads > 0 ? gputrain_gpu()->threads_per_multiprocessor / threads : 1;
  return OK;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) {
  *clusters = 1;
  return OK;
}

// --- Functions by name

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  static void *self;
  char second[160];
  if (!self)
    self = dlopen("libcuda.so.1", RTLD_NOW);
  snprintf(second, sizeof second, "%s_v2", name);
  *function = dlsym(self, second);
  if (!*function)
    *function = dlsym(self, name);
  if (!*function && getenv("GPUTRAIN_EMULATED_TRACE"))
    fprintf(stderr, "gputrain: the driver has no function %s\n", name);
  if (status)
    *status = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
