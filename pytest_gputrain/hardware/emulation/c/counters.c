// Counts what a training asks of the emulated GPU, by what is asked for and by the Python stack that asks. The counts of a
// step are the same on any machine.
//
// A stack is read from the frames of the calling thread, which no other thread changes meanwhile. So Python's lock (the GIL)
// is not taken. Taking it could cause a deadlock, because the allocator calls cudaMalloc under a lock of its own. The worker
// finds the offsets in Python's structures, in worker/python_frames.py.
#include "emulated.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FRAMES = 256, OTHER = 1, AUTOGRAD = 2, TRAINS = 3 };

struct row {
  struct asked key;
  uint64_t count, bytes;
};
struct place {                                  // an instruction of a Python function
  const char *code, *file_text, *function_text; // their addresses in memory
  int at, line;
  char *file, *function;
};
struct stack {
  uint64_t hash;
  uint32_t first, depth; // in stack_places, the innermost place first
};
struct name {
  const void *function;
  const char *name;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int on;
static pthread_t trainer;
static __thread int thread_kind;
static __thread uint32_t noted_line;

GPUTRAIN_HOLD_WHILE_FORKING(lock)
// A forked process has no step, so it counts nothing.
static void count_nothing(void) { __atomic_store_n(&on, 0, __ATOMIC_RELEASE); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, count_nothing); }

// A hash table: room is a power of two, and at least half of the slots are free.
struct table {
  uint32_t *slots; // numbers of entries, which begin with 1
  size_t room;
};

static void *grown(void *entries, size_t used, size_t bytes) {
  if (used & (used - 1) || (used && used < 1024))
    return entries; // there is room for 1024 entries at first, and then until the next power of two
  entries = realloc(entries, (used ? 2 * used : 1024) * bytes);
  if (!entries)
    abort();
  return entries;
}

static uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0xff51afd7ed558ccdu;
  return hash ^ hash >> 32;
}

static uint32_t *slot_of(struct table *table, uint64_t hash, int (*is)(uint32_t, const void *), const void *wanted) {
  size_t at = hash & (table->room - 1);
  while (table->slots[at] && !is(table->slots[at] - 1, wanted))
    at = (at + 1) & (table->room - 1);
  return table->slots + at;
}

static void make_room(struct table *table, size_t used, uint64_t (*hash)(uint32_t)) {
  if (2 * (used + 1) <= table->room)
    return;
  table->room = table->room ? 2 * table->room : 4096;
  free(table->slots);
  table->slots = calloc(table->room, sizeof *table->slots);
  if (!table->slots)
    abort();
  for (uint32_t i = 0; i < used; i++) {
    size_t at = hash(i) & (table->room - 1);
    while (table->slots[at])
      at = (at + 1) & (table->room - 1);
    table->slots[at] = i + 1;
  }
}

// --- Python's structures

static struct layout {
  int thread_frames, frames_current; // of a thread's state: a pointer to a pointer to the frame; -1: to the frame itself
  int code, instruction, previous;   // of a frame
  int file, function, instructions;  // of a code object
  int length, state, shift;          // of a string: its length, its state, and the first bit of its kind in the state
  int ascii, other;                  // where the text of an ASCII string begins, and that of any other
} layout;
static const void *code_type;
static int (*line_of)(const void *, int);
static void *(*thread_state)(void);

#define AT(type, start, offset) (*(type *)((const char *)(start) + (offset)))

// Returns the text of a Python string in UTF-8, which the caller frees.
static char *text_of(const void *string) {
  // The state, shifted, has three bits for the bytes of a character, one for "compact", and one for ASCII.
  size_t length = AT(size_t, string, layout.length);
  unsigned state = AT(unsigned, string, layout.state) >> layout.shift, kind = state & 7;
  char *text = malloc(4 * length + 1), *to = text;
  if (!text)
    abort();
  const unsigned char *from = (const unsigned char *)string + (state & 16 ? layout.ascii : layout.other);
  for (size_t i = 0; i < length; i++) {
    uint32_t point = kind == 1 ? from[i] : kind == 2 ? ((const uint16_t *)from)[i] : ((const uint32_t *)from)[i];
    int more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    // Tabs and line ends separate the columns and rows that the worker reads, so they become blanks.
    *to++ = (char)(more ? (0xF00 >> (more + 1) & 0xFF) | point >> 6 * more : point == '\t' || point == '\n' ? ' ' : point);
    while (more--)
      *to++ = (char)(0x80 | (point >> 6 * more & 0x3F));
  }
  *to = 0;
  return text;
}

static struct place *places;
static size_t places_used;
static struct table place_table;

static uint64_t place_hash(const struct place *place) {
  uint64_t hash = mixed((uint64_t)place->at, (uintptr_t)place->code);
  return mixed(mixed(hash, (uintptr_t)place->file_text), (uintptr_t)place->function_text);
}
static uint64_t hash_of_place(uint32_t index) { return place_hash(places + index); }
// A new code object may get the address of a freed one. Its name or its file is then another object.
static int is_place(uint32_t index, const void *wanted) {
  const struct place *one = places + index, *other = wanted;
  return one->code == other->code && one->at == other->at && one->file_text == other->file_text &&
         one->function_text == other->function_text;
}
static uint32_t number_of_place(const struct place *place) {
  make_room(&place_table, places_used, hash_of_place);
  uint32_t *slot = slot_of(&place_table, place_hash(place), is_place, place);
  if (!*slot) {
    places = grown(places, places_used, sizeof *places);
    struct place made = *place;
    made.line = line_of(place->code, place->at);
    made.file = text_of(place->file_text);
    made.function = text_of(place->function_text);
    places[places_used++] = made;
    *slot = (uint32_t)places_used;
  }
  return *slot - 1;
}

static struct stack *stacks;
static size_t stacks_used;
static struct table stack_table;
static uint32_t *stack_places;
static size_t stack_places_used;

static uint64_t hash_of_stack(uint32_t index) { return stacks[index].hash; }
static int is_stack(uint32_t index, const void *hash) { return stacks[index].hash == *(const uint64_t *)hash; }

// Returns the number of this thread's stack, from 1; 0 if the thread has none.
static uint32_t current_stack(void) {
  struct place found[MOST_FRAMES];
  uint32_t depth = 0;
  uint64_t hash = 0;
  void *thread = thread_state ? thread_state() : NULL;
  const void *frame = thread ? AT(void *, thread, layout.thread_frames) : NULL;
  if (frame && layout.frames_current >= 0)
    frame = AT(void *, frame, layout.frames_current);
  for (; frame && depth < MOST_FRAMES; frame = AT(void *, frame, layout.previous)) {
    const char *code = (const char *)(AT(uintptr_t, frame, layout.code) & ~(uintptr_t)7); // Python 3.14 marks the pointer
    if (!code || AT(void *, code, sizeof(size_t)) != code_type)
      continue; // the interpreter's own frames have no code
    int at = (int)(AT(char *, frame, layout.instruction) - code - layout.instructions);
    found[depth] = (struct place){code, AT(char *, code, layout.file), AT(char *, code, layout.function), at, 0, NULL, NULL};
    hash = mixed(hash, place_hash(found + depth++));
  }
  if (!depth)
    return 0;
  // A stack is found by the hash of its places, so the texts of a known stack are not read again.
  make_room(&stack_table, stacks_used, hash_of_stack);
  uint32_t *slot = slot_of(&stack_table, hash, is_stack, &hash);
  if (!*slot) {
    stacks = grown(stacks, stacks_used, sizeof *stacks);
    stacks[stacks_used++] = (struct stack){hash, (uint32_t)stack_places_used, depth};
    *slot = (uint32_t)stacks_used;
    for (uint32_t i = 0; i < depth; i++) {
      stack_places = grown(stack_places, stack_places_used, sizeof *stack_places);
      stack_places[stack_places_used++] = number_of_place(found + i);
    }
  }
  return *slot;
}

// --- Counting

static struct row *rows;
static size_t rows_used;
static struct table row_table;

static uint64_t key_hash(const struct asked *key) {
  uint64_t hash = 0;
  for (size_t i = 0; i < sizeof *key / 8; i++)
    hash = mixed(hash, ((const uint64_t *)key)[i]);
  return hash;
}
static uint64_t hash_of_row(uint32_t index) { return key_hash(&rows[index].key); }
static int is_row(uint32_t index, const void *key) { return !memcmp(&rows[index].key, key, sizeof(struct asked)); }

static int thread_by_name(void) {
  if (!thread_kind) {
    char thread_name[16] = "";
    pthread_getname_np(pthread_self(), thread_name, sizeof thread_name);
    // torch names the threads of its backward passes pt_autograd_0, pt_autograd_1 and so on.
    thread_kind = strncmp(thread_name, "pt_autograd", 11) ? OTHER : AUTOGRAD;
  }
  return thread_kind;
}
static int kind_of_thread(void) { return pthread_equal(pthread_self(), trainer) ? TRAINS : thread_by_name(); }

// The caller holds the lock.
static void count(const struct asked *key, uint64_t bytes) {
  make_room(&row_table, rows_used, hash_of_row);
  uint32_t *slot = slot_of(&row_table, key_hash(key), is_row, key);
  if (!*slot) {
    rows = grown(rows, rows_used, sizeof *rows);
    rows[rows_used++] = (struct row){*key, 0, 0};
    *slot = (uint32_t)rows_used;
  }
  struct row *row = rows + *slot - 1;
  row->count++;
  row->bytes += bytes;
}

static const char *name_of(const void *function);

static int is_on(void) { return __atomic_load_n(&on, __ATOMIC_ACQUIRE); }

void (*gputrain_profiler)(const char *, const char *, uint64_t, int);
static void tell_profiler(const char *what, const void *function, uint64_t bytes, int replayed) {
  void (*tell)(const char *, const char *, uint64_t, int) = __atomic_load_n(&gputrain_profiler, __ATOMIC_ACQUIRE);
  const char *name = function;
  if (!tell)
    return;
  if (!strcmp(what, "launches")) {
    pthread_mutex_lock(&lock);
    name = name_of(function);
    pthread_mutex_unlock(&lock);
  }
  tell(what, name, bytes, replayed);
}

int gputrain_counting(void) { return is_on() || __atomic_load_n(&gputrain_profiler, __ATOMIC_ACQUIRE); }

void gputrain_count_work(const struct work *work) {
  if (!work->what)
    return;
  tell_profiler(work->what, work->function, work->bytes, 0);
  if (!is_on())
    return;
  struct asked key = {work->what, work->function, work->slow, work->shape, .noted = noted_line};
  key.thread = (uint16_t)kind_of_thread();
  key.backward = noted_line || key.thread == AUTOGRAD;
  pthread_mutex_lock(&lock);
  key.stack = current_stack();
  count(&key, work->bytes);
  pthread_mutex_unlock(&lock);
}

void gputrain_count(const char *what, const void *function, uint64_t bytes) {
  gputrain_count_work(&(struct work){.what = what, .function = function, .bytes = bytes});
}

struct asked gputrain_asked(const struct work *work) {
  struct asked key = {work->what, work->function, work->slow, work->shape, .noted = noted_line, .replayed = 1};
  if (!work->what)
    return key;
  key.backward = noted_line || thread_by_name() == AUTOGRAD;
  pthread_mutex_lock(&lock);
  key.stack = current_stack();
  pthread_mutex_unlock(&lock);
  return key;
}

void gputrain_count_replayed(const struct asked *asked, uint64_t bytes) {
  tell_profiler(asked->what, asked->function, bytes, 1);
  if (!is_on())
    return;
  struct asked key = *asked;
  key.thread = (uint16_t)kind_of_thread();
  pthread_mutex_lock(&lock);
  count(&key, bytes);
  pthread_mutex_unlock(&lock);
}

// Returns a permanent copy of a text, the same copy for equal texts. There are few texts: shapes, and names of operators.
const char *gputrain_interned(const char *text) {
  static char **texts;
  static size_t used;
  pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < used && strcmp(texts[i], text))
    i++;
  if (i == used) {
    texts = grown(texts, used, sizeof *texts);
    texts[used++] = strdup(text);
  }
  const char *found = texts[i];
  pthread_mutex_unlock(&lock);
  return found;
}

int gputrain_ask_product(void *stream, const char *function, const char *slow, const char *shape, uint64_t flops) {
  struct work work = {.kind = NODE_KERNEL, .what = "library_calls", .function = function, .bytes = flops};
  if (*slow) {
    work.slow = gputrain_interned(slow);
    work.shape = gputrain_interned(shape);
  }
  int status;
  gputrain_captured(stream, &work, &status);
  return status;
}

// --- Names of kernels, which programs register when they are loaded

static struct name *names;
static size_t names_used;
static int names_sorted;

void gputrain_name(const void *function, const char *name) {
  pthread_mutex_lock(&lock);
  names = grown(names, names_used, sizeof *names);
  names[names_used++] = (struct name){function, name};
  names_sorted = 0;
  pthread_mutex_unlock(&lock);
}

static int by_function(const void *one, const void *other) {
  uintptr_t a = (uintptr_t)((const struct name *)one)->function, b = (uintptr_t)((const struct name *)other)->function;
  return a < b ? -1 : a > b;
}
static const char *name_of(const void *function) {
  // A library registers all its names when it is loaded, so they are sorted once, before the next look-up.
  if (!names_sorted)
    qsort(names, names_used, sizeof *names, by_function);
  names_sorted = 1;
  struct name wanted = {function, NULL};
  const struct name *found = bsearch(&wanted, names, names_used, sizeof *names, by_function);
  return found ? found->name : "";
}

// --- For the worker

void gputrain_counters_python(const int *offsets, const void *type_of_code) {
  memcpy(&layout, offsets, sizeof layout);
  code_type = type_of_code;
  line_of = (int (*)(const void *, int))dlsym(RTLD_DEFAULT, "PyCode_Addr2Line");
  thread_state = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
}
void gputrain_counters_no_stacks(void) { thread_state = NULL; }

// Starts to count what the calling thread, which trains, and all other threads ask for.
void gputrain_counters_begin(void) {
  pthread_mutex_lock(&lock);
  rows_used = 0;
  if (row_table.room)
    memset(row_table.slots, 0, row_table.room * sizeof *row_table.slots);
  trainer = pthread_self();
  __atomic_store_n(&on, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
}
void gputrain_counters_end(void) { count_nothing(); }

// Sets the line to which this thread's requests in a backward pass belong, by a number of the worker's; 0 for none.
void gputrain_counters_note(uint32_t line) {
  noted_line = line;
  if (line && !thread_kind)
    thread_kind = AUTOGRAD;
}

// Counts something for the worker that asks no stand-in.
void gputrain_counters_add(const char *what, const char *function, uint64_t bytes) {
  if (gputrain_counting())
    gputrain_count(gputrain_interned(what), gputrain_interned(function), bytes);
}

uint32_t gputrain_counters_stack(void) {
  pthread_mutex_lock(&lock);
  uint32_t stack = current_stack();
  pthread_mutex_unlock(&lock);
  return stack;
}

struct text {
  char *to;
  size_t room, at;
};
#define WRITE(text, ...)                                                                                                    \
  ((text)->at += (size_t)snprintf((text)->to && (text)->at < (text)->room ? (text)->to + (text)->at : NULL,                 \
                                  (text)->to && (text)->at < (text)->room ? (text)->room - (text)->at : 0, __VA_ARGS__))

// Writes a line of text for each row. Returns the bytes of all lines, which may exceed the room.
size_t gputrain_counters_rows(char *to, size_t room) {
  struct text text = {to, room, 0};
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < rows_used; i++) {
    const struct asked *key = &rows[i].key;
    const char *name = !key->function ? "" : strcmp(key->what, "launches") ? key->function : name_of(key->function);
    WRITE(&text, "%s\t%s\t%s\t%s\t%u\t%u\t%u\t%u\t%u\t%llu\t%llu\n", key->what, name, key->slow ? key->slow : "",
          key->shape ? key->shape : "", key->stack, key->noted, key->thread, key->backward, key->replayed,
          (unsigned long long)rows[i].count, (unsigned long long)rows[i].bytes);
  }
  pthread_mutex_unlock(&lock);
  return text.at;
}

// Writes the places of the stack with this number, the innermost first, as line, file and function.
size_t gputrain_counters_places(uint32_t number, char *to, size_t room) {
  struct text text = {to, room, 0};
  pthread_mutex_lock(&lock);
  if (number && number <= stacks_used)
    for (uint32_t i = 0; i < stacks[number - 1].depth; i++) {
      const struct place *place = places + stack_places[stacks[number - 1].first + i];
      WRITE(&text, "%d\t%s\t%s\n", place->line, place->file, place->function);
    }
  pthread_mutex_unlock(&lock);
  return text.at;
}
