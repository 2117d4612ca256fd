// Calls the stand-ins as hostile and careless programs do. Compiled together with them, by test_stand_ins_in_c.py:
//
//   stand_ins checks                     each property once
//   stand_ins forks                      children that are forked while other threads allocate
//   stand_ins fuzz SEED CALLS THREADS    calls at random, with the memory in use compared with what they add up to
#include "emulated.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct properties {
  int type, handles, location, device;
  char rest[64];
};
static const struct properties on_first = {1, 0, 1, 0, ""}, on_no_device = {1, 0, 1, 99, ""};

int cudaMalloc(void **, size_t);
int cudaMallocManaged(void **, size_t, unsigned);
int cudaHostAlloc(void **, size_t, unsigned);
int cudaFree(void *);
int cudaFreeHost(void *);
int cudaHostRegister(void *, size_t, unsigned);
int cudaHostUnregister(void *);
int cudaMemGetInfo(size_t *, size_t *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpy2DAsync(char *, size_t, const char *, size_t, size_t, size_t, int, void *);
int cudaMemset(void *, int, size_t);
int cudaSetDevice(int);
int cudaDeviceGetAttribute(int *, int, int);
int cudaDeviceGetPCIBusId(char *, int, int);
int cudaDeviceCanAccessPeer(int *, int, int);
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, const void *, int, size_t);
int cudaStreamCreateWithPriority(void **, unsigned, int);
int cudaStreamGetPriority(const void *, int *);
int cudaStreamDestroy(void *);
int cudaEventCreate(void **);
int cudaEventRecord(void *, void *);
int cudaEventElapsedTime(float *, const void *, const void *);
int cudaEventDestroy(void *);
int cudaDeviceSynchronize(void);
const char *cudaGetErrorString(int);
int cuMemAddressReserve(void **, size_t, size_t, void *, uint64_t);
int cuMemAddressFree(void *, size_t);
int cuMemCreate(void **, size_t, const struct properties *, uint64_t);
int cuMemRelease(void *);
int cuMemRetainAllocationHandle(void **, void *);
int cuMemGetAllocationPropertiesFromHandle(struct properties *, void *);
int cuMemMap(void *, size_t, size_t, void *, uint64_t);
int cuMemUnmap(void *, size_t);
int cuMemSetAccess(const void *, size_t, const void *, size_t);
int cuMemGetAddressRange_v2(void **, size_t *, void *);
int cuCtxSetCurrent(void *);
int cuDeviceTotalMem_v2(size_t *, int);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
int nvmlDeviceGetHandleByIndex_v2(unsigned, void **);
int nvmlDeviceGetMemoryInfo(void *, unsigned long long[3]);
int nvmlDeviceGetTemperature(void *, int, unsigned *);
int nvmlDeviceGetComputeRunningProcesses_v3(void *, unsigned *, void *);
int nvmlDeviceGetUUID(void *, char *, unsigned);
const char *cusparseGetErrorString(int);
uint64_t gputrain_watch(uintptr_t);
void gputrain_counters_begin(void);
void gputrain_counters_end(void);

static const size_t MIB = 1 << 20, GIB = 1 << 30;
static int failures;

void note_failure(int line, const char *condition) {
  __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
  printf("line %d: %s\n", line, condition);
}
void check_captures(void); // in captures.c

#define CHECK(condition) ((condition) ? (void)0 : note_failure(__LINE__, #condition))

static size_t used(void) {
  size_t left = 0, total = 0;
  CHECK(cudaMemGetInfo(&left, &total) == OK);
  return total - left;
}

static void check_sizes(void) {
  static const size_t HUGE[] = {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - PAGE, (size_t)1 << 63, (size_t)1 << 43};
  size_t before = used();
  for (size_t i = 0; i < sizeof HUGE / sizeof *HUGE; i++) {
    void *out = NULL;
    CHECK(cudaMalloc(&out, HUGE[i]) == OUT_OF_MEMORY && !out);
    CHECK(cudaMallocManaged(&out, HUGE[i], 1) == OUT_OF_MEMORY && !out);
    CHECK(cudaHostAlloc(&out, HUGE[i], 0) == OUT_OF_MEMORY && !out);
    CHECK(cuMemAddressReserve(&out, HUGE[i], 0, NULL, 0) == OUT_OF_MEMORY && !out);
    CHECK(cuMemCreate(&out, HUGE[i] / PAGE * PAGE, &on_first, 0) == OUT_OF_MEMORY && !out);
    CHECK(cudaHostRegister(&before, HUGE[i], 0) == INVALID_VALUE);
  }
  void *out = NULL;
  CHECK(cuMemCreate(&out, 1, &on_first, 0) == INVALID_VALUE);
  CHECK(cuMemCreate(&out, 0, &on_first, 0) == INVALID_VALUE);
  CHECK(cuMemAddressReserve(&out, 0, 0, NULL, 0) == INVALID_VALUE);
  CHECK(cuMemCreate(&out, PAGE, &on_no_device, 0) == INVALID_VALUE);
  CHECK(used() == before);
}

static void check_occupancy(void) {
  int blocks = -1;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, NULL, 256, 0xFFFFFC00) == OK && blocks == 0);
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, NULL, 256, SIZE_MAX) == OK && blocks == 0);
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, NULL, 2048, 0) == OK && blocks == 0);
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, NULL, 0, 0) == INVALID_VALUE);
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, NULL, 1024, 227 << 10) == OK && blocks == 1);
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, NULL, 1024, 0) == OK && blocks == 2);
}

static void check_copies(void) {
  enum { BYTES = 4 << 20, ON_HOST = 64 << 10 };
  char *device = NULL, *neighbour = NULL, *pinned = NULL, *host = malloc(BYTES);
  CHECK(cudaMalloc((void **)&device, BYTES) == OK && cudaMalloc((void **)&neighbour, BYTES) == OK);
  CHECK(cudaHostAlloc((void **)&pinned, ON_HOST, 0) == OK);
  memset(host, 5, BYTES);
  CHECK(cudaMemcpy(device, host, 100, 1) == OK && cudaMemcpy(pinned, device, 100, 2) == OK && pinned[99] == 5);
  CHECK(cudaMemcpy(device, host, (size_t)BYTES + 1, 1) == INVALID_VALUE);
  CHECK(cudaMemcpy(device + BYTES - 1, host, 2, 1) == INVALID_VALUE);
  CHECK(cudaMemcpy(host, device, SIZE_MAX, 2) == INVALID_VALUE);
  CHECK(cudaMemcpy(NULL, host, 1, 1) == INVALID_VALUE && cudaMemcpy(NULL, NULL, 0, 1) == OK);
  CHECK(cudaMemcpy(pinned, device, ON_HOST + 1, 2) == INVALID_VALUE);
  CHECK(cudaMemset(device, 1, (size_t)BYTES + 1) == INVALID_VALUE && cudaMemset(host, 1, 1) == INVALID_VALUE);
  CHECK(cudaMemcpy2DAsync(device, 100, host, 100, 100, BYTES / 100, 1, NULL) == OK);
  CHECK(cudaMemcpy2DAsync(device, 100, host, 100, 100, BYTES / 100 + 1, 1, NULL) == INVALID_VALUE);
  CHECK(cudaMemcpy2DAsync(device, 1 << 20, host, 1 << 20, 1, SIZE_MAX, 1, NULL) == INVALID_VALUE);
  CHECK(cudaMemcpy2DAsync(device, 10, host, 100, 11, 1, 1, NULL) == INVALID_PITCH);
  CHECK(cudaFree(device) == OK && cudaFree(device) == INVALID_VALUE && cudaFree(neighbour + 1) == INVALID_VALUE);
  CHECK(cudaMemcpy(device, host, 1, 1) == INVALID_VALUE && cudaMemcpy(host, device, 1, 2) == INVALID_VALUE);
  CHECK(cudaMemset(device, 0, 1) == INVALID_VALUE);
  CHECK(!strcmp(cudaGetErrorString(INVALID_VALUE), "invalid argument"));
  CHECK(cudaFree(neighbour) == OK && cudaFreeHost(pinned) == OK && cudaFreeHost(pinned) == INVALID_VALUE);
  free(host);
}

static void check_registered(void) {
  char *host = malloc(4 * MIB), *device = NULL;
  CHECK(cudaHostRegister(host, MIB, 0) == OK && cudaHostRegister(host, MIB, 0) == ALREADY_REGISTERED);
  CHECK(cudaHostRegister(host + MIB / 2, MIB, 0) == ALREADY_REGISTERED);
  CHECK(cudaFreeHost(host) == INVALID_VALUE && cudaHostUnregister(host + 1) == NOT_REGISTERED);
  CHECK(cudaMalloc((void **)&device, 4 * MIB) == OK && cudaHostUnregister(device) == NOT_REGISTERED);
  CHECK(cudaMemcpy(device, host, 4 * MIB, 1) == OK); // one part of it is registered
  CHECK(cudaHostUnregister(host) == OK && cudaHostUnregister(host) == NOT_REGISTERED && cudaFree(device) == OK);
  free(host);
}

static void check_mappings(void) {
  size_t before = used();
  char *start = NULL, *plain = NULL, byte = 1;
  void *one = NULL, *two = NULL, *again = NULL;
  struct properties found;
  CHECK(cuMemAddressReserve((void **)&start, 64 * MIB, 0, NULL, 0) == OK);
  CHECK(cuMemCreate(&one, 4 * MIB, &on_first, 0) == OK && cuMemCreate(&two, 4 * MIB, &on_first, 0) == OK);
  CHECK(cudaMemcpy(start, &byte, 1, 1) == INVALID_VALUE); // nothing is mapped
  CHECK(cuMemMap(start, 8 * MIB, 0, one, 0) == INVALID_VALUE && cuMemMap(start, 4 * MIB, 2 * MIB, one, 0) == INVALID_VALUE);
  CHECK(cuMemMap(start + 62 * MIB, 4 * MIB, 0, one, 0) == INVALID_VALUE);
  CHECK(cuMemMap(start, 4 * MIB, 0, &byte, 0) == INVALID_VALUE);
  CHECK(cuMemMap(start, 4 * MIB, 0, one, 0) == OK && cuMemMap(start, 4 * MIB, 0, two, 0) == INVALID_VALUE);
  CHECK(cuMemMap(start + 2 * MIB, 4 * MIB, 0, two, 0) == INVALID_VALUE);
  CHECK(cuMemMap(start + 4 * MIB, 4 * MIB, 0, two, 0) == OK && cuMemSetAccess(start, 8 * MIB, NULL, 1) == OK);
  CHECK(cudaMemset(start + 4 * MIB - 1, 7, 2) == OK && cudaMemset(start + 8 * MIB - 1, 7, 2) == INVALID_VALUE);
  CHECK(cuMemSetAccess(start, 64 * MIB, NULL, 1) == INVALID_VALUE);
  CHECK(cudaFree(start) == INVALID_VALUE && cuMemAddressFree(start, 64 * MIB) == INVALID_VALUE);
  CHECK(cuMemUnmap(start, 2 * MIB) == INVALID_VALUE && cuMemUnmap(start + 8 * MIB, 2 * MIB) == INVALID_VALUE);
  CHECK(cuMemRetainAllocationHandle(&again, start + 5 * MIB) == OK && again == two);
  CHECK(cuMemRetainAllocationHandle(&again, start + 9 * MIB) == INVALID_VALUE && cuMemRelease(two) == OK);
  CHECK(cuMemGetAllocationPropertiesFromHandle(&found, two) == OK && found.location == 1 && found.device == 0);
  CHECK(cuMemRelease(two) == OK && cuMemRelease(two) == INVALID_VALUE && used() == before + 8 * MIB); // still mapped
  CHECK(cuMemUnmap(start, 8 * MIB) == OK && used() == before + 4 * MIB);
  CHECK(cuMemRelease(one) == OK && cuMemRelease(one) == INVALID_VALUE && cuMemRelease(NULL) == INVALID_VALUE);
  CHECK(cuMemRelease(&byte) == INVALID_VALUE && used() == before);
  CHECK(cudaMalloc((void **)&plain, PAGE) == OK && cuMemAddressFree(plain, PAGE) == INVALID_VALUE && cudaFree(plain) == OK);
  CHECK(cuMemAddressFree(start, 64 * MIB) == OK && cuMemAddressFree(start, 64 * MIB) == INVALID_VALUE);
}

// Managed memory moves to the host where the device has no place for it.
static void check_managed(void) {
  size_t before = used(), total = 0, left = 0;
  void *managed = NULL, *device = NULL;
  CHECK(cudaMallocManaged(&managed, 10 * GIB, 1) == OK && used() == before + 10 * GIB);
  CHECK(cudaMalloc(&device, 75 * GIB) == OK && cudaMemGetInfo(&left, &total) == OK && left == 0);
  CHECK(cudaFree(device) == OK && used() == before + 10 * GIB && cudaFree(managed) == OK && used() == before);
}

static void check_handles(void) {
  void *stream = NULL, *event = NULL, *device = NULL;
  int number = 1;
  float milliseconds;
  CHECK(cudaStreamCreateWithPriority(&stream, 0, -1) == OK && cudaStreamGetPriority(stream, &number) == OK && number == -1);
  CHECK(cudaStreamGetPriority(NULL, &number) == OK && number == 0);
  CHECK(cudaStreamDestroy(stream) == OK && cudaStreamDestroy(stream) == INVALID_HANDLE);
  CHECK(cudaStreamGetPriority(stream, &number) == INVALID_HANDLE);
  CHECK(cudaEventCreate(&event) == OK && cudaEventElapsedTime(&milliseconds, event, event) == INVALID_HANDLE);
  CHECK(cudaEventRecord(event, NULL) == OK && cudaEventElapsedTime(&milliseconds, event, event) == OK);
  CHECK(cudaEventDestroy(event) == OK && cudaEventDestroy(event) == INVALID_HANDLE);
  CHECK(cudaEventRecord(event, NULL) == INVALID_HANDLE && cudaEventRecord(&number, NULL) == INVALID_HANDLE);
  char text[64];
  unsigned long long memory[3];
  unsigned celsius = 0;
  size_t bytes;
  CHECK(cudaSetDevice(-1) == INVALID_DEVICE && cudaSetDevice(99) == INVALID_DEVICE);
  CHECK(cudaDeviceGetAttribute(&number, 16, 99) == INVALID_DEVICE && cuDeviceTotalMem_v2(&bytes, -1) == INVALID_DEVICE);
  CHECK(cudaDeviceGetPCIBusId(text, sizeof text, 99) == INVALID_DEVICE);
  CHECK(cudaDeviceCanAccessPeer(&number, 0, -7) == INVALID_DEVICE);
  CHECK(cuCtxSetCurrent(&number) == INVALID_CONTEXT);
  CHECK(nvmlDeviceGetHandleByIndex_v2(7, &device) == 2 && nvmlDeviceGetHandleByIndex_v2(0, &device) == OK);
  CHECK(nvmlDeviceGetTemperature(device, 0, &celsius) == OK && celsius > 0 && nvmlDeviceGetUUID(device, text, 64) == OK);
  CHECK(nvmlDeviceGetMemoryInfo(&number, memory) == 2 && nvmlDeviceGetMemoryInfo((char *)device + 99, memory) == 2);
  CHECK(nvmlDeviceGetUUID(NULL, text, sizeof text) == 2);
  unsigned count = 1;
  CHECK(nvmlDeviceGetComputeRunningProcesses_v3(&number, &count, NULL) == 2);
  CHECK(*cusparseGetErrorString(10) && *cusparseGetErrorString(-1));
}

enum { THREADS = 4 };
static volatile int stop;

static void *allocates(void *unused) {
  while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
    void *device = NULL, *event = NULL, *function = NULL;
    int status;
    if (cudaMalloc(&device, PAGE) != OK || cudaEventCreate(&event) != OK || cudaEventRecord(event, NULL) != OK)
      __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
    cuGetProcAddress_v2("cuMemRelease", &function, 0, 0, &status);
    gputrain_count("launches", "kernel", 1);
    gputrain_unknown("nothing");
    gputrain_watch((uintptr_t)device);
    cudaEventDestroy(event);
    cudaFree(device);
  }
  return NULL;
}

static void check_threads(void) {
  pthread_t threads[THREADS];
  size_t before = used();
  gputrain_counters_begin();
  __atomic_store_n(&stop, 0, __ATOMIC_RELAXED);
  for (int i = 0; i < THREADS; i++)
    pthread_create(threads + i, NULL, allocates, NULL);
  usleep(200000);
  __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  gputrain_counters_end();
  CHECK(used() == before);
}

// A child finds no lock that is held, and its calls change nothing for its parent.
static void check_forks(void) {
  enum { CHILDREN = 200, SECONDS = 20 };
  pthread_t threads[THREADS];
  void *held = NULL;
  CHECK(cudaMalloc(&held, GIB) == OK);
  size_t before = used();
  for (int i = 0; i < THREADS; i++)
    pthread_create(threads + i, NULL, allocates, NULL);
  for (int i = 0; i < CHILDREN; i++) {
    pid_t child = fork();
    if (!child) {
      size_t left, total;
      void *out = NULL;
      alarm(SECONDS); // ends a child that waits for a lock
      int errors = cudaFree(held) != NOT_INITIALIZED || cudaMalloc(&out, PAGE) != NOT_INITIALIZED;
      errors |= cudaMemGetInfo(&left, &total) != NOT_INITIALIZED || cudaDeviceSynchronize() != NOT_INITIALIZED;
      errors |= cudaMemset(held, 0, 1) != NOT_INITIALIZED || cuMemRelease(held) != NOT_INITIALIZED;
      gputrain_count("launches", "kernel", 1);
      gputrain_unknown("nothing");
      gputrain_watch(1);
      gputrain_drop_handle(gputrain_handle());
      _exit(errors);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  CHECK(used() == before);
}

// --- Calls at random

enum { HELD = 32, HOST_BYTES = 4 << 20 };

struct fuzz {
  uint64_t state;
  int calls, alone;
  struct {
    char *start;
    size_t bytes;
  } device[HELD], managed[HELD], host[HELD], reserved[HELD];
  struct {
    void *handle;
    char *mapped; // NULL where it is not
    size_t bytes;
  } physical[HELD];
  void *event[HELD], *gone;
  size_t in_use, managed_in_use;
  char *buffer;
};

static uint64_t draw(struct fuzz *of, uint64_t below) { // by xorshift
  of->state ^= of->state << 13;
  of->state ^= of->state >> 7;
  of->state ^= of->state << 17;
  return of->state % below;
}

static size_t rounded(size_t bytes) { return bytes > SIZE_MAX - PAGE ? SIZE_MAX : (bytes + PAGE - 1) / PAGE * PAGE; }

static size_t size_at_random(struct fuzz *of) {
  switch (draw(of, 8)) {
  case 0:
    return 0;
  case 1:
    return SIZE_MAX - draw(of, 3 * PAGE);
  case 2:
    return (size_t)1 << draw(of, 64);
  case 3:
    return draw(of, 20 * GIB);
  default:
    return draw(of, 64 * MIB);
  }
}

static char *address_at_random(struct fuzz *of) {
  size_t at = draw(of, HELD);
  switch (draw(of, 7)) {
  case 0:
    return NULL;
  case 1:
    return of->gone;
  case 2:
    return of->physical[at].mapped;
  case 3:
    return of->reserved[at].start ? of->reserved[at].start + draw(of, of->reserved[at].bytes) : NULL;
  case 4:
    return of->managed[at].start;
  case 5:
    return of->device[at].start ? of->device[at].start + draw(of, of->device[at].bytes) : NULL;
  default:
    return of->device[at].start;
  }
}

static size_t fuzz_memory_in_use(const struct fuzz *of, size_t context, size_t total) {
  size_t all = context + of->in_use;
  return of->managed_in_use < total - all ? all + of->managed_in_use : total;
}

static void one_call(struct fuzz *of) {
  size_t at = draw(of, HELD), bytes = size_at_random(of), other = draw(of, HELD);
  void *out = NULL;
  char *address = address_at_random(of);
  int status;
  switch (draw(of, 16)) {
  case 0: // device memory
  case 1:
    if (of->device[at].start) {
      CHECK(cudaFree(of->device[at].start) == OK);
      of->gone = of->device[at].start;
      of->in_use -= of->device[at].bytes;
      of->device[at].start = NULL;
    } else if (cudaMalloc(&out, bytes) == OK && out) {
      of->device[at].start = out;
      of->in_use += of->device[at].bytes = rounded(bytes);
    }
    return;
  case 2:
    if (of->managed[at].start) {
      CHECK(cudaFree(of->managed[at].start) == OK);
      of->managed_in_use -= of->managed[at].bytes;
      of->managed[at].start = NULL;
    } else if (cudaMallocManaged(&out, bytes % (100 * GIB), 1) == OK && out) {
      of->managed[at].start = out;
      of->managed_in_use += of->managed[at].bytes = rounded(bytes % (100 * GIB));
    }
    return;
  case 3:
    if (of->host[at].start) {
      CHECK(cudaFreeHost(of->host[at].start) == OK);
      of->host[at].start = NULL;
    } else if (cudaHostAlloc(&out, bytes, 0) == OK && out)
      of->host[at].start = out;
    return;
  case 4: // addresses
    if (!of->reserved[at].start) {
      if (cuMemAddressReserve(&out, bytes % (8 * GIB), 0, NULL, 0) == OK) {
        of->reserved[at].start = out;
        of->reserved[at].bytes = rounded(bytes % (8 * GIB));
      }
      return;
    }
    for (size_t i = 0; i < HELD; i++)
      if (of->physical[i].mapped >= of->reserved[at].start &&
          of->physical[i].mapped < of->reserved[at].start + of->reserved[at].bytes) {
        CHECK(cuMemAddressFree(of->reserved[at].start, of->reserved[at].bytes) == INVALID_VALUE);
        return;
      }
    CHECK(cuMemAddressFree(of->reserved[at].start, of->reserved[at].bytes) == OK);
    of->reserved[at].start = NULL;
    return;
  case 5: // memory for them
  case 6:
    if (!of->physical[at].handle) {
      bytes = draw(of, 2) ? bytes : rounded(bytes % GIB);
      if (cuMemCreate(&out, bytes, &on_first, 0) == OK) {
        of->physical[at].handle = out;
        of->in_use += of->physical[at].bytes = bytes;
      }
    } else if (of->physical[at].mapped) {
      CHECK(cuMemUnmap(of->physical[at].mapped, of->physical[at].bytes) == OK);
      of->physical[at].mapped = NULL;
    } else if (of->reserved[other].start && draw(of, 2)) {
      char *start = of->reserved[other].start + draw(of, of->reserved[other].bytes) / PAGE * PAGE;
      if (cuMemMap(start, of->physical[at].bytes, 0, of->physical[at].handle, 0) == OK) {
        CHECK(start + of->physical[at].bytes <= of->reserved[other].start + of->reserved[other].bytes);
        of->physical[at].mapped = start;
        CHECK(cudaMemset(start, 1, 1) == OK);
      }
    } else {
      CHECK(cuMemRelease(of->physical[at].handle) == OK);
      if (of->alone)
        CHECK(cuMemRelease(of->physical[at].handle) == INVALID_VALUE);
      of->in_use -= of->physical[at].bytes;
      of->physical[at].handle = NULL;
    }
    return;
  case 7:
    if (of->event[at]) {
      CHECK(cudaEventRecord(of->event[at], NULL) == OK && cudaEventDestroy(of->event[at]) == OK);
      of->event[at] = NULL;
    } else
      CHECK(cudaEventCreate(of->event + at) == OK);
    return;
  // What follows must fail or do no harm. Addresses that are not this thread's own may be another one's, which gives them
  // back at any time.
  case 8:
    address = (char *)((uintptr_t)address + 1 + draw(of, PAGE - 1));
    if (of->alone && (uintptr_t)address % PAGE)
      CHECK(cudaFree(address) == INVALID_VALUE && cudaHostUnregister(address) == NOT_REGISTERED);
    return;
  case 9:
  case 10:
    if (!of->alone) {
      address = of->device[at].start;
      bytes = address ? bytes % of->device[at].bytes : bytes;
    }
    if (bytes <= HOST_BYTES || bytes > (size_t)1 << 42)
      draw(of, 2) ? cudaMemcpy(address, of->buffer, bytes, 1) : cudaMemcpy(of->buffer, address, bytes, 2);
    return;
  case 11:
    if (of->alone)
      cudaMemset(address, (int)draw(of, 2), bytes);
    return;
  case 12:
    if (of->alone && (bytes % PAGE || !bytes))
      CHECK(cuMemMap(address, bytes, draw(of, 2) ? SIZE_MAX : 0, of->buffer, 0) == INVALID_VALUE);
    return;
  case 13:
    CHECK(cuMemRelease(address) == INVALID_VALUE && cudaEventDestroy(address) == INVALID_HANDLE);
    return;
  case 14:
    status = cuMemGetAddressRange_v2(&out, &bytes, address);
    CHECK(status == OK || status == INVALID_VALUE);
    return;
  case 15:
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&status, NULL, (int)bytes, size_at_random(of));
  }
}

static void *fuzz(void *argument) {
  struct fuzz *of = argument;
  size_t left, total = 0, context = of->alone ? used() : 0;
  CHECK(cudaMemGetInfo(&left, &total) == OK);
  of->buffer = malloc(HOST_BYTES);
  for (int i = 0; i < of->calls && !__atomic_load_n(&failures, __ATOMIC_RELAXED); i++) {
    one_call(of);
    if (of->alone)
      CHECK(used() == fuzz_memory_in_use(of, context, total));
  }
  for (size_t i = 0; i < HELD; i++) {
    if (of->physical[i].mapped)
      CHECK(cuMemUnmap(of->physical[i].mapped, of->physical[i].bytes) == OK);
    if (of->physical[i].handle)
      CHECK(cuMemRelease(of->physical[i].handle) == OK);
    if (of->event[i])
      CHECK(cudaEventDestroy(of->event[i]) == OK);
    CHECK(cudaFree(of->device[i].start) == OK && cudaFree(of->managed[i].start) == OK);
    CHECK(cudaFreeHost(of->host[i].start) == OK);
  }
  for (size_t i = 0; i < HELD; i++)
    if (of->reserved[i].start)
      CHECK(cuMemAddressFree(of->reserved[i].start, of->reserved[i].bytes) == OK);
  free(of->buffer);
  return NULL;
}

static void fuzz_all(uint64_t seed, int calls, int threads) {
  struct fuzz *all = calloc((size_t)threads, sizeof *all);
  pthread_t *running = calloc((size_t)threads, sizeof *running);
  size_t before = used();
  for (int i = 0; i < threads; i++) {
    all[i].state = (seed + 1) * 0x9E3779B97F4A7C15u + (uint64_t)i * 2 + 1;
    all[i].calls = calls;
    all[i].alone = threads == 1;
    pthread_create(running + i, NULL, fuzz, all + i);
  }
  for (int i = 0; i < threads; i++)
    pthread_join(running[i], NULL);
  CHECK(used() == before);
  free(all);
  free(running);
}

int main(int count, char **arguments) {
  const char *what = count > 1 ? arguments[1] : "";
  if (!strcmp(what, "checks")) {
    check_sizes();
    check_occupancy();
    check_copies();
    check_registered();
    check_mappings();
    check_managed();
    check_handles();
    check_threads();
    check_captures();
  } else if (!strcmp(what, "forks"))
    check_forks();
  else if (count == 5)
    fuzz_all(strtoull(arguments[2], NULL, 10), atoi(arguments[3]), atoi(arguments[4]));
  else
    return 2;
  return failures ? 1 : 0;
}
