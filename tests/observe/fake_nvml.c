/* A GPU for tests/observe/test_nvml.py: NVML's functions that the sampler calls, on fixed numbers.
   Counters rise by a step per call; FAKE_NVML_LOST=n makes the n-th power reading and every later one fail. */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type;
    int status;
    unsigned long long value;
} field_t;

static int gpu;
static unsigned long long sent, corrected;
static unsigned readings;

int nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int status) { return status == GPU_IS_LOST ? "GPU is lost" : "error"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &gpu;
    return strcmp(uuid, "GPU-1") ? NOT_FOUND : OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    (void)handle;
    memory->used = 3ull << 30;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    const char *lost = getenv("FAKE_NVML_LOST");
    (void)handle;
    *milliwatts = 500000 + 100000 * (readings % 2); /* 500 W, 600 W, 500 W, .. */
    readings += 1;
    return lost && readings >= (unsigned)atoi(lost) ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetClockInfo(void *handle, int clock, unsigned *megahertz) {
    (void)handle;
    *megahertz = clock == 1 ? 1980 : 0; /* 1: the SMs */
    return OK;
}

/* Corrected errors (0) are counted; of uncorrected ones (1) this GPU knows nothing. */
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *count) {
    (void)handle;
    (void)counter;
    *count = corrected += 2;
    return kind == 0 ? OK : NOT_SUPPORTED;
}

/* Field 138, KiB sent over all links, rises by 2^20 KiB, 1 GiB; field 139 is not supported. */
int nvmlDeviceGetFieldValues(void *handle, int count, field_t *fields) {
    (void)handle;
    for (int i = 0; i < count; i++) {
        fields[i].status = fields[i].field == 138 && fields[i].scope == 0xFFFFFFFFu ? OK : NOT_SUPPORTED;
        fields[i].value = sent += 1ull << 20;
    }
    return OK;
}
