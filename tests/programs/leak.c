/* A small service with a leak, for a first look at heapbpf: `leak [SECONDS]` runs for 60 seconds unless told otherwise.
 *
 * About 50,000 allocations a second, always the same ones: the request loop allocates temporary buffers and frees them,
 * a worker thread does the same with larger ones, and the session cache only grows, by about 1 MB a second. The
 * profile's in-use figures point at cache_insert; its allocation figures at render_page and compress_block. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline))
/* Keeps the compiler from merging or dropping allocations that a real program would use. */
#define USE(p) __asm__ volatile("" : "+r"(p) : : "memory")

struct session { struct session *next; char *user; char payload[]; };
static struct session *cache;
static volatile int stopping;

static NOINLINE char *copy_user_name(uint64_t id) {
  char *name = malloc(24);
  snprintf(name, 24, "user-%llu", (unsigned long long)id);
  USE(name);
  return name;
}
/* The leak: sessions are never removed. */
static NOINLINE void cache_insert(uint64_t id) {
  struct session *s = malloc(sizeof *s + 480);
  s->user = copy_user_name(id);
  s->next = cache;
  cache = s;
}
static NOINLINE char *parse_headers(uint64_t id) {
  char *headers = calloc(16, 32);
  headers[id % 512] = 1;
  USE(headers);
  return headers;
}
static NOINLINE char *render_page(uint64_t id) {
  size_t capacity = 256, used = 200 + id % 1500;
  char *page = malloc(capacity);
  while (capacity < used) page = realloc(page, capacity *= 2);
  memset(page, 'p', used);
  USE(page);
  return page;
}
static NOINLINE void handle_request(uint64_t id) {
  char *headers = parse_headers(id);
  char *page = render_page(id);
  if (id % 5 == 0) cache_insert(id);
  free(page);
  free(headers);
}
static NOINLINE void compress_block(uint64_t number) {
  size_t bytes = 4096 + number % 7 * 4096;
  char *block = malloc(bytes);
  memset(block, 'c', bytes);
  USE(block);
  free(block);
}
/* A thousand ticks a second, until `stopping`. */
static void sleep_until(struct timespec *tick) {
  tick->tv_nsec += 1000000;
  if (tick->tv_nsec >= 1000000000) { tick->tv_nsec -= 1000000000; tick->tv_sec++; }
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, tick, 0)) {}
}
static NOINLINE void *worker_main(void *unused) {
  struct timespec tick;
  clock_gettime(CLOCK_MONOTONIC, &tick);
  for (uint64_t k = 0; !stopping; k++) {
    compress_block(k);
    if (k % 5 == 0) sleep_until(&tick);
  }
  return unused;
}
static NOINLINE void request_loop(long seconds) {
  struct timespec tick;
  clock_gettime(CLOCK_MONOTONIC, &tick);
  time_t end = tick.tv_sec + seconds;
  for (uint64_t id = 0; tick.tv_sec < end; id++) {
    handle_request(id);
    if (id % 10 == 9) sleep_until(&tick);
  }
}
int main(int argc, char **argv) {
  long seconds = argc > 1 ? atol(argv[1]) : 60;
  printf("leak: pid %d, runs for %ld s\n", (int)getpid(), seconds);
  fflush(stdout);
  pthread_t worker;
  if (pthread_create(&worker, 0, worker_main, 0)) return 1;
  pthread_setname_np(worker, "worker");
  request_loop(seconds);
  stopping = 1;
  pthread_join(worker, 0);
  return 0;
}
