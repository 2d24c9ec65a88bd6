/* What the scripted libraries share: a script that is read again when it has changed, and the calls that are counted.

   Whoever includes it defines SCRIPT, the variable that names the script, and the status codes OK, UNINITIALIZED and
   NOT_SUPPORTED. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SLOTS = 1 << 16, LENGTH = 160 };

typedef unsigned int u32;
typedef unsigned long long u64;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *text, *keys[SLOTS], *values[SLOTS];
static struct stat known;
static int users;
static struct { char name[64]; long count; } counts[256];

static u32 slot(const char *key) {
    u32 hash = 2166136261u;
    for (const char *each = key; *each; each++) hash = (hash ^ (unsigned char)*each) * 16777619u;
    u32 at = hash % SLOTS;
    while (keys[at] && strcmp(keys[at], key)) at = (at + 1) % SLOTS;
    return at;
}

static void load(void) {
    const char *path = getenv(SCRIPT);
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (now.st_mtim.tv_sec == known.st_mtim.tv_sec && now.st_mtim.tv_nsec == known.st_mtim.tv_nsec &&
        now.st_size == known.st_size && now.st_ino == known.st_ino) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    known = now;
    memset(keys, 0, sizeof keys);
    free(text);
    text = calloc(1, now.st_size + 1);
    text[fread(text, 1, now.st_size, file)] = 0;
    fclose(file);
    char *rest = text, *line;
    while ((line = strsep(&rest, "\n"))) {
        char *equals = strstr(line, " = ");
        if (!equals) continue;
        *equals = 0;
        u32 at = slot(line);
        keys[at] = line;
        values[at] = equals + 3;
    }
}

static const char *find(const char *gpu, const char *what) {
    char key[LENGTH];
    snprintf(key, sizeof key, "%s %s", gpu, what);
    return values[slot(key)] && keys[slot(key)] ? values[slot(key)] : NULL;
}

/* Copies what the script says to `out`; the return code of a call that asks for it. */
static int look(const char *gpu, const char *what, char *out, size_t size) {
    pthread_mutex_lock(&lock);
    load();
    const char *value = find("-", "*");
    if (!value) value = find(gpu, "*");
    if (!value) value = find(gpu, what);
    const char *sleep = find(gpu, "sleep");
    int milliseconds = sleep ? atoi(sleep) : 0, rc = !users ? UNINITIALIZED : !value ? NOT_SUPPORTED : OK;
    if (!rc && *value == '!') rc = atoi(value + 1);
    if (!rc) snprintf(out, size, "%s", value);
    pthread_mutex_unlock(&lock);
    if (milliseconds) usleep(milliseconds * 1000);
    return rc;
}

static void counted(const char *symbol) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256; i++) {
        if (*counts[i].name && strcmp(counts[i].name, symbol)) continue;
        snprintf(counts[i].name, sizeof counts[i].name, "%s", symbol);
        counts[i].count++;
        break;
    }
    pthread_mutex_unlock(&lock);
}

/* For tests: how often a symbol was called. */
long diag_calls(const char *symbol) {
    for (int i = 0; i < 256; i++)
        if (!strcmp(counts[i].name, symbol)) return counts[i].count;
    return 0;
}

static int numbers(const char *gpu, const char *what, u64 *out, int wanted) {
    char line[LENGTH], *at = line;
    int rc = look(gpu, what, line, sizeof line);
    for (int i = 0; !rc && i < wanted; i++) out[i] = strtoull(at, &at, 0); /* takes a minus sign, too */
    return rc;
}
