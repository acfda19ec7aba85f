/* Allocates by an allocator that announces its samples (USDT), compiled in or from a library that is opened later, and never
 * by malloc. Arguments: interval, rounds, mode (0, or 1 for weights by crossings, 2 to let a child do it, 3 if nobody needs to
 * listen, 4 to repeat it until a line comes, 5 to announce mappings as well, 6 for one unmapping at an address
 * that cannot be read), library. */
#include <dlfcn.h>
#include <poll.h>
#include <sys/prctl.h>
#include "truth.h"
#include "otel_memory.h"

static struct announcing heap;
static void *own_take(uint64_t size) { return announced_take(&heap, size); }
static void own_give(void *block) { announced_give(&heap, block); }
static void *(*take)(uint64_t) = own_take;
static void (*give)(void *) = own_give;

SITE(00, take(n))
SITE(01, take(n))
SITE(02, take(n))

HIDDEN unsigned short otel_memory_mmap_semaphore __attribute__((section(".probes"), used));
HIDDEN unsigned short otel_memory_munmap_semaphore __attribute__((section(".probes"), used));

static NOINLINE void *mapped(uint64_t size) {
  void *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) die("mmap");
  if (otel_memory_mmap_semaphore) __asm__ volatile(NOTE("mmap", "8@%[p] 8@%[n]") : : [p] "r"(p), [n] "r"(size));
  return p;
}
static NOINLINE void unmapped(void *p, uint64_t size) {
  if (munmap(p, size)) die("munmap");
  if (otel_memory_munmap_semaphore) __asm__ volatile(NOTE("munmap", "8@%[p] 8@%[n]") : : [p] "r"(p), [n] "r"(size));
}
static NOINLINE void unmapped_unreadable(void) {
  if (otel_memory_munmap_semaphore)
    __asm__ volatile(NOTE("munmap", "8@(%[p]) 8@%[n]") : : [p] "r"(8ul), [n] "r"(65536ul));
}
SITE(03, mapped(n))

/* Of each mapping one page is written to. A tenth of them stays. */
static void map(void) {
  for (uint64_t i = 0; i < 200; i++) {
    uint64_t size = (1 + i % 7) * 65536;
    char *p = site_03(size);
    took(3, size);
    p[0] = 1;
    if (i % 10) { unmapped(p, size); gave(3, size); }
  }
}

enum { KEPT = 4096 };
static void *kept[KEPT];
static uint64_t sizes[KEPT];
static int sites[KEPT];

static void run(uint64_t rounds) {
  uint64_t random = 1;
  for (uint64_t i = 0; i < rounds; i++) {
    uint64_t r = next_random(&random);
    int at = (int)(r % KEPT);
    if (kept[at]) { gave(sites[at], sizes[at]); give(kept[at]); kept[at] = 0; }
    int site = i % 64 == 0 ? 2 : (int)(i % 2);
    uint64_t size = site == 0 ? 48 : site == 1 ? 100 + r % 7 * 100 : 4096 + r % 5 * 4096;
    kept[at] = site == 0 ? site_00(size) : site == 1 ? site_01(size) : site_02(size);
    sizes[at] = size; sites[at] = site;
    took(site, size);
  }
}

static int line_waits(void) {
  struct pollfd input = {0, POLLIN, 0};
  return poll(&input, 1, 0) != 0;
}

int main(int argc, char **argv) {
  uint64_t interval = argument(argc, argv, 1, 65536), rounds = argument(argc, argv, 2, 100000);
  uint64_t mode = argument(argc, argv, 3, 0);
  announcing_begins(&heap, interval, mode == 1);
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  ready();
  if (argc > 4) {
#ifndef ALONE
    void *library = dlopen(argv[4], RTLD_NOW);
    if (!library) die(dlerror());
    void (*begin)(uint64_t) = (void (*)(uint64_t))dlsym(library, "library_begins");
    take = (void *(*)(uint64_t))dlsym(library, "library_take");
    give = (void (*)(void *))dlsym(library, "library_give");
    begin(interval);
#endif
    step();
  } else if (mode < 3 && !otel_memory_alloc_semaphore)
    die("nobody listens");
  if (mode == 2) {
    pid_t child = fork();
    if (!child) { truth_is(1); run(rounds); _exit(0); }
    int status;
    waitpid(child, &status, 0);
    if (status) die("the child failed");
  } else {
    run(rounds);
    if (mode == 5) map();
    if (mode == 6) unmapped_unreadable();
    if (mode == 4) {
      while (!line_waits()) run(rounds);
      wait_line();
    }
  }
  report();
  if (otel_memory_alloc_semaphore || otel_memory_free_semaphore) die("somebody still listens");
  return 0;
}
