/*
 * A libnvidia-ml.so.1 that answers for GPUs that are not there, so that tests run the real Python bindings on any machine.
 *
 * The macro DRIVER, 470 or 580, decides which functions there are: bindings ask for functions by name, and behave in their own
 * ways where a driver lacks one. What the driver answers is in two variables of the environment, read by nvmlInit:
 *
 *   NVML_INIT  what nvmlInit returns; 0 by default
 *   NVML_GPUS  the GPUs, separated by semicolons; each a list of key=value, separated by commas:
 *
 *     name=Tesla T4        uuid=GPU-1234      bus=1b, slot=1e (hexadecimal)      minor=0
 *     mib=15360,used=1032  the memory; without it the driver refuses to tell, as on GPUs that share the host's
 *     power=150000         milliwatts, mean of a second          instant=90000   milliwatts, at this moment
 *     limit=300000         milliwatts          energy=123456789   millijoules       clock=1290   MHz
 *     busy=97              percent             reasons=4          of clocks, a sum of bits
 *     pids=4000:3072+4001  processes, each with the MiB that it holds, or without where the driver does not know
 *     links=4*1+2*switch   NVLinks, each to a GPU by its index (one beyond the last is hidden), to a switch, or to something
 *                          that the driver does not tell (vm)
 *     level=30             where its path to any other GPU on PCIe meets, by NVML's numbers; 50 (SYS) by default
 *     nvmlDeviceGetUUID=3  the code that a function returns for this GPU, by the name that bindings call it by, without _v2
 *
 * What a GPU's description lacks is not supported.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DRIVER
#define DRIVER 580
#endif

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MOST_GPUS = 16, MOST_KEYS = 24, MOST_LINKS = 18, POWER_INSTANT = 186, TYPE_UNSIGNED_INT = 1 };
enum { LINK_GPU = 0, LINK_SWITCH = 2, LINK_UNKNOWN = 255, TOPOLOGY_SYSTEM = 50 };

typedef struct {
    int keys;
    char *key[MOST_KEYS], *value[MOST_KEYS];
} Gpu;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned int gpu, memory;
} Utilization;

typedef struct {
    char legacy_address[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char address[32];
} Pci;

typedef struct {
    unsigned int pid;
    unsigned long long bytes;
    unsigned int gpu_instance, compute_instance;
} Process;

typedef struct {
    unsigned int field, scope;
    long long timestamp, latency;
    unsigned int type, result;
    union {
        unsigned int ui;
        unsigned long long ull;
    } value;
} FieldValue;

static Gpu gpus[MOST_GPUS];
static unsigned int count;

/* The environment's text, cut into GPUs, keys and values. */
static int load(void)
{
    const char *told = getenv("NVML_GPUS");
    char *text = strdup(told ? told : ""), *rest = text, *gpu, *field;
    count = 0;
    while ((gpu = strsep(&rest, ";")) && *gpu && count < MOST_GPUS) {
        Gpu *described = &gpus[count++];
        described->keys = 0;
        while ((field = strsep(&gpu, ",")) && described->keys < MOST_KEYS) {
            described->key[described->keys] = strsep(&field, "=");
            described->value[described->keys++] = field ? field : "";
        }
    }
    return getenv("NVML_INIT") ? atoi(getenv("NVML_INIT")) : SUCCESS;
}

static const char *find(const Gpu *gpu, const char *key)
{
    for (int at = 0; at < gpu->keys; at++)
        if (!strcmp(gpu->key[at], key))
            return gpu->value[at];
    return NULL;
}

static unsigned long long number(const Gpu *gpu, const char *key, int base)
{
    const char *value = find(gpu, key);
    return value ? strtoull(value, NULL, base) : 0;
}

/* Returns from a function of the library with the code that the GPU's description gives for it. */
#define REFUSED(gpu) \
    do { \
        int code = refused(gpu, __func__); \
        if (code) \
            return code; \
    } while (0)

static int refused(const Gpu *gpu, const char *function)
{
    char name[64];
    snprintf(name, sizeof name, "%s", function);
    char *version = strstr(name, "_v");
    if (version)
        *version = 0;
    return (int)number(gpu, name, 10);
}

static int text_of(const char *text, char *buffer, unsigned int size)
{
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

/* A figure of the description; not supported where it has none. */
static int figure(const Gpu *gpu, const char *key, unsigned int *value)
{
    if (!find(gpu, key))
        return NOT_SUPPORTED;
    *value = (unsigned int)number(gpu, key, 10);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return load();
}

int nvmlInit_v2(void)
{
    return load();
}

int nvmlShutdown(void)
{
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 28: return "GPU not found";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    return text_of(DRIVER < 500 ? "470.256.02" : "580.65.06", version, size);
}

int nvmlDeviceGetCount_v2(unsigned int *devices)
{
    *devices = count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Gpu **handle)
{
    if (index >= count)
        return INVALID_ARGUMENT;
    REFUSED(&gpus[index]);
    *handle = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **handle)
{
    for (unsigned int index = 0; index < count; index++) {
        const char *own = find(&gpus[index], "uuid");
        if (own && !strcmp(own, uuid)) {
            *handle = &gpus[index];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(const Gpu *gpu, char *uuid, unsigned int size)
{
    const char *own = find(gpu, "uuid");
    REFUSED(gpu);
    return text_of(own ? own : "", uuid, size);
}

int nvmlDeviceGetName(const Gpu *gpu, char *name, unsigned int size)
{
    const char *own = find(gpu, "name");
    REFUSED(gpu);
    return text_of(own ? own : "", name, size);
}

int nvmlDeviceGetMinorNumber(const Gpu *gpu, unsigned int *minor)
{
    REFUSED(gpu);
    return figure(gpu, "minor", minor);
}

int nvmlDeviceGetMemoryInfo(const Gpu *gpu, Memory *memory)
{
    REFUSED(gpu);
    memory->total = number(gpu, "mib", 10) << 20;
    memory->used = number(gpu, "used", 10) << 20;
    memory->free = memory->total - memory->used;
    return memory->total ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPciInfo_v3(const Gpu *gpu, Pci *pci)
{
    REFUSED(gpu);
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned int)number(gpu, "bus", 16) & 0xff;
    pci->device = (unsigned int)number(gpu, "slot", 16) & 0xff;
    snprintf(pci->legacy_address, sizeof pci->legacy_address, "0000:%02X:%02X.0", pci->bus, pci->device);
    snprintf(pci->address, sizeof pci->address, "00000000:%02X:%02X.0", pci->bus, pci->device);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(const Gpu *gpu, unsigned int *now, unsigned int *later)
{
    REFUSED(gpu);
    *now = *later = 0;
    return NOT_SUPPORTED;
}

/* Processes as both versions of the list give them; 470 has no _v3. */
static int processes(const Gpu *gpu, unsigned int *size, Process *listed)
{
    const char *told = find(gpu, "pids");
    unsigned int running = 0, room = *size;
    while (told && *told) {
        char *rest;
        Process process = {(unsigned int)strtoul(told, &rest, 10), ~0ULL, ~0U, ~0U};
        if (*rest == ':')
            process.bytes = strtoull(rest + 1, &rest, 10) << 20;
        if (listed && running < room)
            listed[running] = process;
        running++;
        told = *rest == '+' ? rest + 1 : NULL;
    }
    *size = running;
    return running > (listed ? room : 0) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(const Gpu *gpu, unsigned int *size, Process *listed)
{
    REFUSED(gpu);
    return processes(gpu, size, listed);
}

#if DRIVER >= 510
int nvmlDeviceGetComputeRunningProcesses_v3(const Gpu *gpu, unsigned int *size, Process *listed)
{
    REFUSED(gpu);
    return processes(gpu, size, listed);
}
#endif

int nvmlDeviceGetEnforcedPowerLimit(const Gpu *gpu, unsigned int *milliwatts)
{
    REFUSED(gpu);
    return figure(gpu, "limit", milliwatts);
}

int nvmlDeviceGetPowerUsage(const Gpu *gpu, unsigned int *milliwatts)
{
    REFUSED(gpu);
    return figure(gpu, "power", milliwatts);
}

int nvmlDeviceGetFieldValues(const Gpu *gpu, int size, FieldValue *values)
{
    REFUSED(gpu);
    for (int at = 0; at < size; at++) {
        values[at].type = TYPE_UNSIGNED_INT;
        values[at].result =
            values[at].field == POWER_INSTANT ? (unsigned int)figure(gpu, "instant", &values[at].value.ui) : NOT_SUPPORTED;
    }
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(const Gpu *gpu, unsigned long long *millijoules)
{
    REFUSED(gpu);
    *millijoules = number(gpu, "energy", 10);
    return find(gpu, "energy") ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetClockInfo(const Gpu *gpu, unsigned int clock, unsigned int *megahertz)
{
    (void)clock;
    REFUSED(gpu);
    return figure(gpu, "clock", megahertz);
}

int nvmlDeviceGetUtilizationRates(const Gpu *gpu, Utilization *share)
{
    REFUSED(gpu);
    share->memory = 0;
    return figure(gpu, "busy", &share->gpu);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(const Gpu *gpu, unsigned long long *reasons)
{
    REFUSED(gpu);
    *reasons = number(gpu, "reasons", 10);
    return find(gpu, "reasons") ? SUCCESS : NOT_SUPPORTED;
}

#if DRIVER >= 535
int nvmlDeviceGetCurrentClocksEventReasons(const Gpu *gpu, unsigned long long *reasons)
{
    REFUSED(gpu);
    *reasons = number(gpu, "reasons", 10);
    return find(gpu, "reasons") ? SUCCESS : NOT_SUPPORTED;
}
#endif

/* Where a link leads: the index of a GPU, -1 into a switch, -2 to what is not told; -3 for a link that is not there. */
static int end_of(const Gpu *gpu, unsigned int link)
{
    const char *told = find(gpu, "links");
    while (told && *told) {
        char *rest;
        unsigned long alike = strtoul(told, &rest, 10);
        rest += *rest == '*';
        if (link < alike)
            return !strncmp(rest, "switch", 6) ? -1 : !strncmp(rest, "vm", 2) ? -2 : atoi(rest);
        link -= (unsigned int)alike;
        told = strchr(rest, '+') ? strchr(rest, '+') + 1 : NULL;
    }
    return -3;
}

int nvmlDeviceGetNvLinkState(const Gpu *gpu, unsigned int link, unsigned int *active)
{
    REFUSED(gpu);
    *active = end_of(gpu, link) > -3;
    return link < MOST_LINKS ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(const Gpu *gpu, unsigned int link, unsigned int *type)
{
    int end = end_of(gpu, link);
    REFUSED(gpu);
    *type = end >= 0 ? LINK_GPU : end == -1 ? LINK_SWITCH : LINK_UNKNOWN;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(const Gpu *gpu, unsigned int link, Pci *pci)
{
    int end = end_of(gpu, link);
    REFUSED(gpu);
    if (end >= 0 && end < (int)count)
        return nvmlDeviceGetPciInfo_v3(&gpus[end], pci);
    memset(pci, 0, sizeof *pci);
    /* Of a GPU that is hidden from this container; of a switch, or of what a virtual machine hides. */
    pci->bus = end >= 0 ? 0x80 + (unsigned int)end : 0xff;
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(const Gpu *gpu, const Gpu *other, unsigned int *level)
{
    (void)other;
    REFUSED(gpu);
    *level = find(gpu, "level") ? (unsigned int)number(gpu, "level", 10) : TOPOLOGY_SYSTEM;
    return SUCCESS;
}
