// Stands in for cuDNN with one engine for every graph. The workspaces of cuDNN 9.19 for convolutions and attention were
// measured on an H200. For convolutions on capability 8.6 and later they are estimated from that; all others are unknown.
#include "emulated.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
int cudnnGetProperty(int part, int *value) {
  *value = part == 0 ? CUDNN_VERSION / 10000 : part == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
  return OK;
}
const char *cudnnGetErrorString(int status) { return status ? "error of an emulated GPU" : "success"; }
void cudnnGetLastErrorString(char *text, size_t bytes) {
  if (bytes)
    text[0] = 0;
}

enum { BAD_PARAMETER = CUDNN_VERSION >= 90000 ? 2000 : 3, CUDNN_EXECUTION_FAILED = CUDNN_VERSION >= 90000 ? 5000 : 8 };
GPUTRAIN_DESTROYS(cudnnDestroy, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyActivationDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyCTCLossDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyConvolutionDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyDropoutDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyFilterDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyPoolingDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyRNNDataDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyRNNDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroySpatialTransformerDescriptor, BAD_PARAMETER)
GPUTRAIN_DESTROYS(cudnnDestroyTensorDescriptor, BAD_PARAMETER)

// --- The older interface of convolutions, with one algorithm whose workspace is unknown

struct performance {
  int algorithm, status;
  float seconds;
  size_t workspace;
  int deterministic, math, reserved[3];
};

static int one_algorithm(int wanted, int *found, struct performance *results) {
  *found = wanted > 0;
  if (wanted > 0)
    results[0] = (struct performance){.algorithm = 1, .seconds = 1e-3F, .deterministic = 1};
  return OK;
}
int cudnnGetConvolutionForwardAlgorithm_v7(void *handle, void *x, void *w, void *convolution, void *y, int wanted,
                                           int *found, void *results) {
  return one_algorithm(wanted, found, results);
}
int cudnnGetConvolutionBackwardDataAlgorithm_v7(void *handle, void *w, void *dy, void *convolution, void *dx, int wanted,
                                                int *found, void *results) {
  return one_algorithm(wanted, found, results);
}
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void *handle, void *x, void *dy, void *convolution, void *dw, int wanted,
                                                  int *found, void *results) {
  return one_algorithm(wanted, found, results);
}
int cudnnFindConvolutionForwardAlgorithmEx(void *handle, void *x, void *xs, void *w, void *ws, void *convolution, void *y,
                                           void *ys, int wanted, int *found, void *results) {
  return one_algorithm(wanted, found, results);
}
int cudnnFindConvolutionBackwardDataAlgorithmEx(void *handle, void *w, void *ws, void *dy, void *dys, void *convolution,
                                                void *dx, void *dxs, int wanted, int *found, void *results) {
  return one_algorithm(wanted, found, results);
}
int cudnnFindConvolutionBackwardFilterAlgorithmEx(void *handle, void *x, void *xs, void *dy, void *dys, void *convolution,
                                                  void *dw, void *dws, int wanted, int *found, void *results) {
  return one_algorithm(wanted, found, results);
}

// --- Recurrent layers: one buffer has all weights, first the matrices of all layers, and then the biases

struct recurrent {
  int cell, biases, directions, type;
  size_t input, hidden, projected, layers;
};

// The first fields of a tensor descriptor.
struct tensor {
  int type, dimensions, sizes[3];
};

enum { LSTM = 2, GRU = 3, BIDIRECTIONAL = 1, NO_BIAS = 0, TWO_BIASES = 2 };

static size_t element(int type) { return type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4; } // double; half types; float

int cudnnSetRNNDescriptor_v8(struct recurrent *to, int algorithm, int cell, int biases, int direction, int input_mode,
                             int type, int precision, int math, int input, int hidden, int projected, int layers,
                             void *dropout, unsigned flags) {
  *to = (struct recurrent){
      cell,          biases, direction == BIDIRECTIONAL ? 2 : 1, type, (size_t)input, (size_t)hidden, (size_t)projected,
      (size_t)layers};
  return OK;
}

static size_t gates(const struct recurrent *of) { return of->cell == LSTM ? 4 : of->cell == GRU ? 3 : 1; }
static size_t biases(const struct recurrent *of) { return of->biases == NO_BIAS ? 0 : of->biases == TWO_BIASES ? 2 : 1; }

// The columns of a gate's matrix, which multiplies the layer's input or, if recurrent, the layer's last state.
static size_t columns(const struct recurrent *of, size_t layer, int recurrent) {
  size_t own = of->projected ? of->projected : of->hidden;
  return recurrent ? own : layer < (size_t)of->directions ? of->input : own * (size_t)of->directions;
}
// A layer that runs in both directions counts twice.
static size_t matrices(const struct recurrent *of, size_t layers) {
  size_t elements = 0;
  for (size_t layer = 0; layer < layers; layer++) {
    elements += gates(of) * of->hidden * (columns(of, layer, 0) + columns(of, layer, 1));
    if (of->projected && of->projected != of->hidden)
      elements += of->projected * of->hidden;
  }
  return elements;
}
int cudnnGetRNNWeightSpaceSize(void *handle, const struct recurrent *of, size_t *bytes) {
  size_t layers = of->layers * (size_t)of->directions;
  *bytes = (matrices(of, layers) + layers * gates(of) * biases(of) * of->hidden) * element(of->type);
  return OK;
}
int cudnnGetRNNWeightParams(void *handle, const struct recurrent *of, int layer, size_t bytes, char *weights, int matrix,
                            struct tensor *matrix_shape, char **matrix_start, struct tensor *bias_shape, char **bias_start) {
  size_t at = matrices(of, (size_t)layer), each = gates(of), number = (size_t)matrix, rows = of->hidden, wide;
  int is_recurrent = number >= each, is_projection = number >= 2 * each;
  size_t first = each * of->hidden * columns(of, (size_t)layer, 0);
  if (is_projection) {
    at += first + each * of->hidden * columns(of, (size_t)layer, 1);
    rows = of->projected;
    wide = of->hidden;
  } else {
    wide = columns(of, (size_t)layer, is_recurrent);
    at += is_recurrent ? first + (number - each) * of->hidden * wide : number * of->hidden * wide;
  }
  char *bias = NULL;
  if (!is_projection && (biases(of) == 2 || (biases(of) == 1 && !is_recurrent))) {
    size_t all = matrices(of, of->layers * (size_t)of->directions);
    bias = weights + (all + ((size_t)layer * each * biases(of) + number) * of->hidden) * element(of->type);
  }
  // A caller that asks for the matrix alone passes no bias, and the other way round.
  if (matrix_shape)
    *matrix_shape = (struct tensor){of->type, 3, {1, (int)rows, (int)wide}};
  if (matrix_start)
    *matrix_start = weights + at * element(of->type);
  if (bias_shape)
    *bias_shape = (struct tensor){of->type, 3, {1, (int)of->hidden, 1}};
  if (bias_start)
    *bias_start = bias;
  return OK;
}
int cudnnGetTensorNdDescriptor(const struct tensor *of, int room, int *type, int *dimensions, int sizes[], int strides[]) {
  *type = of->type;
  *dimensions = of->dimensions;
  for (int i = of->dimensions - 1, stride = 1; i >= 0; stride *= of->sizes[i--])
    if (i < room) {
      sizes[i] = of->sizes[i];
      strides[i] = stride;
    }
  return OK;
}

// --- The graph interface: descriptors store the attributes that a program sets

// Kinds of descriptors, as in cudnnBackendDescriptorType_t.
enum {
  ENGINEHEUR = 4,
  EXECUTION_PLAN = 5,
  CONVOLUTION_FORWARD = 10,
  CONVOLUTION_BACKWARD_FILTER = 11,
  CONVOLUTION_BACKWARD_DATA = 12,
  OPERATION_GRAPH = 15,
  MATMUL = 19,
  ATTENTION_FORWARD = 41,
};
// Attributes, and types of data.
enum {
  CONVOLUTION_STRIDES = 103,
  ENGINEHEUR_MODE = 200,
  FALLBACK = 2, // a mode
  ENGINEHEUR_OPERATION_GRAPH = 201,
  ENGINEHEUR_RESULTS = 202,
  ENGINECFG_ENGINE = 300,
  ENGINECFG_WORKSPACE_SIZE = 303,
  ENGINECFG_SHARED_MEMORY_USED = 304,
  EXECUTION_PLAN_ENGINE_CONFIG = 401,
  EXECUTION_PLAN_WORKSPACE_SIZE = 402,
  // The attributes of the weight, the source and the result follow each of these.
  CONVOLUTION_OF_FORWARD = 702,
  CONVOLUTION_OF_BACKWARD_DATA = 708,
  CONVOLUTION_OF_BACKWARD_FILTER = 714,
  OPERATIONGRAPH_OPERATIONS = 801,
  TENSOR_TYPE = 901,
  TENSOR_SIZES = 902,
  TENSOR_STRIDES = 903,
  TENSOR_IS_VIRTUAL = 907,
  MATMUL_FACTOR = 1520,
  MATMUL_RESULT = 1522,
  ATTENTION_QUERY = 2800,
  ATTENTION_KEY = 2801,
  ATTENTION_RESULT = 2803,
  FLOAT = 0,
  DOUBLE = 1,
  HALF = 2,
  BFLOAT16 = 9,
  OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
  ENGINE_GLOBAL_INDEX = 1301,
  ENGINE_NUMERICAL_NOTE = 1303,
  TENSOR_CORE = 0, // a note
  ATTRIBUTES = 48, // the most attributes of a descriptor
};

struct attribute {
  int name, type;
  int64_t count;
  void *values;
};
// What an operation computes, with the graph that it belongs to.
struct product {
  uint64_t flops, graph;    // graph: the number of the graph of operations
  int type;                 // cudaDataType of a convolution for which this GPU has tensor cores
  int without_tensor_cores; // whether the chosen engine uses no tensor cores
  const char *slow;         // the class of a convolution on tensor cores
  char shape[104];
};
struct descriptor {
  int kind, used;
  int64_t workspace; // bytes, or NOT_KNOWN; for a matrix product its part of the workspace of attention
  struct product product;
  struct attribute attributes[ATTRIBUTES];
};
enum { NOT_KNOWN = -1, NO_CLASSES = -1, NOT_SUPPORTED_BY_CUDNN = 3000 };

// Returns the bytes of a value of a cudnnBackendAttributeType_t.
static size_t size_of(int type) {
  switch (type) {
  case 0:  // handle
  case 3:  // int64
  case 5:  // double
  case 6:  // void pointer
  case 15: // descriptor
    return 8;
  case 2:  // boolean
  case 24: // char
    return 1;
  case 26: // fraction
    return 16;
  default: // an enumeration, float, int32
    return 4;
  }
}

int cudnnBackendCreateDescriptor(int kind, struct descriptor **out) {
  *out = calloc(1, sizeof **out);
  if (!*out)
    return 1; // CUDNN_STATUS_NOT_INITIALIZED
  (*out)->kind = kind;
  (*out)->workspace = NOT_KNOWN;
  (*out)->product = (struct product){.type = NO_CLASSES, .slow = ""};
  return OK;
}
int cudnnBackendDestroyDescriptor(struct descriptor *descriptor) {
  for (int i = 0; descriptor && i < descriptor->used; i++)
    free(descriptor->attributes[i].values);
  free(descriptor);
  return OK;
}
int cudnnBackendExecute(void *handle, const struct descriptor *plan, void *pack) {
  const struct product *of = &plan->product;
  const char *slow = of->without_tensor_cores ? "fp32" : of->slow;
  char text[sizeof of->shape + 16] = "";
  if (*slow)
    snprintf(text, sizeof text, "%s %s", of->shape, gputrain_type(of->type, !of->without_tensor_cores));
  return gputrain_ask_product(gputrain_stream_of(handle), "cudnnBackendExecute", slow, text, of->flops)
             ? CUDNN_EXECUTION_FAILED
             : OK;
}

static struct attribute *find(struct descriptor *descriptor, int name) {
  for (int i = 0; descriptor && i < descriptor->used; i++)
    if (descriptor->attributes[i].name == name)
      return descriptor->attributes + i;
  return NULL;
}
int cudnnBackendSetAttribute(struct descriptor *descriptor, int name, int type, int64_t count, const void *values) {
  struct attribute *attribute = find(descriptor, name);
  if (!attribute && descriptor->used == ATTRIBUTES)
    return gputrain_missing("cudnnBackendSetAttribute with so many attributes", NOT_SUPPORTED_BY_CUDNN);
  if (!attribute)
    attribute = descriptor->attributes + descriptor->used++;
  size_t bytes = count > 0 ? size_of(type) * (size_t)count : 0;
  free(attribute->values);
  *attribute = (struct attribute){name, type, count, malloc(bytes + 8)};
  if (values && bytes && attribute->values)
    memcpy(attribute->values, values, bytes);
  return OK;
}

// --- Workspaces of cuDNN 9.19 on an H200, measured by what it asked torch 2.11's allocator for

static int64_t number(struct descriptor *descriptor, int name, int64_t at) {
  struct attribute *attribute = find(descriptor, name);
  return attribute && attribute->values && at < attribute->count ? ((int64_t *)attribute->values)[at] : 0;
}
static struct descriptor *referred(struct descriptor *descriptor, int name, int64_t at) {
  return (struct descriptor *)(intptr_t)number(descriptor, name, at);
}
// Returns the size of a tensor's elements in bytes; 0 for a type whose workspaces were not measured.
static int64_t element_of(struct descriptor *tensor) {
  struct attribute *attribute = find(tensor, TENSOR_TYPE);
  int type = attribute && attribute->values ? *(int *)attribute->values : -1;
  return type == FLOAT ? 4 : type == HALF || type == BFLOAT16 ? 2 : 0;
}
static int64_t product(struct descriptor *tensor, int64_t first) {
  struct attribute *sizes = find(tensor, TENSOR_SIZES);
  int64_t all = 1;
  for (int64_t i = first; sizes && i < sizes->count; i++)
    all *= number(tensor, TENSOR_SIZES, i);
  return all;
}
static int64_t aligned(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

// The gradient of a weight is computed in tiles. On capability 9.0, tiles that do not fill all multiprocessors are split
// into parts, and each part stores its sum. With few numbers to add there were fewer parts.
static int64_t of_sums(int64_t made, int64_t read, int64_t depth) {
  enum { FEWEST = 224 }; // the fewest numbers that a part adds for an element
  int64_t side = made <= 64 ? 64 : 128, tiles = aligned(made, side) / side * (aligned(read, side) / side);
  int64_t rest = tiles % gputrain_gpu()->multiprocessors;
  int64_t parts = rest ? least(gputrain_gpu()->multiprocessors / rest, depth / FEWEST) : 0;
  return parts > 1 ? rest * parts * side * side * 4 : 0;
}

// The kernels read and write channels last, halves in groups of eight. Tensors in another layout are copied. Only the fp32
// kernels of 8.x write NCHW themselves in a forward pass: for two shapes their workspace is smaller by the result on 8.6
// than on 12.0 (16,925,184 and 8,536,576 bytes of 2 x 64 x 128 x 128; cuDNN 9.20 and 9.10.2). What convolutions in 16 bits
// add to split sums is left out.
static int64_t of_convolution(struct descriptor *operation, int first) {
  enum { ADDED = 16, FEW = 4 };
  static const int64_t LARGEST = (int64_t)1 << 31; // the most numbers of a tensor
  struct descriptor *convolution = referred(operation, first, 0), *weight = referred(operation, first + 1, 0);
  struct descriptor *source = referred(operation, first + 2, 0), *result = referred(operation, first + 3, 0);
  int forward = first == CONVOLUTION_OF_FORWARD;
  int64_t size = element_of(source), channels = number(source, TENSOR_SIZES, 1), made = number(result, TENSOR_SIZES, 1);
  int64_t each = number(weight, TENSOR_SIZES, 1), window = product(weight, 2), samples = number(source, TENSOR_SIZES, 0);
  int64_t pixels = product(source, 2), pixels_made = product(result, 2), strided = 0;
  if (!size)
    return NOT_KNOWN;
  for (int64_t i = 0; i < find(source, TENSOR_SIZES)->count - 2; i++)
    strided |= number(convolution, CONVOLUTION_STRIDES, i) > 1;
  int grouped = each < channels;
  if ((grouped && each == 1) || (channels <= FEW && !strided && (forward || size == 4)))
    return 0;
  int64_t step = size == 2 ? 8 : 4, read = channels, written = made;
  if (size == 2 && !grouped) {
    read = aligned(channels, step);
    written = aligned(made, step);
  }
  int64_t largest = read * pixels > written * pixels_made ? read * pixels : written * pixels_made;
  samples = largest && largest <= LARGEST ? least(samples, LARGEST / largest) : samples;
  int64_t of_source = samples * read * pixels * size, of_result = samples * written * pixels_made * size;
  int64_t of_weight = written * (grouped ? each : read) * window * size, sums = 0;
  int writes_nchw = forward && size == 4 && gputrain_gpu()->major == 8;
  int adds = first == CONVOLUTION_OF_BACKWARD_FILTER && size == 4 && !grouped && gputrain_gpu()->major == 9;
  if (adds)
    sums = of_sums(made, channels * window, samples * pixels_made);
  if (number(source, TENSOR_STRIDES, 1) == 1 && channels > 1) { // the tensor is stored channels last
    if (grouped || !(channels % step || made % step))
      return sums ? sums + ADDED : 0;
    int copies_result = made % step || (size == 4 && !forward);
    return of_weight + (channels % step ? of_source : 0) + (copies_result ? of_result : 0) + ADDED;
  }
  if (window == 1 && !strided) {
    if (pixels % (forward ? 4 : step))
      return of_source + of_result + sums + ADDED;
    return adds ? samples * of_weight : 0; // each sample is a product of matrices
  }
  return of_source + of_weight + (writes_nchw ? 0 : of_result) + sums + ADDED;
}

enum { SEMAPHORE = 256 }; // bytes that each kernel of attention needs

// If several heads share keys and values, their gradients are computed for each head and then added up.
static int64_t of_matmul(struct descriptor *result) {
  struct attribute *is_virtual = find(result, TENSOR_IS_VIRTUAL);
  int apart = is_virtual && is_virtual->values && *(char *)is_virtual->values && element_of(result) == 2;
  return apart ? product(result, 0) * 2 : 0;
}
static int64_t of_graph(struct descriptor *graph) {
  struct attribute *operations = find(graph, OPERATIONGRAPH_OPERATIONS);
  int64_t bytes = 0, matmuls = 0;
  for (int64_t i = 0; operations && i < operations->count; i++) {
    struct descriptor *operation = referred(graph, OPERATIONGRAPH_OPERATIONS, i);
    if (operations->count == 1)
      return operation->workspace;
    if (operation->kind == MATMUL) {
      matmuls++;
      bytes += operation->workspace;
    }
  }
  return matmuls > 1 && gputrain_gpu()->major == 9 ? SEMAPHORE + bytes : NOT_KNOWN;
}

// --- What convolutions and products compute, and how

static int type_of(struct descriptor *tensor) {
  struct attribute *attribute = find(tensor, TENSOR_TYPE);
  switch (attribute && attribute->values ? *(int *)attribute->values : -1) {
  case FLOAT:
    return REAL_32;
  case DOUBLE:
    return REAL_64;
  case HALF:
    return REAL_16;
  case BFLOAT16:
    return BFLOAT_16;
  }
  return NO_CLASSES;
}
static int has_channels_last(struct descriptor *tensor) {
  return number(tensor, TENSOR_STRIDES, 1) == 1 || number(tensor, TENSOR_SIZES, 1) == 1 || product(tensor, 2) == 1;
}
// Tells whether the channels of a pixel take a multiple of 16 bytes. Images and latents have few channels by nature, so they
// count as aligned.
static int has_aligned_channels(struct descriptor *tensor) {
  enum { FEW_CHANNELS = 4 };
  int64_t channels = number(tensor, TENSOR_SIZES, 1);
  return channels <= FEW_CHANNELS || gputrain_is_aligned((uint64_t)(channels * element_of(tensor)));
}

static int write_sizes(char *to, size_t room, struct descriptor *tensor) {
  struct attribute *sizes = find(tensor, TENSOR_SIZES);
  int used = 0;
  for (int64_t i = 0; sizes && i < sizes->count && (size_t)used < room; i++)
    used += snprintf(to + used, room - (size_t)used, i ? " x %lld" : "%lld", (long long)number(tensor, TENSOR_SIZES, i));
  return (size_t)used < room ? used : (int)room - 1;
}
// A convolution of NCHW has this class even if its channels are not aligned, because they are padded during the
// transposition. A convolution of each channel by itself does not run on tensor cores.
static struct product convolves(struct descriptor *operation, int first) {
  struct descriptor *weight = referred(operation, first + 1, 0), *source = referred(operation, first + 2, 0);
  struct descriptor *result = referred(operation, first + 3, 0);
  struct product of = {.type = NO_CLASSES, .slow = ""};
  int64_t made = number(weight, TENSOR_SIZES, 0), each = number(weight, TENSOR_SIZES, 1);
  of.flops = made ? (uint64_t)(2 * product(result, 0) * (product(weight, 0) / made)) : 0;
  if ((each == 1 && number(source, TENSOR_SIZES, 1) > 1) || !gputrain_tensor_cores(type_of(source)))
    return of;
  of.type = type_of(source);
  if (!has_channels_last(source) || !has_channels_last(weight) || !has_channels_last(result))
    of.slow = "nchw";
  else if (!has_aligned_channels(source) || !has_aligned_channels(result))
    of.slow = "unaligned";
  int used = write_sizes(of.shape, sizeof of.shape, source);
  used += snprintf(of.shape + used, sizeof of.shape - (size_t)used, " with ");
  if ((size_t)used < sizeof of.shape)
    write_sizes(of.shape + used, sizeof of.shape - (size_t)used, weight);
  return of;
}
static struct product multiplies(struct descriptor *operation) {
  struct descriptor *factor = referred(operation, MATMUL_FACTOR, 0), *result = referred(operation, MATMUL_RESULT, 0);
  struct attribute *sizes = find(factor, TENSOR_SIZES);
  int64_t inner = sizes ? number(factor, TENSOR_SIZES, sizes->count - 1) : 0;
  return (struct product){.flops = (uint64_t)(2 * product(result, 0) * inner), .type = NO_CLASSES, .slow = ""};
}
static struct product computes(struct descriptor *graph) {
  struct attribute *operations = find(graph, OPERATIONGRAPH_OPERATIONS);
  struct product all = {.type = NO_CLASSES, .slow = ""};
  uint64_t flops = 0;
  for (int64_t i = 0; operations && i < operations->count; i++) {
    const struct product *one = &referred(graph, OPERATIONGRAPH_OPERATIONS, i)->product;
    flops += one->flops;
    // Of several operations the last one decides the class.
    if (one->type != NO_CLASSES)
      all = *one;
  }
  all.flops = flops;
  return all;
}
static struct product attends(struct descriptor *operation) {
  struct descriptor *query = referred(operation, ATTENTION_QUERY, 0), *key = referred(operation, ATTENTION_KEY, 0);
  int64_t numbers = product(query, 0) + product(referred(operation, ATTENTION_RESULT, 0), 0);
  return (struct product){.flops = (uint64_t)(2 * numbers * number(key, TENSOR_SIZES, 2)), .type = NO_CLASSES, .slow = ""};
}

static void note_product(struct descriptor *to) {
  static uint64_t graphs;
  struct attribute *mode = find(to, ENGINEHEUR_MODE);
  switch (to->kind) {
  case CONVOLUTION_FORWARD:
    to->product = convolves(to, CONVOLUTION_OF_FORWARD);
    break;
  case CONVOLUTION_BACKWARD_DATA:
    to->product = convolves(to, CONVOLUTION_OF_BACKWARD_DATA);
    break;
  case CONVOLUTION_BACKWARD_FILTER:
    to->product = convolves(to, CONVOLUTION_OF_BACKWARD_FILTER);
    break;
  case MATMUL:
    to->product = multiplies(to);
    break;
  case ATTENTION_FORWARD:
    to->product = attends(to);
    break;
  case OPERATION_GRAPH:
    to->product = computes(to);
    to->product.graph = __atomic_add_fetch(&graphs, 1, __ATOMIC_RELAXED);
    break;
  case ENGINEHEUR:
    // torch also asks for the fallback engines, and uses them if it may not use TF32. They have no tensor cores.
    to->product = referred(to, ENGINEHEUR_OPERATION_GRAPH, 0)->product;
    if (to->product.type != NO_CLASSES && mode && mode->values && *(int *)mode->values == FALLBACK)
      to->product.without_tensor_cores = 1;
    break;
  case EXECUTION_PLAN:
    to->product = referred(to, EXECUTION_PLAN_ENGINE_CONFIG, 0)->product;
    break;
  }
}

// To find the fastest engine, torch makes plans with all engines that it may use, and measures them. Times mean nothing
// here. So an engine without tensor cores refuses a plan if one with tensor cores has made one.
static int refuses(const struct descriptor *plan) {
  static __thread uint64_t planned; // the last graph of this thread that has a plan on tensor cores
  if (plan->kind != EXECUTION_PLAN || plan->product.type == NO_CLASSES)
    return 0;
  if (!plan->product.without_tensor_cores)
    planned = plan->product.graph;
  return plan->product.without_tensor_cores && plan->product.graph == planned;
}

int cudnnBackendFinalize(struct descriptor *to) {
  note_product(to);
  if (refuses(to))
    return NOT_SUPPORTED_BY_CUDNN;
  const struct gpu *gpu = gputrain_gpu();
  int attends = to->kind == ATTENTION_FORWARD || to->kind == MATMUL;
  int convolves = to->kind == CONVOLUTION_FORWARD || to->kind == CONVOLUTION_BACKWARD_DATA ||
                  to->kind == CONVOLUTION_BACKWARD_FILTER;
  if (10 * gpu->major + gpu->minor < 86 || (attends && gpu->major != 9)) // these workspaces are unknown
    return OK;
  if (convolves)
    // If cudnn.benchmark is off, the worker removes this note.
    gputrain_unknown("cuDNN's workspaces that cudnn.benchmark chooses by time");
  switch (to->kind) { // A descriptor may refer to others that are freed later, so the figures are computed now.
  case CONVOLUTION_FORWARD:
    to->workspace = of_convolution(to, CONVOLUTION_OF_FORWARD);
    break;
  case CONVOLUTION_BACKWARD_DATA:
    to->workspace = of_convolution(to, CONVOLUTION_OF_BACKWARD_DATA);
    break;
  case CONVOLUTION_BACKWARD_FILTER:
    to->workspace = of_convolution(to, CONVOLUTION_OF_BACKWARD_FILTER);
    break;
  case ATTENTION_FORWARD:
    to->workspace = SEMAPHORE;
    break;
  case MATMUL:
    to->workspace = of_matmul(referred(to, MATMUL_RESULT, 0));
    break;
  case OPERATION_GRAPH:
    to->workspace = of_graph(to);
    break;
  case ENGINEHEUR:
    to->workspace = referred(to, ENGINEHEUR_OPERATION_GRAPH, 0)->workspace;
    break;
  case EXECUTION_PLAN:
    to->workspace = referred(to, EXECUTION_PLAN_ENGINE_CONFIG, 0)->workspace;
    break;
  }
  if (convolves && to->workspace > 0)
    gputrain_estimated((uint64_t)to->workspace);
  return OK;
}
int cudnnBackendGetAttribute(struct descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found,
                             void *values) {
  int64_t ignored, answer = name == OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
  if (!found)
    found = &ignored;
  *found = 1;
  switch (name) {
  case ENGINEHEUR_RESULTS: // the caller made the descriptors of the results
    if (values && wanted > 0) {
      struct descriptor *result = *(struct descriptor **)values;
      result->workspace = descriptor->workspace;
      result->product = descriptor->product;
    }
    return OK;
  case ENGINECFG_ENGINE:
    if (values && wanted > 0)
      (*(struct descriptor **)values)->product = descriptor->product;
    return OK;
  case ENGINE_NUMERICAL_NOTE:
    *found = descriptor->product.type != NO_CLASSES && !descriptor->product.without_tensor_cores;
    if (values && *found && wanted > 0)
      *(int *)values = TENSOR_CORE;
    return OK;
  case ENGINECFG_SHARED_MEMORY_USED:
    if (values)
      memset(values, 0, 4);
    return OK;
  case ENGINECFG_WORKSPACE_SIZE:
  case EXECUTION_PLAN_WORKSPACE_SIZE:
    if (descriptor->workspace == NOT_KNOWN)
      gputrain_unknown("cuDNN's workspaces");
    else
      answer = descriptor->workspace;
    // fall through
  case OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
  case ENGINE_GLOBAL_INDEX:
    if (values)
      memcpy(values, &answer, sizeof answer);
    return OK;
  }
  struct attribute *attribute = find(descriptor, name);
  *found = attribute ? attribute->count : 0;
  int64_t copied = wanted < *found ? wanted : *found;
  if (values && attribute && attribute->values && copied > 0)
    memcpy(values, attribute->values, (size_t)copied * size_of(type));
  return OK;
}
