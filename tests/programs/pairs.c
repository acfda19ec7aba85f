/* OPS THREADS SIZE: malloc(SIZE) and free, OPS times in total, a site per thread. Threads are created before READY. */
#include "truth.h"
enum { MOST_THREADS = 8 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n))
SITE(04, malloc(n)) SITE(05, malloc(n)) SITE(06, malloc(n)) SITE(07, malloc(n))
static void *(*const site[MOST_THREADS])(size_t) = {site_00, site_01, site_02, site_03, site_04, site_05, site_06, site_07};
static uint64_t each, size;
static pthread_barrier_t start;

static NOINLINE void churn(int i) {
  for (uint64_t k = 0; k < each; k++) {
    char *p = site[i](size);
    took(i, size);
    if (size) *(volatile char *)p = 1;
    free(p);
    gave(i, size);
  }
}
static void *thread_main(void *i) {
  pthread_barrier_wait(&start);
  churn((int)(intptr_t)i);
  return 0;
}
int main(int argc, char **argv) {
  uint64_t ops = argument(argc, argv, 1, 100000), threads = argument(argc, argv, 2, 1);
  size = argument(argc, argv, 3, 100);
  if (!threads || threads > MOST_THREADS) die("1 to 8 threads");
  each = ops / threads;
  pthread_t ids[MOST_THREADS];
  pthread_barrier_init(&start, 0, (unsigned)threads);
  for (uint64_t i = 1; i < threads; i++) pthread_create(&ids[i], 0, thread_main, (void *)(intptr_t)i);
  ready();
  thread_main(0);
  for (uint64_t i = 1; i < threads; i++) pthread_join(ids[i], 0);
  report();
  return 0;
}
