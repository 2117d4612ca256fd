// Describes the emulated GPUs, and notes what the stand-ins cannot answer.
#include "emulated.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Only stand-ins export this symbol, so a process that finds it runs on an emulated GPU.
const int gputrain_emulated_gpu = 1;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct gpu gpu;
static int visible[MAX_DEVICES], visible_count;
static __thread int current;

static const char *field(const char *text, const char *key) {
  size_t length = strlen(key);
  for (const char *at = text; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
    if (!strncmp(at, key, length) && at[length] == '=')
      return at + length + 1;
  return "";
}

static size_t number(const char *text, const char *key) { return strtoull(field(text, key), NULL, 10); }

static void read_visible(void) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  visible_count = 0;
  if (!list) {
    for (visible_count = 0; visible_count < gpu.devices; visible_count++)
      visible[visible_count] = visible_count;
    return;
  }
  // As in the driver, the list ends at the first name that is not a device.
  for (const char *at = list; *at; at += strcspn(at, ","), at += *at == ',') {
    int found = -1;
    char *end;
    long wanted = strtol(at, &end, 10);
    if (end != at && (*end == ',' || !*end) && wanted >= 0 && wanted < gpu.devices)
      found = wanted;
    for (int device = 0; found < 0 && !strncmp(at, "GPU-", 4) && device < gpu.devices; device++) {
      unsigned char uuid[16];
      char text[48] = "GPU-", *to = text + 4;
      gputrain_uuid(uuid, device);
      for (int i = 0; i < 16; i++)
        to += sprintf(to, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
      if (!strncmp(at, text, strcspn(at, ",")))
        found = device;
    }
    if (found < 0)
      break;
    // As in the driver, a list that names a device twice shows none.
    if (gputrain_visible_number(found) < visible_count) {
      visible_count = 0;
      break;
    }
    visible[visible_count++] = found;
  }
}

static void read_gpu(void) {
  const char *text = getenv("GPUTRAIN_EMULATED_DEVICE");
  if (!text)
    return; // there is no device then
  gpu.devices = number(text, "devices") < MAX_DEVICES ? (int)number(text, "devices") : MAX_DEVICES;
  gpu.memory = number(text, "memory");
  gpu.context = number(text, "context");
  gpu.major = (int)number(text, "major");
  gpu.minor = (int)number(text, "minor");
  gpu.kernels = (int)number(text, "kernels");
  gpu.multiprocessors = (int)number(text, "multiprocessors");
  gpu.shared_per_multiprocessor = (int)number(text, "shared_per_multiprocessor");
  gpu.shared_per_block = (int)number(text, "shared_per_block");
  gpu.shared_reserved = gpu.shared_per_multiprocessor - gpu.shared_per_block;
  gpu.threads_per_multiprocessor = (int)number(text, "threads_per_multiprocessor");
  gpu.blocks_per_multiprocessor = (int)number(text, "blocks_per_multiprocessor");
  gpu.l2_bytes = (int)number(text, "l2_bytes");
  const char *name = field(text, "name"), *uuid = field(text, "uuid");
  snprintf(gpu.name, sizeof gpu.name, "%.*s", (int)strcspn(name, ","), name);
  for (int i = 0; i < 16 && uuid[0] && uuid[1]; i++, uuid += 2) {
    unsigned byte = 0;
    if (sscanf(uuid, "%2x", &byte) == 1)
      gpu.uuid[i] = (unsigned char)byte;
  }
  read_visible();
}

const struct gpu *gputrain_gpu(void) {
  pthread_once(&once, read_gpu);
  return &gpu;
}
void gputrain_read_gpu_again(void) { read_gpu(); }
int gputrain_visible(void) { return gputrain_gpu()->devices ? visible_count : 0; }
int gputrain_physical(int index) { return index >= 0 && index < gputrain_visible() ? visible[index] : -1; }
int gputrain_current(void) { return current; }
int gputrain_use(int index) {
  if (gputrain_physical(index) < 0)
    return INVALID_DEVICE;
  current = index;
  return OK;
}
void gputrain_uuid(unsigned char uuid[16], int physical) {
  memcpy(uuid, gpu.uuid, 16);
  uuid[15] = (unsigned char)(uuid[15] + physical);
}

int gputrain_visible_number(int physical) {
  int number = 0;
  while (number < visible_count && visible[number] != physical)
    number++;
  return number;
}

// --- For the stand-ins of the libraries

enum { UNKNOWNS = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *unknowns[UNKNOWNS];
GPUTRAIN_HOLD_WHILE_FORKING(lock)

void gputrain_unknown(const char *what) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < UNKNOWNS; i++) {
    if (!unknowns[i])
      unknowns[i] = what;
    if (!strcmp(unknowns[i], what))
      break;
  }
  pthread_mutex_unlock(&lock);
}

const char *gputrain_unknown_at(int index) {
  pthread_mutex_lock(&lock);
  const char *what = index >= 0 && index < UNKNOWNS ? unknowns[index] : NULL;
  pthread_mutex_unlock(&lock);
  return what;
}

static uint64_t estimated; // the largest estimated workspace
void gputrain_estimated(uint64_t bytes) {
  uint64_t known = __atomic_load_n(&estimated, __ATOMIC_RELAXED);
  while (known < bytes && !__atomic_compare_exchange_n(&estimated, &known, bytes, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    ;
}
uint64_t gputrain_estimated_bytes(void) { return __atomic_load_n(&estimated, __ATOMIC_RELAXED); }

// The calls of NCCL that exchanged nothing, by function.
static struct not_exchanged {
  const char *function;
  uint64_t calls, bytes; // the most bytes of a call
} not_exchanged[UNKNOWNS];

void gputrain_not_exchanged(const char *function, size_t bytes) {
  pthread_mutex_lock(&lock);
  struct not_exchanged *at = not_exchanged;
  while (at < not_exchanged + UNKNOWNS - 1 && at->function && strcmp(at->function, function))
    at++;
  at->function = function;
  at->calls++;
  at->bytes = at->bytes < bytes ? bytes : at->bytes;
  pthread_mutex_unlock(&lock);
}
const char *gputrain_not_exchanged_at(int index, uint64_t *calls, uint64_t *bytes) {
  if (index < 0 || index >= UNKNOWNS)
    return NULL;
  *calls = not_exchanged[index].calls;
  *bytes = not_exchanged[index].bytes;
  return not_exchanged[index].function;
}

int gputrain_traces(void) {
  static int state; // 0: not known yet, 1: no, 2: yes
  int known = __atomic_load_n(&state, __ATOMIC_RELAXED);
  if (!known) {
    known = getenv("GPUTRAIN_EMULATED_TRACE") ? 2 : 1;
    __atomic_store_n(&state, known, __ATOMIC_RELAXED);
  }
  return known == 2;
}

// Makes a call fail whose answer is unknown. A made-up size would become a wrong figure.
int gputrain_missing(const char *function, int status) {
  fprintf(stderr, "gputrain: the emulated GPU has no answer to %s, so the call fails\n", function);
  return status;
}

void gputrain_trace(const char *function, int *seen) {
  if (gputrain_traces() && !__atomic_exchange_n(seen, 1, __ATOMIC_RELAXED)) {
    fprintf(stderr, "gputrain: %s does nothing\n", function);
  }
}
