// Stands in for NCCL between the GPUs of one machine, in one process or in several. Data of up to 1 MiB for all ranks
// together is really exchanged, through files, and combined as NCCL does. Larger data is not exchanged, and the run says so.
#include "emulated.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, NO_COLOR = -1 };
enum { SUM = 0, PRODUCT = 1, MAXIMUM = 2, MINIMUM = 3, AVERAGE = 4, OPERATIONS = 5 };
enum { INT8 = 0, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, TYPES };
enum { SMALL = 1 << 20, WAIT_SECONDS = 1800, WAIT_NANOSECONDS = 200000 };

struct id {
  char bytes[128];
};
struct factor { // of an operation that multiplies before it adds
  int type;     // TYPES if it was destroyed
  const void *on_device;
  uint64_t on_host;
};
struct communicator {
  struct id id;
  int rank, ranks, splits;
  int exchanges, ended, kept; // exchanges that have begun, that have ended, and the first one whose file still exists
  int *sent, *fetched;        // the numbers of messages to and from each rank
  struct factor *factors;
  int factor_count;
};

int ncclGetVersion(int *version) {
  *version = NCCL_VERSION;
  return OK;
}
const char *ncclGetErrorString(int status) { return status ? "error of an emulated GPU" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

// --- Files between ranks

struct header {
  uint64_t bytes;
  int ended; // exchanges that the sender has ended and will not read again
  int known; // whether the values are those that a GPU would have
};

static int name(char path[4096], const struct communicator *among, const char *what, int number, int from, int to) {
  const char *folder = getenv("GPUTRAIN_EMULATED_STATE");
  if (!folder)
    return gputrain_missing("NCCL between GPUs, for want of a folder in GPUTRAIN_EMULATED_STATE", SYSTEM_ERROR);
  int length = snprintf(path, 4096, "%s/nccl-%s-%s-%d-%d-%d", folder, among->id.bytes, what, number, from, to);
  return length < 0 || length >= 4096 ? SYSTEM_ERROR : OK;
}

// A file gets its name once it is complete.
static int tell(const char *path, const void *data, size_t bytes, int ended) {
  char part[4096 + 8];
  struct header header = {bytes, ended, gputrain_sends_known()};
  struct iovec parts[] = {{&header, sizeof header}, {(void *)data, bytes}};
  snprintf(part, sizeof part, "%s.part", path);
  int file = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0)
    return SYSTEM_ERROR;
  ssize_t written = writev(file, parts, 2);
  close(file);
  return written == (ssize_t)(sizeof header + bytes) && !rename(part, path) ? OK : SYSTEM_ERROR;
}

static time_t seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

static int hear(const char *path, void *data, size_t bytes, struct header *header) {
  time_t end = seconds() + WAIT_SECONDS;
  struct iovec parts[] = {{header, sizeof *header}, {data, bytes}};
  int file;
  while ((file = open(path, O_RDONLY | O_CLOEXEC)) < 0) {
    if (errno != ENOENT || seconds() > end)
      return gputrain_missing("a collective of NCCL, since another rank does not take part", SYSTEM_ERROR);
    // The other rank has not written its file yet.
    nanosleep(&(struct timespec){0, WAIT_NANOSECONDS}, NULL);
  }
  ssize_t got = readv(file, parts, 2);
  close(file);
  return got == (ssize_t)(sizeof *header + bytes) && header->bytes == bytes
             ? OK
             : gputrain_missing("a collective of NCCL whose ranks differ in size", INVALID_ARGUMENT);
}

// Writes this rank's data for the other ranks. Returns the number of the exchange in *number.
static int begin_exchange(struct communicator *among, const void *own, size_t bytes, int *number) {
  char path[4096];
  *number = among->exchanges++;
  int status = name(path, among, "all", *number, among->rank, 0);
  return status ? status : tell(path, own, bytes, among->ended);
}

// Reads the data of all ranks into `all`, one after the other. *known tells whether all values are known, or those of the
// rank `only` if it is not negative. This rank's files that every rank has read are removed.
static int end_exchange(struct communicator *among, int number, size_t bytes, char *all, int only, int *known) {
  char path[4096];
  int status = OK, ended = number;
  *known = 1;
  for (int rank = 0; rank < among->ranks && !status; rank++) {
    struct header header = {0};
    if ((status = name(path, among, "all", number, rank, 0)) ||
        (status = hear(path, all + (size_t)rank * bytes, bytes, &header)))
      break;
    // A file can be removed once the slowest rank has read it.
    ended = header.ended < ended ? header.ended : ended;
    *known &= header.known || (only >= 0 && only != rank);
  }
  if (status)
    return status;
  among->ended = number + 1;
  for (; among->kept < ended; among->kept++)
    if (!name(path, among, "all", among->kept, among->rank, 0))
      unlink(path);
  return OK;
}

// --- Communicators

int ncclGetUniqueId(struct id *id) {
  static atomic_int made;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "%d.%d.%lld.%ld", (int)getpid(), made++, (long long)now.tv_sec, now.tv_nsec);
  return OK;
}

static int make(struct communicator **out, const struct id *id, int rank, int ranks) {
  gputrain_unknown("NCCL's buffers");
  *out = NULL;
  if (ranks < 1 || rank < 0 || rank >= ranks)
    return INVALID_ARGUMENT;
  struct communicator *made = calloc(1, sizeof *made);
  if (made)
    *made = (struct communicator){.id = *id, .rank = rank, .ranks = ranks};
  if (!made || !(made->sent = calloc((size_t)ranks, sizeof(int))) || !(made->fetched = calloc((size_t)ranks, sizeof(int))))
    return SYSTEM_ERROR;
  *out = made;
  return OK;
}
int ncclCommInitRankConfig(struct communicator **out, int ranks, struct id id, int rank, void *config) {
  return make(out, &id, rank, ranks);
}
int ncclCommInitRank(struct communicator **out, int ranks, struct id id, int rank) { return make(out, &id, rank, ranks); }
int ncclCommInitRankScalable(struct communicator **out, int ranks, int rank, int ids, struct id *id, void *config) {
  return make(out, id, rank, ranks);
}
int ncclCommInitAll(struct communicator **out, int ranks, const int *devices) {
  struct id id;
  int status = ncclGetUniqueId(&id);
  for (int rank = 0; rank < ranks && !status; rank++)
    status = make(out + rank, &id, rank, ranks);
  return status;
}
int ncclCommShrink(void) { return gputrain_missing("ncclCommShrink", INVALID_USAGE); }
int ncclCommFinalize(struct communicator *communicator) { return OK; } // no call is ever under way
int ncclCommDestroy(struct communicator *communicator) {
  if (!communicator)
    return OK;
  free(communicator->sent);
  free(communicator->fetched);
  free(communicator->factors);
  free(communicator);
  return OK;
}
int ncclCommAbort(struct communicator *communicator) { return ncclCommDestroy(communicator); }
int ncclCommGetAsyncError(void *communicator, int *error) {
  *error = OK;
  return OK;
}
int ncclCommCount(const struct communicator *communicator, int *ranks) {
  *ranks = communicator->ranks;
  return OK;
}
int ncclCommUserRank(const struct communicator *communicator, int *rank) {
  *rank = communicator->rank;
  return OK;
}
// Registered memory is used like any other.
int ncclCommRegister(const struct communicator *communicator, void *start, size_t bytes, void **handle) {
  *handle = start;
  return OK;
}
int ncclCommDeregister(const struct communicator *communicator, void *handle) { return OK; }
int ncclMemAlloc(void **out, size_t bytes) { return gputrain_allocate(out, bytes, DEVICE) ? SYSTEM_ERROR : OK; }
int ncclMemFree(void *start) { return gputrain_free(start) ? INVALID_ARGUMENT : OK; }

// --- Numbers: floating point types are computed as doubles. A double holds the sum and the product of two such numbers
// exactly, or with so many bits that a second rounding changes nothing.

struct format {
  int exponent_bits, fraction_bits;
  unsigned most, infinity; // the largest number and infinity, without signs; a type without infinity has twice the same
};
static const struct format HALF = {5, 10, 0x7BFF, 0x7C00}, BRAIN = {8, 7, 0x7F7F, 0x7F80};
// NVIDIA's conversions to 8 bits replace a number that is too large by the largest number.
static const struct format E4M3 = {4, 3, 0x7E, 0x7E}, E5M2 = {5, 2, 0x7B, 0x7B};

static double decoded(const struct format *as, unsigned bits) {
  unsigned sign = 1u << (as->exponent_bits + as->fraction_bits), magnitude = bits & (sign - 1);
  int bias = (1 << (as->exponent_bits - 1)) - 1, exponent = (int)(magnitude >> as->fraction_bits);
  double fraction = magnitude & ((1u << as->fraction_bits) - 1), value;
  if (magnitude > as->most)
    // E4M3 has no infinity.
    value = as != &E4M3 && fraction == 0 ? INFINITY : NAN;
  else if (exponent)
    value = ldexp(fraction + (double)(1u << as->fraction_bits), exponent - bias - as->fraction_bits);
  else
    value = ldexp(fraction, 1 - bias - as->fraction_bits);
  return bits & sign ? -value : value;
}

static unsigned encoded(const struct format *as, double value) {
  unsigned sign = 1u << (as->exponent_bits + as->fraction_bits);
  int bias = (1 << (as->exponent_bits - 1)) - 1, least = 1 - bias;
  if (isnan(value))
    return sign - 1;
  unsigned magnitude = as->infinity;
  if (!isinf(value)) {
    int exponent = value != 0 && ilogb(value) > least ? ilogb(value) : least;
    // A number that is rounded up to the next power of two carries into the exponent.
    double steps = nearbyint(ldexp(fabs(value), as->fraction_bits - exponent));
    double bits = (double)(exponent - least) * (1u << as->fraction_bits) + steps;
    magnitude = bits > as->most ? as->infinity : (unsigned)bits;
  }
  return magnitude | (signbit(value) ? sign : 0);
}

static int is_integer(int type) { return type <= UINT64; }
static size_t size_of(int type) {
  static const unsigned char sizes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < TYPES ? sizes[type] : 0;
}

static double get(int type, const void *from, size_t i) {
  switch (type) {
  case FLOAT16:
    return decoded(&HALF, ((const uint16_t *)from)[i]);
  case BFLOAT16:
    return decoded(&BRAIN, ((const uint16_t *)from)[i]);
  case FLOAT8_E4M3:
    return decoded(&E4M3, ((const uint8_t *)from)[i]);
  case FLOAT8_E5M2:
    return decoded(&E5M2, ((const uint8_t *)from)[i]);
  case FLOAT32:
    return ((const float *)from)[i];
  default:
    return ((const double *)from)[i];
  }
}
static void put(int type, void *to, size_t i, double value) {
  switch (type) {
  case FLOAT16:
    ((uint16_t *)to)[i] = (uint16_t)encoded(&HALF, value);
    break;
  case BFLOAT16:
    ((uint16_t *)to)[i] = (uint16_t)encoded(&BRAIN, value);
    break;
  case FLOAT8_E4M3:
    ((uint8_t *)to)[i] = (uint8_t)encoded(&E4M3, value);
    break;
  case FLOAT8_E5M2:
    ((uint8_t *)to)[i] = (uint8_t)encoded(&E5M2, value);
    break;
  case FLOAT32:
    ((float *)to)[i] = (float)value;
    break;
  default:
    ((double *)to)[i] = value;
  }
}
// Rounds as NCCL's kernels do: they compute types of 8 bits as halves, and all others in their own precision.
static double rounded(int type, double value) {
  uint64_t bits;
  if (type == FLOAT8_E4M3 || type == FLOAT8_E5M2)
    value = rounded(FLOAT16, value);
  put(type, &bits, 0, value);
  return get(type, &bits, 0);
}

// --- Operations, as NCCL's reduce_kernel.h has them

// A number wins against NaN, and 0 counts as more than -0.
static double least(double one, double other) {
  if (isnan(one) || isnan(other))
    return isnan(one) ? other : one;
  return one < other || (one == other && signbit(one)) ? one : other;
}
static double combined(double one, double other, int operation) {
  switch (operation) {
  case PRODUCT:
    return one * other;
  case MAXIMUM:
    return -least(-one, -other);
  case MINIMUM:
    return least(one, other);
  default:
    return one + other;
  }
}

#define COMBINE(type)                                                                                                       \
  for (size_t i = 0; i < count; i++) {                                                                                      \
    type value = ((const type *)all)[i];                                                                                    \
    for (int rank = 1; rank < ranks; rank++) {                                                                              \
      type other = ((const type *)all)[(size_t)rank * stride + i];                                                          \
      if (operation == PRODUCT)                                                                                             \
        value = (type)((uint64_t)value * (uint64_t)other);                                                                  \
      else if (operation == MAXIMUM || operation == MINIMUM)                                                                \
        value = (operation == MAXIMUM) == (value > other) ? value : other;                                                  \
      else                                                                                                                  \
        value = (type)((uint64_t)value + (uint64_t)other);                                                                  \
    }                                                                                                                       \
    ((type *)to)[i] = operation == AVERAGE ? (type)(value / (type)ranks) : value;                                           \
  }                                                                                                                         \
  break

// Numbers are added in the order of the ranks. For three ranks or more the order changes the last bit of a sum; NCCL's order
// depends on its algorithm.
static void combine(void *to, const char *all, size_t count, size_t stride, int type, int operation, int ranks) {
  switch (type) {
  case INT8:
    COMBINE(int8_t);
  case UINT8:
    COMBINE(uint8_t);
  case INT32:
    COMBINE(int32_t);
  case UINT32:
    COMBINE(uint32_t);
  case INT64:
    COMBINE(int64_t);
  case UINT64:
    COMBINE(uint64_t);
  default:
    for (size_t i = 0; i < count; i++) {
      double value = get(type, all, i);
      for (int rank = 1; rank < ranks; rank++)
        value = rounded(type, combined(value, get(type, all, (size_t)rank * stride + i), operation));
      put(type, to, i, value);
    }
  }
}

// Multiplies a rank's numbers before they are added to those of other ranks.
static void multiply(void *own, size_t count, int type, const void *factor) {
  uint64_t integer = 0;
  memcpy(&integer, factor, size_of(type));
  double number = is_integer(type) ? 0 : get(type, factor, 0);
  for (size_t i = 0; i < count; i++)
    if (!is_integer(type))
      put(type, own, i, rounded(type, get(type, own, i) * number));
    else if (size_of(type) == 1)
      ((uint8_t *)own)[i] = (uint8_t)(((uint8_t *)own)[i] * integer);
    else if (size_of(type) == 4)
      ((uint32_t *)own)[i] = (uint32_t)(((uint32_t *)own)[i] * integer);
    else
      ((uint64_t *)own)[i] *= integer;
}

enum { ON_DEVICE = 0 };

int ncclRedOpCreatePreMulSum(int *operation, const void *factor, int type, int residence, struct communicator *among) {
  int at = 0;
  if (!size_of(type) || !factor)
    return INVALID_ARGUMENT;
  while (at < among->factor_count && among->factors[at].type != TYPES)
    at++;
  if (at == among->factor_count) {
    struct factor *all = realloc(among->factors, (size_t)(at + 1) * sizeof *all);
    if (!all)
      return SYSTEM_ERROR;
    among->factors = all;
    among->factor_count++;
  }
  struct factor made = {type, residence == ON_DEVICE ? factor : NULL, 0};
  if (!made.on_device)
    memcpy(&made.on_host, factor, size_of(type));
  among->factors[at] = made;
  *operation = OPERATIONS + at;
  return OK;
}
int ncclRedOpDestroy(int operation, struct communicator *among) {
  int at = operation - OPERATIONS;
  if (at < 0 || at >= among->factor_count || among->factors[at].type == TYPES)
    return INVALID_ARGUMENT;
  among->factors[at].type = TYPES;
  return OK;
}

// --- Calls: each begins when it is made, and ends at once or with its group. So one thread can call for several ranks.

enum kind { REDUCES, GATHERS, RECEIVES, SPLITS };
struct call {
  enum kind kind;
  struct communicator *among;
  size_t bytes; // of each rank
  int number;   // the number of the exchange or of the message
  void *to;
  size_t from, part; // the bytes of each rank's data that are wanted, and their offset
  int type, operation;
  int only; // the only rank whose data are wanted, or -1
};
static __thread struct call *calls;
static __thread int call_count, call_room, groups;

static int split(const struct call *call, const int (*all)[2]) {
  const struct communicator *parent = call->among;
  int color = all[parent->rank][0], key = all[parent->rank][1], ranks = 0, before = 0;
  for (int other = 0; other < parent->ranks; other++) {
    if (all[other][0] != color)
      continue;
    ranks++;
    before += all[other][1] < key || (all[other][1] == key && other < parent->rank);
  }
  if (color == NO_COLOR)
    return OK;
  struct id id;
  int length = snprintf(id.bytes, sizeof id.bytes, "%s.%d.%d", parent->id.bytes, call->operation, color);
  if (length >= (int)sizeof id.bytes)
    return gputrain_missing("ncclCommSplit of splits of splits", INVALID_USAGE);
  return make(call->to, &id, before, ranks);
}

static int receive(const struct call *call, int *known) {
  char path[4096];
  struct header header;
  int status = name(path, call->among, "one", call->number, call->only, call->among->rank);
  if (!status && !(status = hear(path, call->to, call->bytes, &header))) {
    unlink(path);
    *known = header.known;
  }
  return status;
}

// own: the data of the only rank; NULL if other ranks' data must be read.
static int end(const struct call *call, const void *own) {
  struct communicator *among = call->among;
  const char *all = own;
  char *heard = NULL;
  int status = OK, known = gputrain_sends_known();
  if (call->kind == RECEIVES)
    status = receive(call, &known);
  else if (!own && !(all = heard = malloc(call->bytes * (size_t)among->ranks)))
    status = SYSTEM_ERROR;
  else if (!own)
    status = end_exchange(among, call->number, call->bytes, heard, call->only, &known);
  if (!status && call->kind == REDUCES && call->to)
    combine(call->to, all + call->from, call->part / size_of(call->type), call->bytes / size_of(call->type), call->type,
            call->operation, among->ranks);
  for (int rank = 0, at = 0; rank < among->ranks && call->kind == GATHERS && !status; rank++)
    if (call->only < 0 || call->only == rank)
      memmove((char *)call->to + (size_t)at++ * call->part, all + (size_t)rank * call->bytes + call->from, call->part);
  if (!status && call->kind == SPLITS)
    status = split(call, (const int (*)[2])all);
  if (call->to && call->kind != SPLITS)
    gputrain_hears(known && !status);
  free(heard);
  return status;
}

// Writes this rank's data at once, because another rank may wait for them.
static int begin(struct call call, const void *own) {
  if (call.among->ranks == 1 && own)
    return end(&call, own);
  int status = own ? begin_exchange(call.among, own, call.bytes, &call.number) : OK;
  if (status || !groups)
    return status ? status : end(&call, NULL);
  if (call_count == call_room) {
    call_room = call_room ? 2 * call_room : 16;
    calls = realloc(calls, (size_t)call_room * sizeof *calls);
    if (!calls)
      abort();
  }
  calls[call_count++] = call;
  gputrain_awaits(1);
  return OK;
}
int ncclGroupStart(void) {
  groups++;
  return OK;
}
static int keep_requests(void);
int ncclGroupEnd(void) {
  int status = OK;
  if (groups <= 0)
    return INVALID_USAGE;
  if (--groups)
    return OK;
  for (int i = 0; i < call_count; i++) {
    gputrain_awaits(-1);
    if (!status)
      status = end(calls + i, NULL);
  }
  call_count = 0;
  return status ? status : keep_requests();
}

int ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **out, void *config) {
  int own[2] = {color, key};
  *out = NULL;
  struct call call = {SPLITS, parent, .bytes = sizeof own, .to = out, .operation = parent->splits++, .only = -1};
  return begin(call, own);
}

// --- Collectives and messages. In a capture each one becomes a node that is counted. The end of its group becomes a hidden
// node, at which each launch of the graph makes all calls of the group.

struct request {
  int (*make)(const struct request *);
  const char *function;
  const void *own;
  void *to;
  size_t from, part, bytes; // as in a call
  int type, operation, only;
  struct communicator *among;
};
static __thread struct request *requests; // requests of the group that are captured
static __thread size_t request_count;
static __thread void *request_stream;

enum { UNHANDLED_CUDA_ERROR = 1 };

struct group {
  size_t count;
  struct request all[];
};
static int make_group(void *data, int forget) {
  const struct group *group = data;
  int status = OK;
  if (forget)
    return OK;
  ncclGroupStart();
  for (size_t i = 0; i < group->count && !status; i++)
    status = group->all[i].make(group->all + i);
  int ended = ncclGroupEnd();
  return status || ended ? UNKNOWN_ERROR : OK;
}
static int keep_requests(void) {
  size_t bytes = request_count * sizeof *requests;
  if (!request_count)
    return OK;
  struct group *group = malloc(sizeof *group + bytes);
  if (!group)
    abort();
  group->count = request_count;
  memcpy(group->all, requests, bytes);
  request_count = 0;
  int status;
  struct work work = {.kind = NODE_HIDDEN, .run = make_group, .drop = free, .data = group};
  if (gputrain_captured(request_stream, &work, &status) && !status)
    return OK;
  free(group); // the capture has ended, or has failed
  return UNHANDLED_CUDA_ERROR;
}
static int ask(struct request request, size_t counted, void *stream) {
  int status;
  struct work work = {NODE_KERNEL, "collectives", request.function, .bytes = counted};
  if (!gputrain_captured(stream, &work, &status))
    return request.make(&request);
  if (status)
    return UNHANDLED_CUDA_ERROR;
  requests = realloc(requests, (request_count + 1) * sizeof *requests);
  if (!requests)
    abort();
  requests[request_count++] = request;
  request_stream = stream;
  return groups ? OK : keep_requests();
}

// Tells whether this many bytes of each rank are exchanged. If not, the run says so. A single rank exchanges nothing.
static int is_exchanged(const char *function, const void *own, void *to, size_t bytes, const struct communicator *among) {
  if (bytes <= SMALL / (size_t)among->ranks)
    return bytes > 0;
  gputrain_hears(0);
  if (among->ranks > 1)
    gputrain_not_exchanged(function, bytes);
  else if (to != own)
    gputrain_copy(to, own, bytes);
  return 0;
}

// Each rank has `bytes` bytes. This rank gets `part` combined bytes from the offset on at `to`, if it gets any.
static int reduce(const struct request *of) {
  struct communicator *among = of->among;
  const void *own = of->own;
  size_t bytes = of->bytes;
  int type = of->type, operation = of->operation;
  const struct factor *factor = operation >= OPERATIONS ? among->factors + operation - OPERATIONS : NULL;
  if (!size_of(type) || operation < 0 || operation >= OPERATIONS + among->factor_count || (factor && factor->type != type))
    return INVALID_ARGUMENT;
  if (type >= FLOAT8_E4M3 && gputrain_gpu()->major < 9) {
    fprintf(stderr, "gputrain: NCCL reduces numbers of 8 bits on GPUs of compute capability 9.0 and newer only\n");
    return INVALID_ARGUMENT;
  }
  if (!is_exchanged(of->function, own, of->to, bytes, among))
    return OK;
  char *prepared = malloc(bytes);
  if (!prepared)
    return SYSTEM_ERROR;
  memcpy(prepared, own, bytes);
  uint64_t share;
  if (factor)
    multiply(prepared, bytes / size_of(type), type, factor->on_device ? factor->on_device : &factor->on_host);
  else if (operation == AVERAGE && !is_integer(type)) {
    put(type, &share, 0, type == FLOAT64 ? 1.0 / among->ranks : (float)(1.0 / among->ranks));
    multiply(prepared, bytes / size_of(type), type, &share);
  }
  struct call call = {REDUCES,          among,        .bytes = bytes,         .to = of->to, .from = of->from,
                      .part = of->part, .type = type, .operation = operation, .only = -1};
  int status = begin(call, prepared);
  free(prepared);
  return status;
}
int ncclAllReduce(const void *own, void *to, size_t count, int type, int operation, struct communicator *among,
                  void *stream) {
  size_t bytes = count * size_of(type);
  return ask((struct request){reduce, "ncclAllReduce", own, to, 0, bytes, bytes, type, operation, -1, among}, bytes, stream);
}
int ncclReduce(const void *own, void *to, size_t count, int type, int operation, int root, struct communicator *among,
               void *stream) {
  size_t bytes = count * size_of(type);
  to = root == among->rank ? to : NULL;
  return ask((struct request){reduce, "ncclReduce", own, to, 0, bytes, bytes, type, operation, -1, among}, bytes, stream);
}
int ncclReduceScatter(const void *own, void *to, size_t count, int type, int operation, struct communicator *among,
                      void *stream) {
  size_t part = count * size_of(type), bytes = part * (size_t)among->ranks, from = (size_t)among->rank * part;
  struct request request = {reduce, "ncclReduceScatter", own, to, from, part, bytes, type, operation, -1, among};
  return ask(request, bytes, stream);
}

// Copies the wanted part of each rank's data, or of one rank's, to `to` one after the other.
static int gather(const struct request *of) {
  if (!is_exchanged(of->function, of->own, of->to, of->bytes, of->among))
    return OK;
  struct call call = {GATHERS,          of->among,        .bytes = of->bytes, .to = of->to,
                      .from = of->from, .part = of->part, .only = of->only};
  return begin(call, of->own);
}
int ncclBroadcast(const void *own, void *to, size_t count, int type, int root, struct communicator *among, void *stream) {
  size_t bytes = count * size_of(type);
  own = root == among->rank ? own : to;
  return ask((struct request){gather, "ncclBroadcast", own, to, 0, bytes, bytes, type, 0, root, among}, bytes, stream);
}
int ncclBcast(void *to, size_t count, int type, int root, struct communicator *among, void *stream) {
  return ncclBroadcast(to, to, count, type, root, among, stream);
}
int ncclAllGather(const void *own, void *to, size_t count, int type, struct communicator *among, void *stream) {
  size_t bytes = count * size_of(type);
  struct request request = {gather, "ncclAllGather", own, to, 0, bytes, bytes, type, 0, -1, among};
  return ask(request, bytes * (size_t)among->ranks, stream);
}
int ncclAlltoAll(const void *own, void *to, size_t count, int type, struct communicator *among, void *stream) {
  size_t part = count * size_of(type), bytes = part * (size_t)among->ranks, from = (size_t)among->rank * part;
  return ask((struct request){gather, "ncclAlltoAll", own, to, from, part, bytes, type, 0, -1, among}, bytes, stream);
}

static int send(const struct request *of) {
  char path[4096];
  if (of->bytes > SMALL || !of->bytes)
    return OK;
  int status = name(path, of->among, "one", of->among->sent[of->only]++, of->among->rank, of->only);
  return status ? status : tell(path, of->own, of->bytes, 0);
}
int ncclSend(const void *from, size_t count, int type, int peer, struct communicator *among, void *stream) {
  size_t bytes = count * size_of(type);
  struct request request = {.make = send, .function = "ncclSend", .own = from, .bytes = bytes, .only = peer, .among = among};
  return ask(request, bytes, stream);
}
static int receive_later(const struct request *of) {
  if (of->bytes > SMALL) {
    gputrain_hears(0);
    gputrain_not_exchanged("ncclRecv", of->bytes);
  }
  if (of->bytes > SMALL || !of->bytes)
    return OK;
  struct call call = {RECEIVES,     of->among,       .bytes = of->bytes, .number = of->among->fetched[of->only]++,
                      .to = of->to, .only = of->only};
  return begin(call, NULL);
}
int ncclRecv(void *to, size_t count, int type, int peer, struct communicator *among, void *stream) {
  size_t bytes = count * size_of(type);
  struct request request = {
      .make = receive_later, .function = "ncclRecv", .to = to, .bytes = bytes, .only = peer, .among = among};
  return ask(request, bytes, stream);
}
