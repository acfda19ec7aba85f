/* Preloaded into third-party programs: counts their successful outermost allocation calls independently of any probe.
 * The counters are in the file named by COUNTING_FILE (a shared mapping, so they are exact at any moment, even after a
 * kill): three 64-bit numbers, which are calls, bytes, and how many processes counted into the file. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t early[3], *counters = early;
static void *(*real_malloc)(size_t), *(*real_calloc)(size_t, size_t), *(*real_realloc)(void *, size_t);
static void *(*real_reallocarray)(void *, size_t, size_t), *(*real_memalign)(size_t, size_t);
static void *(*real_aligned_alloc)(size_t, size_t), *(*real_valloc)(size_t), *(*real_pvalloc)(size_t);
static int (*real_posix_memalign)(void **, size_t, size_t);

/* Not static: the real allocator is found by name before the first call needs it. */
__attribute__((constructor)) static void find(void) {
  if (real_malloc) return;
  *(void **)&real_calloc = dlsym(RTLD_NEXT, "calloc");
  *(void **)&real_realloc = dlsym(RTLD_NEXT, "realloc");
  *(void **)&real_reallocarray = dlsym(RTLD_NEXT, "reallocarray");
  *(void **)&real_memalign = dlsym(RTLD_NEXT, "memalign");
  *(void **)&real_aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
  *(void **)&real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  *(void **)&real_valloc = dlsym(RTLD_NEXT, "valloc");
  *(void **)&real_pvalloc = dlsym(RTLD_NEXT, "pvalloc");
  *(void **)&real_malloc = dlsym(RTLD_NEXT, "malloc");
  const char *name = getenv("COUNTING_FILE");
  int fd = name ? open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
  if (fd < 0 || ftruncate(fd, 4096)) return;
  uint64_t *shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (shared == MAP_FAILED) return;
  for (int i = 0; i < 2; i++) __atomic_add_fetch(&shared[i], early[i], __ATOMIC_RELAXED);
  __atomic_add_fetch(&shared[2], 1, __ATOMIC_RELAXED);
  counters = shared;
}
static void *count(void *p, size_t bytes) {
  if (p) {
    __atomic_add_fetch(&counters[0], 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&counters[1], bytes, __ATOMIC_RELAXED);
  }
  return p;
}
#define READY() do { if (!real_malloc) find(); } while (0)
#define KEEP(p) __asm__ volatile("" : "+r"(p) : : "memory")
void *malloc(size_t n) { READY(); void *p = real_malloc(n); KEEP(p); return count(p, n); }
void *calloc(size_t a, size_t b) { READY(); void *p = real_calloc(a, b); KEEP(p); return count(p, a * b); }
void *realloc(void *old, size_t n) { READY(); void *p = real_realloc(old, n); KEEP(p); return count(p, n); }
/* glibc's reallocarray calls realloc by name, which resolves to the one above and is counted there. */
void *reallocarray(void *old, size_t a, size_t b) { READY(); void *p = real_reallocarray(old, a, b); KEEP(p); return p; }
void *memalign(size_t a, size_t n) { READY(); void *p = real_memalign(a, n); KEEP(p); return count(p, n); }
void *aligned_alloc(size_t a, size_t n) { READY(); void *p = real_aligned_alloc(a, n); KEEP(p); return count(p, n); }
void *valloc(size_t n) { READY(); void *p = real_valloc(n); KEEP(p); return count(p, n); }
void *pvalloc(size_t n) { READY(); void *p = real_pvalloc(n); KEEP(p); return count(p, n); }
int posix_memalign(void **out, size_t a, size_t n) {
  READY();
  int error = real_posix_memalign(out, a, n);
  if (!error) count(*out, n);
  return error;
}
