// Stands in for CUPTI, from which torch's profiler learns what the GPU does. It gets each call that counters.c counts, and
// invents when the GPU begins and ends the work of the call.
#include "emulated.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// Kinds of records, and errors.
enum { MEMCPY = 1, MEMSET = 2, DRIVER = 4, RUNTIME = 5, KERNEL = 10, EXTERNAL = 39, KINDS = 64 };
enum { QUEUE_EMPTY = 10, NO_MORE_RECORDS = 12, MULTIPLE_SUBSCRIBERS = 39 };
enum { NANOSECONDS = 100, STREAM = 7, EXTERNAL_KINDS = 8, DEPTH = 1024 };

// The first fields of the records in all versions of CUPTI. Every record is a block of the same size.
union record {
  int kind;
  struct {
    int kind, function;
    uint64_t start, end;
    uint32_t process, thread, correlation, status;
  } api;
  struct {
    int kind, unused[3];
    uint64_t start, end, completed;
    uint32_t device, context, stream;
    int32_t blocks[3], threads[3];
    uint32_t more[4], correlation;
    int64_t number;
    const char *name;
  } kernel;
  struct {
    int kind;
    uint8_t direction, from, to, flags;
    uint64_t bytes, start, end;
    uint32_t device, context, stream, correlation;
  } copy; // the second field of a memset differs, and nobody reads it
  struct {
    int kind, external;
    uint64_t id;
    uint32_t correlation;
  } external;
  char block[256];
};

// The functions of the runtime that have records, by CUPTI's numbers.
static const struct function {
  const char *name;
  int number;
} functions[] = {
    {"cudaMalloc", 20},
    {"cudaFree", 22},
    {"cudaFreeHost", 26},
    {"cudaHostAlloc", 27},
    {"cudaMemcpy", 31},
    {"cudaMemcpyAsync", 41},
    {"cudaMemcpy2DAsync", 44},
    {"cudaMemset", 49},
    {"cudaMallocManaged", 206},
    {"cudaStreamSynchronize", 131},
    {"cudaEventSynchronize", 137},
    {"cudaStreamWaitEvent", 147},
    {"cudaDeviceSynchronize", 165},
    {"cudaLaunchKernel", 211},
    {"cudaStreamBeginCapture", 315},
    {"cudaGraphLaunch", 311},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *buffer;
static size_t used, room;
static unsigned char enabled[KINDS];
static uint32_t last_correlation;
static uint64_t (*clock_of_profiler)(void);
static void (*request)(uint8_t **, size_t *, size_t *);
static void (*complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static void *subscriber;
static __thread uint32_t of_graph; // the correlation id of the last launch of a graph
static __thread struct {
  uint64_t ids[DEPTH];
  int depth;
} pushed[EXTERNAL_KINDS];

GPUTRAIN_HOLD_WHILE_FORKING(lock)

static void flush(void) {
  if (buffer)
    complete(NULL, 0, buffer, room, used);
  buffer = NULL;
  used = room = 0;
}
// A buffer is requested as soon as there is a record for it, because torch flushes only if it has given a buffer.
static void put(const union record *record) {
  size_t most;
  if (!enabled[record->kind] || !request)
    return;
  if (used + sizeof *record > room) {
    flush();
    request(&buffer, &room, &most);
  }
  memcpy(buffer + used, record, sizeof *record);
  used += sizeof *record;
}
static uint64_t now(void) {
  struct timespec time;
  if (clock_of_profiler)
    return clock_of_profiler();
  clock_gettime(CLOCK_REALTIME, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}
static const struct function *function_of(const char *name) {
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (!strcmp(functions[i].name, name))
      return functions + i;
  return NULL;
}

static void put_call(const char *name) {
  const struct function *function = function_of(name);
  uint64_t time = now();
  if (!function)
    return;
  for (int kind = 0; kind < EXTERNAL_KINDS; kind++)
    if (pushed[kind].depth)
      put(&(union record){
          .external = {EXTERNAL, kind, pushed[kind].ids[(pushed[kind].depth - 1) % DEPTH], last_correlation}});
  put(&(union record){.api = {RUNTIME, function->number, time, time + 1, (uint32_t)getpid(),
                              (uint32_t)(uintptr_t)pthread_self(), last_correlation, 0}});
}

static void profile(const char *what, const char *name, uint64_t bytes, int replayed) {
  int launches = !strcmp(what, "launches") || !strcmp(what, "library_calls") || !strcmp(what, "collectives");
  int sets = !strcmp(what, "memsets"), copies = what[1] == '2'; // as in h2d_pinned
  if (!strcmp(what, "waits") && !strcmp(name, "cudaMemcpy"))
    return; // the record of the copy stands for the wait
  pthread_mutex_lock(&lock);
  uint32_t correlation = replayed ? of_graph : ++last_correlation;
  if (!replayed)
    put_call(launches ? "cudaLaunchKernel" : name);
  if (!strcmp(what, "replays"))
    of_graph = correlation;
  uint64_t start = now(), end = start + NANOSECONDS;
  if (launches) {
    if (!strcmp(what, "collectives")) {
      char kernel[96] = "ncclDevKernel_";
      strncat(kernel, name + (strncmp(name, "nccl", 4) ? 0 : 4), sizeof kernel - strlen(kernel) - 1);
      name = gputrain_interned(kernel);
    }
    put(&(union record){.kernel = {.kind = KERNEL,
                                   .start = start,
                                   .end = end,
                                   .stream = STREAM,
                                   .blocks = {1, 1, 1},
                                   .threads = {1, 1, 1},
                                   .correlation = correlation,
                                   .name = name}});
  } else if (copies || sets) {
    int to_host = what[2] == 'h', from_host = *what == 'h', host = strstr(what, "pinned") ? 2 : 1;
    put(&(union record){.copy = {.kind = copies ? MEMCPY : MEMSET,
                                 .direction = (uint8_t)(from_host ? 1 : to_host ? 2 : 8),
                                 .from = (uint8_t)(from_host ? host : 3),
                                 .to = (uint8_t)(to_host ? host : 3),
                                 .bytes = bytes,
                                 .start = start,
                                 .end = end,
                                 .stream = STREAM,
                                 .correlation = correlation}});
  }
  pthread_mutex_unlock(&lock);
}

static void follow(void) {
  void (*told)(const char *, const char *, uint64_t, int) =
      enabled[RUNTIME] || enabled[DRIVER] || enabled[KERNEL] || enabled[MEMCPY] || enabled[MEMSET] ? profile : NULL;
  __atomic_store_n(&gputrain_profiler, told, __ATOMIC_RELEASE);
}
static int enable(int kind, int on) {
  if (kind < 0 || kind >= KINDS)
    return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  enabled[kind] = (unsigned char)on;
  pthread_mutex_unlock(&lock);
  follow();
  return OK;
}

int cuptiGetVersion(unsigned *version) {
  *version = CUDA_VERSION * 10;
  return OK;
}
int cuptiGetResultString(int status, const char **text) {
  *text = status == MULTIPLE_SUBSCRIBERS ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
          : status                       ? "error of an emulated GPU"
                                         : "CUPTI_SUCCESS";
  return OK;
}
int cuptiGetCallbackName(int domain, uint32_t number, const char **name) {
  *name = "INVALID";
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (functions[i].number == (int)number)
      *name = functions[i].name;
  return OK;
}
int cuptiSubscribe(void **handle, void *callback, void *data) {
  if (subscriber)
    return MULTIPLE_SUBSCRIBERS;
  *handle = subscriber = gputrain_handle();
  return OK;
}
int cuptiUnsubscribe(void *handle) {
  if (!gputrain_drop_handle(handle))
    return INVALID_VALUE;
  subscriber = NULL;
  return OK;
}
int cuptiActivityRegisterCallbacks(void *requests, void *completes) {
  request = (void (*)(uint8_t **, size_t *, size_t *))requests;
  complete = (void (*)(void *, uint32_t, uint8_t *, size_t, size_t))completes;
  return OK;
}
int cuptiActivityRegisterTimestampCallback(uint64_t (*clock)(void)) {
  clock_of_profiler = clock;
  return OK;
}
int cuptiActivityEnable(int kind) { return enable(kind, 1); }
int cuptiActivityDisable(int kind) { return enable(kind, 0); }
int cuptiActivityPushExternalCorrelationId(int kind, uint64_t id) {
  if (kind < 0 || kind >= EXTERNAL_KINDS)
    return INVALID_VALUE;
  pushed[kind].ids[pushed[kind].depth++ % DEPTH] = id;
  return OK;
}
int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) {
  if (kind < 0 || kind >= EXTERNAL_KINDS || !pushed[kind].depth)
    return QUEUE_EMPTY;
  uint64_t id = pushed[kind].ids[--pushed[kind].depth % DEPTH];
  if (last)
    *last = id;
  return OK;
}
int cuptiActivityFlushAll(uint32_t flag) {
  pthread_mutex_lock(&lock);
  flush();
  pthread_mutex_unlock(&lock);
  return OK;
}
int cuptiActivityGetNextRecord(uint8_t *of, size_t bytes, union record **record) {
  union record *next = *record ? *record + 1 : (union record *)of;
  if ((uint8_t *)(next + 1) > of + bytes)
    return NO_MORE_RECORDS;
  *record = next;
  return OK;
}
int cuptiActivityGetNumDroppedRecords(void *context, unsigned stream, size_t *dropped) {
  *dropped = 0;
  return OK;
}
