/* A scriptable stand-in for libnvidia-ml.so.1, for the genuine pynvml to load through ctypes.
 *
 * LPXTOP_FAKE_NVML names a scenario, one statement a line ('#' begins a comment):
 *   init CODE | delay_init MS | driver 570.86 | cuda 12080 | gpus N | clock wall | clock calls STEP_MS
 *   throttle_ids BASE                    where the thermal, hw-thermal and brake counters are (0: nowhere)
 *   gpu I key=value ...                  from the beginning; "none" makes a reading NOT_SUPPORTED
 *   at MS gpu I key=value ...            from then on (steps); power and reasons are integrated into the counters
 *   err I|* SYMBOL|* code=N [at=MS] [until=MS] [after=CALLS] [once]
 *   ferr I|* FIELD code=N            one field of a batch
 *   delay SYMBOL MS | hang SYMBOL [gpu=I] [at=MS] [for=MS] | crash SYMBOL
 *   xid gpu I at=MS code=N | mig gpu I instances=N bytes=TOTAL
 * LPXTOP_FAKE_NVML_LOG=path appends "symbol gpu ms code" for every call.
 * Symbols are taken away at link time, as old drivers lack them.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_GPUS 32
#define MAX_STEPS 32
#define MAX_RULES 64
#define MAX_MIG 8
#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, BAD_VERSION = 25 };

/* --- layouts ---------------------------------------------------------------------------------------------------- */

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned gpu, memory; } utilization;
typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; int si; } field_union;
typedef struct { unsigned field, scope; long long stamp, latency; unsigned type; int rc; field_union value; } field_value;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } process;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_data;
typedef struct { unsigned version, sensor; int celsius; } temperature_v1;
typedef struct { unsigned version; int margin; } margin_v1;
typedef struct { unsigned long long total, free, used; } bar1;
typedef struct { unsigned version, value; } addressing;
_Static_assert(sizeof(memory_v1) == 24, "");
_Static_assert(sizeof(memory_v2) == 40 && offsetof(memory_v2, used) == 32, "");
_Static_assert(sizeof(utilization) == 8, "");
_Static_assert(sizeof(field_value) == 40 && offsetof(field_value, rc) == 28 && offsetof(field_value, value) == 32, "");
_Static_assert(sizeof(process) == 24 && offsetof(process, bytes) == 8 && offsetof(process, gi) == 16, "");
_Static_assert(sizeof(pci_info) == 68 && offsetof(pci_info, bus_id) == 36, "");
_Static_assert(sizeof(event_data) == 32 && offsetof(event_data, data) == 16, "");
_Static_assert(sizeof(temperature_v1) == 12 && sizeof(margin_v1) == 8 && sizeof(addressing) == 8, "");

/* --- the scenario ----------------------------------------------------------------------------------------------- */

#define KEYS \
    X(util) X(memutil) X(mem_total) X(mem_used) X(mem_reserved) X(power_mw) X(power_avg_mw) X(limit_mw) \
    X(limit_default_mw) X(limit_min_mw) X(limit_max_mw) X(limit_requested_mw) X(energy_mj) X(sm) X(mem) X(sm_max) \
    X(mem_max) X(sm_app) X(temp) X(memtemp) X(margin) X(reasons) X(supported) X(pstate) X(gen) X(width) X(gen_max) \
    X(width_max) X(arch) X(minor) X(persistence) X(compute_mode) X(mig) X(mig_pending) X(ecc) X(ecc_pending) \
    X(ecc_corrected) X(ecc_uncorrected) X(remap_corrected) X(remap_uncorrected) X(remap_pending) X(remap_failure) \
    X(retired_pending) X(fan) X(links) X(tx_kib) X(rx_kib) X(pcie_tx) X(pcie_rx) X(addressing_mode) X(bar1) \
    X(recovery) X(replays) X(slowdown_c) X(shutdown_c) X(proc_grow)
enum key {
#define X(name) K_##name,
    KEYS
#undef X
    KEY_COUNT
};
static const char *key_names[] = {
#define X(name) #name,
    KEYS
#undef X
};

typedef struct { double at, value; } step;
typedef struct { int n; step steps[MAX_STEPS]; } series;
typedef struct {
    char name[96], uuid[96], pci[32];
    series values[KEY_COUNT];
    struct { double at; char text[512]; } procs[MAX_STEPS];
    int n_procs, mig_instances;
    double mig_bytes;
} gpu;
typedef struct {
    char kind, symbol[64];
    int gpu, code, field, after, once, calls;
    double at, until, ms;
} rule;

/* handles are addresses: of a GPU, or of one of its MIG instances */
static gpu gpus[MAX_GPUS];
static char mig_handles[MAX_GPUS][MAX_MIG];
static rule rules[MAX_RULES];
static struct { int gpu, code, done; double at; } xids[MAX_RULES];
static int n_gpus, n_rules, n_xids, init_code, throttle_base, registered[MAX_GPUS];
static char driver[80] = "570.86.15";
static int cuda = 12080;
static double delay_init, call_step, call_clock;
static struct timespec began;
static FILE *log_file;
static int loaded;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now_ms(void) {
    if (call_step > 0) return call_clock;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (t.tv_sec - began.tv_sec) * 1e3 + (t.tv_nsec - began.tv_nsec) / 1e6;
}

static void sleep_ms(double ms) {
    struct timespec t = {(time_t)(ms / 1000), (long)(fmod(ms, 1000) * 1e6)};
    nanosleep(&t, NULL);
}

static void set(gpu *g, const char *name, double at, const char *value) {
    if (!strcmp(name, "name")) { snprintf(g->name, sizeof g->name, "%s", value); return; }
    if (!strcmp(name, "uuid")) { snprintf(g->uuid, sizeof g->uuid, "%s", value); return; }
    if (!strcmp(name, "pci")) { snprintf(g->pci, sizeof g->pci, "%s", value); return; }
    if (!strcmp(name, "procs")) {
        g->procs[g->n_procs].at = at;
        snprintf(g->procs[g->n_procs++].text, 512, "%s", value);
        return;
    }
    for (int k = 0; k < KEY_COUNT; k++)
        if (!strcmp(name, key_names[k])) {
            series *s = &g->values[k];
            double number = !strcmp(value, "none") ? NAN : strtod(value, NULL);
            if (s->n && s->steps[s->n - 1].at == at) s->n--;
            s->steps[s->n++] = (step){at, number};
            return;
        }
    fprintf(stderr, "fake nvml: no key %s\n", name);
    abort();
}

static void healthy(gpu *g, int i) {
    static const char *defaults[][2] = {
        {"util", "0"}, {"memutil", "0"}, {"mem_total", "85899345920"}, {"mem_used", "1073741824"},
        {"mem_reserved", "536870912"}, {"power_mw", "70000"}, {"power_avg_mw", "70000"}, {"limit_mw", "700000"},
        {"limit_default_mw", "700000"}, {"limit_min_mw", "200000"}, {"limit_max_mw", "700000"},
        {"limit_requested_mw", "700000"}, {"energy_mj", "0"}, {"sm", "345"}, {"mem", "2619"}, {"sm_max", "1980"},
        {"mem_max", "2619"}, {"sm_app", "none"}, {"temp", "35"}, {"memtemp", "40"}, {"margin", "50"}, {"reasons", "1"},
        {"supported", "511"}, {"pstate", "0"}, {"gen", "5"}, {"width", "16"}, {"gen_max", "5"}, {"width_max", "16"},
        {"arch", "9"}, {"persistence", "1"}, {"compute_mode", "0"}, {"mig", "0"}, {"mig_pending", "0"}, {"ecc", "1"},
        {"ecc_pending", "1"}, {"ecc_corrected", "0"}, {"ecc_uncorrected", "0"}, {"remap_corrected", "0"},
        {"remap_uncorrected", "0"}, {"remap_pending", "0"}, {"remap_failure", "0"}, {"retired_pending", "none"},
        {"fan", "none"}, {"links", "0"}, {"tx_kib", "0"}, {"rx_kib", "0"}, {"pcie_tx", "1000"}, {"pcie_rx", "2000"},
        {"addressing_mode", "1"}, {"bar1", "137438953472"}, {"recovery", "0"}, {"replays", "0"}, {"slowdown_c", "90"},
        {"shutdown_c", "95"}, {"proc_grow", "0"}};
    char text[64];
    memset(g, 0, sizeof *g);
    snprintf(g->name, sizeof g->name, "NVIDIA H100 80GB HBM3");
    snprintf(g->uuid, sizeof g->uuid, "GPU-%08x-0000-0000-0000-000000000000", 0xa0 + i);
    snprintf(g->pci, sizeof g->pci, "00000000:%02X:00.0", 0x10 + i);
    snprintf(text, sizeof text, "%d", i);
    set(g, "minor", 0, text);
    for (size_t k = 0; k < sizeof defaults / sizeof *defaults; k++) set(g, defaults[k][0], 0, defaults[k][1]);
}

static const char *option(char **words, int n, const char *name) {
    size_t length = strlen(name);
    for (int i = 0; i < n; i++)
        if (!strncmp(words[i], name, length) && words[i][length] == '=') return words[i] + length + 1;
    return NULL;
}

static int which(const char *word) { return *word == '*' ? -1 : atoi(word); }

static void add_rule(char kind, const char *symbol, int of_gpu, char **words, int n) {
    rule *r = &rules[n_rules++];
    const char *text;
    memset(r, 0, sizeof *r);
    r->kind = kind;
    snprintf(r->symbol, sizeof r->symbol, "%s", symbol);
    r->gpu = of_gpu;
    r->until = INFINITY;
    r->field = kind == 'f' ? atoi(symbol) : 0;
    if ((text = option(words, n, "code"))) r->code = atoi(text);
    if ((text = option(words, n, "gpu"))) r->gpu = atoi(text);
    if ((text = option(words, n, "at"))) r->at = atof(text);
    if ((text = option(words, n, "until"))) r->until = atof(text);
    if ((text = option(words, n, "for"))) r->ms = atof(text);
    if ((text = option(words, n, "after"))) r->after = atoi(text);
    for (int i = 0; i < n; i++) r->once |= !strcmp(words[i], "once");
}

static void assign(gpu *g, double at, char **words, int n) {
    for (int i = 0; i < n; i++) {
        char *equals = strchr(words[i], '=');
        if (!equals) continue;
        *equals = 0;
        for (char *c = equals + 1; *c; c++) *c = *c == '~' ? ' ' : *c; /* a name's spaces are written ~ */
        set(g, words[i], at, equals + 1);
    }
}

static void statement(char **w, int n) {
    if (!strcmp(w[0], "init")) init_code = atoi(w[1]);
    else if (!strcmp(w[0], "delay_init")) delay_init = atof(w[1]);
    else if (!strcmp(w[0], "driver")) snprintf(driver, sizeof driver, "%s", w[1]);
    else if (!strcmp(w[0], "cuda")) cuda = atoi(w[1]);
    else if (!strcmp(w[0], "gpus")) { n_gpus = atoi(w[1]); for (int i = 0; i < n_gpus; i++) healthy(&gpus[i], i); }
    else if (!strcmp(w[0], "clock")) call_step = n > 2 ? atof(w[2]) : 0;
    else if (!strcmp(w[0], "throttle_ids")) throttle_base = atoi(w[1]);
    else if (!strcmp(w[0], "gpu")) assign(&gpus[atoi(w[1])], 0, w + 2, n - 2);
    else if (!strcmp(w[0], "at")) assign(&gpus[atoi(w[3])], atof(w[1]), w + 4, n - 4);
    else if (!strcmp(w[0], "err")) add_rule('e', w[2], which(w[1]), w + 3, n - 3);
    else if (!strcmp(w[0], "ferr")) add_rule('f', w[2], which(w[1]), w + 3, n - 3);
    else if (!strcmp(w[0], "delay")) { add_rule('d', w[1], -1, w, 0); rules[n_rules - 1].ms = atof(w[2]); }
    else if (!strcmp(w[0], "hang")) add_rule('h', w[1], -1, w + 2, n - 2);
    else if (!strcmp(w[0], "crash")) add_rule('c', w[1], -1, w + 2, n - 2);
    else if (!strcmp(w[0], "xid")) {
        xids[n_xids].gpu = atoi(w[2]);
        xids[n_xids].at = atof(option(w, n, "at"));
        xids[n_xids++].code = atoi(option(w, n, "code"));
    } else if (!strcmp(w[0], "mig")) {
        gpus[atoi(w[2])].mig_instances = atoi(option(w, n, "instances"));
        gpus[atoi(w[2])].mig_bytes = atof(option(w, n, "bytes"));
        set(&gpus[atoi(w[2])], "mig", 0, "1");
        set(&gpus[atoi(w[2])], "mig_pending", 0, "1");
    } else { fprintf(stderr, "fake nvml: what is %s\n", w[0]); abort(); }
}

static void load(void) {
    char line[1024], *words[64];
    const char *path = getenv("LPXTOP_FAKE_NVML"), *log_path = getenv("LPXTOP_FAKE_NVML_LOG");
    pthread_mutex_lock(&lock);
    if (!loaded) {
        loaded = 1;
        clock_gettime(CLOCK_MONOTONIC, &began);
        if (log_path) { log_file = fopen(log_path, "a"); setvbuf(log_file, NULL, _IOLBF, 0); }
        FILE *file = path ? fopen(path, "r") : NULL;
        while (file && fgets(line, sizeof line, file)) {
            int n = 0;
            line[strcspn(line, "#\n")] = 0;
            for (char *w = strtok(line, " \t"); w && n < 64; w = strtok(NULL, " \t")) words[n++] = w;
            if (n) statement(words, n);
        }
        if (file) fclose(file);
    }
    pthread_mutex_unlock(&lock);
}

/* --- values over time ------------------------------------------------------------------------------------------- */

static double value_at(const series *s, double t) {
    double value = NAN;
    for (int i = 0; i < s->n && s->steps[i].at <= t; i++) value = s->steps[i].value;
    return value;
}

static double get(gpu *g, enum key k) { return value_at(&g->values[k], now_ms()); }

/* ms during which `bits` of the series were set (bits 0: the integral of its value over seconds) */
static double integral(const series *s, unsigned bits) {
    double t = now_ms(), sum = 0;
    for (int i = 0; i < s->n && s->steps[i].at < t; i++) {
        double end = i + 1 < s->n && s->steps[i + 1].at < t ? s->steps[i + 1].at : t;
        double value = isnan(s->steps[i].value) ? 0 : s->steps[i].value;
        sum += (end - s->steps[i].at) * (bits ? ((unsigned)value & bits) != 0 : value / 1000);
    }
    return sum;
}

/* --- what happens to a call ------------------------------------------------------------------------------------- */

static int gpu_of(void *handle) {
    char *h = handle;
    if (h >= (char *)mig_handles && h < (char *)mig_handles + sizeof mig_handles)
        return (int)((h - (char *)mig_handles) / MAX_MIG);
    return h >= (char *)gpus && h < (char *)(gpus + MAX_GPUS) ? (int)((gpu *)handle - gpus) : -1;
}

static int is_mig(void *handle) {
    char *h = handle;
    return h >= (char *)mig_handles && h < (char *)mig_handles + sizeof mig_handles;
}

static int matches(rule *r, const char *symbol, int g, double t) {
    return (r->symbol[0] == '*' || !strcmp(r->symbol, symbol)) && (r->gpu < 0 || r->gpu == g) && t >= r->at && t < r->until;
}

static void record(const char *symbol, int g, int code) {
    if (log_file) fprintf(log_file, "%s %d %.3f %d\n", symbol, g, now_ms(), code);
}

/* The scripted code for this call, after its delay; OK otherwise. */
static int enter(const char *symbol, int g) {
    int code = OK;
    load();
    if (call_step > 0 && g == 0 && !strcmp(symbol, "nvmlDeviceGetUtilizationRates")) call_clock += call_step;
    double t = now_ms();
    for (int i = 0; i < n_rules; i++) {
        rule *r = &rules[i];
        if (r->kind == 'f' || !matches(r, symbol, g, t)) continue;
        /* "*" spares what is not a reading of a GPU */
        if (r->symbol[0] == '*' && g < 0) continue;
        if (r->kind == 'd') sleep_ms(r->ms);
        if (r->kind == 'c') abort();
        if (r->kind == 'h' && (!r->once || !r->calls++)) {
            record(symbol, g, -1);
            sleep_ms(r->ms > 0 ? r->ms : 60e3);
        }
        if (r->kind == 'e' && r->calls++ >= r->after && (!r->once || r->calls == r->after + 1)) code = r->code;
    }
    record(symbol, g, code);
    return code;
}

#define ENTER(g) do { int code_ = enter(__func__, g); if (code_) return code_; } while (0)
#define DEVICE(h) int i_ = gpu_of(h); if (i_ < 0) return INVALID; gpu *g = &gpus[i_]; (void)g; ENTER(i_)
#define PUT(target, k) do { double v_ = get(g, k); if (isnan(v_)) return NOT_SUPPORTED; *(target) = v_; } while (0)
#define GETTER(name, type, k) API int name(void *h, type *out) { DEVICE(h); PUT(out, k); return OK; }

/* --- system ----------------------------------------------------------------------------------------------------- */

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    load();
    if (delay_init > 0) sleep_ms(delay_init);
    ENTER(-1);
    return init_code;
}
API int nvmlShutdown(void) { ENTER(-1); return OK; }
API const char *nvmlErrorString(int code) { (void)code; return "an error"; }
API int nvmlSystemGetDriverVersion(char *out, unsigned n) { ENTER(-1); snprintf(out, n, "%s", driver); return OK; }
API int nvmlSystemGetNVMLVersion(char *out, unsigned n) { ENTER(-1); snprintf(out, n, "12.%s", driver); return OK; }
API int nvmlSystemGetCudaDriverVersion_v2(int *out) { ENTER(-1); *out = cuda; return OK; }
API int nvmlSystemGetCudaDriverVersion(int *out) { ENTER(-1); *out = cuda; return OK; }
API int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned n) { ENTER(-1); snprintf(out, n, "p%u", pid); return OK; }

/* --- identity --------------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetCount_v2(unsigned *out) { ENTER(-1); *out = n_gpus; return OK; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) {
    ENTER((int)i);
    if ((int)i >= n_gpus) return INVALID;
    *out = &gpus[i];
    return OK;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    for (int i = 0; i < n_gpus; i++)
        if (!strcmp(gpus[i].uuid, uuid)) { ENTER(i); *out = &gpus[i]; return OK; }
    ENTER(-1);
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **out) {
    for (int i = 0; i < n_gpus; i++)
        if (!strcmp(gpus[i].pci, pci)) { ENTER(i); *out = &gpus[i]; return OK; }
    ENTER(-1);
    return NOT_FOUND;
}
API int nvmlDeviceGetName(void *h, char *out, unsigned n) {
    DEVICE(h);
    snprintf(out, n, is_mig(h) ? "%s MIG 1g.10gb" : "%s", g->name);
    return OK;
}
API int nvmlDeviceGetUUID(void *h, char *out, unsigned n) {
    DEVICE(h);
    if (is_mig(h)) snprintf(out, n, "MIG-%02d-%d", i_, (int)((char *)h - mig_handles[i_]));
    else snprintf(out, n, "%s", g->uuid);
    return OK;
}
API int nvmlDeviceGetPciInfo_v3(void *h, pci_info *out) {
    DEVICE(h);
    if (!*g->pci) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", g->pci);
    return OK;
}
API int nvmlDeviceGetIndex(void *h, unsigned *out) { DEVICE(h); *out = i_; return OK; }
GETTER(nvmlDeviceGetMinorNumber, unsigned, K_minor)
GETTER(nvmlDeviceGetArchitecture, unsigned, K_arch)

/* --- each sample ------------------------------------------------------------------------------------------------ */

API int nvmlDeviceGetUtilizationRates(void *h, utilization *out) {
    DEVICE(h);
    if (is_mig(h) || get(g, K_mig) == 1) return NOT_SUPPORTED;
    PUT(&out->gpu, K_util);
    PUT(&out->memory, K_memutil);
    return OK;
}
API int nvmlDeviceGetMemoryInfo(void *h, memory_v1 *out) {
    DEVICE(h);
    double reserved = get(g, K_mem_reserved);
    if (is_mig(h)) { *out = (memory_v1){g->mig_bytes, g->mig_bytes / 2, g->mig_bytes / 2}; return OK; }
    PUT(&out->total, K_mem_total);
    PUT(&out->used, K_mem_used);
    out->used += isnan(reserved) ? 0 : reserved;
    out->free = out->total - out->used;
    return OK;
}
API int nvmlDeviceGetMemoryInfo_v2(void *h, memory_v2 *out) {
    DEVICE(h);
    if (out->version != (sizeof(memory_v2) | 2u << 24)) return BAD_VERSION;
    if (is_mig(h)) { out->total = g->mig_bytes; out->used = g->mig_bytes / 4; out->reserved = 0; return OK; }
    PUT(&out->total, K_mem_total);
    PUT(&out->used, K_mem_used);
    PUT(&out->reserved, K_mem_reserved);
    out->free = out->total - out->used - out->reserved;
    return OK;
}
API int nvmlDeviceGetClockInfo(void *h, unsigned type, unsigned *out) {
    DEVICE(h);
    PUT(out, type == 2 ? K_mem : K_sm);
    return OK;
}
API int nvmlDeviceGetMaxClockInfo(void *h, unsigned type, unsigned *out) {
    DEVICE(h);
    PUT(out, type == 2 ? K_mem_max : K_sm_max);
    return OK;
}
API int nvmlDeviceGetClock(void *h, unsigned type, unsigned id, unsigned *out) {
    (void)type, (void)id;
    DEVICE(h);
    PUT(out, K_sm_app);
    return OK;
}
API int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *out) { (void)sensor; DEVICE(h); PUT(out, K_temp); return OK; }
API int nvmlDeviceGetTemperatureV(void *h, temperature_v1 *out) {
    DEVICE(h);
    if (out->version != (sizeof(temperature_v1) | 1u << 24)) return BAD_VERSION;
    PUT(&out->celsius, K_temp);
    return OK;
}
API int nvmlDeviceGetMarginTemperature(void *h, margin_v1 *out) {
    DEVICE(h);
    if (out->version != (sizeof(margin_v1) | 1u << 24)) return BAD_VERSION;
    PUT(&out->margin, K_margin);
    return OK;
}
API int nvmlDeviceGetTemperatureThreshold(void *h, unsigned kind, unsigned *out) {
    DEVICE(h);
    if (kind > 1) return NOT_SUPPORTED;
    PUT(out, kind ? K_slowdown_c : K_shutdown_c);
    return OK;
}
GETTER(nvmlDeviceGetPerformanceState, unsigned, K_pstate)
GETTER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, K_reasons)
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, K_reasons)
GETTER(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, K_supported)
GETTER(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, K_supported)
GETTER(nvmlDeviceGetPowerUsage, unsigned, K_power_avg_mw)
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned, K_limit_mw)
GETTER(nvmlDeviceGetPowerManagementLimit, unsigned, K_limit_mw)
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, K_limit_default_mw)
API int nvmlDeviceGetPowerManagementLimitConstraints(void *h, unsigned *low, unsigned *high) {
    DEVICE(h);
    PUT(low, K_limit_min_mw);
    PUT(high, K_limit_max_mw);
    return OK;
}
API int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *out) {
    DEVICE(h);
    PUT(out, K_energy_mj);
    *out += integral(&g->values[K_power_mw], 0);
    return OK;
}

static int uint_field(gpu *g, enum key k, field_value *f) {
    double value = get(g, k);
    if (isnan(value)) return NOT_SUPPORTED;
    f->type = 1;
    f->value.ui = value;
    return OK;
}
static int ull_field(double value, field_value *f) {
    if (isnan(value)) return NOT_SUPPORTED;
    f->type = 3;
    f->value.ull = value;
    return OK;
}
static int throttled(gpu *g, unsigned bits, field_value *f) { return ull_field(integral(&g->values[K_reasons], bits) * 1e6, f); }
static int smoothing(unsigned value, field_value *f) { f->type = 1; f->value.ui = value; return OK; }

static int field(gpu *g, field_value *f) {
    int n = f->field;
    if (throttle_base && n >= throttle_base && n < throttle_base + 3) return throttled(g, 0x20u << (n - throttle_base), f);
    switch (n) {
    case 74: return throttled(g, 0x4, f);
    case 75: return throttled(g, 0x60, f);
    case 76: return throttled(g, 0x10, f);
    case 77: return throttled(g, 0x200, f);
    case 79: return throttled(g, 0x400, f);
    case 82: return uint_field(g, K_memtemp, f);
    case 83: return ull_field(get(g, K_energy_mj) + integral(&g->values[K_power_mw], 0), f);
    case 91: return uint_field(g, K_links, f);
    case 94: return uint_field(g, K_replays, f);
    case 138: return f->scope == 0xFFFFFFFFu ? ull_field(get(g, K_tx_kib), f) : INVALID;
    case 139: return f->scope == 0xFFFFFFFFu ? ull_field(get(g, K_rx_kib), f) : INVALID;
    case 185: return uint_field(g, K_power_avg_mw, f);
    case 186: return uint_field(g, K_power_mw, f);
    case 190: return uint_field(g, K_limit_mw, f);
    case 192: return uint_field(g, K_limit_requested_mw, f);
    case 193: case 194: case 195: case 196: f->type = 5; f->value.si = -(n - 190); return OK;
    case 197: return ull_field(get(g, K_pcie_tx), f);
    case 198: return ull_field(get(g, K_pcie_rx), f);
    case 230: return uint_field(g, K_recovery, f);
    case 251: case 252: case 253: case 269: case 270: case 271: return smoothing(n - 250, f);
    default: return INVALID;
    }
}

API int nvmlDeviceGetFieldValues(void *h, int n, field_value *values) {
    DEVICE(h);
    for (int i = 0; i < n; i++) {
        values[i].rc = is_mig(h) ? NOT_SUPPORTED : field(g, &values[i]);
        for (int r = 0; r < n_rules; r++)
            if (rules[r].kind == 'f' && rules[r].field == (int)values[i].field && (rules[r].gpu < 0 || rules[r].gpu == i_))
                values[i].rc = rules[r].code;
        if (log_file) fprintf(log_file, "field:%u %d %.3f %d\n", values[i].field, i_, now_ms(), values[i].rc);
    }
    return OK;
}

/* --- seldom ----------------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetPcieThroughput(void *h, unsigned counter, unsigned *out) { (void)counter; sleep_ms(20); DEVICE(h); *out = 1; return OK; }
GETTER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, K_gen)
GETTER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, K_width)
GETTER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, K_gen_max)
GETTER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, K_width_max)
GETTER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, K_gen_max)
GETTER(nvmlDeviceGetPcieReplayCounter, unsigned, K_replays)
GETTER(nvmlDeviceGetPersistenceMode, unsigned, K_persistence)
GETTER(nvmlDeviceGetComputeMode, unsigned, K_compute_mode)
GETTER(nvmlDeviceGetFanSpeed, unsigned, K_fan)
GETTER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, K_retired_pending)
API int nvmlDeviceGetEccMode(void *h, unsigned *now, unsigned *pending) { DEVICE(h); PUT(now, K_ecc); PUT(pending, K_ecc_pending); return OK; }
API int nvmlDeviceGetTotalEccErrors(void *h, unsigned kind, unsigned counter, unsigned long long *out) {
    (void)counter;
    DEVICE(h);
    if (isnan(get(g, K_ecc))) return NOT_SUPPORTED;
    PUT(out, kind ? K_ecc_uncorrected : K_ecc_corrected);
    return OK;
}
API int nvmlDeviceGetRemappedRows(void *h, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
    DEVICE(h);
    PUT(corrected, K_remap_corrected);
    PUT(uncorrected, K_remap_uncorrected);
    PUT(pending, K_remap_pending);
    PUT(failure, K_remap_failure);
    return OK;
}
API int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *pending) { DEVICE(h); PUT(now, K_mig); PUT(pending, K_mig_pending); return OK; }
API int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *out) { DEVICE(h); *out = g->mig_instances ? MAX_MIG - 1 : 0; return OK; }
API int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned place, void **out) {
    DEVICE(h);
    if ((int)place >= g->mig_instances) return NOT_FOUND;
    *out = &mig_handles[i_][place];
    return OK;
}
API int nvmlDeviceGetGpuInstanceId(void *h, unsigned *out) { DEVICE(h); *out = 7 + (unsigned)((char *)h - mig_handles[i_]); return OK; }
API int nvmlDeviceGetComputeInstanceId(void *h, unsigned *out) { DEVICE(h); *out = 0; return OK; }
API int nvmlDeviceGetBAR1MemoryInfo(void *h, bar1 *out) { DEVICE(h); PUT(&out->total, K_bar1); return OK; }
API int nvmlDeviceGetAddressingMode(void *h, addressing *out) {
    DEVICE(h);
    if (out->version != (sizeof(addressing) | 1u << 24)) return BAD_VERSION;
    PUT(&out->value, K_addressing_mode);
    return OK;
}

/* pid:bytes:C,... of a kind; the first call asks with count 0, the second may find more */
static int process_list(gpu *g, char kind, unsigned *count, process *out) {
    char text[512] = "";
    unsigned n = 0, room = *count;
    for (int i = 0; i < g->n_procs && g->procs[i].at <= now_ms(); i++) snprintf(text, sizeof text, "%s", g->procs[i].text);
    process found[64];
    for (char *entry = strtok(text, ","); entry && n < 32; entry = strtok(NULL, ",")) {
        char bytes[32], of;
        unsigned pid;
        if (sscanf(entry, "%u:%31[^:]:%c", &pid, bytes, &of) == 3 && of == kind)
            found[n++] = (process){pid, !strcmp(bytes, "na") ? ~0ull : strtoull(bytes, NULL, 10), ~0u, ~0u};
    }
    if (out && n)
        for (unsigned grow = get(g, K_proc_grow); grow; grow--, n++) found[n] = (process){90000 + grow, 1, ~0u, ~0u};
    *count = n;
    if (!n) return OK;
    if (!out || room < n) return TOO_SMALL;
    memcpy(out, found, n * sizeof *found);
    return OK;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process *out) { DEVICE(h); return process_list(g, 'C', n, out); }
API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, process *out) { DEVICE(h); return process_list(g, 'G', n, out); }
API int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *n, process *out) { DEVICE(h); return process_list(g, 'M', n, out); }

/* --- events ----------------------------------------------------------------------------------------------------- */

API int nvmlEventSetCreate(void **out) { ENTER(-1); memset(registered, 0, sizeof registered); *out = xids; return OK; }
API int nvmlEventSetFree(void *set) { (void)set; ENTER(-1); return OK; }
API int nvmlDeviceGetSupportedEventTypes(void *h, unsigned long long *out) { DEVICE(h); *out = 8; return OK; }
API int nvmlDeviceRegisterEvents(void *h, unsigned long long types, void *set) { (void)types, (void)set; DEVICE(h); registered[i_] = 1; return OK; }
API int nvmlEventSetWait_v2(void *set, event_data *out, unsigned ms) {
    struct timespec start, t;
    (void)set;
    ENTER(-1);
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        for (int i = 0; i < n_xids; i++)
            if (!xids[i].done && xids[i].at <= now_ms() && registered[xids[i].gpu]) {
                xids[i].done = 1;
                *out = (event_data){&gpus[xids[i].gpu], 8, xids[i].code, ~0u, ~0u};
                return OK;
            }
        sleep_ms(10);
        clock_gettime(CLOCK_MONOTONIC, &t);
        if ((t.tv_sec - start.tv_sec) * 1e3 + (t.tv_nsec - start.tv_nsec) / 1e6 >= ms) return TIMEOUT;
    }
}
