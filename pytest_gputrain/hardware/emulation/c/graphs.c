// Captures of streams into CUDA graphs, and the graphs.
//
// Requests to a captured stream become nodes, and nothing is done. Each launch of the graph counts its nodes, and does what
// the stand-ins do for them, in the order of the capture. As in NVIDIA's driver, each node has the nodes that it waits for:
// programs ask for them, and a capture with work that nobody waits for is an error.
#include "emulated.h"
#include <stdlib.h>
#include <string.h>

struct node {
  int references; // from the graph, and from what was made of the graph
  struct work work;
  struct asked asked;
  size_t count;
  struct node **before; // the nodes that this one waits for, which live as long as the graph
  int seen;
};

struct nodes {
  struct node **all;
  size_t count, room;
};

struct graph {
  struct nodes nodes;
  size_t hidden;
};

struct executable {
  int references; // from the program, and from graphs that have this one as a node
  struct nodes nodes;
  uint64_t kernels;
};

struct participant {
  void *stream;
  struct nodes last; // the nodes that the stream's next node waits for
};

struct capture {
  struct capture *next;
  uint64_t id;
  void *origin;
  pthread_t thread;
  int mode, invalid, blocking;
  int is_given; // whether the program passed the graph
  struct graph *graph;
  struct participant *streams;
  size_t count;
};

enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
enum { NONE = 0, ACTIVE = 1, INVALIDATED = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures;
static uint64_t last_id;
static uint64_t begun, replayed;                            // captures that have begun, and launches of graphs, so far
static uint64_t graphs, kernels, most_graphs, most_kernels; // graphs that can be launched, and their kernels
static uint64_t *dropped; // numbers of the worker's functions that no graph calls any more
static size_t dropped_count, dropped_room;
static __thread int thread_mode;
static __thread void *last_stream;

int gputrain_captures; // captures that are under way; read without the lock
GPUTRAIN_HOLD_WHILE_FORKING(lock)

static int any(void) { return __atomic_load_n(&gputrain_captures, __ATOMIC_ACQUIRE); }

static void *resized(void *block, size_t bytes) {
  block = realloc(block, bytes ? bytes : 1);
  if (!block)
    abort();
  return block;
}
static void *zeros(size_t bytes) { return memset(resized(NULL, bytes), 0, bytes); }

static void push(struct nodes *to, struct node *node) {
  if (to->count == to->room) {
    to->room = to->room ? 2 * to->room : 4;
    to->all = resized(to->all, to->room * sizeof *to->all);
  }
  to->all[to->count++] = node;
}
static void merge(struct nodes *into, struct node *const *nodes, size_t count) {
  for (size_t i = 0; i < count; i++) {
    size_t j = 0;
    while (j < into->count && into->all[j] != nodes[i])
      j++;
    if (j == into->count)
      push(into, nodes[i]);
  }
}

// --- The callers of these functions hold the lock

static struct participant *participant(void *stream, struct capture **of) {
  for (struct capture *capture = captures; capture; capture = capture->next)
    for (size_t i = 0; i < capture->count; i++)
      if (capture->streams[i].stream == stream) {
        *of = capture;
        return capture->streams + i;
      }
  return NULL;
}
static struct capture *by_id(uint64_t id) {
  struct capture *capture = captures;
  while (capture && capture->id != id)
    capture = capture->next;
  return capture;
}

static struct participant *join(struct capture *capture, void *stream) {
  capture->streams = resized(capture->streams, (capture->count + 1) * sizeof *capture->streams);
  struct participant *new = capture->streams + capture->count++;
  *new = (struct participant){.stream = stream};
  return new;
}

static struct node *add(struct graph *graph, const struct work *work, const struct asked *asked, struct node *const *before,
                        size_t count) {
  struct node *node = zeros(sizeof *node);
  node->references = 1;
  node->work = *work;
  node->asked = *asked;
  node->count = count;
  node->before = zeros(count * sizeof *node->before);
  if (count)
    memcpy(node->before, before, count * sizeof *before);
  graph->hidden += work->kind == NODE_HIDDEN;
  push(&graph->nodes, node);
  return node;
}
static void append(struct capture *capture, struct participant *at, const struct work *work, const struct asked *asked) {
  if (work->kind == NODE_HIDDEN) {
    add(capture->graph, work, asked, NULL, 0);
    return;
  }
  struct node *node = add(capture->graph, work, asked, at->last.all, at->last.count);
  at->last.count = 0;
  push(&at->last, node);
}

// Blocking streams wait for work on the legacy stream, which would have to wait for the captured streams.
static int is_implicit(void *stream) {
  int found = 0;
  for (struct capture *capture = captures; capture && (!stream || stream == LEGACY); capture = capture->next)
    if (capture->blocking && !capture->invalid)
      found = capture->invalid = 1;
  return found;
}

// --- Work on streams

// If the stream is not captured, counts the work and returns 0: the caller then does it. Otherwise makes a node of it, and
// *status says whether that was possible.
int gputrain_captured(void *stream, const struct work *work, int *status) {
  *status = OK;
  if (!any()) {
    gputrain_count_work(work);
    return 0;
  }
  struct asked asked = gputrain_asked(work);
  struct capture *capture = NULL;
  pthread_mutex_lock(&lock);
  last_stream = stream;
  struct participant *at = participant(stream, &capture);
  int implicit = !at && is_implicit(stream);
  if (at && capture->invalid)
    *status = CAPTURE_INVALIDATED;
  else if (at)
    append(capture, at, work, &asked);
  else if (implicit)
    *status = CAPTURE_IMPLICIT;
  pthread_mutex_unlock(&lock);
  if (!at && !implicit)
    gputrain_count_work(work);
  return at || implicit;
}

// Asks for a kernel or a library call, neither of which computes anything.
int gputrain_ask(void *stream, const char *what, const void *function, uint64_t bytes) {
  int status;
  gputrain_captured(stream, &(struct work){.kind = NODE_KERNEL, .what = what, .function = function, .bytes = bytes},
                    &status);
  return status;
}

void *gputrain_last_stream(void) { return last_stream; }

// Adds a node to the graph that is captured. Each launch of the graph then calls `run` with this number, and the worker
// computes what the nodes before this one write.
int gputrain_note_step(void *stream, int (*run)(void *number, int forget), uint64_t number) {
  struct work work = {.kind = NODE_HIDDEN, .run = run, .data = (void *)number, .is_step = 1};
  int status;
  return any() && gputrain_captured(stream, &work, &status) && !status;
}

// Returns to the worker the numbers of functions that no graph calls any more, and how many they are.
size_t gputrain_dropped_steps(uint64_t *to, size_t room) {
  pthread_mutex_lock(&lock);
  size_t count = dropped_count < room ? dropped_count : room;
  dropped_count -= count;
  if (count)
    memcpy(to, dropped + dropped_count, count * sizeof *to);
  pthread_mutex_unlock(&lock);
  return count;
}

// A capture must not contain a wait of the host for one of its streams or for the device. Such a wait invalidates the
// capture.
int gputrain_waits(void *stream) {
  if (!any())
    return OK;
  int status = OK;
  pthread_mutex_lock(&lock);
  for (struct capture *capture = captures; capture; capture = capture->next)
    for (size_t i = 0; i < capture->count; i++)
      if (stream == WHOLE_DEVICE || capture->streams[i].stream == stream) {
        status = capture->invalid && stream != WHOLE_DEVICE ? CAPTURE_INVALIDATED : CAPTURE_UNSUPPORTED;
        capture->invalid = 1;
        break;
      }
  pthread_mutex_unlock(&lock);
  return status;
}

// Tells whether a call that CUDA names potentially unsafe is an error, which the modes of the captures and of the thread
// decide. It is a guess that calls which only query work outside of the captures are unsafe, too.
int gputrain_unsafe(void) {
  if (!any() || thread_mode == RELAXED)
    return OK;
  int status = OK;
  pthread_mutex_lock(&lock);
  for (struct capture *capture = captures; capture; capture = capture->next) {
    int is_own = pthread_equal(capture->thread, pthread_self()) && capture->mode != RELAXED;
    if (is_own || (thread_mode == GLOBAL && capture->mode == GLOBAL)) {
      capture->invalid = 1;
      status = CAPTURE_UNSUPPORTED;
    }
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int gputrain_exchange_mode(int *mode) {
  int before = thread_mode;
  if (*mode < GLOBAL || *mode > RELAXED)
    return INVALID_VALUE;
  thread_mode = *mode;
  *mode = before;
  return OK;
}

// --- Events: an event that was recorded in a capture stands for nodes, unless it is an external event

void gputrain_happens(struct event *event) {
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  event->capture = 0;
}
static int happen(void *event, int forget) {
  if (!forget)
    gputrain_happens(event);
  return OK;
}

int gputrain_record(struct event *event, void *stream, int external) {
  static const struct asked nobody;
  int status = OK;
  struct capture *capture = NULL;
  pthread_mutex_lock(&lock);
  struct participant *at = participant(stream, &capture);
  if (at && capture->invalid)
    status = CAPTURE_INVALIDATED;
  else if (at && external)
    append(capture, at, &(struct work){.kind = NODE_RECORD, .run = happen, .data = event}, &nobody);
  else {
    gputrain_happens(event);
    free(event->nodes);
    event->nodes = NULL;
    event->count = 0;
    if (at) {
      event->capture = capture->id;
      event->count = at->last.count;
      event->nodes = zeros(event->count * sizeof *event->nodes);
      if (event->count)
        memcpy(event->nodes, at->last.all, event->count * sizeof *event->nodes);
    }
  }
  pthread_mutex_unlock(&lock);
  return status;
}

// A query of a captured event is an error, and invalidates the capture.
int gputrain_asks(const struct event *event) {
  if (!event->capture)
    return gputrain_unsafe();
  pthread_mutex_lock(&lock);
  struct capture *capture = by_id(event->capture);
  if (capture)
    capture->invalid = 1;
  pthread_mutex_unlock(&lock);
  return CAPTURED_EVENT;
}

// Writes to *captured whether the wait becomes a part of a graph.
int gputrain_wait(void *stream, const struct event *event, int external, int *captured) {
  static const struct asked nobody;
  int status = OK;
  struct capture *capture = NULL;
  pthread_mutex_lock(&lock);
  struct capture *other = event->capture ? by_id(event->capture) : NULL;
  struct participant *at = participant(stream, &capture);
  *captured = at || event->capture;
  if (event->capture && !other)
    status = CAPTURED_EVENT; // the event belongs to a capture that has ended
  else if ((other && other->invalid) || (at && capture->invalid))
    status = CAPTURE_INVALIDATED;
  else if (at && other && other != capture) {
    status = CAPTURE_MERGE;
    other->invalid = capture->invalid = 1;
  } else if (at && !other && external)
    append(capture, at, &(struct work){.kind = NODE_WAIT}, &nobody);
  else if (at && !other && event->time.tv_sec) { // a guess: waiting for an event that was never recorded is allowed
    status = CAPTURE_ISOLATION;
    capture->invalid = 1;
  } else if (other) {
    if (!at)
      at = join(other, stream);
    merge(&at->last, event->nodes, event->count);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

// --- Graphs

static void release(struct nodes *nodes) {
  for (size_t i = 0; i < nodes->count; i++) {
    struct node *node = nodes->all[i];
    if (__atomic_sub_fetch(&node->references, 1, __ATOMIC_ACQ_REL))
      continue;
    if (node->work.is_step) {
      pthread_mutex_lock(&lock);
      if (dropped_count == dropped_room) {
        dropped_room = dropped_room ? 2 * dropped_room : 64;
        dropped = resized(dropped, dropped_room * sizeof *dropped);
      }
      dropped[dropped_count++] = (uint64_t)node->work.data;
      pthread_mutex_unlock(&lock);
    } else if (node->work.drop)
      node->work.drop(node->work.data);
    free(node->before);
    free(node);
  }
  free(nodes->all);
}

struct graph *gputrain_new_graph(void) { return zeros(sizeof(struct graph)); }
void gputrain_destroy_graph(struct graph *graph) {
  release(&graph->nodes);
  free(graph);
}

size_t gputrain_nodes(const struct graph *graph, struct node **to, size_t room) {
  size_t found = 0;
  for (size_t i = 0; to && i < graph->nodes.count && found < room; i++)
    if (graph->nodes.all[i]->work.kind != NODE_HIDDEN)
      to[found++] = graph->nodes.all[i];
  return graph->nodes.count - graph->hidden;
}
size_t gputrain_before(const struct node *node, struct node **to, size_t room) {
  for (size_t i = 0; to && i < node->count && i < room; i++)
    to[i] = node->before[i];
  return node->count;
}
int gputrain_kind_of_node(const struct node *node) { return node->work.kind; }

struct node *gputrain_add_node(struct graph *graph, const struct work *work, struct node *const *before, size_t count) {
  struct asked asked = gputrain_asked(work);
  pthread_mutex_lock(&lock);
  struct node *node = add(graph, work, &asked, before, count);
  pthread_mutex_unlock(&lock);
  return node;
}

// --- Captures

int gputrain_begin_capture(void *stream, int mode, int blocking, struct graph *into, struct node *const *before,
                           size_t count) {
  if (!stream || stream == LEGACY)
    return CAPTURE_UNSUPPORTED;
  if (mode < GLOBAL || mode > RELAXED)
    return INVALID_VALUE;
  int status = OK;
  pthread_mutex_lock(&lock);
  struct capture *capture;
  if (participant(stream, &capture)) {
    capture->invalid = 1;
    status = ILLEGAL_STATE; // a guess: the documentation only forbids it
  } else {
    capture = zeros(sizeof *capture);
    capture->id = ++last_id;
    capture->origin = last_stream = stream;
    capture->thread = pthread_self();
    capture->mode = mode;
    capture->blocking = blocking;
    capture->is_given = into != NULL;
    capture->graph = into ? into : gputrain_new_graph();
    merge(&join(capture, stream)->last, before, count);
    capture->next = captures;
    captures = capture;
    begun += !into;
    __atomic_add_fetch(&gputrain_captures, 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

// Tells whether the stream that began the capture waits for all of its nodes. The caller holds the lock.
static int all_joined(struct graph *graph, const struct nodes *last) {
  struct nodes waiting = {0};
  size_t seen = 0;
  for (size_t i = 0; i < graph->nodes.count; i++)
    graph->nodes.all[i]->seen = 0;
  merge(&waiting, last->all, last->count);
  for (size_t i = 0; i < waiting.count; i++)
    waiting.all[i]->seen = 1;
  while (waiting.count) {
    struct node *node = waiting.all[--waiting.count];
    seen++;
    for (size_t i = 0; i < node->count; i++)
      if (!node->before[i]->seen) {
        node->before[i]->seen = 1;
        push(&waiting, node->before[i]);
      }
  }
  free(waiting.all);
  return seen == graph->nodes.count - graph->hidden;
}

// out may be NULL if the program gave its own graph when it began the capture.
int gputrain_end_capture(void *stream, struct graph **out) {
  struct graph *refused = NULL;
  if (out)
    *out = NULL;
  pthread_mutex_lock(&lock);
  struct capture *capture = NULL;
  struct participant *at = participant(stream, &capture);
  int status = OK;
  if (!at)
    status = ILLEGAL_STATE; // a guess
  else if (capture->origin != stream) {
    status = CAPTURE_UNMATCHED;
    capture->invalid = 1;
  } else if (capture->mode != RELAXED && !pthread_equal(capture->thread, pthread_self()))
    status = CAPTURE_WRONG_THREAD;
  else {
    if (capture->invalid)
      status = CAPTURE_INVALIDATED;
    else if (!capture->is_given && !all_joined(capture->graph, &at->last))
      status = CAPTURE_UNJOINED;
    struct capture **link = &captures;
    while (*link != capture)
      link = &(*link)->next;
    *link = capture->next;
    __atomic_sub_fetch(&gputrain_captures, 1, __ATOMIC_RELEASE);
    for (size_t i = 0; i < capture->count; i++)
      free(capture->streams[i].last.all);
    free(capture->streams);
    if (!status && out)
      *out = capture->graph;
    else if (!capture->is_given)
      refused = capture->graph;
    free(capture);
  }
  pthread_mutex_unlock(&lock);
  if (refused)
    gputrain_destroy_graph(refused);
  return status;
}

// Returns whether a stream is captured: 0 no, 1 yes, 2 the capture is invalid. The list stays valid until the stream's next
// request.
int gputrain_capture_info(void *stream, uint64_t *id, struct graph **graph, struct node *const **last, size_t *count) {
  int status = NONE;
  if (id)
    *id = 0;
  if (!any())
    return status;
  pthread_mutex_lock(&lock);
  struct capture *capture;
  struct participant *at = participant(stream, &capture);
  if (at) {
    status = capture->invalid ? INVALIDATED : ACTIVE;
    if (id)
      *id = capture->id;
    if (graph)
      *graph = capture->graph;
    if (last)
      *last = at->last.all;
    if (count)
      *count = at->last.count;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int gputrain_update_dependencies(void *stream, struct node *const *nodes, size_t count, int set) {
  pthread_mutex_lock(&lock);
  struct capture *capture;
  struct participant *at = participant(stream, &capture);
  if (at && set)
    at->last.count = 0;
  if (at)
    merge(&at->last, nodes, count);
  pthread_mutex_unlock(&lock);
  return at ? OK : ILLEGAL_STATE;
}

// --- Launches

// The program may destroy the graph and still launch what was instantiated from it. So the nodes are shared.
struct executable *gputrain_instantiate(const struct graph *graph) {
  struct executable *made = zeros(sizeof *made);
  made->references = 1;
  for (size_t i = 0; i < graph->nodes.count; i++) {
    struct node *node = graph->nodes.all[i];
    __atomic_add_fetch(&node->references, 1, __ATOMIC_RELAXED);
    made->kernels +=
        node->work.kind == NODE_GRAPH ? ((struct executable *)node->work.data)->kernels : node->work.kind == NODE_KERNEL;
    push(&made->nodes, node);
  }
  pthread_mutex_lock(&lock);
  graphs++;
  kernels += made->kernels;
  most_graphs = most_graphs < graphs ? graphs : most_graphs;
  most_kernels = most_kernels < kernels ? kernels : most_kernels;
  pthread_mutex_unlock(&lock);
  gputrain_unknown("the driver's buffers for CUDA graphs");
  return made;
}

static void let_go(struct executable *executable) {
  if (__atomic_sub_fetch(&executable->references, 1, __ATOMIC_ACQ_REL))
    return;
  release(&executable->nodes);
  free(executable);
}
void gputrain_destroy_executable(struct executable *executable) {
  pthread_mutex_lock(&lock);
  graphs--;
  kernels -= executable->kernels;
  pthread_mutex_unlock(&lock);
  let_go(executable);
}

static int do_node(const struct node *node, int forget) {
  const struct work *work = &node->work;
  if (work->run)
    return work->run(work->data, forget);
  if (forget)
    return OK;
  if (work->kind == NODE_MEMCPY)
    return gputrain_copy_rows(work->to, work->to_pitch, work->from, work->from_pitch, work->width, work->height);
  return work->kind == NODE_MEMSET ? gputrain_set(work->to, work->value, work->width) : OK;
}
static int do_all(const struct nodes *nodes, int forget) {
  int status = OK;
  for (size_t i = 0; i < nodes->count && !status; i++) {
    const struct node *node = nodes->all[i];
    if (!forget && node->work.what)
      gputrain_count_replayed(&node->asked, node->work.bytes);
    status = do_node(node, forget);
  }
  return status;
}

static int do_inner(void *executable, int forget) { return do_all(&((struct executable *)executable)->nodes, forget); }
static void drop_inner(void *executable) { let_go(executable); }

int gputrain_launch_graph(struct executable *executable, void *stream) {
  int status;
  struct work inner = {.kind = NODE_GRAPH, .run = do_inner, .drop = drop_inner, .data = executable};
  __atomic_add_fetch(&executable->references, 1,
                     __ATOMIC_RELAXED); // of the node or of the launch, because a function may destroy the node
  if (gputrain_captured(stream, &inner, &status)) {
    if (status)
      let_go(executable);
    return status;
  }
  gputrain_count("replays", "cudaGraphLaunch", 0);
  __atomic_add_fetch(&replayed, 1, __ATOMIC_RELAXED);
  status = do_all(&executable->nodes, 0);
  let_go(executable);
  return status;
}

// The graphs of a conditional node. Whether they run depends on values of the GPU, so what they write becomes unknown.
struct bodies {
  unsigned count;
  struct graph *all[];
};
static int forget_bodies(void *data, int forget) {
  const struct bodies *bodies = data;
  for (unsigned i = 0; i < bodies->count; i++)
    do_all(&bodies->all[i]->nodes, 1);
  return OK;
}
static void drop_bodies(void *data) {
  struct bodies *bodies = data;
  for (unsigned i = 0; i < bodies->count; i++)
    gputrain_destroy_graph(bodies->all[i]);
  free(bodies);
}
struct node *gputrain_add_conditional(struct graph *graph, unsigned count, struct node *const *before, size_t before_count,
                                      struct graph ***inside) {
  struct bodies *bodies = zeros(sizeof *bodies + count * sizeof *bodies->all);
  bodies->count = count;
  for (unsigned i = 0; i < count; i++)
    bodies->all[i] = gputrain_new_graph();
  *inside = bodies->all;
  struct work work = {.kind = NODE_CONDITIONAL, .run = forget_bodies, .drop = drop_bodies, .data = bodies};
  return gputrain_add_node(graph, &work, before, before_count);
}

// --- For the worker

// Returns how many captures have begun and how many graphs were launched, and the most graphs that could be launched at a
// time, with their kernels.
void gputrain_graphs(uint64_t found[4]) {
  pthread_mutex_lock(&lock);
  found[0] = begun;
  found[1] = __atomic_load_n(&replayed, __ATOMIC_RELAXED);
  found[2] = most_graphs;
  found[3] = most_kernels;
  pthread_mutex_unlock(&lock);
}
