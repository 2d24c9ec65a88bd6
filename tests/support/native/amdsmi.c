/* A libamd_smi.so that answers from a script, so that the real amdsmi is what is tested.

   DIAG_AMDSMI_SCRIPT names the script. A line is

       <gpu> <symbol> [<argument> ...] = <bytes in hexadecimal> | <count>:<bytes> for a list | !<status>

   with <gpu> 0, 1, ... and "-" for what belongs to no GPU. `<gpu> *` fails every call on that GPU, `<gpu> sleep = MS`
   holds each one up. What is not in the script is not supported. tests/support/scripted_amdsmi.py writes the bytes with
   the structures of the package itself, so that no layout is written here, and generates an answer "not supported" for
   every other symbol, since the package asks for all of them when it is imported. */

#define SCRIPT "DIAG_AMDSMI_SCRIPT"

enum { OK = 0, NOT_SUPPORTED = 2, UNINITIALIZED = 32, NO_DATA = 40 };
enum { GPUS = 64 };

#include "script.h"

typedef struct { char name[8]; } Device;

static Device gpus[GPUS], socket_of_all;
static int events_seen;

static void decoded(const char *hex, unsigned char *out) {
    for (unsigned int byte; sscanf(hex, "%2x", &byte) == 1; hex += 2) *out++ = byte;
}

/* Copies the bytes that the script has for a call; of a list also their number, without the bytes for out = NULL. */
static int answer(const char *gpu, const char *what, void *out, u32 *count) {
    static char line[1 << 16];
    char symbol[LENGTH];
    sscanf(what, "%s", symbol);
    counted(symbol);
    int rc = look(gpu, what, line, sizeof line);
    if (rc) return rc;
    char *bytes = line;
    if (count) *count = strtoul(line, &bytes, 10), bytes++;
    if (out) decoded(bytes, out);
    return OK;
}

int amdsmi_init(u64 flags) {
    (void)flags;
    counted("amdsmi_init");
    load();
    const char *value = find("-", "amdsmi_init");
    if (value && *value == '!') return atoi(value + 1);
    users = 1;
    for (int i = 0; i < GPUS; i++) snprintf(gpus[i].name, sizeof gpus[i].name, "%d", i);
    return OK;
}

int amdsmi_shut_down(void) {
    counted("amdsmi_shut_down");
    users = 0;
    return OK;
}

int amdsmi_get_lib_version(struct { u32 major, minor, release; char *build; } *out) {
    char line[LENGTH];
    int rc = look("-", "amdsmi_get_lib_version", line, sizeof line);
    if (!rc) sscanf(line, "%u.%u", &out->major, &out->minor), out->release = 0, out->build = "";
    return rc;
}

int amdsmi_get_socket_handles(u32 *count, void **out) {
    if (!users) return UNINITIALIZED;
    *count = 1;
    if (out) *out = &socket_of_all;
    return OK;
}

int amdsmi_get_processor_handles(void *socket, u32 *count, void **out) {
    (void)socket;
    char line[LENGTH];
    int rc = look("-", "amdsmi_get_processor_handles", line, sizeof line);
    if (rc) return rc;
    *count = atoi(line);
    for (u32 i = 0; out && i < *count; i++) out[i] = &gpus[i];
    return OK;
}

#define PLAIN(symbol) \
    int symbol(Device *gpu, void *out) { return answer(gpu->name, #symbol, out, NULL); }
#define ABOUT(symbol)                                                     \
    int symbol(Device *gpu, u32 about, void *out) {                       \
        char what[LENGTH];                                                \
        snprintf(what, sizeof what, #symbol " %u", about);                \
        return answer(gpu->name, what, out, NULL);                        \
    }
#define LIST(symbol) \
    int symbol(Device *gpu, u32 *count, void *out) { return answer(gpu->name, #symbol, out, count); }
PLAIN(amdsmi_get_gpu_device_bdf)
PLAIN(amdsmi_get_gpu_asic_info)
PLAIN(amdsmi_get_gpu_board_info)
PLAIN(amdsmi_get_gpu_driver_info)
PLAIN(amdsmi_get_gpu_enumeration_info)
PLAIN(amdsmi_get_gpu_metrics_info)
PLAIN(amdsmi_get_gpu_activity)
PLAIN(amdsmi_get_power_info)
PLAIN(amdsmi_get_pcie_info)
PLAIN(amdsmi_get_gpu_total_ecc_count)
PLAIN(amdsmi_get_gpu_ecc_enabled)
PLAIN(amdsmi_get_gpu_xgmi_link_status)
ABOUT(amdsmi_get_power_cap_info)
ABOUT(amdsmi_get_clock_info)
ABOUT(amdsmi_get_gpu_memory_total)
ABOUT(amdsmi_get_gpu_memory_usage)
LIST(amdsmi_get_gpu_process_list)
LIST(amdsmi_get_gpu_bad_page_info)

int amdsmi_get_gpu_device_uuid(Device *gpu, u32 *length, char *out) {
    (void)length;
    return answer(gpu->name, "amdsmi_get_gpu_device_uuid", out, NULL);
}

int amdsmi_get_temp_metric(Device *gpu, u32 sensor, u32 metric, void *out) {
    char what[LENGTH];
    snprintf(what, sizeof what, "amdsmi_get_temp_metric %u %u", sensor, metric);
    return answer(gpu->name, what, out, NULL);
}

int amdsmi_get_energy_count(Device *gpu, u64 *energy, float *tick, u64 *time) {
    char bytes[20];
    int rc = answer(gpu->name, "amdsmi_get_energy_count", bytes, NULL);
    if (!rc) memcpy(energy, bytes, 8), memcpy(tick, bytes + 8, 4), memcpy(time, bytes + 12, 8);
    return rc;
}

int amdsmi_topo_get_link_type(Device *gpu, Device *peer, u64 *hops, u32 *type) {
    char what[LENGTH], bytes[12];
    snprintf(what, sizeof what, "amdsmi_topo_get_link_type %s", peer->name);
    int rc = answer(gpu->name, what, bytes, NULL);
    if (!rc) memcpy(hops, bytes, 8), memcpy(type, bytes + 8, 4);
    return rc;
}

/* -- events: one line "- events = 0:3 1:3 ..." that grows, of GPU and kind; each is read once ----------------------- */

int amdsmi_init_gpu_event_notification(Device *gpu) {
    (void)gpu;
    return OK;
}

int amdsmi_set_gpu_event_notification_mask(Device *gpu, u64 mask) {
    (void)gpu;
    return mask ? OK : NOT_SUPPORTED;
}

int amdsmi_stop_gpu_event_notification(Device *gpu) {
    (void)gpu;
    counted("amdsmi_stop_gpu_event_notification");
    return OK;
}

typedef struct { Device *device; u32 kind; char message[256]; } Event;

int amdsmi_get_gpu_event_notification(int timeout, u32 *count, Event *out) {
    (void)timeout;
    char line[4096], *at = line;
    int found = 0, room = *count, gpu, kind;
    *count = 0;
    if (look("-", "events", line, sizeof line)) return NO_DATA;
    for (char *word; (word = strsep(&at, " "));) {
        if (sscanf(word, "%d:%d", &gpu, &kind) != 2 || found++ < events_seen || (int)*count == room) continue;
        events_seen++;
        out[*count] = (Event){&gpus[gpu], kind, ""};
        ++*count;
    }
    return *count ? OK : NO_DATA;
}
