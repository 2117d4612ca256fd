// Handles are blocks of zeros that a program only passes back to a library. They have a memory of their own, so that a
// handle in use can be told from a freed one and from any other address, and no wrong address is read.
#include "emulated.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { BYTES = 256, STEP = 1 << 16 }; // bytes of a handle; handles that become accessible at once
static const size_t MOST = (size_t)1 << 28;

struct block {
  uint64_t in_use; // read without the lock
  struct block *next_free;
  void *stream, *unused;
  char contents[BYTES];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks, *next_free;
static size_t made, accessible; // numbers of blocks

GPUTRAIN_HOLD_WHILE_FORKING(lock)

static struct block *new_block(void) {
  if (!blocks) {
    void *start = mmap(NULL, MOST * sizeof *blocks, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start != MAP_FAILED)
      __atomic_store_n(&blocks, start, __ATOMIC_RELEASE);
  }
  if (blocks && made == accessible && made < MOST && !mprotect(blocks + made, STEP * sizeof *blocks, PROT_READ | PROT_WRITE))
    accessible += STEP;
  if (!blocks || made == accessible) {
    fputs("gputrain: the emulated GPU has no memory for another handle\n", stderr);
    abort();
  }
  struct block *block = blocks + made;
  __atomic_store_n(&made, made + 1, __ATOMIC_RELEASE);
  return block;
}

void *gputrain_handle(void) {
  pthread_mutex_lock(&lock);
  struct block *block = next_free;
  if (block)
    next_free = block->next_free;
  else
    block = new_block();
  memset(block->contents, 0, BYTES);
  block->stream = NULL;
  __atomic_store_n(&block->in_use, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
  return block->contents;
}

static struct block *block_of(const void *handle) {
  const struct block *first = __atomic_load_n(&blocks, __ATOMIC_ACQUIRE);
  uintptr_t at = (uintptr_t)handle - (uintptr_t)first - offsetof(struct block, contents);
  if (!first || at % sizeof *first || at / sizeof *first >= __atomic_load_n(&made, __ATOMIC_ACQUIRE))
    return NULL;
  return (struct block *)((uintptr_t)handle - offsetof(struct block, contents));
}

int gputrain_is_handle(const void *handle) {
  const struct block *block = block_of(handle);
  return block && __atomic_load_n(&block->in_use, __ATOMIC_ACQUIRE);
}

int gputrain_drop_handle(void *handle) {
  struct block *block = block_of(handle);
  pthread_mutex_lock(&lock);
  int known = block && block->in_use;
  if (known) {
    __atomic_store_n(&block->in_use, 0, __ATOMIC_RELEASE);
    block->next_free = next_free;
    next_free = block;
  }
  pthread_mutex_unlock(&lock);
  return known;
}

void gputrain_set_stream(void *handle, void *stream) {
  if (gputrain_is_handle(handle))
    block_of(handle)->stream = stream;
}
void *gputrain_stream_of(const void *handle) {
  return gputrain_is_handle(handle) ? block_of(handle)->stream : gputrain_last_stream();
}
