/* CHURN EVERY: eight threads each leave 128 live blocks among CHURN temporary ones, and exit before the report. After EVERY of these
 * a thread moves to another processor, if that is not 0. Built with more THREADS, each of them leaves 16. */
#include <sched.h>
#include "truth.h"
#ifndef THREADS
#define THREADS 8
#endif
enum { USED = 8, BLOCKS = THREADS > USED ? 16 : 128 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n))
SITE(04, malloc(n)) SITE(05, malloc(n)) SITE(06, malloc(n)) SITE(07, malloc(n))
static void *(*const site[USED])(size_t) = {site_00, site_01, site_02, site_03, site_04, site_05, site_06, site_07};
static void *kept[THREADS][BLOCKS];
static uint64_t churn, every;
static int processors;
static pthread_barrier_t start;

static void move(int to) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(to % processors, &set);
  sched_setaffinity(0, sizeof set, &set); /* it may be a processor that this process may not use */
}

static void *thread_main(void *number) {
  int i = (int)(intptr_t)number, at = i % USED;
  pthread_barrier_wait(&start);
  for (int b = 0; b < BLOCKS; b++) {
    size_t size = 100 + 64 * (size_t)at;
    kept[i][b] = site[at](size);
    took(at, size);
    for (uint64_t k = 0; k < churn / BLOCKS; k++) {
      void *p = site[at](2000);
      took(at, 2000);
      free(p);
      gave(at, 2000);
      if (every && k % every == every - 1) move(i + b + (int)(k / every));
    }
  }
  return 0;
}
int main(int argc, char **argv) {
  churn = argument(argc, argv, 1, 1280);
  every = argument(argc, argv, 2, 0);
  processors = (int)sysconf(_SC_NPROCESSORS_ONLN);
  pthread_t ids[THREADS];
  pthread_barrier_init(&start, 0, THREADS + 1);
  for (int i = 0; i < THREADS; i++)
    if (pthread_create(&ids[i], 0, thread_main, (void *)(intptr_t)i)) die("no thread");
  ready();
  pthread_barrier_wait(&start);
  for (int i = 0; i < THREADS; i++) pthread_join(ids[i], 0);
  report();
  return 0;
}
