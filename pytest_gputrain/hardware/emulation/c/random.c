// Computes the random words that CUDA's kernels draw, for the worker's package emulated_values. It also records with how
// many blocks kernels were launched, because that decides which words each thread draws.
#include "emulated.h"

enum { ROUNDS = 10, KEPT_LAUNCHES = 16 };

// Philox4x32-10 makes four words from a counter and a key. The upper half of the counter is the number of the thread.
static void philox(uint64_t low, uint64_t high, uint64_t seed, uint32_t words[4]) {
  uint32_t counter[4] = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)};
  uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < ROUNDS; round++, key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u) {
    uint64_t first = (uint64_t)0xD2511F53u * counter[0], second = (uint64_t)0xCD9E8D57u * counter[2];
    counter[0] = (uint32_t)(second >> 32) ^ counter[1] ^ key[0];
    counter[1] = (uint32_t)second;
    counter[2] = (uint32_t)(first >> 32) ^ counter[3] ^ key[1];
    counter[3] = (uint32_t)first;
  }
  for (int i = 0; i < 4; i++)
    words[i] = counter[i];
}

// Writes the first `kept` words that each thread draws in each of its calls, ordered by call, word and thread.
void gputrain_philox(uint64_t seed, uint64_t first_call, uint64_t calls, uint64_t first_thread, uint64_t threads, int kept,
                     int64_t *to) {
  for (uint64_t call = 0; call < calls; call++, to += kept * threads)
    for (uint64_t thread = 0; thread < threads; thread++) {
      uint32_t words[4];
      philox(first_call + call, first_thread + thread, seed, words);
      for (int i = 0; i < kept; i++)
        to[i * threads + thread] = words[i];
    }
}

static __thread uint64_t launched[KEPT_LAUNCHES];
static __thread unsigned launches;

void gputrain_launched(uint64_t blocks) { launched[launches++ % KEPT_LAUNCHES] = blocks; }
void gputrain_forget_launches(void) { launches = 0; }

// Tells whether this thread has launched a kernel of that many blocks since earlier launches were forgotten.
int gputrain_has_launched(uint64_t blocks) {
  for (unsigned i = 0; i < launches && i < KEPT_LAUNCHES; i++)
    if (launched[i] == blocks)
      return 1;
  return 0;
}
