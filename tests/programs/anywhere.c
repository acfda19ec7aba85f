/* ROUNDS: every C function that all allocators have, one site each; each site requests a single size.
 * With an allocator that keeps its own statistics, the first line of output has them:
 *   {"source": "mallinfo2", "grew": bytes in use since READY, "usable": usable bytes of the live blocks} */
#include <malloc.h>
#include "truth.h"
#ifndef __GLIBC__
#define NO_STATISTICS
#endif
SITE(00, malloc(n))
SITE(01, calloc(n / 4, 4))
SITE(02, realloc(0, n))
static void *to_grow;
SITE(03, realloc(to_grow, n))
SITE(04, aligned_alloc(64, n))
static void *aligned(size_t n) { void *p = 0; return posix_memalign(&p, 256, n) ? 0 : p; }
SITE(05, aligned(n))
SITE(06, memalign(128, n))
SITE(07, reallocarray(0, n / 8, 8))
SITE(08, malloc(n))
static const size_t sizes[] = {24, 200, 1000, 5000, 640, 2048, 384, 96, 100000};
static void *(*const sites[])(size_t) = {site_00, site_01, site_02, site_03, site_04, site_05, site_06, site_07, site_08};
enum { USED = sizeof sizes / sizeof *sizes };

#ifndef NO_STATISTICS
#include <dlfcn.h>
static int (*mallctl)(const char *, void *, size_t *, void *, size_t);
static int (*tcmalloc_property)(const char *, size_t *);
static const char *source;
static size_t in_use(void) {
  size_t n = 0, bytes = sizeof n;
  if (mallctl) {
    uint64_t epoch = 1; size_t epoch_bytes = sizeof epoch;
    mallctl("epoch", &epoch, &epoch_bytes, &epoch, epoch_bytes);
    mallctl("stats.allocated", &n, &bytes, 0, 0);
  } else if (tcmalloc_property)
    tcmalloc_property("generic.current_allocated_bytes", &n);
  else if (!strcmp(source, "mallinfo2")) {
    struct mallinfo2 m = mallinfo2();
    n = m.uordblks + m.hblkhd;
  }
  return n;
}
static void find_statistics(void) {
  *(void **)&mallctl = dlsym(RTLD_DEFAULT, "mallctl");
  *(void **)&tcmalloc_property = dlsym(RTLD_DEFAULT, "MallocExtension_GetNumericProperty");
  int other = mallctl || tcmalloc_property || dlsym(RTLD_DEFAULT, "mi_malloc");
  source = mallctl ? "mallctl" : tcmalloc_property ? "MallocExtension" : other ? "none" : "mallinfo2";
  in_use(); /* the first call allocates internally */
}
#endif

int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 50);
#ifndef NO_STATISTICS
  find_statistics();
#endif
  ready();
#ifndef NO_STATISTICS
  size_t before = in_use();
#endif
  size_t usable = 0;
  (void)usable;
  for (uint64_t r = 0; r < rounds; r++)
    for (int i = 0; i < USED; i++) {
      if (i == 3) { to_grow = site_08(sizes[3] / 2); took(8, sizes[3] / 2); }
      void *p = sites[i](sizes[i]);
      if (!p) die("an allocation failed");
      if (i == 3) gave(8, sizes[3] / 2);
      took(i, sizes[i]);
      memset(p, 1, 8);
      if (r % 3) { free(p); gave(i, sizes[i]); }
      else usable += malloc_usable_size(p);
    }
#ifndef NO_STATISTICS
  put_text("{\"source\":\""); put_text(source);
  put_text("\",\"grew\":"); put_number(in_use() - before);
  put_text(",\"usable\":"); put_number(usable); put_text("}\n");
#endif
  report();
  return 0;
}
