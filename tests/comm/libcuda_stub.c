/* Stands for the driver library and notes what it is asked, for tests of cuda-bindings. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef unsigned long long u64;

struct place { int type, id; };
struct properties { int type, handles; struct place place; void *unused; unsigned char flags[16]; };
struct access { struct place place; int flags; };

#define NOTE(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), 0)

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "planned"; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x99; return 0; }
int cuCtxPushCurrent_v2(void *context) { return NOTE("push %p", context); }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)0x99; return NOTE("pop"); }

int cuStreamCreate(void **stream, unsigned flags) {
    *stream = (void *)0x55;
    return NOTE("stream %u", flags);
}

int cuStreamQuery(void *stream) {
    static int asked;
    return asked++ ? 0 : 600;
}

int cuMemGetAllocationGranularity(size_t *size, const struct properties *given, int which) {
    *size = 2 << 20;
    return 0;
}

int cuMemCreate(u64 *handle, size_t size, const struct properties *p, u64 flags) {
    *handle = 0x77;
    return NOTE("create %zu: %d %d %d %d", size, p->type, p->handles, p->place.type, p->place.id);
}

int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags) {
    *address = 0x700000000ull;
    return 0;
}

int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
    return NOTE("map %zu of %llx", size, handle);
}

int cuMemSetAccess(u64 address, size_t size, const struct access *a, size_t count) {
    return NOTE("access %zu: %d %d %d", size, a->place.type, a->place.id, a->flags);
}

int cuMemsetD8Async(u64 address, unsigned char byte, size_t size, void *stream) {
    return NOTE("set %llx %u %zu %p", address, byte, size, stream);
}

int cuMemExportToShareableHandle(void *fd, u64 handle, int type, u64 flags) {
    *(int *)fd = open("/dev/null", O_RDONLY);
    return NOTE("export %llx as %d: %d", handle, type, *(int *)fd);
}

int cuMemImportFromShareableHandle(u64 *handle, void *fd, int type) {
    *handle = 0x88;
    return NOTE("import %d as %d", (int)(intptr_t)fd, type);
}

int cuMemGetAllocationPropertiesFromHandle(struct properties *p, u64 handle) {
    memset(p, 0, 32);
    p->place.id = 3;
    return 0;
}

int cuDeviceGetP2PAttribute(int *value, int attribute, int from, int to) {
    *value = 1;
    return NOTE("reaches %d: %d to %d", attribute, from, to);
}

int cuMemRelease(u64 handle) { return NOTE("release %llx", handle); }
int cuMemUnmap(u64 address, size_t size) { return NOTE("unmap %zu", size); }
int cuMemAddressFree(u64 address, size_t size) { return NOTE("free %zu", size); }

static int missing(void) { return 999; }

/* The bindings ask for every function by its name without a version. */
int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *found) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(library, newer);
    if (!*function) *function = dlsym(library, name);
    if (!*function) *function = (void *)missing;
    if (found) *found = 0;
    return 0;
}

int cuGetProcAddress(const char *name, void **function, int version, u64 flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
