// Captures streams into CUDA graphs, as careful and as careless programs do. A part of stand_ins.c.
#include "emulated.h"

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaHostAlloc(void **, size_t, unsigned);
int cudaFreeHost(void *);
int cudaMallocAsync(void **, size_t, void *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemsetAsync(void *, int, size_t, void *);
int cudaStreamCreateWithFlags(void **, unsigned);
int cudaStreamDestroy(void *);
int cudaStreamSynchronize(void *);
int cudaStreamQuery(void *);
int cudaStreamWaitEvent(void *, void *, unsigned);
int cudaStreamAddCallback(void *, void (*)(void *, int, void *), void *, unsigned);
int cudaDeviceSynchronize(void);
int cudaEventCreate(void **);
int cudaEventRecord(void *, void *);
int cudaEventRecordWithFlags(void *, void *, unsigned);
int cudaEventElapsedTime(float *, const void *, const void *);
int cudaEventQuery(void *);
int cudaEventDestroy(void *);
int cudaLaunchHostFunc(void *, void (*)(void *), void *);
int cudaStreamBeginCapture(void *, int);
int cudaStreamBeginCaptureToGraph(void *, void *, void *, const void *, size_t, int);
int cudaStreamEndCapture(void *, void **);
int cudaStreamIsCapturing(void *, int *);
int cudaStreamGetCaptureInfo(void *, int *, uint64_t *, void **, void *const **, const void **, size_t *);
int cudaStreamUpdateCaptureDependencies(void *, void **, const void *, size_t, unsigned);
int cudaThreadExchangeStreamCaptureMode(int *);
int cudaGraphGetNodes(void *, void **, size_t *);
int cudaGraphNodeGetDependencies(void *, void **, void *, size_t *);
int cudaGraphAddNode(void **, void *, void *const *, const void *, size_t, void *);
int cudaGraphConditionalHandleCreate(uint64_t *, void *, unsigned, unsigned);
int cudaGraphInstantiateWithFlags(void **, void *, uint64_t);
int cudaGraphLaunch(void *, void *);
int cudaGraphDestroy(void *);
int cudaGraphExecDestroy(void *);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int gputrain_note_step(void *, int (*)(void *, int), uint64_t);
size_t gputrain_dropped_steps(uint64_t *, size_t);
void gputrain_graphs(uint64_t *);
uint64_t gputrain_watch(uintptr_t);
int gputrain_is_watched(uintptr_t, uint64_t);

void note_failure(int line, const char *condition);
#define CHECK(condition) ((condition) ? (void)0 : note_failure(__LINE__, #condition))

enum { BLOCKING = 0, NON_BLOCKING = 1, BYTES = 64, GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
static void *a, *b, *c, *event, *other, *device;
static char *pinned;

static int begin(void *stream, int mode) { return cudaStreamBeginCapture(stream, mode); }
static int fill(void *stream, int value) { return cudaMemsetAsync(device, value, BYTES, stream); }
static int end(void *stream) {
  void *graph = NULL;
  int status = cudaStreamEndCapture(stream, &graph);
  CHECK((status == OK) == (graph != NULL));
  if (graph)
    cudaGraphDestroy(graph);
  return status;
}
static int is_capturing(void *stream) {
  int status = -1;
  cudaStreamIsCapturing(stream, &status);
  return status;
}
static int in_another_thread(void *(*function)(void *), void *argument) {
  pthread_t thread;
  void *result;
  pthread_create(&thread, NULL, function, argument);
  pthread_join(thread, &result);
  return (int)(intptr_t)result;
}
static void *end_here(void *stream) { return (void *)(intptr_t)end(stream); }
static void *allocate_here(void *mode) {
  void *memory = NULL;
  int own = (int)(intptr_t)mode;
  cudaThreadExchangeStreamCaptureMode(&own);
  int status = cudaMalloc(&memory, PAGE);
  cudaFree(memory);
  return (void *)(intptr_t)status;
}

static int steps, forgotten;
static int step(void *number, int forget) {
  steps += (int)(intptr_t)number;
  forgotten += forget;
  return OK;
}
static void count_call(void *calls) { ++*(int *)calls; }
static void call_back(void *stream, int status, void *data) {}

static void check_replays(void) {
  void *graph, *executable;
  int calls = 0;
  size_t nodes = 0;
  uint64_t before[4], after[4], dropped[2];
  gputrain_graphs(before);
  CHECK(begin(a, GLOBAL) == OK && is_capturing(a) == 1 && is_capturing(c) == 0);
  CHECK(fill(a, 7) == OK && cudaLaunchHostFunc(a, count_call, &calls) == OK);
  CHECK(cudaEventRecord(event, a) == OK && cudaStreamWaitEvent(b, event, 0) == OK && is_capturing(b) == 1);
  CHECK(cudaMemcpyAsync(pinned, device, BYTES, 2, b) == OK && cuLaunchKernel(a, 1, 1, 1, 1, 1, 1, 0, b, NULL, NULL) == OK);
  CHECK(gputrain_note_step(b, step, 10) && !gputrain_note_step(c, step, 1));
  CHECK(cudaEventRecord(event, b) == OK && cudaStreamWaitEvent(a, event, 0) == OK);
  CHECK(cudaStreamEndCapture(a, &graph) == OK && is_capturing(a) == 0 && is_capturing(b) == 0);
  CHECK(calls == 0 && steps == 0 && pinned[0] == 0);
  CHECK(cudaGraphGetNodes(graph, NULL, &nodes) == OK && nodes == 4);
  CHECK(cudaGraphInstantiateWithFlags(&executable, graph, 0) == OK && cudaGraphDestroy(graph) == OK);
  CHECK(cudaGraphLaunch(executable, c) == OK && calls == 1 && steps == 10 && pinned[BYTES - 1] == 7);
  pinned[0] = 0;
  CHECK(cudaGraphLaunch(executable, c) == OK && calls == 2 && steps == 20 && pinned[0] == 7);
  gputrain_graphs(after);
  CHECK(after[0] == before[0] + 1 && after[1] == before[1] + 2 && after[2] == 1 && after[3] == 1);

  // In another graph, which outlives it.
  void *outer;
  CHECK(begin(c, GLOBAL) == OK && cudaGraphLaunch(executable, c) == OK && calls == 2);
  CHECK(cudaStreamEndCapture(c, &graph) == OK && cudaGraphInstantiateWithFlags(&outer, graph, 0) == OK);
  CHECK(cudaGraphDestroy(graph) == OK && cudaGraphExecDestroy(executable) == OK);
  CHECK(gputrain_dropped_steps(dropped, 2) == 0 && cudaGraphLaunch(outer, a) == OK && calls == 3 && steps == 30);
  CHECK(cudaGraphExecDestroy(outer) == OK && gputrain_dropped_steps(dropped, 2) == 1 && dropped[0] == 10);
  gputrain_graphs(after);
  CHECK(after[2] == 2 && after[3] == 2); // the kernel of the inner graph is one of the outer, too
  steps = 0;
}

static void check_nodes(void) {
  void *graph = NULL, *found = NULL, *nodes[4], *const * last;
  size_t count = 4, edges = 1;
  uint64_t id = 0, same = 0, next = 0;
  CHECK(begin(a, GLOBAL) == OK && fill(a, 1) == OK && fill(a, 2) == OK);
  CHECK(cudaStreamGetCaptureInfo(a, NULL, &id, &graph, &last, NULL, &edges) == OK && id && edges == 1);
  CHECK(cudaGraphGetNodes(graph, nodes, &count) == OK && count == 2 && last[0] == nodes[1]);
  count = 1;
  CHECK(cudaGraphNodeGetDependencies(nodes[1], &found, NULL, &count) == OK && count == 1 && found == nodes[0]);
  CHECK(cudaStreamUpdateCaptureDependencies(a, nodes, NULL, 1, 0) == OK);
  CHECK(cudaStreamGetCaptureInfo(a, NULL, &same, NULL, NULL, NULL, &edges) == OK && same == id && edges == 2);
  CHECK(cudaStreamUpdateCaptureDependencies(a, nodes, NULL, 1, 1) == OK);
  CHECK(end(a) == CAPTURE_UNJOINED); // nobody waits for the second one any more
  CHECK(begin(a, GLOBAL) == OK && cudaStreamGetCaptureInfo(a, NULL, &next, NULL, NULL, NULL, NULL) == OK && next != id);
  CHECK(cudaStreamUpdateCaptureDependencies(c, nodes, NULL, 1, 1) == ILLEGAL_STATE && end(a) == OK);
}

static void check_conditional(void) {
  struct {
    int kind, reserved[3];
    uint64_t handle;
    int condition;
    unsigned size;
    void **inside;
    char rest[200];
  } parameters = {.kind = NODE_CONDITIONAL, .size = 1};
  void *graph, *executable, *node, *const *last;
  size_t count;
  CHECK(begin(a, GLOBAL) == OK && fill(a, 1) == OK && gputrain_note_step(a, step, 1));
  CHECK(cudaStreamGetCaptureInfo(a, NULL, NULL, &graph, &last, NULL, &count) == OK);
  CHECK(cudaGraphConditionalHandleCreate(&parameters.handle, graph, 0, 0) == OK);
  CHECK(cudaGraphAddNode(&node, graph, last, NULL, count, &parameters) == OK);
  CHECK(cudaStreamUpdateCaptureDependencies(a, &node, NULL, 1, 1) == OK);
  CHECK(cudaStreamBeginCaptureToGraph(b, parameters.inside[0], NULL, NULL, 0, THREAD_LOCAL) == OK);
  CHECK(fill(b, 9) == OK && gputrain_note_step(b, step, 100) && cudaStreamEndCapture(b, NULL) == OK);
  CHECK(cudaStreamEndCapture(a, &graph) == OK && cudaGraphInstantiateWithFlags(&executable, graph, 0) == OK);
  CHECK(cudaGraphLaunch(executable, a) == OK && steps == 101 && forgotten == 1);
  CHECK(cudaMemcpy(pinned, device, BYTES, 2) == OK && pinned[0] == 1); // the body is not run
  CHECK(cudaGraphExecDestroy(executable) == OK && cudaGraphDestroy(graph) == OK);
  parameters.kind = NODE_MEMSET;
  graph = gputrain_new_graph();
  CHECK(cudaGraphAddNode(&node, graph, NULL, NULL, 0, &parameters) == NOT_SUPPORTED);
  CHECK(cudaGraphDestroy(graph) == OK);
}

static void check_errors(void) {
  void *memory = NULL, *blocking;
  float milliseconds;
  int mode = RELAXED;
  CHECK(cudaStreamBeginCapture(NULL, GLOBAL) == CAPTURE_UNSUPPORTED && begin(a, 3) == INVALID_VALUE);
  CHECK(cudaStreamBeginCapture(&mode, GLOBAL) == INVALID_HANDLE && end(a) == ILLEGAL_STATE);

  // What waits for a stream that is captured, or for the device, invalidates the capture.
  CHECK(begin(a, GLOBAL) == OK && cudaStreamSynchronize(a) == CAPTURE_UNSUPPORTED && fill(a, 0) == CAPTURE_INVALIDATED);
  CHECK(is_capturing(a) == 2 && end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, RELAXED) == OK && cudaDeviceSynchronize() == CAPTURE_UNSUPPORTED && end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, RELAXED) == OK && cudaStreamAddCallback(a, call_back, NULL, 0) == CAPTURE_UNSUPPORTED);
  CHECK(end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, GLOBAL) == OK && begin(a, GLOBAL) == ILLEGAL_STATE && end(a) == CAPTURE_INVALIDATED);

  // What is potentially unsafe, by the modes of the capture and of the thread.
  CHECK(begin(a, GLOBAL) == OK && cudaMalloc(&memory, PAGE) == CAPTURE_UNSUPPORTED && !memory);
  CHECK(end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, GLOBAL) == OK && cudaStreamQuery(c) == CAPTURE_UNSUPPORTED && end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, GLOBAL) == OK && cudaMemcpy(pinned, device, 1, 2) == CAPTURE_UNSUPPORTED && end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, RELAXED) == OK && cudaMalloc(&memory, PAGE) == OK && cudaFree(memory) == OK && end(a) == OK);
  CHECK(begin(a, GLOBAL) == OK && cudaThreadExchangeStreamCaptureMode(&mode) == OK && mode == GLOBAL);
  CHECK(cudaMalloc(&memory, PAGE) == OK && cudaFree(memory) == OK);
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == OK && mode == RELAXED && end(a) == OK);
  mode = 7;
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == INVALID_VALUE);
  CHECK(begin(a, GLOBAL) == OK && in_another_thread(allocate_here, (void *)GLOBAL) == CAPTURE_UNSUPPORTED);
  CHECK(end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, GLOBAL) == OK && in_another_thread(allocate_here, (void *)THREAD_LOCAL) == OK && end(a) == OK);
  CHECK(begin(a, THREAD_LOCAL) == OK && in_another_thread(allocate_here, (void *)GLOBAL) == OK && end(a) == OK);
  CHECK(begin(a, RELAXED) == OK && cudaMallocAsync(&memory, PAGE, a) == NOT_SUPPORTED && end(a) == OK);

  // Streams and events.
  CHECK(begin(a, RELAXED) == OK && begin(b, RELAXED) == OK && cudaEventRecord(event, a) == OK);
  CHECK(cudaStreamWaitEvent(b, event, 0) == CAPTURE_MERGE && end(a) == CAPTURE_INVALIDATED && end(b) == CAPTURE_INVALIDATED);
  CHECK(begin(a, GLOBAL) == OK && cudaEventRecord(event, a) == OK && cudaStreamWaitEvent(b, event, 0) == OK);
  CHECK(end(b) == CAPTURE_UNMATCHED && end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, GLOBAL) == OK && cudaEventRecord(event, a) == OK && cudaStreamWaitEvent(b, event, 0) == OK);
  CHECK(fill(b, 1) == OK && end(a) == CAPTURE_UNJOINED && is_capturing(b) == 0);
  CHECK(cudaEventRecord(event, c) == OK && begin(a, GLOBAL) == OK);
  CHECK(cudaStreamWaitEvent(a, event, 0) == CAPTURE_ISOLATION && end(a) == CAPTURE_INVALIDATED);
  CHECK(begin(a, GLOBAL) == OK && cudaEventRecord(event, a) == OK && cudaEventQuery(event) == CAPTURED_EVENT);
  CHECK(end(a) == CAPTURE_INVALIDATED && cudaEventQuery(event) == CAPTURED_EVENT);
  CHECK(cudaEventRecord(other, c) == OK && cudaEventElapsedTime(&milliseconds, event, other) == CAPTURED_EVENT);
  CHECK(cudaStreamWaitEvent(c, event, 0) == CAPTURED_EVENT);
  CHECK(cudaEventRecord(event, c) == OK && cudaEventElapsedTime(&milliseconds, event, other) == OK);
  CHECK(begin(a, GLOBAL) == OK && in_another_thread(end_here, a) == CAPTURE_WRONG_THREAD && end(a) == OK);
  CHECK(begin(a, RELAXED) == OK && in_another_thread(end_here, a) == OK && is_capturing(a) == 0);

  // External events are nodes.
  CHECK(begin(a, GLOBAL) == OK && cudaEventRecordWithFlags(event, a, 1) == OK && cudaStreamWaitEvent(a, event, 1) == OK);
  CHECK(end(a) == OK);

  // The legacy stream waits for blocking streams.
  CHECK(cudaStreamCreateWithFlags(&blocking, BLOCKING) == OK && begin(blocking, RELAXED) == OK);
  CHECK(fill(NULL, 1) == CAPTURE_IMPLICIT && end(blocking) == CAPTURE_INVALIDATED);
  CHECK(begin(a, RELAXED) == OK && fill(NULL, 1) == OK && end(a) == OK);
  CHECK(cudaStreamDestroy(blocking) == OK);
}

// Captures, launches and destroys graphs beside others.
static void *capture_alone(void *unused) {
  void *stream, *graph, *executable;
  cudaStreamCreateWithFlags(&stream, NON_BLOCKING);
  for (int i = 0; i < 200; i++) {
    CHECK(begin(stream, THREAD_LOCAL) == OK && fill(stream, 1) == OK && gputrain_note_step(stream, step, 0));
    CHECK(cudaStreamEndCapture(stream, &graph) == OK && cudaGraphInstantiateWithFlags(&executable, graph, 0) == OK);
    CHECK(cudaGraphDestroy(graph) == OK && cudaGraphExecDestroy(executable) == OK);
  }
  cudaStreamDestroy(stream);
  return unused;
}

void check_captures(void) {
  enum { THREADS = 4 };
  pthread_t threads[THREADS];
  uint64_t dropped[64];
  size_t count, all = 0;
  CHECK(cudaStreamCreateWithFlags(&a, NON_BLOCKING) == OK && cudaStreamCreateWithFlags(&b, NON_BLOCKING) == OK);
  CHECK(cudaStreamCreateWithFlags(&c, NON_BLOCKING) == OK && cudaEventCreate(&event) == OK && cudaEventCreate(&other) == OK);
  CHECK(cudaMalloc(&device, PAGE) == OK && cudaHostAlloc((void **)&pinned, PAGE, 0) == OK);
  check_replays();
  check_nodes();
  check_conditional();
  check_errors();
  while (gputrain_dropped_steps(dropped, 64))
    ;
  for (int i = 0; i < THREADS; i++)
    pthread_create(threads + i, NULL, capture_alone, NULL);
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  while ((count = gputrain_dropped_steps(dropped, 64)))
    all += count;
  CHECK(all == 200 * THREADS);
  uint64_t number = gputrain_watch((uintptr_t)device + BYTES); // as a replay does in a pool, of what torch has freed
  CHECK(gputrain_is_watched((uintptr_t)device + BYTES, number) && cudaFree(device) == OK);
  CHECK(!gputrain_is_watched((uintptr_t)device + BYTES, number));
  CHECK(cudaFreeHost(pinned) == OK && cudaEventDestroy(event) == OK && cudaEventDestroy(other) == OK);
  CHECK(cudaStreamDestroy(a) == OK && cudaStreamDestroy(b) == OK && cudaStreamDestroy(c) == OK);
}
