/* [THREADS [DEPTH]]: malloc/free pairs on demand, for measuring what a pair costs; nothing else allocates.
 *
 * Prints "READY pid", then answers each line of its input with one of its own, "WALL_NS CPU_NS":
 *   run PAIRS SIZE    makes PAIRS pairs on each thread, DEPTH calls below main
 *   cold PAIRS SIZE   makes PAIRS pairs as in a program that also does other work: frees a random one of thousands of
 *                     live blocks, and fills the caches with other data and other code between two calls
 * CPU_NS is the sum of the threads' own CPU clocks, which excludes other work of the machine. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 64 };
static uint64_t pairs, size, cpu[MOST_THREADS];
static int threads = 1, depth = 0;
static pthread_barrier_t start, end;

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
enum { LIVE = 4096, LINE = 64, TOUCHED = 64, CALLED = 64, OTHER_BYTES = 2 << 20 };
static void *live[LIVE];
static volatile unsigned char *other_data;
static unsigned char *other_code;
static uint64_t random_state;

static uint64_t next_random(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}
/* Functions that return at once, each in a cache line of its own. */
static int make_others(void) {
  other_data = mmap(0, OTHER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  other_code = mmap(0, OTHER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (other_data == MAP_FAILED || other_code == MAP_FAILED) return 0;
  for (size_t i = 0; i < OTHER_BYTES; i += LINE)
#ifdef __aarch64__
    memcpy(other_code + i, "\xc0\x03\x5f\xd6", 4);
#else
    other_code[i] = 0xc3;
#endif
  __builtin___clear_cache((char *)other_code, (char *)other_code + OTHER_BYTES);
  return !mprotect(other_code, OTHER_BYTES, PROT_READ | PROT_EXEC);
}
static void work_elsewhere(void) {
  for (int i = 0; i < TOUCHED; i++) (void)other_data[next_random() % OTHER_BYTES];
  size_t first = next_random() % (OTHER_BYTES / LINE - CALLED);
  for (size_t i = first; i < first + CALLED; i++) ((void (*)(void))(other_code + i * LINE))();
}
static __attribute__((noinline)) void churn_cold(void) {
  random_state = 1; /* The same work each time. */
  for (uint64_t i = 0; i < pairs; i++) {
    void **any = &live[next_random() % LIVE];
    work_elsewhere();
    free(*any);
    work_elsewhere();
    *any = malloc(size);
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
static int read_line(char *line, int capacity) {
  int n = 0;
  while (n < capacity - 1) {
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
    uint64_t wall = now(CLOCK_MONOTONIC), spent = 0;
    size = bytes;
    if (!strcmp(word, "run")) {
      pairs = count;
      if (threads > 1) pthread_barrier_wait(&start);
      measured(0);
      if (threads > 1) pthread_barrier_wait(&end);
      for (int i = 0; i < threads; i++) spent += cpu[i];
    } else {
      if (!other_code && !make_others()) return 95;
      for (int i = 0; i < LIVE; i++)
        if (!live[i]) live[i] = malloc(size);
      pairs = count;
      spent = now(CLOCK_THREAD_CPUTIME_ID);
      churn_cold();
      spent = now(CLOCK_THREAD_CPUTIME_ID) - spent;
    }
    answer(now(CLOCK_MONOTONIC) - wall, spent);
  }
  return 0;
}
