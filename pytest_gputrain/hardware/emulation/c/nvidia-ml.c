// Stands in for NVML, the library that nvidia-smi and nvidia-ml-py read. What an emulated GPU has no figure of (power,
// clocks, temperature) is not supported here, as it is not on some real ones.
#include "emulated.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };

static char devices[MAX_DEVICES]; // a handle is an address in here

static int number_of(const void *handle) { return (int)((const char *)handle - devices); }

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
  default:
    return "Invalid Argument";
  }
}
int nvmlInit(void) { return OK; } // which torch calls by this name, to count GPUs without CUDA
int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
  snprintf(text, bytes, "%s", CUDA_VERSION >= 13000 ? "580.65.06" : "570.86.15"); // the first of that CUDA
  return OK;
}
int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = CUDA_VERSION;
  return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

// NVML lists every device, whatever CUDA_VISIBLE_DEVICES says.
int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)gputrain_gpu()->devices;
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = devices + index;
  return index < (unsigned)gputrain_gpu()->devices ? OK : NVML_INVALID_ARGUMENT;
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
int nvmlDeviceGetName(void *handle, char *text, unsigned bytes) {
  snprintf(text, bytes, "%s", gputrain_gpu()->name);
  return OK;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned bytes) {
  write_uuid(text, bytes, number_of(handle));
  return OK;
}
int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  *index = (unsigned)number_of(handle);
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  *major = gputrain_gpu()->major;
  *minor = gputrain_gpu()->minor;
  return OK;
}

struct memory {
  unsigned long long total, left, used;
};
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
  memory->total = gputrain_gpu()->memory;
  memory->used = gputrain_used_so_far(number_of(handle));
  memory->left = memory->total - memory->used;
  return OK;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *after) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *megahertz) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) { return NVML_NOT_SUPPORTED; }

struct process {
  unsigned id;
  unsigned long long used;
};
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process *processes) {
  unsigned room = *count;
  size_t used = gputrain_used_so_far(number_of(handle));
  *count = used > 0;
  if (*count > room)
    return NVML_INSUFFICIENT_SIZE;
  if (*count)
    processes[0] = (struct process){(unsigned)getpid(), used};
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *processes) {
  *count = 0;
  return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level) {
  *level = 0; // on one board
  return OK;
}
