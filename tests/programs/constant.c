/* BLOCKS SIZE THREADS BATCH PAUSE [SECONDS] [SIZES]: constant memory in use. THREADS threads share BLOCKS blocks evenly.
 * Block number k of a thread has SIZE * (1 + k % SIZES) bytes. After READY the threads allocate all blocks. Then each
 * thread replaces BATCH of its blocks at a time (it frees a block and allocates another of the same size) and sleeps for
 * PAUSE microseconds (0: not at all). So the memory in use is always constant, minus at most one block per thread.
 * The report states that constant. It is printed once all blocks are allocated; the replacing goes on until the next
 * line on standard input. With FREE_RUNNING the program ends SECONDS after the report. */
#include "truth.h"
enum { MOST_THREADS = 8, MOST_BLOCKS = 1 << 16 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n))
SITE(04, malloc(n)) SITE(05, malloc(n)) SITE(06, malloc(n)) SITE(07, malloc(n))
static void *(*const site[MOST_THREADS])(size_t) = {site_00, site_01, site_02, site_03, site_04, site_05, site_06, site_07};
static void *blocks[MOST_THREADS][MOST_BLOCKS];
static uint64_t each, size, batch, pause_us, sizes;
static pthread_barrier_t start, filled;

static size_t size_of(uint64_t k) { return size * (1 + k % sizes); }

static void *thread_main(void *number) {
  int i = (int)(intptr_t)number;
  pthread_barrier_wait(&start);
  for (uint64_t k = 0; k < each; k++) {
    blocks[i][k] = site[i](size_of(k));
    took(i, size_of(k));
  }
  pthread_barrier_wait(&filled);
  struct timespec pause = {(time_t)(pause_us / 1000000), (long)(pause_us % 1000000) * 1000};
  for (uint64_t k = 0;;) {
    for (uint64_t b = 0; b < batch; b++) {
      free(blocks[i][k]);
      blocks[i][k] = site[i](size_of(k));
      *(volatile char *)blocks[i][k] = 1;
      k = k + 1 == each ? 0 : k + 1;
    }
    if (pause_us) nanosleep(&pause, 0);
  }
  return 0;
}
int main(int argc, char **argv) {
  uint64_t many = argument(argc, argv, 1, 200), threads = argument(argc, argv, 3, 1);
  size = argument(argc, argv, 2, 5000);
  batch = argument(argc, argv, 4, 16);
  pause_us = argument(argc, argv, 5, 3000);
  uint64_t seconds = argument(argc, argv, 6, 0);
  sizes = argument(argc, argv, 7, 1);
  if (!threads || threads > MOST_THREADS) die("1 to 8 threads");
  each = many / threads;
  if (!each || each > MOST_BLOCKS || !batch || !sizes || !size) die("too few or too many blocks");
  pthread_barrier_init(&start, 0, (unsigned)threads + 1);
  pthread_barrier_init(&filled, 0, (unsigned)threads + 1);
  for (uint64_t i = 0; i < threads; i++) {
    pthread_t id;
    if (pthread_create(&id, 0, thread_main, (void *)(intptr_t)i)) die("pthread_create");
  }
  ready();
  pthread_barrier_wait(&start);
  pthread_barrier_wait(&filled);
  report();
  if (getenv("FREE_RUNNING")) sleep((unsigned)seconds);
  return 0;
}
