/* BLOCKS THREADS PAUSE_US: allocates BLOCKS at once and keeps them; after a step, threads allocate, reallocate and free until the
 * next line, resting PAUSE_US after every 16 rounds; then frees every other one of the first blocks, and reallocates the rest. */
#include "truth.h"
enum { MOST = 65536, THREADS = 16, KEPT = 16 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, calloc(1, n))
static NOINLINE void *site_03(void *old, size_t n) {
  void *p = realloc(old, n);
  KEEP(p);
  return p;
}
static NOINLINE void *site_04(void *old, size_t n) {
  void *p = reallocarray(old, n, 1);
  KEEP(p);
  return p;
}
static void *first[MOST];
static volatile int stops;
static uint64_t threads, pause_us;
static pthread_barrier_t start, end;

static size_t size_of(uint64_t k) { return 40 + k % 50 * 16; }

static void *worker(void *unused) {
  void *kept[KEPT] = {0};
  pthread_barrier_wait(&start);
  for (uint64_t k = 0; !stops; k++) {
    size_t n = size_of(k);
    void *p = site_01(n);
    took(1, n);
    void *q = site_02(n + 8);
    took(2, n + 8);
    if (kept[k % KEPT]) {
      free(kept[k % KEPT]);
      gave(3, size_of(k - KEPT) + 2000);
    }
    kept[k % KEPT] = site_03(p, n + 2000);
    gave(1, n);
    took(3, n + 2000);
    free(q);
    gave(2, n + 8);
    if (pause_us && k % 16 == 15) usleep((useconds_t)pause_us);
  }
  pthread_barrier_wait(&end);
  pause();
  return unused;
}

int main(int argc, char **argv) {
  uint64_t blocks = argument(argc, argv, 1, 400);
  threads = argument(argc, argv, 2, 1);
  pause_us = argument(argc, argv, 3, 0);
  if (blocks > MOST || threads > THREADS) die("too many");
  pthread_barrier_init(&start, 0, (unsigned)threads + 1);
  pthread_barrier_init(&end, 0, (unsigned)threads + 1);
  for (uint64_t i = 0; i < threads; i++) {
    pthread_t thread;
    if (pthread_create(&thread, 0, worker, 0)) die("cannot create a thread");
  }
  ready();
  for (uint64_t k = 0; k < blocks; k++) {
    first[k] = site_00(size_of(k));
    took(0, size_of(k));
  }
  step();
  pthread_barrier_wait(&start);
  wait_line();
  stops = 1;
  pthread_barrier_wait(&end);
  for (uint64_t k = 0; k < blocks; k++) {
    if (k % 2) {
      free(first[k]);
    } else {
      first[k] = site_04(first[k], size_of(k) + 5000);
      took(4, size_of(k) + 5000);
    }
    gave(0, size_of(k));
  }
  report();
  return 0;
}
