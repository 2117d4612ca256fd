// Stands in for NVML, the library that nvidia-smi, nvidia-ml-py and loggers read. It answers as an idle GPU, because no
// kernel runs. Power limits, fans, serial numbers and others are not supported, as on some real boards.
#include "emulated.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };

enum { IDLE_CELSIUS = 30, IDLE_MILLIWATTS = 50000, IDLE_MEGAHERTZ = 345, IDLE_MEMORY_MEGAHERTZ = 405, GPU_IS_IDLE = 1 };

static char devices[MAX_DEVICES]; // a handle is an address in this array

// Returns the number of the device; -1 if the handle is none.
static int number_of(const void *handle) {
  uintptr_t number = (uintptr_t)handle - (uintptr_t)devices;
  return number < (uintptr_t)gputrain_gpu()->devices ? (int)number : -1;
}

static void write_uuid(char *text, unsigned bytes, int device) {
  unsigned char uuid[16];
  char hex[48] = "GPU-", *to = hex + 4;
  gputrain_uuid(uuid, device);
  for (int i = 0; i < 16; i++)
    to += sprintf(to, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
  snprintf(text, bytes, "%s", hex);
}

const char *nvmlErrorString(int status) {
  switch (status) {
  case OK:
    return "The operation was successful";
  case NVML_NOT_SUPPORTED:
    return "Not Supported";
  case NVML_NOT_FOUND:
    return "Not Found";
  case NVML_INSUFFICIENT_SIZE:
    return "Insufficient Size";
  default:
    return "Invalid Argument";
  }
}
int nvmlInit(void) { return OK; } // torch calls this function to count GPUs without CUDA
int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
#define DRIVER (CUDA_VERSION >= 13000 ? "580.65.06" : "570.86.15") // the first driver of that CUDA
int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
  snprintf(text, bytes, "%s", DRIVER);
  return OK;
}
int nvmlSystemGetNVMLVersion(char *text, unsigned bytes) {
  snprintf(text, bytes, "%d.%s", CUDA_VERSION / 1000, DRIVER);
  return OK;
}
int nvmlSystemGetProcessName(unsigned process, char *text, unsigned bytes) {
  char path[32];
  snprintf(path, sizeof path, "/proc/%u/cmdline", process);
  FILE *file = fopen(path, "r");
  if (!file)
    return NVML_NOT_FOUND;
  size_t read = bytes ? fread(text, 1, bytes - 1, file) : 0;
  if (bytes)
    text[read] = 0;
  fclose(file);
  return OK;
}
int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = CUDA_VERSION;
  return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

// NVML lists every device, even those that CUDA_VISIBLE_DEVICES hides.
int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)gputrain_gpu()->devices;
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index >= (unsigned)gputrain_gpu()->devices)
    return NVML_INVALID_ARGUMENT;
  *handle = devices + index;
  return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  for (int device = 0; device < gputrain_gpu()->devices; device++) {
    char text[48];
    write_uuid(text, sizeof text, device);
    *handle = devices + device;
    if (!strcmp(text, uuid))
      return OK;
  }
  return NVML_NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
  const char *colon = strchr(bus, ':');
  long number = colon ? strtol(colon + 1, NULL, 16) : 0;
  if (number < 1 || number > gputrain_gpu()->devices)
    return NVML_NOT_FOUND;
  *handle = devices + number - 1;
  return OK;
}

// Returns an error from the function if the handle is none.
#define DEVICE_OF(handle)                                                                                                   \
  int device = number_of(handle);                                                                                           \
  if (device < 0)                                                                                                           \
    return NVML_INVALID_ARGUMENT
// Defines a function that writes one figure of a device.
#define ANSWERS(function, type, figure)                                                                                     \
  int function(void *handle, type *value) {                                                                                 \
    DEVICE_OF(handle);                                                                                                      \
    *value = (type)(figure);                                                                                                \
    return OK;                                                                                                              \
  }
#define NOT_SUPPORTED_HERE(function)                                                                                        \
  int function(void *handle) { return number_of(handle) < 0 ? NVML_INVALID_ARGUMENT : NVML_NOT_SUPPORTED; }

int nvmlDeviceGetName(void *handle, char *text, unsigned bytes) {
  DEVICE_OF(handle);
  snprintf(text, bytes, "%s", gputrain_gpu()->name);
  return OK;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned bytes) {
  DEVICE_OF(handle);
  write_uuid(text, bytes, device);
  return OK;
}
ANSWERS(nvmlDeviceGetIndex, unsigned, device)
ANSWERS(nvmlDeviceGetMinorNumber, unsigned, device)
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  DEVICE_OF(handle);
  *major = gputrain_gpu()->major;
  *minor = gputrain_gpu()->minor;
  return OK;
}
static unsigned architecture(void) { // with the numbers of nvmlDeviceArchitecture_t
  const struct gpu *gpu = gputrain_gpu();
  if (gpu->major < 8)
    return gpu->minor < 5 ? 5 : 6; // Volta, Turing
  if (gpu->major == 8)
    return gpu->minor < 9 ? 7 : 8; // Ampere, Ada
  return gpu->major == 9 ? 9 : 10; // Hopper, Blackwell
}
ANSWERS(nvmlDeviceGetArchitecture, unsigned, architecture())

// The GPU belongs to no fabric of NVLink switches (state 0). The low bytes of the version are the size of the structure.
int nvmlDeviceGetGpuFabricInfoV(void *handle, unsigned *version) {
  DEVICE_OF(handle);
  size_t bytes = *version & 0xFFFFFF;
  if (bytes < sizeof *version)
    return NVML_INVALID_ARGUMENT;
  memset(version + 1, 0, bytes - sizeof *version);
  return OK;
}

struct pci {
  char old_text[16];
  unsigned domain, bus, device, model, subsystem;
  char text[32];
};
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
  enum { NVIDIA = 0x10DE };
  DEVICE_OF(handle);
  memset(pci, 0, sizeof *pci);
  pci->bus = (unsigned)device + 1;
  pci->model = NVIDIA; // the upper half, which would be the model, is 0
  snprintf(pci->old_text, sizeof pci->old_text, "0000:%02X:00.0", pci->bus & 0xFF);
  snprintf(pci->text, sizeof pci->text, "00000000:%02X:00.0", pci->bus & 0xFF);
  return OK;
}

struct memory {
  unsigned long long total, left, used;
};
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
  DEVICE_OF(handle);
  memory->total = gputrain_gpu()->memory;
  memory->used = gputrain_used_so_far(device);
  memory->left = memory->used < memory->total ? memory->total - memory->used : 0;
  return OK;
}
struct memory_v2 {
  unsigned version;
  unsigned long long total, reserved, left, used;
};
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
  struct memory plain;
  int status = nvmlDeviceGetMemoryInfo(handle, &plain);
  if (status == OK)
    *memory = (struct memory_v2){memory->version, plain.total, 0, plain.left, plain.used};
  return status;
}

struct rates {
  unsigned gpu, memory;
};
ANSWERS(nvmlDeviceGetUtilizationRates, struct rates, ((struct rates){0, 0}))
ANSWERS(nvmlDeviceGetPowerUsage, unsigned, IDLE_MILLIWATTS)
ANSWERS(nvmlDeviceGetPerformanceState, int, 0)
ANSWERS(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, GPU_IS_IDLE)
ANSWERS(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, GPU_IS_IDLE)
ANSWERS(nvmlDeviceGetPersistenceMode, int, 1)
ANSWERS(nvmlDeviceGetComputeMode, int, 0)
ANSWERS(nvmlDeviceGetDisplayMode, int, 0)
ANSWERS(nvmlDeviceGetDisplayActive, int, 0)
ANSWERS(nvmlDeviceGetMaxMigDeviceCount, unsigned, 0)
int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *megahertz) {
  enum { GRAPHICS, MULTIPROCESSORS, MEMORY, VIDEO };
  DEVICE_OF(handle);
  if (type < GRAPHICS || type > VIDEO)
    return NVML_INVALID_ARGUMENT;
  *megahertz = type == MEMORY ? IDLE_MEMORY_MEGAHERTZ : IDLE_MEGAHERTZ;
  return OK;
}
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
  DEVICE_OF(handle);
  if (sensor) // there is only sensor 0
    return NVML_INVALID_ARGUMENT;
  *celsius = IDLE_CELSIUS;
  return OK;
}
struct temperature {
  unsigned version;
  int sensor, celsius;
};
int nvmlDeviceGetTemperatureV(void *handle, struct temperature *to) {
  return nvmlDeviceGetTemperature(handle, to->sensor, (unsigned *)&to->celsius);
}
static int codec(void *handle, unsigned *percent, unsigned *microseconds) {
  DEVICE_OF(handle);
  *percent = 0;
  *microseconds = 200000; // the time between two samples
  return OK;
}
int nvmlDeviceGetEncoderUtilization(void *handle, unsigned *percent, unsigned *microseconds) {
  return codec(handle, percent, microseconds);
}
int nvmlDeviceGetDecoderUtilization(void *handle, unsigned *percent, unsigned *microseconds) {
  return codec(handle, percent, microseconds);
}
struct field {
  unsigned number, scope;
  long long time, latency;
  int type, status;
  unsigned long long value;
};
int nvmlDeviceGetFieldValues(void *handle, int count, struct field *fields) {
  DEVICE_OF(handle);
  for (int i = 0; i < count; i++)
    fields[i].status = NVML_NOT_SUPPORTED;
  return OK;
}
NOT_SUPPORTED_HERE(nvmlDeviceGetMigMode)
NOT_SUPPORTED_HERE(nvmlDeviceGetMigDeviceHandleByIndex)
NOT_SUPPORTED_HERE(nvmlDeviceGetEnforcedPowerLimit)
NOT_SUPPORTED_HERE(nvmlDeviceGetPowerManagementLimit)
NOT_SUPPORTED_HERE(nvmlDeviceGetPowerManagementDefaultLimit)
NOT_SUPPORTED_HERE(nvmlDeviceGetPowerManagementLimitConstraints)
NOT_SUPPORTED_HERE(nvmlDeviceGetTotalEnergyConsumption)
NOT_SUPPORTED_HERE(nvmlDeviceGetTemperatureThreshold)
NOT_SUPPORTED_HERE(nvmlDeviceGetFanSpeed)
NOT_SUPPORTED_HERE(nvmlDeviceGetFanSpeed_v2)
NOT_SUPPORTED_HERE(nvmlDeviceGetNumFans)
NOT_SUPPORTED_HERE(nvmlDeviceGetMaxClockInfo)
NOT_SUPPORTED_HERE(nvmlDeviceGetApplicationsClock)
NOT_SUPPORTED_HERE(nvmlDeviceGetCurrPcieLinkGeneration)
NOT_SUPPORTED_HERE(nvmlDeviceGetCurrPcieLinkWidth)
NOT_SUPPORTED_HERE(nvmlDeviceGetMaxPcieLinkGeneration)
NOT_SUPPORTED_HERE(nvmlDeviceGetMaxPcieLinkWidth)
NOT_SUPPORTED_HERE(nvmlDeviceGetPcieThroughput)
NOT_SUPPORTED_HERE(nvmlDeviceGetPcieReplayCounter)
NOT_SUPPORTED_HERE(nvmlDeviceGetBAR1MemoryInfo)
NOT_SUPPORTED_HERE(nvmlDeviceGetEccMode)
NOT_SUPPORTED_HERE(nvmlDeviceGetTotalEccErrors)
NOT_SUPPORTED_HERE(nvmlDeviceGetMemoryErrorCounter)
NOT_SUPPORTED_HERE(nvmlDeviceGetRetiredPages)
NOT_SUPPORTED_HERE(nvmlDeviceGetRemappedRows)
NOT_SUPPORTED_HERE(nvmlDeviceGetSerial)
NOT_SUPPORTED_HERE(nvmlDeviceGetVbiosVersion)
NOT_SUPPORTED_HERE(nvmlDeviceGetBoardPartNumber)
NOT_SUPPORTED_HERE(nvmlDeviceGetBrand)
NOT_SUPPORTED_HERE(nvmlDeviceGetNumGpuCores)
NOT_SUPPORTED_HERE(nvmlDeviceGetMemoryBusWidth)
NOT_SUPPORTED_HERE(nvmlDeviceGetAccountingMode)
NOT_SUPPORTED_HERE(nvmlDeviceGetProcessUtilization)
NOT_SUPPORTED_HERE(nvmlDeviceGetCpuAffinity)
NOT_SUPPORTED_HERE(nvmlDeviceGetNvLinkState)

// --- Processes: only the calling process is known

struct process {
  unsigned id;
  unsigned long long used;
};
struct process_v2 {
  struct process process;
  unsigned gpu_instance, compute_instance;
};
static int processes_of(void *handle, unsigned *count, unsigned long long *used) {
  DEVICE_OF(handle);
  unsigned room = *count;
  *used = gputrain_used_so_far(device);
  *count = *used > 0;
  return *count > room ? NVML_INSUFFICIENT_SIZE : OK;
}
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process *processes) {
  unsigned long long used;
  int status = processes_of(handle, count, &used);
  if (status == OK && *count)
    processes[0] = (struct process){(unsigned)getpid(), used};
  return status;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process_v2 *processes) {
  enum { NO_INSTANCE = 0xFFFFFFFF };
  unsigned long long used;
  int status = processes_of(handle, count, &used);
  if (status == OK && *count)
    processes[0] = (struct process_v2){{(unsigned)getpid(), used}, (unsigned)NO_INSTANCE, (unsigned)NO_INSTANCE};
  return status;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process_v2 *processes) {
  return nvmlDeviceGetComputeRunningProcesses_v2(handle, count, processes);
}
#define NO_PROCESSES(function)                                                                                              \
  int function(void *handle, unsigned *count, void *processes) {                                                            \
    DEVICE_OF(handle);                                                                                                      \
    *count = 0;                                                                                                             \
    return OK;                                                                                                              \
  }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level) {
  if (number_of(one) < 0 || number_of(other) < 0)
    return NVML_INVALID_ARGUMENT;
  *level = 0; // both GPUs are on one board
  return OK;
}
