// Tracks values for the worker's package emulated_values: which blocks of memory still hold what it wrote, and what the host
// reads of a device.
#include "emulated.h"
#include <dlfcn.h>
#include <execinfo.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static int tracked;

void gputrain_track_values(void) {
  __atomic_store_n(&tracked, 1, __ATOMIC_RELAXED);
  // The worker computes values in large tensors that live for a short time. glibc's default threshold for mmap rises with
  // each freed block, which would leave holes that no other tensor fits into.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
}

// --- What the host reads. A read gets the next of the answers that this thread was given; without one it gets zero, because
// kernels write nothing. An operator that reads from the device how many results there are gets its number in this way.
// Reads without an answer are counted, so that no made-up zero stays unnoticed.

enum { ANSWER_BYTES = 16 };
static __thread const char (*answers)[ANSWER_BYTES];
static __thread int given, taken;
static __thread uint64_t unanswered;

uint64_t gputrain_unanswered_reads; // reads of all threads that nobody has asked about yet

// Gives this thread answers, which the caller keeps until it drops them. Each is a number, or a structure of two.
void gputrain_answer(const void *all, int count) {
  answers = all;
  given = count;
  taken = 0;
}
// Returns how many answers were used.
int gputrain_drop_answers(void) {
  int count = taken;
  given = taken = 0;
  return count;
}

// Returns the number of this thread's reads without an answer since the last call.
uint64_t gputrain_take_unanswered(void) {
  uint64_t count = unanswered;
  unanswered = 0;
  __atomic_sub_fetch(&gputrain_unanswered_reads, count, __ATOMIC_RELAXED);
  return count;
}

int gputrain_read_value(void *to, size_t bytes) {
  if (!__atomic_load_n(&tracked, __ATOMIC_RELAXED))
    return 0;
  if (taken < given && bytes <= ANSWER_BYTES) {
    memcpy(to, answers[taken++], bytes); // the low bytes come first
    return 1;
  }
  memset(to, 0, bytes);
  unanswered++;
  __atomic_add_fetch(&gputrain_unanswered_reads, 1, __ATOMIC_RELAXED);
  return 1;
}

// --- NCCL: other ranks are told whether the values that this rank sends are known

enum { HEARD_UNKNOWN = 0, HEARD_KNOWN = 1, STILL_WAITS = 2, HEARD_NOTHING = 3 };
static __thread int sends_known, heard = HEARD_NOTHING, awaited;

void gputrain_begin_exchange(int known) {
  sends_known = known;
  heard = HEARD_NOTHING;
}
int gputrain_end_exchange(void) {
  sends_known = 0;
  return awaited && heard != HEARD_UNKNOWN ? STILL_WAITS : heard;
}
int gputrain_sends_known(void) { return sends_known; }
void gputrain_hears(int known) { heard = known && heard != HEARD_UNKNOWN ? HEARD_KNOWN : HEARD_UNKNOWN; }
void gputrain_awaits(int change) { awaited += change; }

// --- Blocks of torch's allocator: each watched block has a number until torch frees it

struct block {
  uintptr_t address;
  uint64_t number; // 0 once it is freed
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks; // found by the hash of their addresses
static size_t room, used;
static uint64_t last_number;
GPUTRAIN_HOLD_WHILE_FORKING(lock)

static struct block *slot(uintptr_t address) {
  size_t at = (size_t)(((uint64_t)address * 0x9E3779B97F4A7C15u) >> 32) & (room - 1);
  while (blocks[at].address && blocks[at].address != address)
    at = (at + 1) & (room - 1);
  return blocks + at;
}

static void grow(void) {
  struct block *before = blocks;
  size_t count = room;
  room = room ? 2 * room : 4096;
  blocks = calloc(room, sizeof *blocks);
  if (!blocks)
    abort();
  for (size_t i = 0; i < count; i++)
    if (before[i].address)
      *slot(before[i].address) = before[i];
  free(before);
}

uint64_t gputrain_watch(uintptr_t address) {
  pthread_mutex_lock(&lock);
  if (2 * used >= room)
    grow();
  struct block *block = slot(address);
  used += !block->address;
  block->address = address;
  if (!block->number)
    block->number = ++last_number;
  uint64_t number = block->number;
  pthread_mutex_unlock(&lock);
  return number;
}

int gputrain_is_watched(uintptr_t address, uint64_t number) {
  pthread_mutex_lock(&lock);
  int same = room && slot(address)->number == number;
  pthread_mutex_unlock(&lock);
  return same;
}

static void freed(uintptr_t address) {
  pthread_mutex_lock(&lock);
  if (room)
    slot(address)->number = 0;
  pthread_mutex_unlock(&lock);
}

// Memory was returned to the driver. torch has freed the blocks in it. In the pool of a CUDA graph, however, replays write
// to freed blocks.
void gputrain_freed_range(uintptr_t start, size_t bytes) {
  pthread_mutex_lock(&lock);
  for (size_t at = 0; at < room; at++)
    if (blocks[at].address - start < bytes)
      blocks[at].number = 0;
  pthread_mutex_unlock(&lock);
}

// --- Kernels of other libraries may write to each device address among their arguments, so the values at these addresses
// become unknown. Only compiled code knows how many arguments a kernel has. They lie on the stack of the launching function,
// of which all words are read. A word that was no argument does no harm, because it can only make further values unknown.

enum { MOST_LIBRARIES = 64, MOST_ARGUMENTS = 64, ARGUMENT_WORDS = 16, MOST_NOTED = 1 << 16 };
static struct library {
  const void *base;
  uintptr_t low, high; // the addresses of the functions of its kernels
} libraries[MOST_LIBRARIES];
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t *noted; // the last addresses, in a ring
uint64_t gputrain_noted; // the number of addresses so far
GPUTRAIN_HOLD_WHILE_FORKING(noting)

// The library whose kernels this thread registers. It is looked up once for each compiled file, which registers itself
// before its kernels. Looking it up for each kernel of libtorch_cuda takes two and a half seconds.
static __thread Dl_info registering;

void gputrain_registers_kernels(const void *caller) {
  if (!dladdr(caller, &registering))
    registering.dli_fname = NULL;
}

void gputrain_kernel(const void *function) {
  const Dl_info at = registering;
  if (!at.dli_fname || strstr(at.dli_fname, "libtorch_cuda"))
    return;
  uintptr_t address = (uintptr_t)function;
  pthread_mutex_lock(&noting);
  for (struct library *one = libraries; one < libraries + MOST_LIBRARIES; one++) {
    if (one->base && one->base != at.dli_fbase)
      continue;
    if (!one->base)
      *one = (struct library){at.dli_fbase, address, address};
    one->low = address < one->low ? address : one->low;
    one->high = address > one->high ? address : one->high;
    break;
  }
  pthread_mutex_unlock(&noting);
}

static int is_of_another(const void *function) {
  for (const struct library *one = libraries; one < libraries + MOST_LIBRARIES && one->base; one++)
    if (one->low <= (uintptr_t)function && (uintptr_t)function <= one->high)
      return 1;
  return 0;
}

static uintptr_t end_of_stack(void) {
  static __thread uintptr_t end;
  pthread_attr_t attributes;
  void *start;
  size_t bytes;
  if (!end && !pthread_getattr_np(pthread_self(), &attributes)) {
    if (!pthread_attr_getstack(&attributes, &start, &bytes))
      end = (uintptr_t)start + bytes;
    pthread_attr_destroy(&attributes);
  }
  return end;
}

struct written {
  size_t count;
  uintptr_t addresses[];
};

// Records the addresses that a kernel may have written to. This is called at each of its launches, also by a CUDA graph.
int gputrain_note_written(void *data, int forget) {
  const struct written *written = data;
  pthread_mutex_lock(&noting);
  if (!noted && !(noted = calloc(MOST_NOTED, sizeof *noted)))
    abort();
  for (size_t i = 0; i < written->count; i++) {
    noted[gputrain_noted % MOST_NOTED] = written->addresses[i];
    __atomic_add_fetch(&gputrain_noted, 1, __ATOMIC_RELAXED);
  }
  pthread_mutex_unlock(&noting);
  return OK;
}

__attribute__((no_sanitize("address"))) struct written *gputrain_may_write(const void *function, void **arguments) {
  if (!__atomic_load_n(&tracked, __ATOMIC_RELAXED) || !is_of_another(function))
    return NULL;
  uintptr_t low = (uintptr_t)__builtin_frame_address(0), high = end_of_stack();
  if ((uintptr_t)arguments < low)
    return NULL; // the arguments are not on the stack
  struct written *written = NULL;
  for (int i = 0; i < MOST_ARGUMENTS && (uintptr_t)(arguments + i + 1) <= high; i++) {
    uintptr_t argument = (uintptr_t)arguments[i];
    if (argument < low || argument >= high || argument % 4)
      break; // after the last argument
    for (int word = 0; word < ARGUMENT_WORDS && argument + (word + 1) * sizeof(uintptr_t) <= high; word++) {
      uintptr_t address;
      int device;
      memcpy(&address, (char *)argument + word * sizeof address, sizeof address);
      if (gputrain_kind((void *)address, &device) != DEVICE)
        continue;
      if (!written && !(written = calloc(1, sizeof *written + MOST_ARGUMENTS * ARGUMENT_WORDS * sizeof address)))
        abort();
      written->addresses[written->count++] = address;
    }
  }
  return written;
}

// Returns the address with this number; 0 if it was overwritten.
uintptr_t gputrain_noted_at(uint64_t number) {
  pthread_mutex_lock(&noting);
  uintptr_t address = number < gputrain_noted && gputrain_noted - number <= MOST_NOTED ? noted[number % MOST_NOTED] : 0;
  pthread_mutex_unlock(&noting);
  return address;
}

// --- torch reports to a sanitizer what its allocator does, through virtual functions of a Python object. This object takes
// its place. A Python function would also be called in destructors, which let Python's errors through.
//
// The functions get a device type, and a handle or an address. The addresses are those of allocated or freed blocks. The
// function about the whole device gets only the type. It is the first one that is called, so the first call shows which
// function it is.

enum { FUNCTIONS = 64 };
static int whole_device = -1;

static void on_trace(int function, uintptr_t handle) {
  int first = -1;
  if (!__atomic_compare_exchange_n(&whole_device, &first, function, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED) &&
      function != first)
    freed(handle);
}

#define TRACE(number)                                                                                                       \
  static void trace_##number(void *self, signed char device_type, uintptr_t handle) { on_trace(0##number, handle); }
#define TRACES(eight)                                                                                                       \
  TRACE(eight##0)                                                                                                           \
  TRACE(eight##1)                                                                                                           \
  TRACE(eight##2)                                                                                                           \
  TRACE(eight##3)                                                                                                           \
  TRACE(eight##4)                                                                                                           \
  TRACE(eight##5)                                                                                                           \
  TRACE(eight##6)                                                                                                           \
  TRACE(eight##7)
#define NAMES(eight)                                                                                                        \
  trace_##eight##0, trace_##eight##1, trace_##eight##2, trace_##eight##3, trace_##eight##4, trace_##eight##5,               \
      trace_##eight##6, trace_##eight##7
TRACES(0)
TRACES(1)
TRACES(2)
TRACES(3)
TRACES(4)
TRACES(5)
TRACES(6)
TRACES(7)

static void (*const functions[FUNCTIONS])(void *, signed char, uintptr_t) = {NAMES(0), NAMES(1), NAMES(2), NAMES(3),
                                                                             NAMES(4), NAMES(5), NAMES(6), NAMES(7)};
static const void *const table = functions;
static const void *const tracer = &table;

const void *gputrain_tracer(void) { return &tracer; }

// --- Who asks for a number: the program, or a check in torch's own C++ code

static int begins(const char *symbol, const char *with) { return symbol && !strncmp(symbol, with, strlen(with)); }

static int is_operator(const char *symbol) { return begins(symbol, "_ZN2at4_ops"); }

static int asks(const char *symbol) {
  static const char *const asking[] = {"_ZN2at4_ops4item",  "_ZN2at4_ops10is_nonzero", "_ZN2at4_ops19_local_scalar_dense",
                                       "_ZN2at4_ops5equal", "_ZN2at4_ops8allclose",    "_ZNK2at6Tensor4itemI"};
  for (size_t i = 0; i < sizeof asking / sizeof *asking; i++)
    if (begins(symbol, asking[i]))
      return 1;
  return 0;
}

// What is known of an address of code. dladdr searches all symbols of a library, and torch's libraries have many. Calling it
// for each frame of a stack takes milliseconds, and most reads come from the same frames.
struct symbol {
  const void *address;
  const char *operator; // the name of torch's operator; NULL for other code
  int asks, of_torch;
};
static pthread_mutex_t naming = PTHREAD_MUTEX_INITIALIZER;
GPUTRAIN_HOLD_WHILE_FORKING(naming)

static struct symbol symbol_of(const void *address) {
  enum { MOST_SYMBOLS = 1 << 12 };
  static struct symbol symbols[MOST_SYMBOLS];
  struct symbol *kept = symbols + (uintptr_t)address % MOST_SYMBOLS;
  pthread_mutex_lock(&naming);
  struct symbol found = *kept;
  pthread_mutex_unlock(&naming);
  if (found.address == address)
    return found;
  Dl_info at;
  found = (struct symbol){.address = address};
  if (dladdr(address, &at) && at.dli_fname) {
    found.asks = asks(at.dli_sname);
    found.of_torch = strstr(at.dli_fname, "libtorch_cpu") || strstr(at.dli_fname, "libtorch_cuda");
    found.operator = is_operator(at.dli_sname) ? at.dli_sname : NULL;
  }
  pthread_mutex_lock(&naming);
  *kept = found;
  pthread_mutex_unlock(&naming);
  return found;
}

// Returns the symbol of the torch operator whose own code asks for the number that this thread reads now; of allclose, if a
// derivative compares by it. Returns NULL if the program asks.
const char *gputrain_asking_operator(void) {
  enum { FRAMES = 128 };
  void *frames[FRAMES];
  int count = backtrace(frames, FRAMES), outermost = -1;
  for (int i = 0; i < count; i++) {
    struct symbol at = symbol_of(frames[i]);
    if (at.asks)
      outermost = i;
    else if (outermost >= 0 && at.operator)
      break;
  }
  if (outermost < 0 || outermost + 1 == count || !symbol_of(frames[outermost + 1]).of_torch)
    return NULL;
  const char *asking = symbol_of(frames[outermost]).operator;
  if (begins(asking, "_ZN2at4_ops8allclose"))
    return asking;
  for (int i = outermost + 1; i < count; i++) {
    struct symbol at = symbol_of(frames[i]);
    if (at.operator)
      return at.operator;
  }
  return NULL;
}
