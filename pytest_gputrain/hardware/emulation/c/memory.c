// Keeps the memory of the emulated GPUs: its addresses, and how much is in use.
//
// Device memory is a range of addresses for each device, which are given out as NVIDIA's driver does it. The addresses
// matter: of two free blocks of one size torch's allocator takes the lower one, so they decide what it can reuse. No host
// memory is behind the addresses, except for the pages that small copies touch.
#include "emulated.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef GPUTRAIN_SPAN
#define GPUTRAIN_SPAN ((size_t)1 << 42)
#endif
// The range of addresses of each device, which limits an allocation. Fragments of virtual memory must fit. It is smaller
// with a sanitizer.
static const size_t SPAN = GPUTRAIN_SPAN;
static const size_t LARGE_COPY = 1 << 20;    // bytes; the contents of larger copies are dropped
static const size_t SMALL_MEMORY = 64 << 10; // host memory is given out in pieces of this size
static const size_t RESERVATION = 32 << 20, FIRST_RESERVATION = 408 << 20;

// Figures of this process for other processes, in a file of the folder GPUTRAIN_EMULATED_STATE that is named by the process
// id.
struct state {
  uint64_t used[MAX_DEVICES], peak[MAX_DEVICES]; // the peak includes managed memory if it fits
  uint64_t beside[MAX_DEVICES];                  // the most bytes missing for a request of others than torch's allocator
  uint64_t managed_peak[MAX_DEVICES];
};

// What the addresses of a range are: emulated memory, addresses to which physical memory can be mapped, or host memory that
// the program registered.
enum how { ALLOCATED, RESERVED, REGISTERED };

struct range {
  uintptr_t start;
  size_t bytes;
  int kind, device;
  enum how how;
};

// Memory without an address. It exists as long as its handle or a mapping of it does.
struct physical {
  size_t bytes;
  int device, handles;
  size_t mappings;
};
struct mapping {
  uintptr_t start;
  size_t bytes;
  struct physical *of;
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
static struct mapping *mappings; // by ascending address
static size_t mapping_count, mapping_room;
static uint64_t managed[MAX_DEVICES]; // bytes
static int touched[MAX_DEVICES];
static size_t limit; // a limit in bytes in place of the device's own memory; 0 for none
static int forked;

// A forked child has a copy of these variables, and its parent's file is not its own. A thread takes the lock of the handles
// under this lock. pthread_atfork calls the last registered function first, so this one is registered after those of
// constructors with a number.
static void hold(void) { pthread_mutex_lock(&lock); }
static void leave(void) { pthread_mutex_unlock(&lock); }
static void begin_child(void) {
  private_state = *state;
  state = &private_state;
  for (int device = 0; device < MAX_DEVICES; device++)
    if (touched[device])
      __atomic_store_n(&forked, 1, __ATOMIC_RELAXED);
  leave();
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(hold, leave, begin_child); }

int gputrain_forked(void) { return __atomic_load_n(&forked, __ATOMIC_RELAXED); }

// --- Addresses; the callers of static functions hold the lock

// Returns the first entry that ends after the address. Each entry begins with its start and its bytes.
static size_t first_behind(const void *entries, size_t used, size_t size, uintptr_t address) {
  size_t low = 0, high = used;
  while (low < high) {
    size_t middle = (low + high) / 2;
    const uintptr_t *entry = (const uintptr_t *)((const char *)entries + middle * size);
    if (entry[0] + entry[1] <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}
static size_t place(uintptr_t address) { return first_behind(ranges, count, sizeof *ranges, address); }

static struct range *find(const void *address) {
  size_t at = place((uintptr_t)address);
  return at < count && ranges[at].start <= (uintptr_t)address ? ranges + at : NULL;
}

static void add(uintptr_t start, size_t bytes, int kind, int device, enum how how) {
  if (count == room) {
    room = room ? 2 * room : 1024;
    ranges = realloc(ranges, room * sizeof *ranges);
    if (!ranges)
      abort();
  }
  size_t at = place(start);
  memmove(ranges + at + 1, ranges + at, (count++ - at) * sizeof *ranges);
  ranges[at] = (struct range){start, bytes, kind, device, how};
}

static void drop(struct range *range) { memmove(range, range + 1, (size_t)(ranges + --count - range) * sizeof *range); }

// Returns the lowest free addresses in a reservation; 0 without any.
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

// Does as driver 580 did, which put 150 allocations of 1 MiB to 4 GiB on an H200 at the lowest free addresses of its
// reservations. If none fitted, it made a new reservation of whole 32 MiB, at the highest place below the first one.
static uintptr_t free_addresses(int device, size_t bytes) {
  if (!arenas[device]) {
    void *arena = mmap(NULL, SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) {
      fputs("gputrain: the emulated GPU needs 4 TiB of address space; raise the limit (ulimit -v unlimited)\n", stderr);
      return 0;
    }
    madvise(arena, SPAN, MADV_NOHUGEPAGE); // otherwise reading a byte would take 2 MiB of the host
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

// Frees the reservation of these freed addresses, if it is empty and not the first one.
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

// Managed memory moves to the host if other memory needs its place.
static uint64_t used_with_managed(int device) {
  uint64_t total = gputrain_gpu()->memory, used = state->used[device];
  return used >= total ? used : managed[device] < total - used ? used + managed[device] : total;
}

static void note_peak(int device) {
  uint64_t used = used_with_managed(device);
  if (used > state->peak[device])
    state->peak[device] = used;
  if (managed[device] > state->managed_peak[device])
    state->managed_peak[device] = managed[device];
}

static void touch(int device) {
  if (touched[device])
    return;
  if (state == &private_state)
    share_state();
  touched[device] = 1;
  state->used[device] += gputrain_gpu()->context;
  note_peak(device);
}

static int take(int device, size_t bytes) {
  touch(device);
  size_t total = limit ? limit : gputrain_gpu()->memory, used = state->used[device];
  // This comparison has no sums, which could overflow.
  if (bytes > SPAN || used > total || bytes > total - used)
    return OUT_OF_MEMORY;
  state->used[device] += bytes;
  note_peak(device);
  return OK;
}

static void give(int device, size_t bytes) { state->used[device] -= bytes; }

// Limits the memory of devices from now on. The memory that they report stays the same.
void gputrain_limit(size_t bytes) {
  pthread_mutex_lock(&lock);
  limit = bytes;
  pthread_mutex_unlock(&lock);
}

static void unregister_between(uintptr_t start, uintptr_t end) {
  for (size_t at = place(start); at < count && ranges[at].start < end;)
    if (ranges[at].how == REGISTERED)
      drop(ranges + at);
    else
      at++;
}

static uintptr_t host_memory(size_t bytes) {
  void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED)
    return 0;
  // A program may have unmapped registered memory without telling CUDA.
  unregister_between((uintptr_t)start, (uintptr_t)start + bytes);
  return (uintptr_t)start;
}

static uintptr_t device_memory(int device, size_t bytes, int kind) {
  uintptr_t start = free_addresses(device, bytes);
  if (start && mprotect((void *)start, bytes, PROT_READ | PROT_WRITE))
    start = 0;
  if (start)
    add(start, bytes, kind, device, ALLOCATED);
  return start;
}

static size_t rounded(size_t bytes, size_t page) { return (bytes + page - 1) / page * page; }

// The driver gives out device memory in pages of 2 MiB. On a real GPU smaller requests share a page, but torch's allocator
// makes none.
int gputrain_allocate(void **out, size_t bytes, int kind) {
  if (!out)
    return INVALID_VALUE;
  *out = NULL;
  int device = gputrain_physical(gputrain_current()), status = OK;
  if (device < 0)
    return NO_DEVICE;
  if (gputrain_forked())
    return NOT_INITIALIZED;
  if (!bytes)
    return OK;
  if (bytes <= SPAN)
    bytes = rounded(bytes, kind == HOST ? SMALL_MEMORY : PAGE);
  pthread_mutex_lock(&lock);
  if (kind == DEVICE)
    status = take(device, bytes);
  else if (bytes > SPAN)
    status = OUT_OF_MEMORY;
  if (status == OK) {
    uintptr_t start = kind == HOST ? host_memory(bytes) : device_memory(device, bytes, kind);
    if (start && kind == HOST)
      add(start, bytes, kind, device, ALLOCATED);
    if (start && kind == MANAGED) {
      touch(device);
      managed[device] += bytes;
      note_peak(device);
    }
    if (!start && kind == DEVICE)
      give(device, bytes);
    *out = (void *)start;
    status = start ? OK : OUT_OF_MEMORY;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

// Requests of torch's allocator do not count here, because it repeats them after it has emptied its cache.
void gputrain_refused(size_t bytes, const void *caller) {
  Dl_info at;
  int device = gputrain_physical(gputrain_current());
  if (device < 0 || (dladdr(caller, &at) && at.dli_fname && strstr(at.dli_fname, "libc10_cuda")))
    return;
  if (bytes <= SPAN)
    bytes = rounded(bytes, PAGE);
  pthread_mutex_lock(&lock);
  size_t total = limit ? limit : gputrain_gpu()->memory, used = state->used[device];
  uint64_t missing = used < total && bytes > total - used ? bytes - (total - used) : bytes;
  if (missing > state->beside[device])
    state->beside[device] = missing;
  pthread_mutex_unlock(&lock);
}

void *gputrain_scratch(void) {
  static uintptr_t start;
  int device = gputrain_physical(gputrain_current());
  pthread_mutex_lock(&lock);
  if (!start && device >= 0)
    start = device_memory(device, PAGE, MANAGED);
  pthread_mutex_unlock(&lock);
  return (void *)start;
}

static void forget_contents(uintptr_t start, size_t bytes) {
  madvise((void *)start, bytes, MADV_DONTNEED);
  mprotect((void *)start, bytes, PROT_NONE);
}

// Returns the range of this kind that begins at this address.
static struct range *range_from(const void *start, enum how how) {
  struct range *range = find(start);
  return range && range->start == (uintptr_t)start && range->how == how ? range : NULL;
}

int gputrain_free(void *start) {
  if (!start)
    return OK;
  if (gputrain_forked())
    return NOT_INITIALIZED;
  size_t freed_bytes = 0;
  pthread_mutex_lock(&lock);
  struct range *range = range_from(start, ALLOCATED);
  if (range) {
    struct range freed = *range;
    drop(range);
    if (freed.kind == HOST)
      munmap(start, freed.bytes);
    else {
      forget_contents(freed.start, freed.bytes);
      drop_reservation(freed.device, freed.start);
    }
    if (freed.kind == DEVICE)
      give(freed.device, freed.bytes);
    else if (freed.kind == MANAGED)
      managed[freed.device] -= freed.bytes;
    freed_bytes = freed.bytes;
  }
  pthread_mutex_unlock(&lock);
  if (freed_bytes)
    gputrain_freed_range((uintptr_t)start, freed_bytes);
  return range ? OK : INVALID_VALUE;
}

int gputrain_register(void *start, size_t bytes) {
  uintptr_t first = (uintptr_t)start;
  if (!start || !bytes || bytes > SPAN)
    return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  size_t at = place(first);
  int status = at < count && ranges[at].start < first + bytes ? ALREADY_REGISTERED : OK;
  if (status == OK)
    add(first, bytes, HOST, gputrain_physical(gputrain_current()), REGISTERED);
  pthread_mutex_unlock(&lock);
  return status;
}

int gputrain_unregister(void *start) {
  pthread_mutex_lock(&lock);
  struct range *range = range_from(start, REGISTERED);
  if (range)
    drop(range);
  pthread_mutex_unlock(&lock);
  return range ? OK : NOT_REGISTERED;
}

// --- Virtual memory management

static size_t mapping_place(uintptr_t address) { return first_behind(mappings, mapping_count, sizeof *mappings, address); }

// Returns how many mappings, from this one on, fill these addresses without a gap. The last one may go on beyond them.
// Returns 0 if they do not fill them.
static size_t filling(size_t at, uintptr_t start, size_t bytes) {
  uintptr_t reached = start;
  for (size_t next = at; next < mapping_count && mappings[next].start <= reached; next++) {
    reached = mappings[next].start + mappings[next].bytes;
    if (reached - start >= bytes)
      return next + 1 - at;
  }
  return 0;
}

int gputrain_create(void **out, int device, size_t bytes) {
  if (!out || device < 0 || !bytes || bytes % PAGE)
    return INVALID_VALUE;
  if (gputrain_forked())
    return NOT_INITIALIZED;
  struct physical *made = gputrain_handle();
  *made = (struct physical){bytes, device, 1, 0};
  pthread_mutex_lock(&lock);
  int status = take(device, bytes);
  pthread_mutex_unlock(&lock);
  if (status == OK)
    *out = made;
  else
    gputrain_drop_handle(made);
  return status;
}

static void drop_if_unused(struct physical *of) {
  if (of->handles || of->mappings)
    return;
  give(of->device, of->bytes);
  gputrain_drop_handle(of);
}

int gputrain_retain(void **handle, const void *address) {
  pthread_mutex_lock(&lock);
  size_t at = mapping_place((uintptr_t)address);
  int known = at < mapping_count && mappings[at].start <= (uintptr_t)address;
  if (known) {
    mappings[at].of->handles++;
    *handle = mappings[at].of;
  }
  pthread_mutex_unlock(&lock);
  return known ? OK : INVALID_VALUE;
}

int gputrain_release(void *handle) {
  struct physical *of = handle;
  if (gputrain_forked())
    return NOT_INITIALIZED;
  pthread_mutex_lock(&lock);
  int known = gputrain_is_handle(handle) && of->handles > 0;
  if (known) {
    of->handles--;
    drop_if_unused(of);
  }
  pthread_mutex_unlock(&lock);
  return known ? OK : INVALID_VALUE;
}

int gputrain_device_of(const void *handle) {
  return gputrain_is_handle(handle) ? ((const struct physical *)handle)->device : -1;
}

int gputrain_reserve(void **out, int device, size_t bytes) {
  if (!out || device < 0 || !bytes)
    return INVALID_VALUE;
  if (gputrain_forked())
    return NOT_INITIALIZED;
  if (bytes > SPAN)
    return OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  bytes = rounded(bytes, PAGE);
  uintptr_t start = free_addresses(device, bytes);
  if (start)
    add(start, bytes, DEVICE, device, RESERVED);
  pthread_mutex_unlock(&lock);
  *out = (void *)start;
  return start ? OK : OUT_OF_MEMORY;
}

int gputrain_unreserve(void *start, size_t bytes) {
  pthread_mutex_lock(&lock);
  struct range *range = range_from(start, RESERVED);
  size_t mapped = range ? mapping_place(range->start) : 0;
  int empty = range && (mapped == mapping_count || mappings[mapped].start >= range->start + range->bytes);
  int known = empty && bytes <= range->bytes && rounded(bytes, PAGE) == range->bytes;
  if (known) {
    struct range freed = *range;
    drop(range);
    drop_reservation(freed.device, freed.start);
  }
  pthread_mutex_unlock(&lock);
  return known ? OK : INVALID_VALUE;
}

int gputrain_map(void *start, size_t bytes, size_t offset, void *handle) {
  struct physical *of = handle;
  uintptr_t first = (uintptr_t)start;
  if (gputrain_forked())
    return NOT_INITIALIZED;
  pthread_mutex_lock(&lock);
  const struct range *range = find(start);
  size_t at = mapping_place(first);
  int fits = range && range->how == RESERVED && bytes && bytes <= range->start + range->bytes - first &&
             gputrain_is_handle(handle) && of->handles > 0 && offset <= of->bytes && bytes <= of->bytes - offset &&
             (at == mapping_count || mappings[at].start >= first + bytes) && !mprotect(start, bytes, PROT_READ | PROT_WRITE);
  if (fits) {
    if (mapping_count == mapping_room) {
      mapping_room = mapping_room ? 2 * mapping_room : 1024;
      mappings = realloc(mappings, mapping_room * sizeof *mappings);
      if (!mappings)
        abort();
    }
    memmove(mappings + at + 1, mappings + at, (mapping_count++ - at) * sizeof *mappings);
    mappings[at] = (struct mapping){first, bytes, of};
    of->mappings++;
  }
  pthread_mutex_unlock(&lock);
  return fits ? OK : INVALID_VALUE;
}

int gputrain_unmap(void *start, size_t bytes) {
  if (gputrain_forked())
    return NOT_INITIALIZED;
  uintptr_t first = (uintptr_t)start;
  pthread_mutex_lock(&lock);
  size_t at = mapping_place(first), whole = bytes ? filling(at, first, bytes) : 0;
  // A program can only unmap whole mappings.
  int fits = whole && mappings[at].start == first &&
             mappings[at + whole - 1].start + mappings[at + whole - 1].bytes == first + bytes;
  if (fits) {
    forget_contents(first, bytes);
    for (size_t next = at; next < at + whole; next++) {
      mappings[next].of->mappings--;
      drop_if_unused(mappings[next].of);
    }
    memmove(mappings + at, mappings + at + whole, ((mapping_count -= whole) - at) * sizeof *mappings);
  }
  pthread_mutex_unlock(&lock);
  if (fits)
    gputrain_freed_range(first, bytes);
  return fits ? OK : INVALID_VALUE;
}

// --- Queries: what an address is, and how much memory is in use

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

// Returns what the process leaves of the device's memory. This makes the context, as cudaMemGetInfo does.
size_t gputrain_left(int device) {
  if (device < 0)
    return 0;
  pthread_mutex_lock(&lock);
  touch(device);
  size_t total = gputrain_gpu()->memory, used = used_with_managed(device);
  pthread_mutex_unlock(&lock);
  return total > used ? total - used : 0;
}

// Returns the used memory without making the context, as NVML does.
size_t gputrain_used_so_far(int device) {
  pthread_mutex_lock(&lock);
  size_t used = touched[device] ? used_with_managed(device) : 0;
  pthread_mutex_unlock(&lock);
  return used;
}

// --- Contents

static int is_on_host(int kind) { return kind == HOST || kind == UNKNOWN; }

int gputrain_holds(const void *address, size_t bytes) {
  uintptr_t start = (uintptr_t)address;
  if (!bytes)
    return 1;
  if (!address || bytes > SPAN)
    return 0;
  pthread_mutex_lock(&lock);
  const struct range *range = find(address);
  int holds = 1;
  if (!range)
    for (int device = 0; device < MAX_DEVICES; device++)
      holds &= !arenas[device] || start + bytes <= arenas[device] || start >= arenas[device] + SPAN - PAGE;
  else if (range->how == ALLOCATED)
    holds = bytes <= range->start + range->bytes - start;
  else if (range->how == RESERVED)
    holds = filling(mapping_place(start), start, bytes) > 0;
  pthread_mutex_unlock(&lock);
  return holds;
}

static void zero(char *to, size_t bytes, int kind) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  char *first = (char *)(((uintptr_t)to + page - 1) / page * page);
  char *last = (char *)((uintptr_t)(to + bytes) / page * page);
  if (bytes <= LARGE_COPY || first >= last || is_on_host(kind)) {
    memset(to, 0, bytes);
    return;
  }
  memset(to, 0, (size_t)(first - to));
  madvise(first, (size_t)(last - first), MADV_DONTNEED); // zeros that take no memory
  memset(last, 0, (size_t)(to + bytes - last));
}

// Small copies are real, so that the host reads what it wrote. Large copies have no contents, and the host then reads zeros
// instead of what its memory held before. If values are tracked, values.c decides what the host reads of a device.
static void copy(void *to, const void *from, size_t bytes) {
  int to_kind = gputrain_kind(to, NULL), from_kind = gputrain_kind(from, NULL);
  if (is_on_host(to_kind) && from_kind == DEVICE && gputrain_read_value(to, bytes))
    return;
  if (bytes <= LARGE_COPY || (is_on_host(to_kind) && is_on_host(from_kind)))
    memmove(to, from, bytes);
  else
    zero(to, bytes, to_kind);
}

int gputrain_copy(void *to, const void *from, size_t bytes) { return gputrain_copy_rows(to, bytes, from, bytes, bytes, 1); }

int gputrain_copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height) {
  size_t to_bytes, from_bytes;
  if (!width || !height)
    return OK;
  if (gputrain_forked() && !(is_on_host(gputrain_kind(to, NULL)) && is_on_host(gputrain_kind(from, NULL))))
    return NOT_INITIALIZED;
  if (to_pitch < width || from_pitch < width)
    return INVALID_PITCH;
  if (__builtin_mul_overflow(to_pitch, height - 1, &to_bytes) || __builtin_add_overflow(to_bytes, width, &to_bytes) ||
      __builtin_mul_overflow(from_pitch, height - 1, &from_bytes) ||
      __builtin_add_overflow(from_bytes, width, &from_bytes) || !gputrain_holds(to, to_bytes) ||
      !gputrain_holds(from, from_bytes))
    return INVALID_VALUE;
  for (size_t row = 0; row < height; row++)
    copy(to + row * to_pitch, from + row * from_pitch, width);
  return OK;
}

int gputrain_set(void *to, int value, size_t bytes) {
  if (!bytes)
    return OK;
  int kind = gputrain_kind(to, NULL);
  if (gputrain_forked())
    return NOT_INITIALIZED;
  if (kind == UNKNOWN || !gputrain_holds(to, bytes))
    return INVALID_VALUE;
  if (!value)
    zero(to, bytes, kind);
  else if (bytes <= LARGE_COPY)
    memset(to, value, bytes);
  return OK;
}
