// Whose memory of the emulated GPUs is where.
//
// Device memory is address space of one range for each device, given out as NVIDIA's driver does: torch's allocator takes
// the lower of two free blocks of one size, so the addresses decide what it can reuse. No host memory is behind it but for
// the pages that small copies touch.
#include "emulated.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t SPAN = (size_t)1 << 42;  // addresses of each device: fragments of virtual memory must not run out
static const size_t LARGE_COPY = 1 << 20;    // bytes; larger contents are not kept
static const size_t SMALL_MEMORY = 64 << 10; // host memory is given in these
static const size_t RESERVATION = 32 << 20, FIRST_RESERVATION = 408 << 20;

// What other processes read of this one, in a file of the folder GPUTRAIN_EMULATED_STATE that is named by its id.
struct state {
  uint64_t used[MAX_DEVICES], peak[MAX_DEVICES];
  uint64_t refused, refused_bytes; // requests that did not fit, and the size of the last one
};

struct range {
  uintptr_t start;
  size_t bytes;
  int kind, device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct state private_state, *state = &private_state;
static struct range *ranges; // by ascending address
static size_t count, room;
static uintptr_t arenas[MAX_DEVICES];
static struct reservation {
  uintptr_t start, end;
} *reservations[MAX_DEVICES]; // by ascending address
static size_t reserved[MAX_DEVICES];
static int touched[MAX_DEVICES];
static int unlimited; // whether devices give more memory than they have

// --- Addresses; the static functions need the lock

// The first range that ends behind the address.
static size_t place(uintptr_t address) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges[middle].start + ranges[middle].bytes <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static struct range *find(const void *address) {
  size_t at = place((uintptr_t)address);
  return at < count && ranges[at].start <= (uintptr_t)address ? ranges + at : NULL;
}

static void add(uintptr_t start, size_t bytes, int kind, int device) {
  if (count == room) {
    room = room ? 2 * room : 1024;
    ranges = realloc(ranges, room * sizeof *ranges);
    if (!ranges)
      abort();
  }
  size_t at = place(start);
  memmove(ranges + at + 1, ranges + at, (count++ - at) * sizeof *ranges);
  ranges[at] = (struct range){start, bytes, kind, device};
}

static void drop(struct range *range) { memmove(range, range + 1, (size_t)(ranges + --count - range) * sizeof *range); }

// The lowest free addresses in a reservation, or 0.
static uintptr_t hole_in(const struct reservation *in, size_t bytes) {
  uintptr_t start = in->start;
  for (size_t at = place(start); at < count && ranges[at].start < in->end; at++) {
    if (ranges[at].start - start >= bytes)
      return start;
    start = ranges[at].start + ranges[at].bytes;
  }
  return in->end - start >= bytes ? start : 0;
}

static void insert_reservation(int device, size_t at, uintptr_t start, uintptr_t end) {
  struct reservation *all = realloc(reservations[device], (reserved[device] + 1) * sizeof *all);
  if (!all)
    abort();
  memmove(all + at + 1, all + at, (reserved[device]++ - at) * sizeof *all);
  all[at] = (struct reservation){start, end};
  reservations[device] = all;
}

// As driver 580 put 150 allocations of 1 MiB to 4 GiB on an H200: at the lowest free addresses of its reservations, or else
// in a new one of whole 32 MiB, as high as it fits below the first.
static uintptr_t free_addresses(int device, size_t bytes) {
  if (!arenas[device]) {
    void *arena = mmap(NULL, SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) {
      fputs("gputrain: the emulated GPU needs 4 TiB of address space; raise the limit (ulimit -v unlimited)\n", stderr);
      return 0;
    }
    madvise(arena, SPAN, MADV_NOHUGEPAGE); // or reading a byte would take 2 MiB of the host
    arenas[device] = ((uintptr_t)arena + PAGE - 1) / PAGE * PAGE;
    uintptr_t end = arenas[device] + SPAN - PAGE;
    insert_reservation(device, 0, end - FIRST_RESERVATION, end);
  }
  const struct reservation *all = reservations[device];
  for (size_t at = 0; at < reserved[device]; at++) {
    uintptr_t start = hole_in(all + at, bytes);
    if (start)
      return start;
  }
  size_t size = (bytes + RESERVATION - 1) / RESERVATION * RESERVATION, at = reserved[device] - 1;
  while (at > 0 && all[at].start - all[at - 1].end < size)
    at--;
  uintptr_t end = all[at].start;
  if (end - arenas[device] < size)
    return 0;
  insert_reservation(device, at, end - size, end);
  return end - size;
}

// Gives back the reservation of addresses that have become free, if it is wholly free and not the first.
static void drop_reservation(int device, uintptr_t address) {
  struct reservation *all = reservations[device];
  for (size_t at = 0; at + 1 < reserved[device]; at++)
    if (all[at].start <= address && address < all[at].end && hole_in(all + at, all[at].end - all[at].start)) {
      memmove(all + at, all + at + 1, (--reserved[device] - at) * sizeof *all);
      return;
    }
}

static void share_state(void) {
  const char *folder = getenv("GPUTRAIN_EMULATED_STATE");
  char path[4096];
  if (!folder || (size_t)snprintf(path, sizeof path, "%s/%d", folder, (int)getpid()) >= sizeof path)
    return;
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0)
    return;
  if (!ftruncate(file, sizeof *state)) {
    void *shared = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED)
      state = shared;
  }
  close(file);
}

static int take(int device, size_t bytes) {
  if (state == &private_state && !touched[device])
    share_state();
  if (!touched[device]) {
    touched[device] = 1;
    state->used[device] += gputrain_gpu()->context;
  }
  if (!unlimited && state->used[device] + bytes > gputrain_gpu()->memory) {
    state->refused++;
    state->refused_bytes = bytes;
    return OUT_OF_MEMORY;
  }
  state->used[device] += bytes;
  if (state->used[device] > state->peak[device])
    state->peak[device] = state->used[device];
  return OK;
}

// For checks that a program would not make: what they take is no figure, and must not end it.
void gputrain_lift_limit(void) {
  pthread_mutex_lock(&lock);
  unlimited = 1;
  pthread_mutex_unlock(&lock);
}

static uintptr_t host_memory(size_t bytes) {
  void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? 0 : (uintptr_t)start;
}

// The driver gives device memory in pages of 2 MiB. Smaller requests share a page in truth; torch's allocator makes none.
int gputrain_allocate(void **out, size_t bytes, int kind) {
  *out = NULL;
  if (gputrain_visible() == 0)
    return NO_DEVICE;
  if (!bytes)
    return OK;
  int device = gputrain_physical(gputrain_current()), status = OK;
  size_t page = kind == HOST ? SMALL_MEMORY : PAGE;
  bytes = (bytes + page - 1) / page * page;
  pthread_mutex_lock(&lock);
  if (kind == DEVICE)
    status = take(device, bytes);
  if (status == OK) {
    uintptr_t start = kind == HOST ? host_memory(bytes) : free_addresses(device, bytes);
    if (start && kind != HOST && mprotect((void *)start, bytes, PROT_READ | PROT_WRITE))
      start = 0;
    if (start) {
      add(start, bytes, kind, device);
      *out = (void *)start;
    } else {
      if (kind == DEVICE)
        state->used[device] -= bytes;
      status = OUT_OF_MEMORY;
    }
  }
  pthread_mutex_unlock(&lock);
  return status;
}

static void forget_contents(uintptr_t start, size_t bytes) {
  madvise((void *)start, bytes, MADV_DONTNEED);
  mprotect((void *)start, bytes, PROT_NONE);
}

int gputrain_free(void *start) {
  if (!start)
    return OK;
  pthread_mutex_lock(&lock);
  struct range *range = find(start);
  int known = range && range->start == (uintptr_t)start;
  if (known) {
    if (range->kind == HOST)
      munmap(start, range->bytes);
    else
      forget_contents(range->start, range->bytes);
    struct range freed = *range;
    if (freed.kind == DEVICE)
      state->used[freed.device] -= freed.bytes;
    drop(range);
    if (freed.kind != HOST)
      drop_reservation(freed.device, freed.start);
  }
  pthread_mutex_unlock(&lock);
  return known ? OK : INVALID_VALUE;
}

int gputrain_take(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  int status = device >= 0 ? take(device, bytes) : INVALID_DEVICE;
  pthread_mutex_unlock(&lock);
  return status;
}

void gputrain_give(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  state->used[device] -= bytes;
  pthread_mutex_unlock(&lock);
}

void *gputrain_reserve(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  uintptr_t start = free_addresses(device, bytes);
  if (start)
    add(start, bytes, DEVICE, device);
  pthread_mutex_unlock(&lock);
  return (void *)start;
}

// Forgets a range whose memory is not counted: reserved addresses, or the host's own memory that was registered.
int gputrain_release(void *start) {
  pthread_mutex_lock(&lock);
  struct range *range = find(start);
  if (range) {
    struct range freed = *range;
    if (freed.kind != HOST)
      forget_contents(freed.start, freed.bytes);
    drop(range);
    if (freed.kind != HOST)
      drop_reservation(freed.device, freed.start);
  }
  pthread_mutex_unlock(&lock);
  return range ? OK : INVALID_VALUE;
}

// Gives memory to addresses that were reserved, or takes it from them.
int gputrain_map(void *start, size_t bytes) { return mprotect(start, bytes, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK; }
int gputrain_unmap(void *start, size_t bytes) {
  forget_contents((uintptr_t)start, bytes);
  return OK;
}

void gputrain_register(void *start, size_t bytes) {
  pthread_mutex_lock(&lock);
  if (!find(start))
    add((uintptr_t)start, bytes, HOST, gputrain_physical(gputrain_current()));
  pthread_mutex_unlock(&lock);
}

int gputrain_kind(const void *address, int *device) {
  pthread_mutex_lock(&lock);
  struct range *range = find(address);
  int kind = range ? range->kind : UNKNOWN;
  if (range && device)
    *device = gputrain_visible_number(range->device);
  pthread_mutex_unlock(&lock);
  return kind;
}

size_t gputrain_extent(const void *address, void **start) {
  pthread_mutex_lock(&lock);
  struct range *range = find(address);
  size_t bytes = range ? range->bytes : 0;
  if (range)
    *start = (void *)range->start;
  pthread_mutex_unlock(&lock);
  return bytes;
}

// What the process leaves of the device. Asking makes the context, as cudaMemGetInfo does.
size_t gputrain_left(int device) {
  pthread_mutex_lock(&lock);
  take(device, 0);
  size_t total = gputrain_gpu()->memory, bytes = total > state->used[device] ? total - state->used[device] : 0;
  pthread_mutex_unlock(&lock);
  return bytes;
}

// The same without making the context, as NVML tells it.
size_t gputrain_used_so_far(int device) { return state->used[device]; }
size_t gputrain_peak(int device) { return state->peak[device]; }

// --- Contents

static void zero(char *to, size_t bytes) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  char *first = (char *)(((uintptr_t)to + page - 1) / page * page);
  char *last = (char *)((uintptr_t)(to + bytes) / page * page);
  if (bytes <= LARGE_COPY || first >= last || gputrain_kind(to, NULL) == HOST || gputrain_kind(to, NULL) == UNKNOWN) {
    memset(to, 0, bytes);
    return;
  }
  memset(to, 0, (size_t)(first - to));
  madvise(first, (size_t)(last - first), MADV_DONTNEED); // zeros that take no memory
  memset(last, 0, (size_t)(to + bytes - last));
}

// Small copies are real, so that the host reads back what it wrote. Large ones have no contents: the host reads zeros then,
// and not what its memory held before. Where values are tracked, values.c says what the host reads of a device.
void gputrain_copy(void *to, const void *from, size_t bytes) {
  if (!bytes || !to || !from)
    return;
  int to_kind = gputrain_kind(to, NULL), from_kind = gputrain_kind(from, NULL);
  int to_host = to_kind == HOST || to_kind == UNKNOWN, on_host = to_host && (from_kind == HOST || from_kind == UNKNOWN);
  if (to_host && from_kind == DEVICE && gputrain_read_value(to, bytes))
    return;
  if (bytes <= LARGE_COPY || on_host)
    memmove(to, from, bytes);
  else
    zero(to, bytes);
}

void gputrain_set(void *to, int value, size_t bytes) {
  if (!bytes || !to)
    return;
  if (!value)
    zero(to, bytes);
  else if (bytes <= LARGE_COPY)
    memset(to, value, bytes);
}
