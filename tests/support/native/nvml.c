/* A libnvidia-ml.so.1 that answers from a script, so that the real nvidia-ml-py is what is tested.

   DIAG_NVML_SCRIPT names the script; it is read again when it has changed. A line is

       <gpu> <symbol> [<argument> ...] = <number> ... | <text> | !<return code>

   with <gpu> 0, 1, ..., "0.1" for MIG instance 1 of GPU 0, and "-" for what belongs to no GPU. `= !15` makes a call fail;
   `<gpu> *` fails every call on that GPU, `- *` every call; `<gpu> sleep = MS` holds each one up. What is not in the
   script is not supported. See tests/support/scripted_nvml.py, which writes it.

   -DOLD_DRIVER leaves out what a driver of 2020 (R450) does not have. The layouts are those of the driver's own ABI. */

#define SCRIPT "DIAG_NVML_SCRIPT"

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, TIMEOUT = 10, VERSION = 25 };
enum { GPUS = 64, INSTANCES = 8 };

#include "script.h"

typedef struct { char name[8]; } Device;
typedef struct { u64 registered; int seen; } Events;

static Device gpus[GPUS], instances[GPUS][INSTANCES];

/* -- the library itself ------------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(u32 flags) {
    (void)flags;
    counted("nvmlInitWithFlags");
    pthread_mutex_lock(&lock);
    load();
    const char *value = find("-", "nvmlInit");
    int rc = value && *value == '!' ? atoi(value + 1) : OK;
    if (!rc) users++;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < GPUS; i++) {
        snprintf(gpus[i].name, sizeof gpus[i].name, "%d", i);
        for (int j = 0; j < INSTANCES; j++) snprintf(instances[i][j].name, sizeof gpus[i].name, "%d.%d", i, j);
    }
    return rc;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    counted("nvmlShutdown");
    pthread_mutex_lock(&lock);
    int rc = users ? OK : UNINITIALIZED;
    if (users) users--;
    pthread_mutex_unlock(&lock);
    return rc;
}

const char *nvmlErrorString(int rc) {
    (void)rc;
    return "an error of the script";
}

int nvmlSystemGetDriverVersion(char *out, u32 size) { return look("-", "nvmlSystemGetDriverVersion", out, size); }

int nvmlDeviceGetCount_v2(u32 *out) {
    u64 count;
    int rc = numbers("-", "nvmlDeviceGetCount", &count, 1);
    if (!rc) *out = count;
    return rc;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, Device **out) {
    u32 count;
    char line[LENGTH];
    int rc = nvmlDeviceGetCount_v2(&count);
    if (rc) return rc;
    if (index >= count) return INVALID;
    *out = &gpus[index];
    rc = look(gpus[index].name, "nvmlDeviceGetHandleByIndex", line, sizeof line);
    return rc == NOT_SUPPORTED ? OK : rc;
}

int nvmlDeviceGetUUID(Device *gpu, char *out, u32 size) { return look(gpu->name, "nvmlDeviceGetUUID", out, size); }
int nvmlDeviceGetName(Device *gpu, char *out, u32 size) { return look(gpu->name, "nvmlDeviceGetName", out, size); }

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    char line[LENGTH];
    for (int i = 0; i < GPUS; i++) {
        if (!nvmlDeviceGetUUID(&gpus[i], line, sizeof line) && !strcmp(line, uuid)) return *out = &gpus[i], OK;
        for (int j = 0; j < INSTANCES; j++)
            if (!nvmlDeviceGetUUID(&instances[i][j], line, sizeof line) && !strcmp(line, uuid))
                return *out = &instances[i][j], OK;
    }
    return NOT_FOUND;
}

typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;

static int pci(const char *gpu, const char *what, Pci *out) {
    memset(out, 0, sizeof *out);
    return look(gpu, what, out->bus_id, sizeof out->bus_id);
}

int nvmlDeviceGetPciInfo_v3(Device *gpu, Pci *out) { return pci(gpu->name, "nvmlDeviceGetPciInfo", out); }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *gpu, u32 link, Pci *out) {
    char what[LENGTH];
    snprintf(what, sizeof what, "nvmlDeviceGetNvLinkRemotePciInfo %u", link);
    return pci(gpu->name, what, out);
}

/* -- calls of one shape ------------------------------------------------------------------------------------------- */

#define PLAIN(symbol, type)                                      \
    int symbol(Device *gpu, type *out) {                         \
        u64 value;                                               \
        counted(#symbol);                                        \
        int rc = numbers(gpu->name, #symbol, &value, 1);         \
        if (!rc) *out = value;                                   \
        return rc;                                               \
    }
#define ABOUT(symbol, type)                                      \
    int symbol(Device *gpu, u32 about, type *out) {              \
        char what[LENGTH];                                       \
        u64 value;                                               \
        counted(#symbol);                                        \
        snprintf(what, sizeof what, #symbol " %u", about);       \
        int rc = numbers(gpu->name, what, &value, 1);            \
        if (!rc) *out = value;                                   \
        return rc;                                               \
    }
#define TWO(symbol, type)                                        \
    int symbol(Device *gpu, type *first, type *second) {         \
        u64 value[2];                                            \
        counted(#symbol);                                        \
        int rc = numbers(gpu->name, #symbol, value, 2);          \
        if (!rc) *first = value[0], *second = value[1];          \
        return rc;                                               \
    }
PLAIN(nvmlDeviceGetPowerUsage, u32)
PLAIN(nvmlDeviceGetEnforcedPowerLimit, u32)
PLAIN(nvmlDeviceGetPowerManagementDefaultLimit, u32)
PLAIN(nvmlDeviceGetTotalEnergyConsumption, u64)
PLAIN(nvmlDeviceGetCurrentClocksThrottleReasons, u64)
PLAIN(nvmlDeviceGetPcieReplayCounter, u32)
PLAIN(nvmlDeviceGetPersistenceMode, u32)
PLAIN(nvmlDeviceGetCurrPcieLinkGeneration, u32)
PLAIN(nvmlDeviceGetCurrPcieLinkWidth, u32)
PLAIN(nvmlDeviceGetMaxPcieLinkGeneration, u32)
PLAIN(nvmlDeviceGetMaxPcieLinkWidth, u32)
PLAIN(nvmlDeviceGetMaxMigDeviceCount, u32)
ABOUT(nvmlDeviceGetTemperature, u32)
ABOUT(nvmlDeviceGetTemperatureThreshold, u32)
ABOUT(nvmlDeviceGetClockInfo, u32)
ABOUT(nvmlDeviceGetMaxClockInfo, u32)
ABOUT(nvmlDeviceGetPcieThroughput, u32)
ABOUT(nvmlDeviceGetNvLinkState, u32)
TWO(nvmlDeviceGetCudaComputeCapability, int)
TWO(nvmlDeviceGetPowerManagementLimitConstraints, u32)
TWO(nvmlDeviceGetMigMode, u32)

int nvmlDeviceGetUtilizationRates(Device *gpu, u32 *out) {
    u64 value[2];
    counted("nvmlDeviceGetUtilizationRates");
    int rc = numbers(gpu->name, "nvmlDeviceGetUtilizationRates", value, 2);
    if (!rc) out[0] = value[0], out[1] = value[1];
    return rc;
}

int nvmlDeviceGetP2PStatus(Device *gpu, Device *peer, u32 index, int *out) {
    char what[LENGTH];
    u64 value;
    snprintf(what, sizeof what, "nvmlDeviceGetP2PStatus %s %u", peer->name, index);
    int rc = numbers(gpu->name, what, &value, 1);
    if (!rc) *out = value;
    return rc;
}

int nvmlDeviceGetTopologyCommonAncestor(Device *gpu, Device *peer, int *out) {
    char what[LENGTH];
    u64 value;
    counted("nvmlDeviceGetTopologyCommonAncestor");
    snprintf(what, sizeof what, "nvmlDeviceGetTopologyCommonAncestor %s", peer->name);
    int rc = numbers(gpu->name, what, &value, 1);
    if (!rc) *out = value;
    return rc;
}

int nvmlDeviceGetTotalEccErrors(Device *gpu, u32 error, u32 counter, u64 *out) {
    char what[LENGTH];
    snprintf(what, sizeof what, "nvmlDeviceGetTotalEccErrors %u %u", error, counter);
    return numbers(gpu->name, what, out, 1);
}

int nvmlDeviceGetViolationStatus(Device *gpu, u32 policy, u64 *out) {
    char what[LENGTH];
    counted("nvmlDeviceGetViolationStatus");
    snprintf(what, sizeof what, "nvmlDeviceGetViolationStatus %u", policy);
    out[0] = 0; /* referenceTime, microseconds */
    return numbers(gpu->name, what, &out[1], 1);
}

int nvmlDeviceGetRemappedRows(Device *gpu, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    u64 value[4];
    int rc = numbers(gpu->name, "nvmlDeviceGetRemappedRows", value, 4);
    if (!rc) *corrected = value[0], *uncorrected = value[1], *pending = value[2], *failed = value[3];
    return rc;
}

int nvmlDeviceGetMemoryInfo(Device *gpu, u64 *out) { /* total free used */
    return numbers(gpu->name, "nvmlDeviceGetMemoryInfo", out, 3);
}

/* -- what newer drivers have -------------------------------------------------------------------------------------- */

#ifndef OLD_DRIVER
PLAIN(nvmlDeviceGetCurrentClocksEventReasons, u64)

int nvmlDeviceGetTemperatureV(Device *gpu, int *out) { /* version sensor temperature */
    char what[LENGTH];
    u64 value;
    if (out[0] != 0x100000C) return VERSION;
    counted("nvmlDeviceGetTemperatureV");
    snprintf(what, sizeof what, "nvmlDeviceGetTemperatureV %d", out[1]);
    int rc = numbers(gpu->name, what, &value, 1);
    if (!rc) out[2] = value;
    return rc;
}

int nvmlDeviceGetMarginTemperature(Device *gpu, int *out) { /* version margin */
    u64 value;
    if (out[0] != 0x1000008) return VERSION;
    int rc = numbers(gpu->name, "nvmlDeviceGetMarginTemperature", &value, 1);
    if (!rc) out[1] = value;
    return rc;
}

int nvmlDeviceGetMemoryInfo_v2(Device *gpu, u64 *out) { /* version total reserved free used */
    if ((u32)out[0] != 0x02000028) return VERSION;
    return numbers(gpu->name, "nvmlDeviceGetMemoryInfo_v2", &out[1], 4);
}
#endif

/* -- field values ------------------------------------------------------------------------------------------------- */

typedef struct {
    u32 id, scope;
    long long timestamp, latency;
    int type, rc;
    union { double d; u64 u; long long s; } value;
} Field;

int nvmlDeviceGetFieldValues(Device *gpu, int count, Field *fields) {
    char what[LENGTH], line[LENGTH];
    int rc = look(gpu->name, "nvmlDeviceGetFieldValues", line, sizeof line);
    counted("nvmlDeviceGetFieldValues");
    if (rc && rc != NOT_SUPPORTED) return rc;
    for (Field *field = fields; field < fields + count; field++) {
        snprintf(what, sizeof what, "field %u %u", field->id, field->scope);
        field->rc = look(gpu->name, what, line, sizeof line);
#ifdef OLD_DRIVER
        if (field->id > 145) field->rc = INVALID;
#endif
        if (field->rc) continue;
        field->type = strchr(line, '.') ? 0 : *line == '-' ? 4 : 3;
        if (field->type == 0) field->value.d = strtod(line, NULL);
        else if (field->type == 4) field->value.s = strtoll(line, NULL, 10);
        else field->value.u = strtoull(line, NULL, 0);
    }
    return OK;
}

/* -- processes: lines "<gpu> processes = N" and "<gpu> process <i> = PID BYTES" ------------------------------------- */

typedef struct { u32 pid; u64 bytes; u32 gpu_instance, compute_instance; } Process;

static int processes(Device *gpu, u32 *count, Process *out) {
    char what[LENGTH];
    u64 there, value[2];
    int rc = numbers(gpu->name, "processes", &there, 1);
    if (rc) return rc;
    u32 room = *count;
    *count = there;
    if (room < there) return SMALL;
    for (u32 i = 0; i < there; i++) {
        snprintf(what, sizeof what, "process %u", i);
        if ((rc = numbers(gpu->name, what, value, 2))) return rc;
        out[i] = (Process){value[0], value[1], -1, -1};
    }
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device *gpu, u32 *count, Process *out) {
    counted("nvmlDeviceGetComputeRunningProcesses_v2");
    return processes(gpu, count, out);
}
#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(Device *gpu, u32 *count, Process *out) {
    counted("nvmlDeviceGetComputeRunningProcesses_v3");
    return processes(gpu, count, out);
}
#endif

/* -- a line "<gpu> process_utilization = PID PERCENT ..."; without one that has worked: not found ------------------- */

typedef struct { u32 pid; u64 time; u32 sm, memory, encoder, decoder; } Utilization;

int nvmlDeviceGetProcessUtilization(Device *gpu, Utilization *out, u32 *count, u64 since) {
    char line[LENGTH], *at = line;
    u32 there = 0, pid, percent, read;
    (void)since;
    counted("nvmlDeviceGetProcessUtilization");
    int rc = look(gpu->name, "process_utilization", line, sizeof line);
    if (rc) return rc;
    for (; sscanf(at, "%u %u%n", &pid, &percent, &read) == 2; at += read, there++)
        if (out && there < *count) out[there] = (Utilization){pid, 0, percent, 0, 0, 0};
    u32 room = *count;
    *count = there;
    return !there ? NOT_FOUND : !out || room < there ? SMALL : OK;
}

/* -- MIG ---------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigDeviceHandleByIndex(Device *gpu, u32 index, Device **out) {
    char line[LENGTH];
    if (index >= INSTANCES) return INVALID;
    *out = &instances[gpu - gpus][index];
    return nvmlDeviceGetUUID(*out, line, sizeof line) ? NOT_FOUND : OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *instance, Device **out) {
    *out = &gpus[(instance - &instances[0][0]) / INSTANCES];
    return OK;
}

/* -- events: one line "- events = 0:79 1:31 ..." that grows; a set sees those that came after it was made ------------ */

typedef struct { Device *device; u64 type, data; u32 gpu_instance, compute_instance; } Event;

static int event(int which, Event *out) {
    char line[4096], *at = line;
    int found = 0;
    if (look("-", "events", line, sizeof line)) return 0;
    for (char *word; (word = strsep(&at, " "));) {
        int gpu, xid;
        if (sscanf(word, "%d:%d", &gpu, &xid) != 2) continue;
        if (found++ == which && out) *out = (Event){&gpus[gpu], 8, xid, -1, -1};
    }
    return found;
}

int nvmlEventSetCreate(Events **out) {
    *out = calloc(1, sizeof **out);
    (*out)->seen = event(-1, NULL);
    return users ? OK : UNINITIALIZED;
}

int nvmlEventSetFree(Events *set) {
    counted("nvmlEventSetFree");
    free(set);
    return OK;
}

int nvmlDeviceRegisterEvents(Device *gpu, u64 types, Events *set) {
    char line[LENGTH];
    int rc = look(gpu->name, "nvmlDeviceRegisterEvents", line, sizeof line);
    counted("nvmlDeviceRegisterEvents");
    if (rc && rc != NOT_SUPPORTED) return rc;
    if (types != 8) return NOT_SUPPORTED;
    set->registered |= 1ull << (gpu - gpus);
    return OK;
}

int nvmlEventSetWait_v2(Events *set, Event *out, u32 milliseconds) {
    char line[LENGTH];
    for (u32 waited = 0;; waited += 100) {
        int rc = look("-", "nvmlEventSetWait", line, sizeof line);
        if (rc && rc != NOT_SUPPORTED) return rc;
        while (set->seen < event(set->seen, out)) {
            set->seen++;
            if (set->registered >> (out->device - gpus) & 1) return OK;
        }
        if (waited >= milliseconds) return TIMEOUT;
        usleep(100000);
    }
}
