// Declares what the stand-ins of NVIDIA's libraries share: the emulated GPUs and their memory. The definitions are in
// counters.c, gpus.c, graphs.c, handles.c, memory.c, products.c and values.c.
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

// The functions have the parameters of NVIDIA's functions, and use few of them.
#pragma GCC diagnostic ignored "-Wunused-parameter"

enum { MAX_DEVICES = 16, PAGE = 2 << 20, WARP = 32, REGISTERS = 65536, MOST_THREADS = 1024 };

// Errors that have the same number in the driver and in the runtime.
enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_PITCH = 12,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401,
  NOT_FOUND = 500,
  ASSERTED = 710,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_MERGE = 902,
  CAPTURE_UNMATCHED = 903,
  CAPTURE_UNJOINED = 904,
  CAPTURE_ISOLATION = 905,
  CAPTURE_IMPLICIT = 906,
  CAPTURED_EVENT = 907,
  CAPTURE_WRONG_THREAD = 908,
  UNKNOWN_ERROR = 999,
};

// Kinds of memory, with the numbers of cudaMemoryType.
enum { UNKNOWN = 0, HOST = 1, DEVICE = 2, MANAGED = 3 };

// The model of GPU that the variable GPUTRAIN_EMULATED_DEVICE describes.
struct gpu {
  char name[96];
  size_t memory;  // bytes that the driver reports as the total
  size_t context; // bytes that a process takes with its first call
  int devices, major, minor, multiprocessors;
  int kernels; // the torch kernels that the GPU runs: 86 for those compiled for sm_86
  int shared_per_multiprocessor, shared_per_block, shared_reserved; // bytes
  int threads_per_multiprocessor, blocks_per_multiprocessor;
  int l2_bytes;
  unsigned char uuid[16]; // of the first device; the last byte is the number of a device
};

const struct gpu *gputrain_gpu(void);
void gputrain_read_gpu_again(void); // in a forked child whose variable describes another GPU

// The devices that CUDA_VISIBLE_DEVICES shows, and the number of this thread's device among all devices.
int gputrain_visible(void);
int gputrain_physical(int visible);
int gputrain_visible_number(int physical);
int gputrain_current(void);
int gputrain_use(int visible);
void gputrain_uuid(unsigned char uuid[16], int physical);

// Whether the process was forked from one that had used a GPU. The driver then returns NOT_INITIALIZED.
int gputrain_forked(void);

int gputrain_allocate(void **out, size_t bytes, int kind);
void gputrain_refused(size_t bytes, const void *caller); // after a request for device memory did not fit
int gputrain_free(void *start);
void *gputrain_scratch(void); // managed memory for variables in kernels' code, which nothing reads and no figure counts
int gputrain_register(void *start, size_t bytes);
int gputrain_unregister(void *start);
int gputrain_kind(const void *address, int *device);
size_t gputrain_extent(const void *address, void **start);
size_t gputrain_left(int device);
void gputrain_limit(size_t bytes);
size_t gputrain_used_so_far(int device);

// Virtual memory management: bytes of a device without an address, and addresses without memory.
int gputrain_create(void **handle, int device, size_t bytes);
int gputrain_retain(void **handle, const void *address); // returns the handle of the memory at this address
int gputrain_release(void *handle);
int gputrain_device_of(const void *handle); // the number of the device; -1 if the handle is no physical memory
int gputrain_reserve(void **start, int device, size_t bytes);
int gputrain_unreserve(void *start, size_t bytes);
int gputrain_map(void *start, size_t bytes, size_t offset, void *handle);
int gputrain_unmap(void *start, size_t bytes);

// Whether these bytes may be read and written. Host memory that nobody registered always may.
int gputrain_holds(const void *address, size_t bytes);
int gputrain_copy(void *to, const void *from, size_t bytes);
int gputrain_copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height);
int gputrain_set(void *to, int value, size_t bytes);
int gputrain_read_value(void *to, size_t bytes);
void gputrain_freed_range(uintptr_t start, size_t bytes);
// Records where kernels of libraries other than torch's may write.
void gputrain_registers_kernels(const void *caller); // sets the library of the kernels that this thread registers
void gputrain_kernel(const void *function);
struct written *gputrain_may_write(const void *function,
                                   void **arguments); // the caller frees the result; NULL if there is nothing to record
int gputrain_note_written(void *written, int forget);

// For NCCL: whether this thread sends known values, whether all values that it received are known, and how many calls still
// wait.
int gputrain_sends_known(void);
void gputrain_hears(int known);
void gputrain_awaits(int change);

// Returns 256 bytes of zeros for objects that the caller only passes back.
void *gputrain_handle(void);
int gputrain_is_handle(const void *handle);
int gputrain_drop_handle(void *handle); // returns whether there was such a handle
// The stream on which a library's handle runs its work. For an unknown handle this is the last stream that the thread used.
void gputrain_set_stream(void *handle, void *stream);
void *gputrain_stream_of(const void *handle);

// Defines a function that frees what the library's function of the same name with Create has made.
#define GPUTRAIN_DESTROYS(function, error)                                                                                  \
  int function(void *handle) { return gputrain_drop_handle(handle) ? OK : error; }

// A forked child has only the forking thread, so a lock that another thread held would stay locked. So the lock is held
// while the process forks. No thread holds two of these locks at once.
#define GPUTRAIN_HOLD_WHILE_FORKING(lock)                                                                                   \
  static void hold_##lock(void) { pthread_mutex_lock(&lock); }                                                              \
  static void leave_##lock(void) { pthread_mutex_unlock(&lock); }                                                           \
  __attribute__((constructor(101))) static void watch_forks_of_##lock(void) {                                               \
    pthread_atfork(hold_##lock, leave_##lock, leave_##lock);                                                                \
  }

// Notes that a figure lacks memory of a library whose amount is unknown.
void gputrain_unknown(const char *what);
// Notes the bytes of an estimated workspace.
void gputrain_estimated(uint64_t bytes);
// Notes that a collective of NCCL did not exchange data, because each rank has this many bytes. The function's name is a
// constant.
void gputrain_not_exchanged(const char *function, size_t bytes);
int gputrain_missing(const char *function, int status);
int gputrain_traces(void); // whether GPUTRAIN_EMULATED_TRACE is set
void gputrain_trace(const char *function, int *seen);

// --- Counts of what is asked of the GPU: counters.c

struct work;

// What is asked for, and who asks. The struct has no padding, because it is compared and hashed as a block.
struct asked {
  const char *what;          // one of the names in records/counts.py
  const void *function;      // a kernel, or a constant name
  const char *slow, *shape;  // of a product; permanent texts
  uint32_t stack, noted;     // the number of the stack, and of the line that the worker noted for a backward pass
  uint16_t thread, backward; // the kind of thread, and whether it runs a backward pass
  uint32_t replayed;         // whether a graph asks for it
};

// Counts something. `what` and `function` are constants, see counters.c.
void gputrain_count(const char *what, const void *function, uint64_t bytes);
void gputrain_count_work(const struct work *work);
struct asked gputrain_asked(const struct work *work); // who asks for work that a graph will launch later
void gputrain_count_replayed(const struct asked *asked, uint64_t bytes);
void gputrain_launched(uint64_t blocks);
// Asks for a product or a convolution of a library. `slow` is the name of its class if the class is a slow one, with its
// shape in `shape`; else it is empty.
int gputrain_ask_product(void *stream, const char *function, const char *slow, const char *shape, uint64_t flops);
int gputrain_counting(void);
// Gets the same calls as gputrain_count while a profiler runs, see cupti.c.
extern void (*gputrain_profiler)(const char *what, const char *name, uint64_t bytes, int replayed);
const char *gputrain_interned(const char *text);
// Records the name of a kernel. The text must be permanent.
void gputrain_name(const void *function, const char *name);

// Types of numbers, with the numbers of cudaDataType.
enum { REAL_32 = 0, REAL_64 = 1, REAL_16 = 2, COMPLEX_32 = 4, COMPLEX_64 = 5, BFLOAT_16 = 14 };

struct matrix {
  const void *start; // NULL if it is unknown
  int type;
  int64_t apart, batch_apart; // the numbers from a column to the next, and from a matrix of a batch to the next
};

const char *gputrain_type(int type, int rounds); // the name of a type; "tf32" for fp32 that may be rounded
int gputrain_is_single(int type);
int gputrain_tensor_cores(int type); // whether this GPU has tensor cores for the type, or for TF32 in its place
int gputrain_is_aligned(uint64_t bytes);

int gputrain_may_round(int compute, int mode); // whether cuBLAS may round fp32 for tensor cores

// Asks for `batch` products of m x k and k x n. The matrices are stored by columns.
int gputrain_product(void *stream, const char *function, int64_t batch, int64_t m, int64_t n, int64_t k, struct matrix a,
                     struct matrix b, struct matrix c, int rounds);

// --- Work on streams, and graphs of it: graphs.c

// Kinds of nodes, with the numbers of cudaGraphNodeType. A program does not see hidden nodes, which are our own.
enum {
  NODE_KERNEL = 0,
  NODE_MEMCPY = 1,
  NODE_MEMSET = 2,
  NODE_HOST = 3,
  NODE_GRAPH = 4,
  NODE_EMPTY = 5,
  NODE_WAIT = 6,
  NODE_RECORD = 7,
  NODE_CONDITIONAL = 13,
  NODE_HIDDEN = 15,
};
#define LEGACY ((void *)1)
#define WHOLE_DEVICE ((void *)-1)

// Work of the GPU, which is done at once or by each launch of a graph.
struct work {
  int kind;
  const char *what; // the name under which it is counted; NULL if it is not
  const void *function;
  const char *slow, *shape;
  uint64_t bytes;
  void *to; // of a copy or a fill
  const void *from;
  size_t to_pitch, from_pitch, width, height;
  int value;
  int (*run)(void *data, int forget); // forget: whether it runs is unknown
  void (*drop)(void *data);
  void *data;
  int is_step; // whether it calls a function of the worker's
};

// The contents of an event's handle.
struct event {
  struct timespec time; // the time of the last recording
  uint64_t capture;     // the capture of that recording; 0 for none
  struct node **nodes;  // the nodes of the capture that it stands for
  size_t count;
};

struct graph;
struct node;
struct executable;

extern int gputrain_captures;
int gputrain_captured(void *stream, const struct work *work, int *status);
int gputrain_ask(void *stream, const char *what, const void *function, uint64_t bytes);
void *gputrain_last_stream(void);
int gputrain_waits(void *stream);
int gputrain_unsafe(void);
int gputrain_exchange_mode(int *mode);
void gputrain_happens(struct event *event);
int gputrain_record(struct event *event, void *stream, int external);
int gputrain_asks(const struct event *event);
int gputrain_wait(void *stream, const struct event *event, int external, int *captured);
int gputrain_begin_capture(void *stream, int mode, int blocking, struct graph *into, struct node *const *before,
                           size_t count);
int gputrain_end_capture(void *stream, struct graph **out);
int gputrain_capture_info(void *stream, uint64_t *id, struct graph **graph, struct node *const **last, size_t *count);
int gputrain_update_dependencies(void *stream, struct node *const *nodes, size_t count, int set);
struct graph *gputrain_new_graph(void);
void gputrain_destroy_graph(struct graph *graph);
size_t gputrain_nodes(const struct graph *graph, struct node **to, size_t room);
size_t gputrain_before(const struct node *node, struct node **to, size_t room);
int gputrain_kind_of_node(const struct node *node);
struct node *gputrain_add_node(struct graph *graph, const struct work *work, struct node *const *before, size_t count);
struct node *gputrain_add_conditional(struct graph *graph, unsigned count, struct node *const *before, size_t before_count,
                                      struct graph ***inside);
struct executable *gputrain_instantiate(const struct graph *graph);
void gputrain_destroy_executable(struct executable *executable);
int gputrain_launch_graph(struct executable *executable, void *stream);
