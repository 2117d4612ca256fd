// Stands in for NCCL between processes of one machine. Small data is really exchanged, by files, since it decides what a
// program does: sizes, flags, pickled objects. Large data, such as gradients, is left alone.
#include "emulated.h"
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, NO_COLOR = -1 };
enum { SUM = 0, PRODUCT = 1, MAXIMUM = 2, MINIMUM = 3, AVERAGE = 4 };
enum { SMALL = 1 << 20, WAIT_SECONDS = 1800, WAIT_NANOSECONDS = 200000 };

struct id {
  char bytes[128];
};
struct communicator {
  struct id id;
  int rank, ranks, splits;
  int exchanges;       // so far
  int *sent, *fetched; // messages to and from each rank
  int of_one_process;  // all ranks are devices of this process, and none can wait for another
};

int ncclGetVersion(int *version) {
  *version = NCCL_VERSION;
  return OK;
}
const char *ncclGetErrorString(int status) { return status ? "error of an emulated GPU" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

// --- Files between ranks

static int name(char path[4096], const struct communicator *among, const char *what, int number, int from, int to) {
  const char *folder = getenv("GPUTRAIN_EMULATED_STATE");
  if (!folder)
    return gputrain_missing("NCCL between processes, for want of a folder in GPUTRAIN_EMULATED_STATE", SYSTEM_ERROR);
  int length = snprintf(path, 4096, "%s/nccl-%s-%s-%d-%d-%d", folder, among->id.bytes, what, number, from, to);
  return length < 0 || length >= 4096 ? SYSTEM_ERROR : OK;
}

// A file that has its name is whole.
static int tell(const char *path, const void *data, size_t bytes) {
  char part[4096 + 8];
  snprintf(part, sizeof part, "%s.part", path);
  int file = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0)
    return SYSTEM_ERROR;
  ssize_t written = write(file, data, bytes);
  close(file);
  return written == (ssize_t)bytes && !rename(part, path) ? OK : SYSTEM_ERROR;
}

static time_t seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

static int hear(const char *path, void *data, size_t bytes) {
  time_t end = seconds() + WAIT_SECONDS;
  int file;
  while ((file = open(path, O_RDONLY | O_CLOEXEC)) < 0) {
    if (errno != ENOENT || seconds() > end)
      return gputrain_missing("a collective of NCCL, since another rank does not take part", SYSTEM_ERROR);
    nanosleep(&(struct timespec){0, WAIT_NANOSECONDS}, NULL);
  }
  ssize_t got = read(file, data, bytes);
  close(file);
  return got == (ssize_t)bytes ? OK : gputrain_missing("a collective of NCCL whose ranks differ in size", INVALID_ARGUMENT);
}

// Tells the other ranks what this one has, and learns what each has. When this ends, all have told, and so have heard what
// was told the time before.
static int exchange(struct communicator *among, const void *own, size_t bytes, char *all) {
  char path[4096];
  int status = OK, number = among->exchanges++;
  if (among->ranks == 1 || among->of_one_process) {
    for (int rank = 0; rank < among->ranks; rank++)
      memcpy(all + (size_t)rank * bytes, own, bytes);
    return OK;
  }
  if ((status = name(path, among, "all", number, among->rank, 0)) || (status = tell(path, own, bytes)))
    return status;
  for (int rank = 0; rank < among->ranks && !status; rank++)
    if (!(status = name(path, among, "all", number, rank, 0)))
      status = hear(path, all + (size_t)rank * bytes, bytes);
  if (number && !name(path, among, "all", number - 1, among->rank, 0))
    unlink(path);
  return status;
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
    if (!(status = make(out + rank, &id, rank, ranks)))
      out[rank]->of_one_process = 1;
  return status;
}
int ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **out, void *config) {
  int own[2] = {color, key}, split = parent->splits++, ranks = 0, before = 0;
  int (*all)[2] = calloc((size_t)parent->ranks, sizeof own);
  int status = all ? exchange(parent, own, sizeof own, (char *)all) : SYSTEM_ERROR;
  for (int other = 0; other < parent->ranks && !status; other++) {
    if (all[other][0] != color)
      continue;
    ranks++;
    before += all[other][1] < key || (all[other][1] == key && other < parent->rank);
  }
  free(all);
  *out = NULL;
  if (status || color == NO_COLOR)
    return status;
  struct id id;
  int length = snprintf(id.bytes, sizeof id.bytes, "%s.%d.%d", parent->id.bytes, split, color);
  if (length >= (int)sizeof id.bytes)
    return gputrain_missing("ncclCommSplit of splits of splits", INVALID_ARGUMENT);
  return make(out, &id, before, ranks);
}
int ncclCommShrink(void) { return gputrain_missing("ncclCommShrink", INVALID_ARGUMENT); }
int ncclCommDestroy(struct communicator *communicator) {
  free(communicator->sent);
  free(communicator->fetched);
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
int ncclMemAlloc(void **out, size_t bytes) { return gputrain_allocate(out, bytes, DEVICE) ? SYSTEM_ERROR : OK; }
int ncclMemFree(void *start) { return gputrain_free(start) ? INVALID_ARGUMENT : OK; }

// --- Collectives

static size_t size_of(int type) {
  static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 0;
}

// What each rank has, in a block that the caller frees; NULL with status OK where it is large.
static int hear_all(char **all, const void *own, size_t bytes, struct communicator *among) {
  *all = NULL;
  if (bytes * (size_t)among->ranks > SMALL || !bytes)
    return OK;
  *all = malloc(bytes * (size_t)among->ranks);
  return *all ? exchange(among, own, bytes, *all) : SYSTEM_ERROR;
}

static double combined(double one, double other, int operation) {
  switch (operation) {
  case PRODUCT:
    return one * other;
  case MAXIMUM:
    return one > other ? one : other;
  case MINIMUM:
    return one < other ? one : other;
  default: // a sum, also of what was to be multiplied before
    return one + other;
  }
}

// Numbers are combined as doubles: what counts and flags need.
#define COMBINE(type)                                                                                                       \
  for (size_t i = 0; i < count; i++) {                                                                                      \
    double value = (double)((const type *)all)[i];                                                                          \
    for (int rank = 1; rank < ranks; rank++)                                                                                \
      value = combined(value, (double)((const type *)all)[(size_t)rank * stride + i], operation);                           \
    ((type *)to)[i] = (type)(operation == AVERAGE ? value / ranks : value);                                                 \
  }                                                                                                                         \
  break

static void combine(void *to, const char *all, size_t count, size_t stride, int type, int operation, int ranks) {
  switch (type) {
  case 0:
    COMBINE(int8_t);
  case 1:
    COMBINE(uint8_t);
  case 2:
    COMBINE(int32_t);
  case 3:
    COMBINE(uint32_t);
  case 4:
    COMBINE(int64_t);
  case 5:
    COMBINE(uint64_t);
  case 7:
    COMBINE(float);
  case 8:
    COMBINE(double);
  default: // half types hold weights and gradients, whose values nobody knows
    memcpy(to, all, count * size_of(type));
  }
}

// Each rank has `stride` elements, of which this one is to have `count` combined ones from the index on.
static int reduce(const void *own, void *to, size_t from, size_t count, size_t stride, int type, int operation, int wanted,
                  struct communicator *among) {
  char *all;
  size_t bytes = stride * size_of(type);
  int status = hear_all(&all, own, bytes, among);
  if (all && !status && wanted)
    combine(to, all + from * size_of(type), count, stride, type, operation, among->ranks);
  free(all);
  return status;
}
int ncclAllReduce(const void *own, void *to, size_t count, int type, int operation, struct communicator *among,
                  void *stream) {
  gputrain_count("collectives", "ncclAllReduce", count * size_of(type));
  return reduce(own, to, 0, count, count, type, operation, 1, among);
}
int ncclReduce(const void *own, void *to, size_t count, int type, int operation, int root, struct communicator *among,
               void *stream) {
  gputrain_count("collectives", "ncclReduce", count * size_of(type));
  return reduce(own, to, 0, count, count, type, operation, root == among->rank, among);
}
int ncclReduceScatter(const void *own, void *to, size_t count, int type, int operation, struct communicator *among,
                      void *stream) {
  gputrain_count("collectives", "ncclReduceScatter", count * (size_t)among->ranks * size_of(type));
  size_t all = count * (size_t)among->ranks;
  return reduce(own, to, (size_t)among->rank * count, count, all, type, operation, 1, among);
}

// Copies of each rank's block the part from the offset on, to `to` one after the other, or of one rank only.
static int gather(const void *own, char *to, size_t bytes, size_t offset, size_t part, int only,
                  struct communicator *among) {
  char *all;
  int status = hear_all(&all, own, bytes, among);
  for (int rank = 0; rank < among->ranks && all && !status; rank++)
    if (only < 0)
      memcpy(to + (size_t)rank * part, all + (size_t)rank * bytes + offset, part);
    else if (only == rank)
      memcpy(to, all + (size_t)rank * bytes + offset, part);
  free(all);
  return status;
}
int ncclBroadcast(const void *own, void *to, size_t count, int type, int root, struct communicator *among, void *stream) {
  gputrain_count("collectives", "ncclBroadcast", count * size_of(type));
  size_t bytes = count * size_of(type);
  return gather(root == among->rank ? own : to, to, bytes, 0, bytes, root, among);
}
int ncclBcast(void *to, size_t count, int type, int root, struct communicator *among, void *stream) {
  return ncclBroadcast(to, to, count, type, root, among, stream);
}
int ncclAllGather(const void *own, void *to, size_t count, int type, struct communicator *among, void *stream) {
  gputrain_count("collectives", "ncclAllGather", count * size_of(type) * (size_t)among->ranks);
  size_t bytes = count * size_of(type);
  return gather(own, to, bytes, 0, bytes, -1, among);
}
int ncclAlltoAll(const void *own, void *to, size_t count, int type, struct communicator *among, void *stream) {
  gputrain_count("collectives", "ncclAlltoAll", count * size_of(type) * (size_t)among->ranks);
  size_t bytes = count * size_of(type);
  return gather(own, to, bytes * (size_t)among->ranks, (size_t)among->rank * bytes, bytes, -1, among);
}

// --- Messages: a group receives when it ends, after all of it was sent

struct awaited {
  struct communicator *among;
  void *to;
  size_t bytes;
  int peer;
};
static __thread struct awaited *awaited;
static __thread int awaited_count, awaited_room, groups;

static int receive(const struct awaited *message) {
  char path[4096];
  struct communicator *among = message->among;
  int status = name(path, among, "one", among->fetched[message->peer]++, message->peer, among->rank);
  if (!status && !(status = hear(path, message->to, message->bytes)))
    unlink(path);
  return status;
}
int ncclSend(const void *from, size_t count, int type, int peer, struct communicator *among, void *stream) {
  gputrain_count("collectives", "ncclSend", count * size_of(type));
  char path[4096];
  size_t bytes = count * size_of(type);
  if (bytes > SMALL || among->of_one_process)
    return OK;
  int status = name(path, among, "one", among->sent[peer]++, among->rank, peer);
  return status ? status : tell(path, from, bytes);
}
int ncclRecv(void *to, size_t count, int type, int peer, struct communicator *among, void *stream) {
  gputrain_count("collectives", "ncclRecv", count * size_of(type));
  struct awaited message = {among, to, count * size_of(type), peer};
  if (message.bytes > SMALL || among->of_one_process)
    return OK;
  if (!groups)
    return receive(&message);
  if (awaited_count == awaited_room) {
    awaited_room = awaited_room ? 2 * awaited_room : 16;
    awaited = realloc(awaited, (size_t)awaited_room * sizeof *awaited);
    if (!awaited)
      abort();
  }
  awaited[awaited_count++] = message;
  return OK;
}
int ncclGroupStart(void) {
  groups++;
  return OK;
}
int ncclGroupEnd(void) {
  int status = OK;
  if (--groups)
    return OK;
  for (int i = 0; i < awaited_count && !status; i++)
    status = receive(awaited + i);
  awaited_count = 0;
  return status;
}
