/* THREADS [maps]: as many ordinary threads as urgent ones, all on one processor. Each allocates two blocks, frees one, and ends. With
 * `maps` it maps these blocks itself.
 * The urgent ones (SCHED_FIFO) wake one after another, most of them before one of less priority is done, and take the
 * processor from whatever another thread does, which may be to end. */
#include <sched.h>
#include "truth.h"
#include <string.h>
#include <sys/mman.h>
enum { BLOCKS = 2, MOST = 1000, STEP_NS = 50000, PRIORITIES = 20 };
SITE(00, malloc(n)) SITE(01, malloc(n))
SITE(02, mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
static int maps;
static pthread_barrier_t start;
static struct timespec begun;

static size_t size_of(int b) { return maps ? (1 + (size_t)b) * (size_t)getpagesize() : 100 + 100 * (size_t)b; }
static void mappings(void) {
  for (int b = 0; b < BLOCKS; b++) {
    size_t size = size_of(b);
    void *p = site_02(size);
    if (p == MAP_FAILED) die("mmap");
    if (b && munmap(p, size)) die("munmap");
  }
}
static void blocks(int site) {
  if (maps) { mappings(); return; }
  for (int b = 0; b < BLOCKS; b++) {
    size_t size = size_of(b);
    void *p = site ? site_01(size) : site_00(size);
    if (b) free(p);
  }
}
/* What a thread did, once all have ended. An urgent one would wait for ever for the lock of these tables if it took the processor
 * from one that has it. */
static void count(int site) {
  for (int b = 0; b < BLOCKS; b++) {
    took(maps ? 2 : site, size_of(b));
    if (b) gave(maps ? 2 : site, size_of(b));
  }
}
static void *ordinary(void *unused) {
  pthread_barrier_wait(&start);
  blocks(0);
  return unused;
}
static void *urgent(void *number) {
  struct timespec at;
  pthread_barrier_wait(&start);
  uint64_t ns = (uint64_t)begun.tv_nsec + (uint64_t)(intptr_t)number * STEP_NS;
  at.tv_sec = begun.tv_sec + (time_t)(ns / 1000000000);
  at.tv_nsec = (long)(ns % 1000000000);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, 0)) {}
  blocks(1);
  return 0;
}
int main(int argc, char **argv) {
  uint64_t many = argument(argc, argv, 1, 100);
  maps = argc > 2 && !strcmp(argv[2], "maps");
  static pthread_t ids[2 * MOST];
  if (many > MOST) die("too many threads");
  cpu_set_t first;
  CPU_ZERO(&first);
  CPU_SET(0, &first);
  if (sched_setaffinity(0, sizeof first, &first)) die("sched_setaffinity");
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setinheritsched(&attributes, PTHREAD_EXPLICIT_SCHED);
  pthread_attr_setschedpolicy(&attributes, SCHED_FIFO);
  pthread_barrier_init(&start, 0, (unsigned)(2 * many + 1));
  for (uint64_t i = 0; i < many; i++) {
    if (pthread_create(&ids[i], 0, ordinary, 0)) die("pthread_create");
    struct sched_param priority = {.sched_priority = 1 + (int)(i % PRIORITIES)};
    pthread_attr_setschedparam(&attributes, &priority);
    /* Without permission they are ordinary threads that wake late. */
    if (pthread_create(&ids[many + i], &attributes, urgent, (void *)(intptr_t)i) &&
        pthread_create(&ids[many + i], 0, urgent, (void *)(intptr_t)i))
      die("pthread_create");
  }
  ready();
  clock_gettime(CLOCK_MONOTONIC, &begun);
  pthread_barrier_wait(&start);
  for (uint64_t i = 0; i < 2 * many; i++) pthread_join(ids[i], 0);
  for (uint64_t i = 0; i < 2 * many; i++) count(i >= many);
  report();
  return 0;
}
