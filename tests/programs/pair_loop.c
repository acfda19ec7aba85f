/* [THREADS [DEPTH]]: malloc/free pairs on demand, for measuring what a pair costs; nothing else allocates.
 *
 * Prints "READY pid", then answers each line of its input with one of its own, "WALL_NS CPU_NS":
 *   run PAIRS SIZE    that many pairs on each thread, DEPTH calls below main
 *   hold COUNT SIZE   that many blocks, kept
 *   drop 0 0          frees them
 * CPU_NS is the sum over the threads, by their own clocks: what else the machine does is not in it. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 64, MOST_HELD = 1 << 21 };
static uint64_t pairs, size, cpu[MOST_THREADS];
static int threads = 1, depth = 0;
static pthread_barrier_t start, end;
static void *held[MOST_HELD];
static uint64_t held_count;

static uint64_t now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static __attribute__((noinline)) void churn(void) {
  for (uint64_t i = 0; i < pairs; i++) {
    void *p = malloc(size);
    __asm__ volatile("" : "+r"(p) : : "memory");
    free(p);
  }
}
static __attribute__((noinline)) void descend(int below) {
  volatile char frame[128];
  frame[0] = 1;
  if (below > 0) descend(below - 1);
  else churn();
  frame[1] = frame[0];
}
static void measured(int i) {
  uint64_t before = now(CLOCK_THREAD_CPUTIME_ID);
  descend(depth);
  cpu[i] = now(CLOCK_THREAD_CPUTIME_ID) - before;
}
static void *thread_main(void *i) {
  for (;;) {
    pthread_barrier_wait(&start);
    measured((int)(intptr_t)i);
    pthread_barrier_wait(&end);
  }
}
static int read_line(char *line, int room) {
  int n = 0;
  while (n < room - 1) {
    if (read(0, line + n, 1) <= 0) return 0;
    if (line[n] == '\n') break;
    n++;
  }
  line[n] = 0;
  return 1;
}
static void answer(uint64_t a, uint64_t b) {
  char text[48];
  int n = snprintf(text, sizeof text, "%llu %llu\n", (unsigned long long)a, (unsigned long long)b);
  if (write(1, text, (size_t)n) != n) _exit(98);
}
int main(int argc, char **argv) {
  if (argc > 1) threads = atoi(argv[1]);
  if (argc > 2) depth = atoi(argv[2]);
  if (threads < 1 || threads > MOST_THREADS || depth < 0 || depth > 10000) return 2;
  pthread_barrier_init(&start, 0, (unsigned)threads);
  pthread_barrier_init(&end, 0, (unsigned)threads);
  for (int i = 1; i < threads; i++) {
    pthread_t id;
    if (pthread_create(&id, 0, thread_main, (void *)(intptr_t)i)) return 97;
  }
  char line[128];
  int n = snprintf(line, sizeof line, "READY %d\n", getpid());
  if (write(1, line, (size_t)n) != n) return 98;
  while (read_line(line, sizeof line)) {
    char word[16];
    unsigned long long count, bytes;
    if (sscanf(line, "%15s %llu %llu", word, &count, &bytes) != 3) return 96;
    uint64_t wall = now(CLOCK_MONOTONIC), spent = now(CLOCK_PROCESS_CPUTIME_ID);
    size = bytes;
    if (!strcmp(word, "run")) {
      pairs = count;
      if (threads > 1) pthread_barrier_wait(&start);
      measured(0);
      if (threads > 1) pthread_barrier_wait(&end);
      spent = 0;
      for (int i = 0; i < threads; i++) spent += cpu[i];
    } else {
      if (!strcmp(word, "hold"))
        while (count-- && held_count < MOST_HELD) held[held_count++] = malloc(size);
      else
        while (held_count) free(held[--held_count]);
      spent = now(CLOCK_PROCESS_CPUTIME_ID) - spent;
    }
    answer(now(CLOCK_MONOTONIC) - wall, spent);
  }
  return 0;
}
